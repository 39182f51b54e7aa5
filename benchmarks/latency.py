"""How much of the pool's delay is hidden: own rollout with and without it. `python -m benchmarks.latency`

32 questions, 16 slots, two calls each, replies delayed 1 s. The wall-clock time must be at most 1.25 times
that without delay, aim 1.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minirouter.trajectory import Limits

from .common import Plan, planned_rollout, prompts_of, router_of
from .measure import alternate, compare, options, report


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    given = options(__doc__, argv)
    n, slots, common, turn, reply, delay = (
        (4, 2, 20, 3, 5, 0.01) if given.tiny else (32, 16, 1100, 60, 120, 1)
    )
    router = router_of(given)
    prompts, _, words = prompts_of(router, n, common, own=20)
    limits = Limits(2, 10**9, reply, common + 20 + 3 * turn + 2 * reply + 1, slots, 1.0)

    def run(seconds: float) -> None:
        plans = [Plan((turn,) * 3, (reply,) * 2, (seconds,) * 2)] * n
        planned_rollout(router, prompts, plans, limits, words)

    planned_rollout(router, prompts[:2], [Plan((3, 3), (5,), (0.0,))] * 2, limits, words)
    timings = alternate({"delayed": lambda: run(delay), "at once": lambda: run(0.0)}, given.rounds)
    row = compare(timings, "delayed", "at once")
    work = f"{n} questions, {slots} slots, {delay} s"
    return report("latency", given, [{"work": work} | row | {"must, aim": "at most 1.25x, 1.1x"}])


if __name__ == "__main__":
    main()
