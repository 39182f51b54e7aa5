"""Trajectories -> one forward pass that computes every distinct token once.

Prompts share their instructions and descriptors, about a thousand tokens. A pack is one row: the longest
common prefix once, then what is each trajectory's own (a branch), with positions that restart after the
prefix; a token sees the prefix and its own branch. There is no padding, and the numbers are those of one
forward pass a trajectory. The reference implementation pads every trajectory to the longest prompt and the
longest response.

Column `a` of everything is the a-th token that the router itself drew: replies have no column, so nothing
that is computed from a batch (KL, GAE, whitening, losses, entropy) can see them.

Shape letters: B trajectories, A actions, N tokens of a pack.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from .trajectory import Batch, Trajectory

Packs = list[tuple[list[int], Batch]]  # (rows of the batch of trajectories, the same laid out)


def common_prefix(rows: list[list[int]], longest: int) -> int:
    """Length of the longest common prefix of all rows, at most `longest`."""
    first, last = min(rows), max(rows)  # in the order of lists, these two differ the earliest
    limit = min(len(first), len(last), longest)
    return next((i for i in range(limit) if first[i] != last[i]), limit)


def shared_prefix(trajectories: list[Trajectory]) -> int:
    """The prefix of a pack: not beyond the shortest prompt, and every branch keeps a token of its own."""
    longest = min(min(t.prompt_len, len(t.ids) - 1) for t in trajectories)
    return common_prefix([t.ids for t in trajectories], longest)


def micro_batches(trajectories: list[Trajectory], max_tokens: int) -> list[list[int]]:
    """Row numbers of packs of at most `max_tokens` tokens, the longest trajectories first (a longer one than
    that has a pack of its own).
    """
    lengths = [len(t.ids) for t in trajectories]
    prefix = shared_prefix(trajectories) if trajectories else 0
    packs: list[list[int]] = []
    room = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not packs or lengths[i] - prefix > room:
            packs.append([])
            room = max_tokens - prefix
        packs[-1].append(i)
        room -= lengths[i] - prefix
    return packs


def packs_of(trajectories: Sequence[Trajectory], rows: Sequence[int], max_tokens: int) -> Packs:
    """The given rows as packs of at most `max_tokens` tokens."""
    chosen = [trajectories[i] for i in rows]
    groups = micro_batches(chosen, max_tokens)
    return [([rows[i] for i in group], pack([chosen[i] for i in group])) for group in groups]


def pack(trajectories: list[Trajectory]) -> Batch:
    """Lay trajectories (at least one) out for one forward pass."""
    prefix = shared_prefix(trajectories)
    owns = [len(t.ids) - prefix for t in trajectories]
    actions = [t.actions for t in trajectories]
    shape = len(trajectories), max(map(len, actions))
    states, ids, mask = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))  # (B, A)
    for b, (t, own, start) in enumerate(zip(trajectories, actions, accumulate([0, *owns]), strict=False)):
        before = torch.tensor(own, dtype=torch.int64) - 1  # the state of an action ends one token before it
        states[b, : len(own)] = torch.where(before < prefix, before, before + start)
        ids[b, : len(own)] = torch.tensor([t.ids[i] for i in own], dtype=torch.int64)
        mask[b, : len(own)] = 1
    tokens = trajectories[0].ids[:prefix] + [i for t in trajectories for i in t.ids[prefix:]]
    positions = torch.cat([torch.arange(prefix)] + [torch.arange(prefix, prefix + own) for own in owns])
    return Batch(torch.tensor([tokens]), positions[None], (prefix, *owns), states, ids, mask.bool())
