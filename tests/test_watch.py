"""The collapse watch: each way to die is told once, with its step and figure, and healthy runs stay quiet."""

from __future__ import annotations

import math
import random

import pytest

from minirouter.watch import WINDOW, warnings, watch

HEALTHY = {"calls": 1.4, "format_rate": 0.93, "entropy": 0.16, "kl": 0.05, "ratio_max": 1.5}


def run_of(steps: int, **changed: dict[int, float]) -> list[dict]:
    """Rows of a healthy run, in which a key takes other values from the steps given on."""
    rows = []
    for step in range(1, steps + 1):
        later = {key: at[max(s for s in at if s <= step)] for key, at in changed.items() if min(at) <= step}
        rows.append({"step": step, **HEALTHY, **later})
    return rows


@pytest.mark.parametrize(
    ("changed", "step", "figure"),
    [
        # 1.4 to 0: means .84 .56 .28 at steps 11 to 14 count down by .28, and 0 at step 15
        ({"calls": {11: 0.0}}, 15, "0.00 calls"),
        # .93 to .5: the window loses .086 a step and is .258 down after three
        ({"format_rate": {11: 0.5}}, 13, "0.67, from 0.93"),
        # .16 to .01: means .13 .10 .07 .04 and then .01, under a tenth of .16
        ({"entropy": {11: 0.01}}, 15, "0.0100 nats"),
        # .05 to 2: (4 x .05 + 2) / 5 = .44, .83, then (2 x .05 + 6) / 5 = 1.22
        ({"kl": {11: 2.0}}, 13, "1.22 nats"),
        ({"kl": {11: -2.0}}, 13, "-1.18 nats"),
        ({"kl": {11: math.nan}}, 11, "nan nats"),
        ({"ratio_max": {11: 35.0}}, 13, "35 times"),  # the third of five
        ({"ratio_max": {11: math.nan}}, 13, "nan times"),
    ],
)
def test_each_death_is_told_once_at_its_step_with_its_figure(changed, step, figure):
    """Catches a sign that never fires, fires late, repeats at every step, or does not say how bad it is."""
    found = watch(run_of(30, **changed))
    assert [s for s, _ in found] == [step]
    assert found[0][1].startswith(f"step {step}: ") and figure in found[0][1]
    assert "\n" not in found[0][1]


def test_the_step_that_raises_a_warning_is_the_only_one_that_reports_it():
    """Catches a warning that is written at every later step, or again after a resume."""
    rows = run_of(30, calls={11: 0.0}, ratio_max={13: 99.0, 16: 1.2, 20: 99.0})
    told = {row["step"]: warnings(rows[: row["step"]]) for row in rows}
    assert {step: len(lines) for step, lines in told.items() if lines} == {15: 2}


def alpha_run(rng: random.Random, steps: int, calls: float, entropy: tuple[float, float], kl: float) -> list:
    """A run as they are seen in the miniature world: batches of 64, rates with their sampling noise."""
    rows = []
    for step in range(1, steps + 1):
        done = step / steps
        rate = 0.86 + 0.12 * done
        rows.append({
            "step": step,
            "calls": calls + rng.gauss(0, 0.1),
            "format_rate": sum(rng.random() < rate for _ in range(64)) / 64,
            "entropy": entropy[0] * (entropy[1] / entropy[0]) ** done * math.exp(rng.gauss(0, 0.15)),
            "kl": kl * done + rng.gauss(0, 0.01),
            "ratio_max": 260.0 if rng.random() < 0.01 else 1 + rng.lognormvariate(-0.3, 0.8),
        })  # fmt: skip
    return rows


def test_healthy_runs_of_every_alpha_stay_quiet():
    """Catches thresholds within the noise of a batch: a watch that cries wolf is not read."""
    rng = random.Random(0)
    for _ in range(100):
        assert watch(alpha_run(rng, 80, 1.7, (0.19, 0.03), 0.12)) == []  # alpha 0
        assert watch(alpha_run(rng, 60, 1.4, (0.16, 0.035), 0.12)) == []  # alpha .6
        assert watch(alpha_run(rng, 100, 0.9, (0.16, 0.04), 0.15)) == []  # alpha .9


def test_steps_without_an_update_and_short_runs_are_no_sign():
    """Catches a crash, or a false alarm, when an outage leaves steps that have no KL, entropy or ratio."""
    rows = run_of(30)
    for row in rows[8:20]:
        del row["kl"], row["entropy"], row["ratio_max"]
    assert watch(rows) == []
    assert watch([]) == []
    silent = run_of(WINDOW, calls={1: 0.0})
    assert watch(silent[:-1]) == [] and len(watch(silent)) == 1
