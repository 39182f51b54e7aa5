"""Rollouts of equal turns against a lockstep loop around `model.generate`. `python -m benchmarks.rollout`

16 questions, a common prompt of 1,100 tokens and 20 of each question's own, two calls each with replies of
120 tokens, 60 tokens a turn, 8 slots. Must be 3x faster, aim 4x.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minirouter.trajectory import Limits

from .common import Plan, library_router, lockstep_rollout, planned_rollout, prompts_of, router_of
from .measure import alternate, compare, options, report


def race(given: Any, plans: list[Plan], slots: int, common: int, own: int) -> dict[str, Any]:
    """Both rollouts of the plans, in turn; one row of a table. Short ones warm up before."""
    ours, theirs = router_of(given), library_router(given)
    prompts, texts, words = prompts_of(ours, len(plans), common, own)
    longest = max(sum(plan.turns) + sum(plan.replies) for plan in plans)
    limits = Limits(
        max_calls=max(len(plan.replies) for plan in plans),
        turn_tokens=10**9,
        reply_tokens=max(max(plan.replies) for plan in plans),
        total_tokens=common + own + longest + 1,
        slots=slots,
        temperature=1.0,
    )
    few = [Plan(plan.turns[-2:], plan.replies[-1:], (0.0,)) for plan in plans[:2]]
    for rollout, router, start in ((planned_rollout, ours, prompts), (lockstep_rollout, theirs, texts)):
        rollout(router, start[:2], few, limits, words)
    versions = {
        "lockstep": lambda: lockstep_rollout(theirs, texts, plans, limits, words),
        "minirouter": lambda: planned_rollout(ours, prompts, plans, limits, words),
    }
    drawn = sum(sum(plan.turns) for plan in plans)
    row = compare(timings := alternate(versions, given.rounds), "lockstep", "minirouter")
    return row | {"own tokens/s": f"{drawn / min(timings['minirouter'].wall):.0f}"}


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    given = options(__doc__, argv)
    n, slots, common, turn, reply = (4, 2, 20, 3, 5) if given.tiny else (16, 8, 1100, 60, 120)
    plans = [Plan((turn,) * 3, (reply,) * 2, (0.0, 0.0))] * n
    row = race(given, plans, slots, common, own=20)
    return report(
        "rollout", given, [{"work": f"{n} questions, {slots} slots"} | row | {"must, aim": "3x, 4x"}]
    )


if __name__ == "__main__":
    main()
