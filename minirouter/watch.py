"""Collapse watch: the known ways in which a router dies, each told in one plain warning a run.

A pure function of the metrics. Most signs are read off the mean of the last WINDOW steps, because one batch
of 64 trajectories is noisy (standard error of a rate: .04 to .06). The thresholds keep away from the figures
of healthy runs, of the miniature world (alpha 0, .6, .9) and in the paper's Fig. 4. Neither the paper nor the
reference implementation watches for anything.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

WINDOW = 5  # steps; 320 trajectories at the usual batch
CALLS_FLOOR = 0.1  # calls a question; healthy runs make .9 to 1.8, the paper's 1.0 to 1.4
FORMAT_DROP = 0.2  # below the best so far; noise of two windows is .03, a run without format reward loses .26
ENTROPY_LEFT = 0.1  # of that at the start; a good run at alpha .6 keeps .2, the paper's .17 after 223 steps
KL_CEILING = 1.0  # nats an action, either sign; 22 healthy runs stayed under .85, one that fell silent had 7
# pi / pi_old within one update, in most of the last WINDOW steps: the median of five steps stayed under 14 in
# healthy runs, while a single action of a single step reached 260. The clip begins at 1.2.
RATIO_CEILING = 20.0

Row = Mapping[str, Any]
Signs = Iterator[tuple[int, str]]  # (step, warning)


def watch(history: Sequence[Row]) -> list[tuple[int, str]]:
    """(step, warning) of every sign that metrics rows, in the order of their steps, show; each sign once, at
    the first step that shows it. A row may lack keys (a step without an update has no KL).
    """
    first = [next(sign(history), None) for sign in (_silent, _malformed, _certain, _far, _sudden)]
    return sorted(found for found in first if found)


def warnings(history: Sequence[Row]) -> list[str]:
    """The warnings that the last row raises and no earlier row raised."""
    return [text for step, text in watch(history) if step == history[-1]["step"]]


def _recent(history: Sequence[Row], key: str) -> list[tuple[int, float]]:
    """(step, mean of the last WINDOW values), from the first full window on."""
    points = [(row["step"], row[key]) for row in history if key in row]
    windows = [points[end - WINDOW : end] for end in range(WINDOW, len(points) + 1)]
    return [(window[-1][0], statistics.fmean(value for _, value in window)) for window in windows]


def _silent(history: Sequence[Row]) -> Signs:
    for step, calls in _recent(history, "calls"):
        if calls < CALLS_FLOOR:
            yield step, f"step {step}: the router has stopped calling, {calls:.2f} calls a question"


def _malformed(history: Sequence[Row]) -> Signs:
    best = 0.0
    for step, rate in _recent(history, "format_rate"):
        best = max(best, rate)
        if rate < best - FORMAT_DROP:
            yield step, f"step {step}: the format rate has fallen to {rate:.2f}, from {best:.2f} at its best"


def _certain(history: Sequence[Row]) -> Signs:
    points = _recent(history, "entropy")
    for step, entropy in points:
        start = points[0][1]
        if entropy < ENTROPY_LEFT * start:
            yield step, f"step {step}: entropy has vanished, {entropy:.4f} nats an action, from {start:.3f}"


def _far(history: Sequence[Row]) -> Signs:
    for step, kl in _recent(history, "kl"):
        if not abs(kl) <= KL_CEILING:  # so written that NaN warns
            yield step, f"step {step}: KL to the reference has exploded, {kl:.2f} nats an action"


def _sudden(history: Sequence[Row]) -> Signs:
    points = [(row["step"], row["ratio_max"]) for row in history if "ratio_max" in row]
    for end in range(WINDOW, len(points) + 1):
        over = [ratio for _, ratio in points[end - WINDOW : end] if not ratio <= RATIO_CEILING]  # NaN too
        if len(over) > WINDOW / 2:
            step = points[end - 1][0]
            yield (
                step,
                f"step {step}: updates change an action's probability, last {over[-1]:.0f} times (ratio max)",
            )
