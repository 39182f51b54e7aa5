"""What a difference means: bootstrap intervals, a paired test, tables, and the paper's own figures beside
ours.

A *row* is one question answered by one system, as methods.py writes it: id, kind, em, f1, cost, calls.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

Rows = Sequence[dict[str, Any]]
PAPER = Path(__file__).parent.parent / "assets" / "paper_tables.json"
SETS = {  # our names of the benchmarks: the paper's
    "nq": "NQ",
    "triviaqa": "TriviaQA",
    "popqa": "PopQA",
    "hotpotqa": "HotpotQA",
    "2wikimultihopqa": "2wiki",
    "musique": "Musique",
    "bamboogle": "Bamboogle",
}


def bootstrap(values: np.ndarray, draws: int = 2000, seed: int = 0) -> tuple[float, float]:
    """95 % percentile interval of a mean. values (n,), or (S, n) for S training seeds on the same n
    questions: then seeds and questions are both drawn again. (nan, nan) of nothing.
    """
    values = np.atleast_2d(np.asarray(values, dtype=float))
    seeds, n = values.shape
    if n == 0:
        return math.nan, math.nan
    rng = np.random.default_rng(seed)
    mixed = values[rng.integers(0, seeds, (draws, seeds))].mean(axis=1)  # (draws, n)
    means = np.take_along_axis(mixed, rng.integers(0, n, (draws, n)), axis=1).mean(axis=1)
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def paired_test(a: np.ndarray, b: np.ndarray, draws: int = 10_000, seed: int = 0) -> float:
    """Two-sided p of "both systems are equally good", by flipping the signs of a - b question by question.

    a, b (n,) on the same questions. Never 0: (hits + 1) / (draws + 1).
    """
    difference = np.asarray(a, dtype=float) - np.asarray(b, dtype=float)
    difference = difference[difference != 0]  # a tie says nothing, whatever its sign
    if not len(difference):
        return 1.0
    signs = np.random.default_rng(seed).choice((-1.0, 1.0), (draws, len(difference)))
    hits = (abs(signs @ difference) >= abs(difference.sum()) - 1e-9).sum()
    return float(hits + 1) / (draws + 1)


def column(rows: Rows, key: str, kind: str | None = None) -> np.ndarray:
    """(n,) the values of `em`, `f1`, `cost` or `calls` (their number) of the rows of a kind (None: all)."""
    chosen = [row[key] for row in rows if kind in (None, row["kind"])]
    return np.array([len(v) if key == "calls" else v for v in chosen], dtype=float)


def stacked(runs: Sequence[Rows], key: str, kind: str | None = None) -> np.ndarray:
    """(S, n) the same for several training seeds; the same questions in the same order."""
    return np.stack([column(rows, key, kind) for rows in runs])


def number(values: np.ndarray, digits: int = 3, interval: bool = True) -> str:
    """ "mean [low, high]" of (n,) or (S, n) values; "-" of nothing."""
    if np.size(values) == 0:
        return "-"
    mean = f"{np.mean(values):.{digits}f}"
    low, high = bootstrap(values) if interval else (0, 0)
    return f"{mean} [{low:.{digits}f}, {high:.{digits}f}]" if interval else mean


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    parts = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in parts)


def main_table(
    systems: dict[str, Sequence[Rows]], ours: Sequence[str] = (), best_of: Sequence[str] = ()
) -> str:
    """Table 1: systems by kind of question, with intervals; p of the EM against the best of `best_of` for
    `ours`.

    Each system has one list of rows, or one for each training seed.
    """
    kinds = list(dict.fromkeys(row["kind"] for row in next(iter(systems.values()))[0]))
    rivals = {name: stacked(systems[name], "em").mean() for name in best_of if name in systems}
    best = max(rivals, key=rivals.get, default=None)
    head = ["system", "EM", *(f"EM {kind}" for kind in kinds), "F1", "cost", "USD per 1,000", "calls"]
    lines = []
    for name, runs in systems.items():
        em, cost = stacked(runs, "em"), stacked(runs, "cost")
        line = [name, number(em), *(number(stacked(runs, "em", kind), interval=False) for kind in kinds)]
        line += [number(stacked(runs, "f1")), number(cost, 1), f"{cost.mean() / 1000:.4f}"]
        line.append(number(stacked(runs, "calls"), 2, interval=False))
        if best:
            p = paired_test(em.mean(0), stacked(systems[best], "em").mean(0)) if name in ours else None
            line.append("" if p is None else f"{p:.4f}")
        lines.append(line)
    return markdown([*head, f"p against {best}"] if best else head, lines)


# ---- the paper beside ours


@cache
def _paper() -> dict[str, Any]:
    return json.loads(PAPER.read_text("utf-8"))


def half_width(share: float, n: int) -> float:
    """Half of the 95 % sampling interval of a share measured on n questions."""
    return 1.96 * math.sqrt(share * (1 - share) / n)


def published(
    system: str, kind: str, metric: str = "em", backbone: str = "qwen", alpha: float = 0.0
) -> float | None:
    """What the paper has for a system and one of our sets: "em" (Table 1; single LLMs, alpha > 0: Table 4),
    "f1" (Table 3) or "cost" (Table 4, Qwen only). None where it has nothing.
    """
    ours, tables = system == "minirouter", _paper()
    if kind not in SETS:
        return None
    found = tables[{"em": "table1_em", "f1": "table3_f1"}.get(metric, "table1_em")][backbone]
    name = f"Router-R1-{backbone.capitalize()}" if ours else system
    if metric != "cost" and name in found and not (ours and alpha):
        return found[name][tables["datasets"].index(SETS[kind])]
    columns, found = tables["table4_cost"]["cols"], tables["table4_cost"]["rows"]
    name = f"Router-R1-Qwen a={alpha:.1f}" if ours else system.removeprefix("only ")
    column = f"{SETS[kind]} {'cost' if metric == 'cost' else 'EM'}"
    if metric == "f1" or backbone != "qwen" or name not in found or column not in columns:
        return None
    return found[name][columns.index(column)]


def beside(systems: dict[str, Rows], model: str, alpha: float = 0.0) -> str:
    """Markdown: our EM, F1 and cost beside the paper's for the same system and set; "" where it has none.

    The interval is what 500 questions (Bamboogle: 125) can resolve; differences inside both mean nothing. Of
    the cost the paper gives a mean alone.
    """
    backbone = "llama" if "llama" in model.casefold() else "qwen"
    lines = []
    for name, rows in systems.items():
        kinds = dict.fromkeys(row["kind"] for row in rows)
        for kind, metric in ((kind, metric) for kind in kinds for metric in ("em", "f1", "cost")):
            theirs = published(name, kind, metric, backbone, alpha)
            if theirs is None:
                continue
            n, digits = 125 if kind == "bamboogle" else 500, 1 if metric == "cost" else 3
            sampled = "" if metric == "cost" else f" ± {half_width(theirs, n):.3f} (n = {n})"
            mine = number(column(rows, metric, kind), digits)
            lines.append([name, kind, metric.upper(), mine, f"{theirs:.{digits}f}{sampled}"])
    head = ("system", "set", "metric", "here, 95 %", f"paper ({backbone}), 95 % sampling interval")
    return markdown(head, lines) if lines else ""
