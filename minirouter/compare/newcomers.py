"""Candidates that training never saw: `python -m minirouter.compare.newcomers RUN` (the miniature world).

The paper adds two candidates at inference (its Table 2) and does not say whether they were called. Here, on
the same test questions, without any training: every candidate under a name that training never used; pools
that lack the expert of a topic; and the same pools with a new expert for it, at 1 USD, under such a name.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from minirouter import world
from minirouter.facts import TOPICS, topics
from minirouter.record import mean
from minirouter.report import Result
from minirouter.run import restore


def share_of_expert(results: Sequence[Result], topic: str) -> float:
    """Of the calls that ask one fact of the topic: the share that went to an expert in it."""
    asked = [
        r.pool.find(call.reply.candidate)
        for r in results
        for call in r.trajectory.calls
        if topics(call.query or "") == (topic,)
    ]
    return mean(candidate is not None and candidate.descriptor == topic for candidate in asked)


def row(name: str, results: Sequence[Result], share: float | None = None) -> str:
    em, cost = mean(r.reward.em for r in results), mean(r.trajectory.cost for r in results)
    return f"| {name} | {len(results)} | {em:.3f} | {cost:.1f} | {'' if share is None else f'{share:.2f}'} |"


def main() -> None:
    from evaluate import Options, build, evaluate
    from minirouter.config import load_config

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", help="run folder")
    parser.add_argument("--count", type=int, default=400, help="test questions")
    args = parser.parse_args()
    config = load_config(["--run", args.run], extra=Options)[0]
    router, task = build(config)
    restore(router, Path(args.run), "newest")
    lines = ["| pools | n | EM | cost | calls on the topic that its expert gets |", "|---|---|---|---|---|"]
    for name, names in (("as in training", "train"), ("names never used in training", "held-out")):
        questions = world.questions("test", args.count, 0, names=names)
        lines.append(row(name, evaluate(router, task, questions, config)))
    everything = world.questions("test", args.count, 0)
    for topic in TOPICS:
        about = [q for q in everything if topic in topics(q.text) and q.kind != "own"]
        lacking = evaluate(router, task, [world.without_expert(q, topic) for q in about], config)
        lines.append(row(f"{topic}: no expert", lacking))
        joined = evaluate(router, task, [world.with_newcomer(q, topic) for q in about], config)
        lines.append(row(f"{topic}: a new expert at 1 USD", joined, share_of_expert(joined, topic)))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
