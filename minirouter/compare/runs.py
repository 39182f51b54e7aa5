"""The training runs behind the tables: each is `python train.py ...`, one thread, two side by side,
resumable.

A finished run is left alone, an interrupted one is resumed, so that the whole can be stopped at any time.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import yaml

from minirouter import world
from minirouter.trajectory import Candidate

ROOT = Path(__file__).parents[2]  # where train.py lies
SECONDS_A_STEP = 2.0  # with two one-thread runs side by side on two cores, until runs report their own
SECONDS_AROUND = 15.0  # loading and evaluating, a run
DEFAULT_ALPHA = 0.6  # of every run that is not about alpha
NEW_TOPIC = "science"  # what the candidate is expert in that is added during training
FIXED_PRICES = {"film": 2, "sport": 1, "science": 1, "place": 3, "people": 2, "middling": 3, "large": 7}
GRPO = ("--kl_coef", "0.001", "--entropy_coef", "0.003")  # at the bonus of PPO it falls silent in 100 steps
CANDIDATE_FORMS = {  # the first line of a prompt: how a candidate is shown
    "short": "{candidate} = [${price} ]{descriptor} {name}",
    "long": "{candidate} = [${price} ]i think i know about {descriptor} {name}",
    "none": "{candidate} = [${price} ]{name}",
}


@dataclass(frozen=True)
class Job:
    """One run: its name and what it is trained with besides the defaults of the whole."""

    name: str
    options: tuple[str, ...]
    grafted_on: str | None = None  # a run whose first half it continues, with `pool` in place of its pool
    pool: str = ""


def fixed_pool() -> tuple[Candidate, ...]:
    """The pool of the runs that are about one pool: each descriptor once, names of the training set."""
    names = world.TRAIN_NAMES
    return tuple(
        Candidate(names[7 * i], float(price), word) for i, (word, price) in enumerate(FIXED_PRICES.items())
    )


def write_inputs(folder: Path) -> dict[str, str]:
    """Pool files and prompts of the runs; -> their paths by name."""
    folder.mkdir(parents=True, exist_ok=True)
    everybody = fixed_pool()
    pools = {
        "fixed": everybody,
        "fixed-without": tuple(c for c in everybody if c.descriptor != NEW_TOPIC),
        "one": tuple(c for c in everybody if c.descriptor == "large"),
    }
    paths = {}
    for name, pool in pools.items():
        entries = [{"name": c.name, "price": c.price, "descriptor": c.descriptor} for c in pool]
        paths[name] = str(folder / f"{name}.yaml")
        Path(paths[name]).write_text(yaml.safe_dump(entries, sort_keys=False), encoding="utf-8")
    for name, form in CANDIDATE_FORMS.items():
        paths[f"prompt-{name}"] = str(folder / f"{name}.txt")
        text = f"{form}\npool\n{{candidates}}\nquestion {{question}}\n"
        Path(paths[f"prompt-{name}"]).write_text(text, encoding="utf-8")
    return paths


def all_jobs(alphas: Sequence[float], seeds: Sequence[int], inputs: dict[str, str]) -> dict[str, list[Job]]:
    """The runs of each stage of the paper, by the name of what is varied: every seed of each alpha, one of
    everything else.
    """
    half = ("--alpha", str(DEFAULT_ALPHA))
    varied = {f"alpha {a:g}": ("--alpha", f"{a:g}") for a in alphas}
    varied |= {
        "search-r1": ("--alpha", "0", "--pool", "retriever"),
        "no format reward": (*half, "--no_format_reward"),
        "prices hidden": (*half, "--show_prices", "false"),
        "long descriptors": (*half, "--prompt", inputs["prompt-long"]),
        "no descriptors": (*half, "--prompt", inputs["prompt-none"]),
        "fixed pool": (*half, "--pool", inputs["fixed"]),
        "fixed pool, order shuffled": (*half, "--pool", inputs["fixed"], "--shuffle_candidates"),
        "fixed pool without": (*half, "--pool", inputs["fixed-without"]),
        "one candidate": (*half, "--pool", inputs["one"]),
        "info mask off": (*half, "--train_on_info"),
        "one call only": (*half, "--max_calls", "1"),
        "GRPO": (*half, "--algo", "grpo", "--samples_per_question", "8", "--kl_in", "loss", *GRPO),
        "weak KL": (*half, "--kl_coef", "0.001"),
        "paid when wrong": ("--alpha", "0.9", "--cost_when_wrong"),
    }
    jobs = {
        name: [
            Job(f"{_slug(name)}-seed{seed}", (*options, "--seed", str(seed)))
            for seed in (seeds if name.startswith("alpha ") else seeds[:1])
        ]
        for name, options in varied.items()
    }
    before = jobs["fixed pool without"][0].name
    jobs["added during training"] = [Job("added-seed0", (), before, inputs["fixed"])]
    return jobs


def _slug(name: str) -> str:
    return name.replace(",", "").replace(" ", "-")


def done(folder: Path, steps: int) -> bool:
    """Whether a run has its last checkpoint."""
    return (folder / "checkpoints" / f"step-{steps:06d}" / "manifest.json").exists()


def estimate(jobs: Sequence[Job], folder: Path, steps: int, parallel: int) -> str:
    """How long the missing runs will take, from the time that finished ones report."""
    reported = [
        json.loads(line)["time/step"]
        for path in sorted(folder.glob("*/metrics.jsonl"))
        for line in path.read_text("utf-8").splitlines()
    ]
    a_step = sum(reported) / len(reported) if reported else SECONDS_A_STEP
    missing = [job for job in jobs if not done(folder / job.name, steps)]
    total = sum(steps / (2 if job.grafted_on else 1) for job in missing)
    minutes = (total * a_step + SECONDS_AROUND * len(missing)) / parallel / 60
    return (
        f"{len(missing)} runs to train, {total:.0f} steps of {a_step:.1f} s, {parallel} at a time: "
        f"{minutes:.0f} minutes"
    )


def train_all(
    jobs: Sequence[Job],
    folder: Path,
    steps: int,
    common: Sequence[str],
    parallel: int,
    say: Callable[[str], None],
) -> None:
    """Finish all runs, `parallel` at a time; grafted ones last. Raises ValueError naming the log of one that
    fails, and for one that is there but was trained with other settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for job in jobs:
        _check_settings(job, folder / job.name, steps)
    for wave in ([job for job in jobs if not job.grafted_on], [job for job in jobs if job.grafted_on]):
        _train_wave(
            [job for job in wave if not done(folder / job.name, steps)], folder, steps, common, parallel, say
        )


def _check_settings(job: Job, run: Path, steps: int) -> None:
    """Raises ValueError if a run was trained with another preset or for other steps than asked for now."""
    if not (run / "config.yaml").exists():
        return
    before, now = (
        yaml.safe_load(path.read_text("utf-8")) for path in (run / "config.yaml", ROOT / "configs/tiny.yaml")
    )
    varied = {option.removeprefix("--") for option in job.options} | {"pool", "prompt", "model"}
    now["steps"] = steps
    for name in now.keys() - varied:
        if before[name] != now[name]:
            what = f"{name} {before[name]}, now {now[name]}"
            raise ValueError(f"{run} was trained with {what}: give another --folder")


def _train_wave(
    jobs: Sequence[Job],
    folder: Path,
    steps: int,
    common: Sequence[str],
    parallel: int,
    say: Callable[[str], None],
) -> None:
    """Train runs that do not need one another."""
    with ThreadPoolExecutor(parallel) as threads:
        futures = {threads.submit(_train, job, folder, steps, common): job for job in jobs}
        for i, future in enumerate(as_completed(futures), start=1):
            name = futures[future].name
            if future.result() != 0 or not done(folder / name, steps):
                threads.shutdown(cancel_futures=True)  # those that run are let finish
                raise ValueError(f"a run failed, see {folder / name}.log")
            say(f"run {i} of {len(jobs)} finished: {name}")


def _train(job: Job, folder: Path, steps: int, common: Sequence[str]) -> int:
    """Start, resume or graft one run as a process of its own; -> its exit status."""
    path = folder / job.name
    if job.grafted_on and not path.exists():
        graft(folder / job.grafted_on, path, steps // 2, job.pool)
    if any((path / "checkpoints").glob("step-*")):
        arguments = ["--resume", str(path)]
    else:
        shutil.rmtree(path, ignore_errors=True)
        # the middle checkpoint is kept: a grafted run starts from it
        saving = ["--save_every", str(max(1, steps // 2)), "--keep_last", "3", "--print_every", "0"]
        arguments = [*common, *job.options, "--steps", str(steps), "--run_dir", str(path), *saving]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with open(folder / f"{job.name}.log", "a", encoding="utf-8") as log:
        command = [sys.executable, str(ROOT / "train.py"), *arguments]
        return subprocess.run(command, stdout=log, stderr=log, env=environment, check=False).returncode


def graft(run: Path, new: Path, step: int, pool: str) -> None:
    """A copy of `run` as it was after `step`, with another pool file from there on."""
    partial = new.with_name(f".{new.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(run, partial)
    for path in (partial / "checkpoints").glob("step-*"):
        if path.name > f"step-{step:06d}":
            shutil.rmtree(path)
    config = yaml.safe_load((run / "config.yaml").read_text("utf-8"))
    config |= {"pool": pool, "run_dir": str(new)}
    (partial / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
    shutil.copy(pool, partial / "pool.yaml")
    partial.rename(new)
