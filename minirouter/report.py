"""Results of an evaluation as tables: means with 95 % intervals, by kind of question."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import world
from .facts import topics
from .record import mean
from .trajectory import Call, Question, Reward, Trajectory


@dataclass(frozen=True)
class Result:
    """One question and what came of it."""

    question: Question
    pool: Any
    trajectory: Trajectory
    reward: Reward


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a mean: Wilson for shares, normal otherwise; (0, 0) of nothing."""
    n, m = len(values), mean(values)
    if n == 0:
        return 0.0, 0.0
    z = 1.96
    if set(values) <= {0, 1}:
        centre = (m + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(m * (1 - m) / n + z * z / (4 * n * n))
    else:
        centre, half = m, z * math.sqrt(sum((v - m) ** 2 for v in values) / max(1, n - 1) / n)
    return max(0.0, centre - half), centre + half  # nothing that is averaged here can be negative


def asked_expert(pool: Any, call: Call) -> bool | None:
    """Whether a call of the miniature world went to the expert in what it asks; None for any other call."""
    asked = topics(call.query or "") if isinstance(pool, world.SimulatedPool) else ()
    candidate = pool.find(call.reply.candidate) if asked else None
    return candidate and candidate.descriptor == asked[0] and len(asked) == 1


def columns(results: Sequence[Result]) -> dict[str, list[float]]:
    """What is averaged: values per question, or per call."""
    found = {
        "EM": [r.reward.em for r in results],
        "F1": [r.reward.f1 for r in results],
        "format": [float(r.reward.format_error is None) for r in results],
        "calls": [float(len(r.trajectory.calls)) for r in results],
        "cost": [r.trajectory.cost for r in results],
    }
    experts = [asked_expert(r.pool, call) for r in results for call in r.trajectory.calls]
    return found | {"expert": [float(e) for e in experts if e is not None]}


def table(results: Sequence[Result]) -> str:
    """Markdown: one row a kind of question, and all; means with 95 % intervals."""
    kinds = list(dict.fromkeys(r.question.kind for r in results))
    rows = [("all", list(results))] + [
        (kind, [r for r in results if r.question.kind == kind]) for kind in kinds
    ]
    names = list(columns(results))
    lines = ["| questions | n | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for kind, chosen in rows if len(kinds) > 1 else rows[:1]:
        cells = []
        for values in columns(chosen).values():
            low, high = interval(values)
            digits = 1 if max(values, default=0) > 10 else 3
            cells.append(
                f"{mean(values):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]" if values else "-"
            )
        lines.append(f"| {kind} | {len(chosen)} | " + " | ".join(cells) + " |")
    if faulted := sum(r.trajectory.faulted for r in results):
        lines.append(f"\nThe pool failed in {faulted} of these questions; they count as they are.")
    return "\n".join(lines)


def compare(before: Sequence[Result], after: Sequence[Result]) -> str:
    """Tables of the same questions before and after training."""
    parts = [
        f"{title}\n\n{table(results)}" for title, results in (("before", before), ("after", after)) if results
    ]
    return "\n\n".join(parts)
