"""Score a router on held-out questions: every question exactly once, by the rollout code of training.

Greedy unless `--eval_temperature` says otherwise (the paper's reference implementation samples at
temperature 1). EM ignores the form of the text, as in the reference; the format rate stands beside it.
Intervals are at 95 %.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from minirouter import checkpoint, world
from minirouter.config import Config, fail, load_config, read_yaml
from minirouter.facts import topics
from minirouter.model import Router
from minirouter.record import mean, trajectory_row, write_rows
from minirouter.reward import CostScale, score
from minirouter.rollout import rollout
from minirouter.task import Task, open_pool
from minirouter.trajectory import Call, Limits, Question, Reward, Trajectory

TINY = Path(world.__file__).parent / "assets" / "tiny"


@dataclass
class Options:
    """Score a run, or a base model, on held-out questions."""

    run: str | None = None  # run folder; without one, the base of the configuration is scored
    at: str = "newest"  # which checkpoint: newest, best, or a step
    split: str = "test"


@dataclass(frozen=True)
class Result:
    """One question and what came of it."""

    question: Question
    pool: Any
    trajectory: Trajectory
    reward: Reward


def build(config: Config) -> tuple[Router, Task]:
    """Base model with fresh adapters, and the task; raises ValueError, one line, for anything that cannot be
    used.
    """
    path = str(TINY) if config.model == "tiny" else config.model
    router = Router.load(
        path,
        {
            "load_in_4bit": config.load_in_4bit,
            "trust_remote_code": config.trust_remote_code,
            "total_tokens": config.total_tokens,
        },
        lora_r=config.lora_r,
        critic=config.algo == "ppo",
        temperature=config.temperature,
        gradient_checkpointing=config.gradient_checkpointing,
        seed=config.seed,
    )
    pool = open_pool(config.pool, config.data, router.tokenizer, config.timeout_s)
    task = Task(
        router.tokenizer,
        config.data,
        pool,
        config.prompt,
        config.show_prices,
        config.info_tag,
        config.max_calls,
        config.seed,
    )
    return router, task


def limits_of(config: Config, training: bool = False) -> Limits:
    """Budgets of a rollout. Evaluation has its own temperature, and alone a top-p."""
    return Limits(
        config.max_calls,
        config.turn_tokens,
        config.reply_tokens,
        config.total_tokens,
        config.slots,
        config.temperature if training else config.eval_temperature,
        1.0 if training else config.top_p,
    )


def evaluate(router: Router, task: Task, questions: Sequence[Question], config: Config) -> list[Result]:
    """Answer every question once. The cost scale is not touched: `reward.cost_reward` is .5 throughout."""
    pools = task.pools(questions)
    trajectories = rollout(
        router, task.prompts(questions), pools, limits_of(config), seed=config.seed, info_tag=config.info_tag
    )
    rewards = [
        score(t, q, pool.names, CostScale(), alpha=config.alpha, metric=config.metric, update=False)
        for t, q, pool in zip(trajectories, questions, pools, strict=True)
    ]
    return [Result(*row) for row in zip(questions, pools, trajectories, rewards, strict=True)]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % interval of a mean: Wilson for shares, normal otherwise; (0, 0) of nothing."""
    n, m = len(values), mean(values)
    if n == 0:
        return 0.0, 0.0
    z = 1.96
    if set(values) <= {0, 1}:
        centre = (m + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * math.sqrt(m * (1 - m) / n + z * z / (4 * n * n))
        return centre - half, centre + half
    half = z * math.sqrt(sum((v - m) ** 2 for v in values) / max(1, n - 1) / n)
    return m - half, m + half


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
    return "\n".join(lines)


def compare(before: Sequence[Result], after: Sequence[Result]) -> str:
    """Tables of the same questions before and after training."""
    parts = [
        f"{title}\n\n{table(results)}" for title, results in (("before", before), ("after", after)) if results
    ]
    return "\n\n".join(parts)


def restore(router: Router, run: Path, at: str) -> str:
    """Put a run's trained adapters on the router; -> the name of the checkpoint. Raises ValueError if there
    is none.
    """
    folder = run / "checkpoints"
    if at == "newest":
        path, _ = checkpoint.newest(folder)
    elif at == "best":
        newest, _ = checkpoint.newest(folder)
        best = json.loads((newest / "state.json").read_text("utf-8"))["best_step"] if newest else None
        path = folder / f"step-{best:06d}" if best is not None else None
    else:
        path = folder / f"step-{int(at):06d}" if at.isdigit() else None
    if path is None or not path.is_dir():
        raise ValueError(f"{run}: no checkpoint {at}")
    checkpoint.check(path)
    router.load_adapters(path)
    return path.name


def own_files(config: Config, run: Path) -> Config:
    """The run folder alone is enough: its copies of pool file and prompt stand in for the paths that training
    had.
    """
    saved = read_yaml(run / "config.yaml")
    copies = {"pool": run / "pool.yaml", "prompt": run / "prompt.txt"}
    return replace(
        config,
        **{
            key: str(path)
            for key, path in copies.items()
            if path.is_file() and getattr(config, key) == saved.get(key)
        },
    )


def main() -> None:
    config, options = load_config(extra=Options)
    run = Path(options.run) if options.run else None
    try:
        if run:
            config = own_files(config, run)
        router, task = build(config)
        task.keep_account(config.ledger or (run or Path()) / "ledger.sqlite", config.max_usd)
        name = restore(router, run, options.at) if run else "base model"
        questions = task.questions(options.split, config.eval_questions)
    except ValueError as error:
        fail(error)
    results = evaluate(router, task, questions, config)
    print(f"{name}, {len(results)} {options.split} questions, pool {config.pool}\n\n{table(results)}")
    if run:
        rows = [
            trajectory_row(r.trajectory, r.question, r.reward, router.tokenizer, step=name) for r in results
        ]
        write_rows(run / f"{options.split}.jsonl", rows)


if __name__ == "__main__":
    main()
