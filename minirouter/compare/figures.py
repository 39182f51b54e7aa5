"""The pictures of the comparison, each from rows (methods.py) or from the metrics of runs, as one PNG."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .stats import Rows, bootstrap, stacked

Runs = Sequence[Rows]  # one list of rows for each training seed
BLUE, GREY, ORANGE = "#1f5fa8", "#888888", "#d1660f"


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]


def curve(runs: Sequence[Path], key: str, window: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values): a metric over the steps, mean of the seeds, smoothed by a mean over `window` steps."""
    found = [[row[key] for row in read_metrics(run)] for run in runs]
    values = np.mean([own[: min(map(len, found))] for own in found], axis=0)
    kernel = np.ones(min(window, len(values)))
    smooth = np.convolve(values, kernel, mode="same") / np.convolve(np.ones(len(values)), kernel, mode="same")
    return np.arange(1, len(values) + 1), smooth


def pareto(path: Path, trained: Mapping[str, Runs], others: Mapping[str, Runs]) -> None:
    """Table 4 and Fig. 5: EM against cost; the alphas as a line with 95 % bars, every other system as a
    point.
    """
    plt, figure, (axis,) = _figure(1, (10, 6.5))
    placed: list[tuple[float, float]] = []
    for name, runs in sorted(others.items(), key=lambda item: stacked(item[1], "cost").mean()):
        x, y = stacked(runs, "cost").mean(), stacked(runs, "em").mean()
        colour = ORANGE if name in ("Oracle", "by hand") else GREY
        axis.plot(x, y, "o", color=colour, markersize=5)
        line = y
        while any(x - left < 12 and abs(line - up) < 0.0175 for left, up in placed):
            line -= 0.018  # below the label that is in the way
        placed.append((x, line))
        axis.annotate(
            name,
            (x, y),
            xytext=(x + 0.8, line),
            fontsize=7,
            color=colour,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.4} if line < y else None,
        )
    points = []
    for name, runs in trained.items():
        em, cost = stacked(runs, "em"), stacked(runs, "cost")
        (low, high), (cheap, dear), x, y = bootstrap(em), bootstrap(cost), cost.mean(), em.mean()
        axis.errorbar(
            x, y, [[y - low], [high - y]], [[x - cheap], [dear - x]], fmt="o", color=BLUE, capsize=2
        )
        axis.annotate(name, (x, y), xytext=(5, -11), textcoords="offset points", fontsize=9, color=BLUE)
        points.append((x, y))
    axis.plot(*zip(*points, strict=True), color=BLUE, linewidth=1)
    axis.set(
        xlabel="cost, USD per 1M questions",
        ylabel="exact match",
        title="minirouter and what it is compared with",
        ylim=(0, 1),
    )
    _save(plt, figure, path)


def curves(path: Path, panels: Mapping[str, str], runs: Mapping[str, Sequence[Path]]) -> None:
    """Metrics over the steps: one panel a metric ({title: key}), one line a set of runs (one run a seed)."""
    plt, figure, axes = _figure(len(panels), (4.6 * len(panels), 3.8))
    for axis, (title, key) in zip(axes, panels.items(), strict=True):
        for name, folders in runs.items():
            axis.plot(*curve(folders, key), label=name)
        axis.set(title=title, xlabel="step")
    axes[0].legend(frameon=False, fontsize=8)
    _save(plt, figure, path)


def bars(path: Path, groups: Mapping[str, Runs], keys: Sequence[str], titles: Sequence[str]) -> None:
    """One panel a column of the rows ("em", "cost", "calls"), one bar a system, with 95 % intervals."""
    plt, figure, axes = _figure(len(keys), (4.8 * len(keys), 0.42 * len(groups) + 1.6))
    names = list(groups)[::-1]
    for axis, key, title in zip(axes, keys, titles, strict=True):
        values = [stacked(groups[name], key) for name in names]
        means = [v.mean() for v in values]
        ends = [bootstrap(v) for v in values]
        errors = [[m - low for m, (low, _) in zip(means, ends, strict=True)],
                  [high - m for m, (_, high) in zip(means, ends, strict=True)]]  # fmt: skip
        axis.barh(names, means, xerr=np.maximum(errors, 0), color=BLUE, alpha=0.8, error_kw={"capsize": 2})
        axis.set(title=title)
    for axis in axes[1:]:
        axis.set_yticklabels([])
    _save(plt, figure, path)


def by_kind(path: Path, systems: Mapping[str, Runs], key: str, title: str) -> None:
    """Fig. 4a: a column of the rows by kind of question, one group of bars a kind, one bar a system."""
    kinds = list(dict.fromkeys(row["kind"] for row in next(iter(systems.values()))[0]))
    plt, figure, (axis,) = _figure(1, (8, 4))
    width = 0.8 / len(systems)
    for i, (name, runs) in enumerate(systems.items()):
        values = [stacked(runs, key, kind) for kind in kinds]
        means = np.array([v.mean() for v in values])
        ends = np.array([bootstrap(v) for v in values]).T
        places = np.arange(len(kinds)) + i * width
        axis.bar(
            places,
            means,
            width,
            yerr=np.maximum([means - ends[0], ends[1] - means], 0),
            label=name,
            capsize=2,
        )
    axis.set_xticks(np.arange(len(kinds)) + 0.4 - width / 2, kinds)
    axis.set(title=title)
    axis.legend(frameon=False, fontsize=8)
    _save(plt, figure, path)


def _figure(panels: int, size: tuple[float, float]) -> tuple[Any, Any, list[Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, panels, figsize=size, layout="constrained", squeeze=False)
    for axis in axes[0]:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    return plt, figure, list(axes[0])


def _save(plt: Any, figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=130)
    plt.close(figure)
