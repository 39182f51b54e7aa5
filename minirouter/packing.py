"""Trajectories -> one forward pass that computes every distinct token once.

Prompts share their instructions and descriptors, about a thousand tokens. A pack is one row: the longest
common prefix once, then what is each trajectory's own, with positions that restart after the prefix and a
tree mask (a token sees the prefix and its own branch). Where the prefix is short, each trajectory gets a
right-padded row of its own instead. Both layouts give the numbers of one forward pass a trajectory. The
reference implementation pads every trajectory to the longest prompt and the longest response.

Column `a` of everything is the a-th token that the router itself drew: replies have no column, so nothing
that is computed from a batch (KL, GAE, whitening, losses, entropy) can see them.

Shape letters: B trajectories, A actions, R rows, N tokens a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from .trajectory import Batch, Trajectory

# Attention costs about 4 d FLOPs for each pair that looks, the rest of a layer 24 d^2 a token: 6 d pairs
# cost as much as a token. Between the 768 of the tiny base and the 12,288 of a 3B model.
PAIRS_PER_TOKEN = 2048

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


def layout(lengths: list[int], prefix: int) -> tuple[bool, int]:
    """(is a tree cheaper than padded rows?, its tokens) for trajectories of these lengths: tokens and
    attention.
    """
    tree = prefix + sum(length - prefix for length in lengths)
    rows = len(lengths) * max(lengths)
    tree_cost = tree + tree**2 / PAIRS_PER_TOKEN  # a masked row computes all pairs, causal rows half of them
    rows_cost = rows + rows * max(lengths) / 2 / PAIRS_PER_TOKEN
    return (True, tree) if tree_cost < rows_cost else (False, rows)


def micro_batches(trajectories: list[Trajectory], max_tokens: int) -> list[list[int]]:
    """Row numbers of packs of at most `max_tokens` tokens (a longer trajectory has a pack of its own)."""
    lengths = [len(t.ids) for t in trajectories]
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    prefix = shared_prefix(trajectories) if trajectories else 0
    packs: list[list[int]] = []
    for i in order:
        if packs and layout([lengths[j] for j in [*packs[-1], i]], prefix)[1] <= max_tokens:
            packs[-1].append(i)
        else:
            packs.append([i])
    return packs


def packs_of(trajectories: Sequence[Trajectory], rows: Sequence[int], max_tokens: int) -> Packs:
    """The given rows as packs of at most `max_tokens` tokens."""
    chosen = [trajectories[i] for i in rows]
    groups = micro_batches(chosen, max_tokens)
    return [([rows[i] for i in group], pack([chosen[i] for i in group])) for group in groups]


def pack(trajectories: list[Trajectory]) -> Batch:
    """Lay trajectories (at least one) out for one forward pass, in the cheaper of the two layouts."""
    prefix = shared_prefix(trajectories)
    tree, _ = layout([len(t.ids) for t in trajectories], prefix)
    actions = [t.actions for t in trajectories]
    width = max(map(len, actions))
    states, ids, mask = (torch.zeros(len(trajectories), width, dtype=torch.int64) for _ in range(3))  # (B, A)
    place = _tree(trajectories, prefix) if tree else _rows(trajectories)
    input_ids, position_ids, attention_mask, offsets = place
    for b, (t, own) in enumerate(zip(trajectories, actions, strict=True)):
        before = torch.tensor(own, dtype=torch.int64) - 1  # the state of an action ends one token before it
        states[b, : len(own)] = (
            torch.where(before < prefix, before, before + offsets[b]) if tree else before + offsets[b]
        )
        ids[b, : len(own)] = torch.tensor([t.ids[i] for i in own], dtype=torch.int64)
        mask[b, : len(own)] = 1
    return Batch(input_ids, position_ids, attention_mask, states, ids, mask.bool())


def _rows(trajectories: list[Trajectory]):
    """One right-padded row a trajectory; causal attention never looks right, where the padding is."""
    width = max(len(t.ids) for t in trajectories)
    input_ids = torch.tensor([t.ids + [0] * (width - len(t.ids)) for t in trajectories])
    position_ids = torch.arange(width).expand(len(trajectories), width)
    return input_ids, position_ids, None, [row * width for row in range(len(trajectories))]


def _tree(trajectories: list[Trajectory], prefix: int):
    """One row: the prefix, then the branches. `offsets[b]` leads from a position of trajectory b to its
    column.
    """
    owns = [len(t.ids) - prefix for t in trajectories]
    starts = [0, *accumulate(owns[:-1])]
    input_ids = torch.tensor(
        [trajectories[0].ids[:prefix] + [i for t in trajectories for i in t.ids[prefix:]]]
    )
    position_ids = torch.cat([torch.arange(prefix)] + [torch.arange(prefix, prefix + own) for own in owns])
    branch = torch.cat(
        [torch.zeros(prefix, dtype=torch.int64)]
        + [torch.full((own,), b, dtype=torch.int64) for b, own in enumerate(owns, 1)]
    )
    sees = (branch[:, None] == branch) | (branch == 0)
    return input_ids, position_ids[None], sees.tril()[None, None], starts
