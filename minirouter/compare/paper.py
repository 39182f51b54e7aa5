"""Every table and figure of the paper, in the miniature world: `python -m minirouter.compare.paper --quick`.

Trains the routers that are missing (runs.py), answers the test questions with every system, and writes
tables (Markdown) and figures (PNG) to `runs/paper/` (quick: `runs/paper-quick/`), all of it in `paper.md`.
Stop it at any time: what is done stays done. `--only` picks stages. Untrained systems are answered once for
each set of questions; the sets hold the same questions with different pools, so that everything can be
compared question by question.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from minirouter import world
from minirouter.config import Config, fail, load_config, read_yaml
from minirouter.facts import TOPICS, topics
from minirouter.record import trajectory_row, transcript
from minirouter.reward import CostScale, score
from minirouter.trajectory import Question

from . import ablations, methods, runs, stages
from .prompts import Bench
from .retriever import require
from .stats import Rows
from .systems import loop
from .table import collect, read_table

STAGES = {  # name: (title, the function, the runs that it needs; "alphas" are all alphas, "default" is one)
    "table1": ("1. All systems (Tables 1, 3)", stages.comparison, ("alphas", "search-r1")),
    "unseen": ("2. Unseen candidates (Table 2)", stages.unseen, ("alphas",)),
    "newcomers": ("2b. Newcomers one by one", stages.newcomers, ("alphas",)),
    "pareto": ("3. EM against cost (Table 4, Fig. 5)", stages.pareto, ("alphas",)),
    "calls": ("4. Calls and escalation (Fig. 4a)", stages.calls, ("alphas",)),
    "cost": ("4b. The cost reward (Fig. 3)", stages.cost_reward, ("alphas",)),
    "transcripts": ("4c. Transcripts", stages.transcripts, ("alphas",)),
    "format": ("5. The format reward (Fig. 4b, 4c)", ablations.format_reward, (
        "default", "no format reward")),
    "prompt": ("6. Descriptors, prices, order (Table 6)", ablations.prompt, (
        "default", "long descriptors", "no descriptors", "prices hidden", "fixed pool",
        "fixed pool, order shuffled")),
    "newcomer": ("7. A candidate added during training (Table 7)", ablations.newcomer, (
        "fixed pool", "fixed pool without", "added during training")),
    "lacking": ("8. What the paper lacks", ablations.lacking, (
        "alphas", "one candidate", "one call only", "info mask off", "fixed pool")),
    "ablations": ("9. One option each", ablations.one_line, ("alphas", *ablations.ONE_LINE)),
}  # fmt: skip
ALONE = ("Direct", "CoT", "SFT", "RAG")  # they do not see the pool, and answer alike in every set
SECONDS_A_QUESTION = 0.9  # of all systems and sets together, one core


@dataclass
class Paper:
    """One comparison: its folder and size, and what has been answered so far."""

    folder: Path
    model: str
    steps: int
    count: int  # test questions
    table_size: int  # training questions of the collected table
    alpha_values: tuple[float, ...]
    seeds: tuple[int, ...]
    parallel: int = 2
    answered: dict[tuple[str, str], list[Rows] | Rows] = field(default_factory=dict)

    @property
    def alphas(self) -> list[str]:
        return [f"alpha {a:g}" for a in self.alpha_values]

    @property
    def singles(self) -> list[str]:
        return [f"only {word}" for word in world.DESCRIPTORS]

    @cached_property
    def jobs(self) -> dict[str, list[runs.Job]]:
        return runs.all_jobs(self.alpha_values, self.seeds, runs.write_inputs(self.folder / "inputs"))

    def folders(self, name: str) -> list[Path]:
        """The run folders of what is varied, one a seed."""
        return [self.folder / "runs" / job.name for job in self.jobs[name]]

    def wanted(self, only: Sequence[str]) -> list[runs.Job]:
        """The runs that these stages need, and those that others are grafted on."""
        names = dict.fromkeys(name for stage in only for name in STAGES[stage][2])
        known = {"alphas": self.alphas, "default": [stages.DEFAULT]}
        names = dict.fromkeys(found for name in names for found in known.get(name, [name]))
        some = set(ablations.ONE_LINE)  # of these, those that the alphas have
        return [job for name in names if name in self.jobs or name not in some for job in self.jobs[name]]

    @cached_property
    def config(self) -> Config:
        return replace(load_config([]), model=self.model)

    @cached_property
    def bench(self) -> Bench:
        """The untrained base, with the table that learned routers train on: collected now if not there."""
        from evaluate import build, limits_of

        base, task = build(self.config)
        bench = methods.open_bench(base, task, limits_of(self.config), 0, None, None, None)
        path = self.folder / f"table-{self.table_size}.jsonl"
        for _ in collect(bench, task.questions("train", self.table_size), path):
            pass
        bench.table = read_table(path)
        return bench

    @cached_property
    def sets(self) -> dict[str, list[Question]]:
        """The same test questions with different pools."""
        drawn = world.questions("test", self.count, 0)
        fixed = runs.fixed_pool()
        pools = {
            "fixed": fixed,
            "reversed": fixed[::-1],
            "fixed-without": tuple(c for c in fixed if c.descriptor != runs.NEW_TOPIC),
            "one": tuple(c for c in fixed if c.descriptor == "large"),
        }
        found = {
            name: [replace(q, pool=world.SimulatedPool(pool)) for q in drawn] for name, pool in pools.items()
        }
        found["drawn"] = drawn
        found["full"] = [
            replace(q, pool=world.draw_pool(random.Random(f"full {q.id}"), full=True)) for q in drawn
        ]
        found["retriever"] = [replace(q, pool=self.bench.retriever) for q in drawn]
        found["lacking"], found["newcomers"] = drawn, drawn
        found["renamed"] = [world.renamed(q) for q in drawn]
        for topic in TOPICS:
            about = [q for q in drawn if topic in topics(q.text) and q.kind != "own"]
            found[f"no-{topic}"] = [world.without_expert(q, topic) for q in about]
            found[f"new-{topic}"] = [world.with_newcomer(q, topic) for q in about]
        for topic in stages.NEWCOMERS:
            found["lacking"] = [world.without_expert(q, topic) for q in found["lacking"]]
            found["newcomers"] = [world.with_newcomer(q, topic) for q in found["newcomers"]]
        return found

    def method(self, setting: str, name: str) -> Rows:
        """The rows of an untrained system on a set of questions."""
        setting = "drawn" if name in ALONE else setting
        return self._kept(
            setting, name, None, lambda: methods.run_method(self.bench, name, self.sets[setting])
        )

    def trained(self, setting: str, name: str) -> list[Rows]:
        """The rows of trained routers on a set of questions, one list a seed."""
        return [
            self._kept(setting, folder.name, folder, lambda folder=folder: self._answer(setting, folder))
            for folder in self.folders(name)
        ]

    def _kept(self, setting: str, name: str, run: Path | None, compute: Any) -> Rows:
        """Rows from memory or disk; computed if they are not there, or older than the run they are of."""
        if (setting, name) not in self.answered:
            path = self.folder / "rows" / setting / f"{name.replace(' ', '-').replace('*', '-star')}.jsonl"
            newest = run / "checkpoints" / f"step-{self.steps:06d}" / "manifest.json" if run else None
            rows = (
                [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []
            )
            stale = newest and path.exists() and path.stat().st_mtime < newest.stat().st_mtime
            if stale or [row["id"] for row in rows] != [q.id for q in self.sets[setting]]:
                say(f"answering: {name}, {setting}")
                rows = compute()
                path.parent.mkdir(parents=True, exist_ok=True)
                partial = path.with_suffix(".partial")
                partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
                partial.rename(path)
            self.answered[setting, name] = rows
        return self.answered[setting, name]

    def _answer(self, setting: str, run: Path) -> Rows:
        router, bench = self._open(run)
        questions = self.sets[setting]
        return methods.rows_of(questions, bench.task.pools(questions), loop(bench, questions, router))

    def _open(self, run: Path) -> tuple[Any, Bench]:
        """A trained router and the bench with its prompt and limits."""
        from evaluate import build, limits_of, own_files, restore

        config = own_files(Config(**read_yaml(run / "config.yaml")), run)
        router, task = build(config)
        restore(router, run, str(self.steps))
        return router, Bench(router, task, limits_of(config))

    def transcripts(self, name: str | None) -> dict[str, str]:
        """One whole episode of each kind of question, by the first seed's router, or the untrained base."""
        router, bench = self._open(self.folders(name)[0]) if name else (self.bench.base, self.bench)
        chosen = {q.kind: q for q in reversed(self.sets["drawn"])}
        questions = [chosen[kind] for kind in sorted(chosen)]
        found = {}
        for q, outcome in zip(questions, loop(bench, questions, router), strict=True):
            reward = score(outcome.trajectory, q, q.pool.names, CostScale(), alpha=0.0, update=False)
            row = trajectory_row(outcome.trajectory, q, reward, router.tokenizer)
            found[q.kind] = f"{row['prompt_text'].strip()}\n\n{transcript(row)}"
        return found


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="minirouter.compare.paper", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="one seed, three alphas, fewer questions and steps"
    )
    parser.add_argument("--only", default=",".join(STAGES), help=f"stages: {', '.join(STAGES)}")
    parser.add_argument("--folder", type=Path, help="default: runs/paper, quick: runs/paper-quick")
    parser.add_argument("--model", default="tiny", help="tiny, or a folder made by assets/tiny/make.py")
    parser.add_argument("--parallel", type=int, default=2, help="runs side by side, one thread each")
    parser.add_argument("--steps", type=int, help="training steps of a run (180, quick: 80)")
    parser.add_argument("--questions", type=int, help="test questions (1000, quick: 400)")
    parser.add_argument(
        "--table", type=int, help="training questions of the collected table (3000, quick: 1000)"
    )
    parser.add_argument("--alphas", help="comma list (0,.6,.7,.8,.9; quick: 0,.6,.9)")
    parser.add_argument("--seeds", type=int, help="training seeds (3, quick: 1)")
    parser.add_argument(
        "--no_training", action="store_true", help="tables and figures of the runs that are there"
    )
    return parser.parse_args(argv)


def open_paper(options: argparse.Namespace) -> Paper:
    """The comparison that the options ask for. Raises ValueError, one line, for a mistake in them."""
    quick = options.quick
    try:
        alphas = tuple(
            float(a) for a in (options.alphas or ("0,.6,.9" if quick else "0,.6,.7,.8,.9")).split(",")
        )
    except ValueError:
        raise ValueError(f"--alphas {options.alphas}: not a comma list of numbers") from None
    if runs.DEFAULT_ALPHA not in alphas:
        raise ValueError(f"--alphas must hold {runs.DEFAULT_ALPHA:g}, which the other runs are compared with")
    return Paper(
        options.folder or Path("runs/paper-quick" if quick else "runs/paper"),
        options.model,
        options.steps or (80 if quick else 180),
        options.questions or (400 if quick else 1000),
        options.table or (1000 if quick else 3000),
        alphas,
        tuple(range(options.seeds or (1 if quick else 3))),
        options.parallel,
    )


def write_stage(paper: Paper, name: str) -> None:
    """Compute one stage and write its Markdown."""
    title, make, _ = STAGES[name]
    (paper.folder / f"{name}.md").write_text(f"## {title}\n\n{make(paper)}\n", encoding="utf-8")


def gather(paper: Paper) -> Path:
    """paper.md: all stages that have been written, in their order."""
    head = (
        "# The tables and figures of the paper, in the miniature world\n\n"
        f"{paper.count} test questions, {paper.steps} steps a run; {len(paper.seeds)} seeds of each alpha, "
        "one of everything else. "
        "Cost is in USD per 1M such questions, a price in USD per 1M output tokens. Intervals are at 95 % "
        "(bootstrap), p is of a sign-flip test, paired by question. In the miniature a thought is about whom "
        "to ask, so that CoT has nothing to think about."
    )
    parts = [path.read_text("utf-8") for name in STAGES if (path := paper.folder / f"{name}.md").exists()]
    (paper.folder / "paper.md").write_text("\n\n".join([head, *parts]), encoding="utf-8")
    return paper.folder / "paper.md"


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    sys.path.insert(0, str(runs.ROOT))  # where evaluate.py lies
    only = [name.strip() for name in options.only.split(",") if name.strip()]
    try:
        if unknown := [name for name in only if name not in STAGES]:
            raise ValueError(f"no stage {unknown[0]!r} (stages: {', '.join(STAGES)})")
        require("bm25s", "sklearn")  # now, not after an hour of training
        paper = open_paper(options)
        jobs = paper.wanted(only)
        say(runs.estimate(jobs, paper.folder / "runs", paper.steps, paper.parallel))
        answering = paper.count * SECONDS_A_QUESTION / 60
        say(f"answering {paper.count} questions with every system: at most {answering:.0f} minutes")
        if not options.no_training:
            common = ["--config", "tiny", "--model", options.model, "--eval_questions", "40"]
            runs.train_all(jobs, paper.folder / "runs", paper.steps, common, paper.parallel, say)
        for name in only:
            write_stage(paper, name)
            say(f"written: {paper.folder / name}.md")
        say(f"all of it: {gather(paper)}")
    except ValueError as error:
        fail(error)


if __name__ == "__main__":
    main()
