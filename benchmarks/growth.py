"""What a trajectory costs as the batch and the replies grow. `python -m benchmarks.growth`

Rollout and update of 8, 16, 32 and 64 trajectories (cost per trajectory never grows), and of replies of 50 to
400 tokens (cost per token grows no faster than attention must).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from minirouter.model import Router
from minirouter.trajectory import Limits, Trajectory

from .common import Plan, planned_rollout, prompts_of, router_of
from .measure import alternate, options, report, spread
from .update import packed


def run(router: Router, n: int, reply: int, turn: int, common: int, slots: int) -> list[Trajectory]:
    prompts, _, words = prompts_of(router, n, common, own=20)
    limits = Limits(1, 10**9, reply, common + 20 + 2 * turn + reply + 1, slots, 1.0)
    return planned_rollout(router, prompts, [Plan((turn, turn), (reply,), (0.0,))] * n, limits, words)


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    given = options(__doc__, argv)
    batches, replies, turn, common = (
        ((2, 4), (4, 8), 3, 20) if given.tiny else ((8, 16, 32, 64), (50, 100, 200, 400), 10, 500)
    )
    router = router_of(given)
    cases = [(n, replies[0]) for n in batches] + [(batches[0], reply) for reply in replies[1:]]
    rollouts = {case: lambda case=case: run(router, *case, turn, common, 64) for case in cases}
    made = {case: work() for case, work in rollouts.items()}
    updates = {case: lambda case=case: packed(router, made[case], 4096) for case in cases}
    updates[cases[0]]()
    rolled = alternate(rollouts, given.rounds)
    updated = alternate(updates, given.rounds)
    rows = []
    for n, reply in cases:
        row = {"trajectories": n, "reply": reply}
        # the common prefix is there once, however many trajectories there are
        own = sum(len(t.ids) - common for t in made[n, reply])
        for name, timings in (("rollout", rolled), ("update", updated)):
            wall, cpu = timings[n, reply].wall, timings[n, reply].cpu
            row |= {
                f"{name}, ms a trajectory": spread([1e3 * x / n for x in wall]),
                f"{name}, CPU ms a trajectory": f"{1e3 * statistics.median(cpu) / n:.1f}",
                f"{name}, ms a token": f"{1e3 * statistics.median(wall) / own:.3f}",
            }
        rows.append(row)
    return report("growth", given, rows)


if __name__ == "__main__":
    main()
