"""Rollouts of unequal turns and late replies against the same lockstep loop. `python -m benchmarks.ragged`

As benchmarks/rollout.py, but turns of 5 to 150 tokens, 1 to 4 calls, replies delayed .2 to 2 s. Must be 4x
faster, aim 8x.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from .common import Plan
from .measure import options, report
from .rollout import race


def ragged_plans(n: int, turns: tuple[int, int], reply: int, delays: tuple[float, float]) -> list[Plan]:
    """n plans of 1 to 4 calls, drawn with a fixed seed."""
    rng = random.Random(0)
    counts = [rng.randint(1, 4) for _ in range(n)]
    return [
        Plan(
            tuple(rng.randint(*turns) for _ in range(calls + 1)),
            (reply,) * calls,
            tuple(rng.uniform(*delays) for _ in range(calls)),
        )
        for calls in counts
    ]


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    given = options(__doc__, argv)
    n, slots, common = (4, 2, 20) if given.tiny else (16, 8, 1100)
    plans = ragged_plans(n, (1, 6), 5, (0, 0.01)) if given.tiny else ragged_plans(n, (5, 150), 120, (0.2, 2))
    row = race(given, plans, slots, common, own=20)
    return report(
        "ragged", given, [{"work": f"{n} questions, {slots} slots"} | row | {"must, aim": "4x, 8x"}]
    )


if __name__ == "__main__":
    main()
