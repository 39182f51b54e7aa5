"""The tables and figures of the paper, one function each: (paper) -> Markdown; figures are written beside.

Numbers in the titles are those of issue and paper. What the paper found is told above each table, so that a
reader sees where the miniature agrees and where it does not. Every trained run is greedy, on the same test
questions; "EM x [y, z]" are means with 95 % bootstrap intervals over questions (and seeds, where there are
several).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from minirouter.facts import TOPICS, topics

from . import figures
from .methods import BASELINES
from .runs import DEFAULT_ALPHA
from .stats import Rows, main_table, markdown, number, paired_test, stacked

if TYPE_CHECKING:
    from .paper import Paper

DEFAULT = f"alpha {DEFAULT_ALPHA:g}"
NEWCOMERS = ("film", "science")  # topics whose experts are replaced by candidates that training never saw
BOTH_SIDES = (DEFAULT, "alpha 0.9")  # where a large stand-in for a missing expert is worth it, and not


def comparison(paper: Paper) -> str:
    """Table 1 and Table 3: every system, EM, F1, cost, calls, by kind of question; in drawn and in full
    pools.
    """
    said = "The paper: the trained router has the best EM on average, .416 against .338 of Largest LLM."
    parts = [said]
    for setting in ("drawn", "full"):
        systems = {name: [paper.method(setting, name)] for name in (*BASELINES, *paper.singles)}
        systems["Search-R1"] = paper.trained("retriever", "search-r1")
        systems |= {f"minirouter, {name}": paper.trained(setting, name) for name in paper.alphas}
        rivals = [*BASELINES, *paper.singles, "Search-R1"]
        ours = [f"minirouter, {name}" for name in paper.alphas]
        systems |= {name: [paper.method(setting, name)] for name in ("Oracle", "by hand")}
        parts += [f"### {setting} pools", main_table(systems, ours, rivals)]
    return "\n\n".join([*parts, "### EM by topic, one hop, drawn pools", _by_topic(paper)])


def _by_topic(paper: Paper) -> str:
    """EM of one-hop questions by topic, for the systems that choose."""
    names = ("Prompt LLM", "Largest LLM", "KNN Router", "BERT Router", "RouterDC", "GraphRouter")
    systems = {name: [paper.method("drawn", name)] for name in names}
    systems |= {f"minirouter, {name}": paper.trained("drawn", name) for name in paper.alphas}
    found = sorted(
        {topics(row["question"])[0] for row in systems["Prompt LLM"][0] if row["kind"] == "one-hop"}
    )

    def about(rows: Rows, topic: str) -> Rows:
        return [row for row in rows if row["kind"] == "one-hop" and topics(row["question"])[0] == topic]

    lines = [
        [name, *(number(stacked([about(rows, topic) for rows in own], "em")) for topic in found)]
        for name, own in systems.items()
    ]
    return markdown(["system", *found], lines)


def unseen(paper: Paper) -> str:
    """Table 2: two candidates added that training never saw, no retraining, and how often they are called."""
    names = (
        "Prompt LLM",
        "Largest LLM",
        "KNN Router",
        "BERT Router",
        "GraphRouter",
        "Prompt LLM*",
        "KNN Router*",
    )
    lines = []
    for name in (*names, *paper.alphas):
        before, after = (
            paper.trained(setting, name) if name in paper.alphas else [paper.method(setting, name)]
            for setting in ("lacking", "newcomers")
        )
        shares = [share_of(rows, NEWCOMERS) for rows in after]
        p = paired_test(stacked(after, "em").mean(0), stacked(before, "em").mean(0))
        title = f"minirouter, {name}" if name in paper.alphas else name
        lines.append(
            [
                title,
                *_before_after(before, after),
                *(f"{np.mean(share):.2f}" for share in zip(*shares, strict=True)),
                f"{p:.4f}",
            ]
        )
    head = (
        "system",
        "EM without",
        "EM with",
        "cost without",
        "cost with",
        "share of all calls",
        "of calls on their topics",
        "p (EM)",
    )
    said = (
        f"Experts in {' and '.join(NEWCOMERS)} are taken out of every pool; then one of each, at $1 and with "
        "a name that training never showed, is put in. The paper: EM +.005 for the router, inside the noise, "
        "and no word of whether the new models were called. Learned routers know a newcomer here, as their "
        "classes are descriptors."
    )
    return f"{said}\n\n{markdown(head, lines)}"


def newcomers(paper: Paper) -> str:
    """What the paper does not say of Table 2: names that training never showed, and one new expert at a time,
    by seed.
    """
    names = [name for name in BOTH_SIDES if name in paper.alphas]
    systems = {name: [paper.trained(setting, name) for setting in ("drawn", "renamed")] for name in names}
    systems["by hand"] = [[paper.method(setting, "by hand")] for setting in ("drawn", "renamed")]
    renamed = []
    for name, (before, after) in systems.items():
        pairs = zip(stacked(before, "em").mean(1), stacked(after, "em").mean(1), strict=True)
        p = paired_test(stacked(after, "em").mean(0), stacked(before, "em").mean(0))
        by_seed = ", ".join(f"{a:.3f} to {b:.3f}" for a, b in pairs)
        renamed.append([name, *_before_after(before, after), by_seed, f"{p:.4f}"])
    lines = []
    for topic in TOPICS:
        line = [topic, str(len(paper.sets[f"no-{topic}"]))]
        for name in names:
            before, after = (paper.trained(f"{setting}-{topic}", name) for setting in ("no", "new"))
            em, new_em, cost, new_cost = _before_after(before, after, interval=False)
            shares = " ".join(f"{share_of(rows, (topic,))[1]:.2f}" for rows in after)
            line += [f"{em} to {new_em}", f"{cost} to {new_cost}", shares]
        lines.append(line)
    head = [f"{name}: {what}" for name in names for what in ("EM", "cost", "its share by seed")]
    return (
        "No training, the same questions. All candidates under names that training never used (of what made "
        "the base, its look-up drill has them, its demonstrations have not); behind them are the same LLMs, "
        "so that `by hand`, which reads any name, loses nothing:\n\n"
        + markdown(("", "EM", "EM, new names", "cost", "cost, new names", "EM by seed", "p (EM)"), renamed)
        + "\n\nQuestions about a topic whose expert is missing, then with a new one at $1, under such a "
        "name; its share is that of the calls on the topic:\n\n"
        + markdown(("topic", "questions", *head), lines)
    )


def _before_after(before: Sequence[Rows], after: Sequence[Rows], interval: bool = True) -> list[str]:
    """EM before and after, cost before and after."""
    return [
        number(stacked(runs, key), digits, interval)
        for key, digits in (("em", 3), ("cost", 1))
        for runs in (before, after)
    ]


def share_of(rows: Rows, words: Sequence[str]) -> tuple[float, float]:
    """Share of all calls, and of those that ask one hop of these topics, that go to these labels."""
    calls = [call for row in rows for call in row["calls"]]
    asked = [call for call in calls if len(found := topics(call["query"] or "")) == 1 and found[0] in words]
    return tuple(sum(call["label"] in words for call in some) / max(1, len(some)) for some in (calls, asked))


def expert_share(rows: Rows) -> float:
    """Of the calls that ask a fact: the share that asks one hop of the expert in it."""
    asked = [
        (call["label"], found)
        for row in rows
        for call in row["calls"]
        if (found := topics(call["query"] or ""))
    ]
    return sum((label,) == found for label, found in asked) / max(1, len(asked))


def pareto(paper: Paper) -> str:
    """Table 4 and Fig. 5: alpha trades EM for cost, beside every baseline and single LLM."""
    trained = {name: paper.trained("drawn", name) for name in paper.alphas}
    others = {
        name: [paper.method("drawn", name)] for name in (*BASELINES, *paper.singles, "Oracle", "by hand")
    }
    figures.pareto(paper.folder / "pareto.png", trained, others)
    lines = []
    for name, own in trained.items():
        line = [name]
        for rows in (own, paper.trained("full", name)):
            line += [number(stacked(rows, "em")), number(stacked(rows, "cost"), 1)]
        by_seed = zip(stacked(own, "em").mean(1), stacked(own, "cost").mean(1), strict=True)
        lines.append([*line, ", ".join(f"{em:.3f} / {cost:.1f}" for em, cost in by_seed)])
    head = ("alpha", "EM, drawn pools", "cost", "EM, full pools", "cost", "EM / cost by seed, drawn pools")
    table = markdown(head, lines)
    said = "The paper: three regimes, not a smooth frontier (cost 135, 116 | 27, 26 | 6)."
    return f"{said}\n\n{table}\n\n![](pareto.png)"


def calls(paper: Paper) -> str:
    """Fig. 4a: calls by kind of question; and what follows a refusal."""
    systems = {"untrained": [paper.method("drawn", "Prompt LLM*")]}
    systems |= {name: paper.trained("drawn", name) for name in paper.alphas}
    figures.by_kind(paper.folder / "calls.png", systems, "calls", "calls a question")
    kinds = list(dict.fromkeys(row["kind"] for row in systems["untrained"][0]))
    lines = [
        [name, *(number(stacked(runs, "calls", kind), 2) for kind in kinds)] for name, runs in systems.items()
    ]
    after = [
        [name, *_after_refusal([row for rows in runs for row in rows])] for name, runs in systems.items()
    ]
    head = (
        "system",
        "refusals",
        "then a dearer candidate",
        "the same",
        "another, not dearer",
        "no further call",
    )
    return (
        "The paper: 1.08 calls on general and 1.21 on multi-hop questions.\n\n"
        f"{markdown(['system', *kinds], lines)}\n\n![](calls.png)\n\n"
        f"After a refusal by a candidate that was not the dearest asked:\n\n{markdown(head, after)}\n\n"
        f"Whom the calls go to, drawn pools:\n\n{_called(systems)}"
    )


def _after_refusal(rows: Rows) -> list[str]:
    """How many refusals by a candidate below $5, and the shares of what came next."""
    follow: list[str] = []
    for row in rows:
        for i, call in enumerate(row["calls"]):
            if not call["refused"] or call["price"] >= 5:
                continue
            later = row["calls"][i + 1] if i + 1 < len(row["calls"]) else None
            same = later and later["name"] == call["name"]
            dearer = later and later["price"] > call["price"]
            follow.append("none" if not later else "same" if same else "dearer" if dearer else "other")
    return [
        str(len(follow)),
        *(f"{follow.count(what) / max(1, len(follow)):.2f}" for what in ("dearer", "same", "other", "none")),
    ]


def _called(systems: dict[str, Sequence[Rows]]) -> str:
    """Shares of calls by label."""
    counted = {
        name: [c["label"] for rows in runs for row in rows for c in row["calls"]]
        for name, runs in systems.items()
    }
    found = sorted({label for labels in counted.values() for label in labels})
    lines = [
        [name, *(f"{labels.count(x) / max(1, len(labels)):.2f}" for x in found)]
        for name, labels in counted.items()
    ]
    return markdown(["system", *found], lines)


def cost_reward(paper: Paper) -> str:
    """Fig. 3: the normalised cost reward by alpha, and the cost itself, which the moving window hides."""
    runs = {name: paper.folders(name) for name in paper.alphas}
    figures.curves(
        paper.folder / "cost_reward.png",
        {"normalised cost reward": "reward/cost", "cost, USD per 1M questions": "cost", "EM (sampled)": "em"},
        runs,
    )
    lines = [
        [
            name,
            *(
                f"{np.mean([figures.curve(folders, key)[1][-10:]]):.{d}f}"
                for key, d in (("reward/cost", 3), ("cost", 1), ("em", 3))
            ),
        ]
        for name, folders in runs.items()
    ]
    head = ("alpha", "cost reward, last 10 steps", "cost", "EM (sampled)")
    said = "The paper has this picture, without figures that could be read."
    return f"{said}\n\n{markdown(head, lines)}\n\n![](cost_reward.png)"


def transcripts(paper: Paper) -> str:
    """4c: one whole episode of each kind of question, before and after training."""
    found = {"before": paper.transcripts(None)} | {name: paper.transcripts(name) for name in paper.alphas}
    kinds = list(found["before"])
    parts = [f"### {kind}, {name}\n\n```\n{found[name][kind]}\n```" for kind in kinds for name in found]
    return "\n\n".join(parts)
