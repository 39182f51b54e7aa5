"""Log-probs of actions: the head in slices against full logits. `python -m benchmarks.head`

Vocabulary 152k, 1,024 actions, hidden size 2,048, forward and backward. The peak of extra memory must be at
most 1/8, aim 1/16, and the time at most 1.6x (three products instead of two).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from minirouter.head import logp_entropy

from .measure import alternate, compare, options, peak_bytes, report


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    given = options(__doc__, argv)
    vocab, actions, width = (300, 64, 16) if given.tiny else (152_000, 1024, 2048)
    torch.manual_seed(0)
    head = nn.Linear(width, vocab, bias=False).requires_grad_(False)
    states = torch.randn(actions, width)
    ids = torch.randint(vocab, (actions,))
    slices = {"slice_logits": 1000} if given.tiny else {}

    def part(h: torch.Tensor, columns: slice) -> torch.Tensor:
        return nn.functional.linear(h, head.weight[columns])

    def full() -> torch.Tensor:
        h = states.clone().requires_grad_()
        head(h).log_softmax(-1).gather(1, ids[:, None]).sum().backward()
        return h.grad

    def sliced() -> torch.Tensor:
        h = states.clone().requires_grad_()
        logp_entropy(part, h, ids, vocab, **slices)[0].sum().backward()
        return h.grad

    difference = ((full() - sliced()).abs().max() / full().abs().max()).item()
    memory = {name: peak_bytes(work) for name, work in (("full", full), ("sliced", sliced))}
    row = compare(alternate({"sliced": sliced, "full": full}, given.rounds), "sliced", "full")
    row |= {
        "peak, full": f"{memory['full'] / 1e6:.0f} MB",
        "peak, sliced": f"{memory['sliced'] / 1e6:.0f} MB",
        "share": f"1/{memory['full'] / memory['sliced']:.1f}",
        "gradient difference": f"{difference:.1e}",
        "must, aim": "1/8, 1/16; at most 1.6x",
    }
    return report("head", given, [{"work": f"{actions} x {width} x {vocab}"} | row])


if __name__ == "__main__":
    main()
