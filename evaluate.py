"""Score a router on held-out questions: every question exactly once, by the rollout code of training.

Greedy unless `--eval_temperature` says otherwise (the paper's reference implementation samples at
temperature 1). EM ignores the form of the text, as in the reference; the format rate stands beside it.
Intervals are at 95 %.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from minirouter import world
from minirouter.compare import methods, prompts
from minirouter.compare.retriever import retriever_pool
from minirouter.config import Config, fail, knob, load_config, read_yaml
from minirouter.load import default_device, default_dtype, model_config
from minirouter.memory import memory_estimate, memory_table
from minirouter.model import Router
from minirouter.record import trajectory_row, write_rows
from minirouter.report import Result, table
from minirouter.reward import CostScale, score
from minirouter.rollout import rollout
from minirouter.run import find_checkpoint, restore
from minirouter.task import Task, open_pool
from minirouter.trajectory import Limits, Question

TINY = Path(world.__file__).parent / "assets" / "tiny"


@dataclass
class Options:
    """Score a run, or a base model, on held-out questions."""

    run: str | None = knob(None, "run folder; without one, the base of the configuration is scored")
    at: str = knob("newest", "which checkpoint: newest, best, or a step")
    split: str = knob("test", "which questions: test, dev or train")
    methods: str | None = knob(None, "other systems on the same questions: a comma list, or all")
    search_run: str | None = knob(None, "for Search-R1: a run that was trained with --pool retriever")
    retriever: str | None = knob(None, "for RAG and Search-R1: a .jsonl corpus, or a /retrieve server's URL")
    encoder: str | None = knob(
        None, "of the learned routers: a Hugging Face encoder; default: the base itself"
    )
    table: str = knob("runs/table.jsonl", "what the learned routers train on")
    collect: bool = knob(False, "fill the table with --questions training questions, then stop")
    show_prompts: bool = knob(False, "print the prompts of the other systems, then stop")


def build(config: Config) -> tuple[Router, Task]:
    """Base model with fresh adapters, and the task; raises ValueError, one line, for anything that cannot be
    used.
    """
    path = str(TINY) if config.model == "tiny" else config.model
    if config.model != "tiny":
        tqdm.write(f"memory on the device (estimated)\n{memory_table(memory_of(config))}", file=sys.stderr)
    base = {name: getattr(config, name) for name in ("load_in_4bit", "trust_remote_code", "total_tokens")}
    router = Router.load(
        path,
        base,
        lora_r=config.lora_r,
        critic=config.algo == "ppo",
        temperature=config.temperature,
        gradient_checkpointing=config.gradient_checkpointing,
        seed=config.seed,
    )
    pool = retriever_pool(config.pool, config.data, config.timeout_s)
    pool = pool or open_pool(config.pool, config.data, router.tokenizer, config.timeout_s)
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


def memory_of(config: Config) -> dict[str, int]:
    """Bytes that a run will take, by purpose, estimated before anything is loaded."""
    return memory_estimate(
        model_config(config.model, config.trust_remote_code),
        load_in_4bit=config.load_in_4bit,
        lora_r=config.lora_r,
        slots=2 * config.slots,  # as many rows of the cache may wait for replies as are decoded
        total_tokens=config.total_tokens,
        max_tokens_per_pack=config.max_tokens_per_pack,
        gradient_checkpointing=config.gradient_checkpointing,
        critic=config.algo == "ppo",
        warm=config.sft_steps > 0,
        dtype=default_dtype(default_device()),
    )


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


def others(options: Options, router: Router, task: Task, config: Config, questions: Sequence[Question]):
    """Rows of the systems that are asked for on the same questions, by name; None if only the table was
    filled.
    """
    sources = (options.table, options.retriever, options.encoder)
    bench = methods.open_bench(router, task, limits_of(config), config.seed, *sources)
    if options.collect:
        training = task.questions("train", config.questions)
        with tqdm(total=len(training), desc=options.table, unit="question") as bar:
            for held in methods.collect_table(bench, training, options.table):
                bar.update(held - bar.n)
        if left := max(0, len(training) - bar.n):
            tqdm.write(f"{left} questions met a fault of the pool and are left out: collect again")
        return None
    if options.search_run:
        find_checkpoint(Path(options.search_run), "newest")
        _ = bench.retriever
    found = methods.compare_methods(bench, options.methods or "", questions)
    if options.search_run:
        restore(router, Path(options.search_run), "newest")
        found["Search-R1"] = methods.search_r1(bench, questions)
    return found


def main() -> None:
    config, options = load_config(extra=Options)
    if options.show_prompts:
        print(prompts.show_prompts())
        return
    run = Path(options.run) if options.run else None
    try:
        if run:
            config = own_files(config, run)
            find_checkpoint(run, options.at)  # what is missing is said before anybody is asked
        router, task = build(config)
        task.keep_account(config.ledger or (run or Path("runs")) / "ledger.sqlite", config.max_usd)
        questions = task.questions(options.split, config.eval_questions)
        found = others(options, router, task, config, questions)
        name = restore(router, run, options.at) if run else "base model"
    except ValueError as error:
        fail(error)
    if found is None:
        return
    results = evaluate(router, task, questions, config)
    print(f"{name}, {len(results)} {options.split} questions, pool {config.pool}\n\n{table(results)}")
    if found:
        found["minirouter" if run else "untrained loop"] = methods.rows_of_results(results)
        print(f"\n{methods.report(found, config.model, config.alpha)}")
    if run:
        rows = [
            trajectory_row(r.trajectory, r.question, r.reward, router.tokenizer, step=name) for r in results
        ]
        write_rows(run / f"{options.split}.jsonl", rows)


if __name__ == "__main__":
    main()
