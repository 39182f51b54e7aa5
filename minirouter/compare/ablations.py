"""The ablations: figures 4b and 4c, tables 6 and 7 of the paper, what the paper lacks, one option each.
(paper) -> Markdown.

Every run has the default alpha, unless it is about alpha, and is tested against the default run, question by
question.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from . import figures
from .runs import DEFAULT_ALPHA, NEW_TOPIC, fixed_pool
from .stages import DEFAULT, expert_share, share_of
from .stats import Rows, column, markdown, number, paired_test, stacked

if TYPE_CHECKING:
    from .paper import Paper

ONE_LINE = (  # runs whose options are one line
    *(DEFAULT, "alpha 0", "alpha 0.9", "no format reward", "info mask off", "one call only"),
    *("GRPO", "weak KL", "paid when wrong"),
)


def format_reward(paper: Paper) -> str:
    """Fig. 4b, 4c: reward, entropy and form with and without the format reward."""
    names = {"with": DEFAULT, "without": "no format reward"}
    panels = {"reward": "reward", "entropy, nats": "entropy", "format rate (sampled)": "format_rate"}
    figures.curves(
        paper.folder / "format.png", panels, {key: paper.folders(name) for key, name in names.items()}
    )
    return (
        "The paper: with it the reward settles within 100 steps, without it training is unstable and the "
        "text decays.\n\n"
        + _ablations(paper, {DEFAULT: "drawn", "no format reward": "drawn"}) + "\n\n![](format.png)"
    )  # fmt: skip


def prompt(paper: Paper) -> str:
    """Table 6 and more: how candidates are described, prices shown or not, their order."""
    told = _ablations(
        paper,
        {DEFAULT: "drawn", "long descriptors": "drawn", "no descriptors": "drawn", "prices hidden": "drawn"},
        figure="prompt.png",
    )
    order = {
        f"{name} / shown {shown}": paper.trained(setting, name)
        for name in ("fixed pool", "fixed pool, order shuffled")
        for shown, setting in (("in the order of training", "fixed"), ("in reverse", "reversed"))
    }
    return (
        "The paper: short descriptors instead of long ones change nothing (.419, .416). It shows no "
        f"prices, nor says whether the order matters.\n\n{told}\n\n![](prompt.png)\n\n"
        f"### Order of the candidates, one fixed pool\n\n{_lines_of(order)}"
    )


def newcomer(paper: Paper) -> str:
    """Table 7: a candidate added at test time only, half-way through training, or there from the start."""
    mine = next(c.name for c in fixed_pool() if c.descriptor == NEW_TOPIC)
    runs = {
        "never there": paper.trained("fixed-without", "fixed pool without"),
        "added at test time only": paper.trained("fixed", "fixed pool without"),
        "added half-way through training": paper.trained("fixed", "added during training"),
        "there from the start": paper.trained("fixed", "fixed pool"),
    }
    shares = [
        [name, f"{np.mean([share_of(rows, (NEW_TOPIC,))[1] for rows in own]):.2f}"]
        for name, own in runs.items()
    ]
    return (
        "The paper: a model added during training gives .425 against .416 (noise). "
        f"Here it is the {NEW_TOPIC} expert ({mine}, $1) of one fixed pool.\n\n{_lines_of(runs)}\n\n"
        + markdown(("newcomer", f"share of the calls on {NEW_TOPIC} that it gets"), shares)
    )


def lacking(paper: Paper) -> str:
    """What the paper lacks: one candidate only, the info mask off, one call only, seeds with intervals."""
    parts = [_ablations(
        paper,
        {DEFAULT: "drawn", "one candidate": "one", "one call only": "drawn", "info mask off": "drawn"},
        figure="lacking.png",
    )]  # fmt: skip
    untrained = paper.method("one", "Prompt LLM*")
    single = [[name, number(stacked(runs, "em")), number(stacked(runs, "cost"), 1)] for name, runs in {
        "always the large one, single round, untrained base": [paper.method("one", "Largest LLM")],
        "the untrained base in its own loop, large one only": [untrained],
        "trained with the large one only": paper.trained("one", "one candidate"),
        f"trained with all ({DEFAULT}), fixed pool": paper.trained("fixed", "fixed pool"),
    }.items()]  # fmt: skip
    parts += [
        "### How much is choosing, how much is learning to answer?",
        markdown(("system", "EM", "cost"), single),
    ]
    panels = {
        "KL to the reference, nats": "kl",
        "gradient norm of the policy": "grad_norm/policy",
        "EM (sampled)": "em",
    }
    runs = {"mask on": paper.folders(DEFAULT), "mask off": paper.folders("info mask off")}
    known = figures.read_metrics(runs["mask on"][0])[0]
    figures.curves(paper.folder / "mask.png", {t: k for t, k in panels.items() if k in known}, runs)
    parts += ["![](lacking.png)", "### The info mask off", "![](mask.png)", "### Seeds", _by_seed(paper)]
    return "\n\n".join(parts)


def one_line(paper: Paper) -> str:
    """What each option does to training itself: means over its last 20 steps, sampled, and over seeds."""
    keys = {
        "EM": "em",
        "cost": "cost",
        "format": "format_rate",
        "calls": "calls",
        "after a refusal: dearer": "after_refusal/dearer",
        "entropy": "entropy",
        "KL": "kl",
        "gradient norm": "grad_norm/policy",
    }
    lines = []
    for name in (name for name in ONE_LINE if name in paper.jobs):
        last = [row for run in paper.folders(name) for row in figures.read_metrics(run)[-20:]]
        given = paper.jobs[name][0].options[:-2]  # without the seed
        given = given[2:] if given[:2] == ("--alpha", str(DEFAULT_ALPHA)) else given
        means = [f"{np.mean([row[key] for row in last]):.2f}" for key in keys.values()]
        lines.append([name, f"`{' '.join(['python train.py', *given])}`", *means])
    return markdown(("what", "command", *keys), lines)


def _by_seed(paper: Paper) -> str:
    """Every run of every alpha by itself, in drawn and in full pools (where each topic has an expert)."""
    lines = []
    for name in paper.alphas:
        pairs = zip(paper.trained("drawn", name), paper.trained("full", name), strict=True)
        for seed, (drawn, full) in enumerate(pairs):
            one = [row for row in drawn if row["kind"] == "one-hop"]
            two = [row for row in drawn if row["kind"].startswith("two-hop")]
            cells = ((drawn, "em", 3), (drawn, "cost", 1), (drawn, "format_ok", 3), (one, "calls", 2),
                     (two, "calls", 2), (full, "em", 3), (full, "cost", 1))  # fmt: skip
            shown = [number(column(rows, key), digits, interval=False) for rows, key, digits in cells]
            lines.append([name, str(seed), *shown, f"{expert_share(full):.2f}"])
    head = ("alpha", "seed", "EM", "cost", "format", "calls, one hop", "calls, two hops")
    return markdown((*head, "full pools: EM", "cost", "right expert"), lines)


def _ablations(paper: Paper, settings: dict[str, str], figure: str | None = None) -> str:
    """A table of runs on the question sets they belong to, tested against the first; a bar chart if asked
    for.
    """
    runs = {name: paper.trained(setting, name) for name, setting in settings.items()}
    if figure:
        titles = ("exact match", "cost, USD per 1M questions", "calls a question")
        figures.bars(paper.folder / figure, runs, ("em", "cost", "calls"), titles)
    return _lines_of(runs)


def _lines_of(runs: dict[str, Sequence[Rows]]) -> str:
    """EM, format rate, cost, calls of each set of runs; p of the EM against the first one."""
    first = stacked(next(iter(runs.values())), "em").mean(0)
    lines = []
    for i, (name, own) in enumerate(runs.items()):
        em = stacked(own, "em")
        line = [name, number(em), number(stacked(own, "format_ok"), interval=False)]
        line += [number(stacked(own, "cost"), 1), number(stacked(own, "calls"), 2)]
        lines.append([*line, f"{paired_test(em.mean(0), first):.4f}" if i else ""])
    return markdown(("run", "EM", "format", "cost", "calls", "p against the first"), lines)
