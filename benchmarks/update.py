"""Forward and backward of an update: packed against right-padded. `python -m benchmarks.update`

16 trajectories, a common prompt of 1,100 tokens, own parts of 60 to 400 (a question, two turns, a reply).
The other side pads micro-batches of four rows to their longest and projects to the vocabulary at action
positions only. Must be 2.5x faster, aim 3.5x, with gradients equal to 1e-5 relative.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from minirouter.model import Router
from minirouter.packing import packs_of
from minirouter.trajectory import Trajectory

from .common import library_router, router_of
from .measure import alternate, compare, options, report


def trajectories_of(n: int, common: int, own: tuple[int, int], vocab: int) -> list[Trajectory]:
    """n trajectories whose own parts are spread evenly from the shortest to the longest, in mixed order."""
    rng = random.Random(0)
    prefix = [rng.randrange(vocab) for _ in range(common)]
    lengths = [own[0] + (own[1] - own[0]) * i // max(1, n - 1) for i in range(n)]
    made = []
    for length in rng.sample(lengths, n):
        question, reply = length // 10 + 1, length // 4
        turn = (length - question - reply) // 2
        ids = [rng.randrange(vocab) for _ in range(length)]
        t = Trajectory(prompt_len=common + question)
        t.append(prefix + ids[:question])
        for part, drawn in ((turn, True), (reply, False), (length - question - reply - turn, True)):
            start = len(t.ids) - common
            t.append(ids[start : start + part], [-1.0] * part if drawn else None)
        made.append(t)
    return made


def weights(n: int, b: int) -> torch.Tensor:
    """Stand-ins for advantages, which differ from action to action."""
    return torch.sin(torch.arange(n) * 1.7 + b)


def packed(router: Router, trajectories: list[Trajectory], max_tokens: int) -> None:
    """minirouter's log-probs in packs, and the backward pass of their weighted mean."""
    actions = sum(len(t.actions) for t in trajectories)
    for rows, batch in packs_of(trajectories, range(len(trajectories)), max_tokens):
        logp, _ = router.logp(batch)
        loss = sum(logp[k, : (n := len(trajectories[b].actions))] @ weights(n, b) for k, b in enumerate(rows))
        (loss / actions).backward()


def padded(router: Router, trajectories: list[Trajectory], size: int) -> None:
    """The same in right-padded micro-batches of `size` rows, by the library's own forward pass."""
    actions = sum(len(t.actions) for t in trajectories)
    model = router.model.get_base_model().train()
    for first in range(0, len(trajectories), size):
        group = trajectories[first : first + size]
        width = max(len(t.ids) for t in group)
        ids = torch.tensor([t.ids + [0] * (width - len(t.ids)) for t in group])
        mask = torch.tensor([[1] * len(t.ids) + [0] * (width - len(t.ids)) for t in group])
        hidden = model.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        loss = torch.zeros(())
        states = torch.cat([hidden[b, torch.tensor(t.actions) - 1] for b, t in enumerate(group)])
        tokens = torch.tensor([t.ids[i] for t in group for i in t.actions])
        logp = model.lm_head(states).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        weight = torch.cat([weights(len(t.actions), first + b) for b, t in enumerate(group)])
        loss = logp @ weight / actions
        loss.backward()


def gradients(router: Router) -> torch.Tensor:
    """All gradients of the policy in one vector, and none left."""
    parameters = router.parameters("policy")
    found = torch.cat([p.grad.flatten() for p in parameters])
    for p in parameters:
        p.grad = None
    return found


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    given = options(__doc__, argv)
    n, common, own, max_tokens = (4, 30, (6, 20), 90) if given.tiny else (16, 1100, (60, 400), 16384)
    saving = {"gradient_checkpointing": bool(given.model)}  # as the presets of real models do
    ours, theirs = router_of(given, **saving), library_router(given, **saving)
    trajectories = trajectories_of(n, common, own, ours.config.vocab_size)
    packs = packs_of(trajectories, range(n), max_tokens)
    packed(ours, trajectories, max_tokens)
    padded(theirs, trajectories, 4)
    a, b = gradients(theirs), gradients(ours)
    versions = {
        "padded": lambda: padded(theirs, trajectories, 4),
        "packed": lambda: packed(ours, trajectories, max_tokens),
    }
    row = compare(alternate(versions, given.rounds), "padded", "packed")
    tokens = sum(batch.input_ids.numel() for _, batch in packs)
    row |= {
        "packs, tokens": f"{len(packs)}, {tokens} for {sum(len(t.ids) for t in trajectories)}",
        "largest gradient difference": f"{(a - b).abs().max() / a.abs().max():.1e} of the largest gradient, "
        f"{(a - b).norm() / a.norm():.1e} of the norm",
        "must, aim": "2.5x, 3.5x, 1e-5",
    }
    return report("update", given, [{"work": f"{n} trajectories"} | row])


if __name__ == "__main__":
    main()
