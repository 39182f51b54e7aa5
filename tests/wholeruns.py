"""Whole training runs for the tests, by train.main(), each in a process of its own that can be killed.

    code, said = train(folder, "--steps", "4")          run to the end: exit code, and all that it printed
    process = start(folder, "--steps", "4")             the same, and do not wait
    train(folder, resume=True)                          python train.py --resume FOLDER

A server process that has imported everything forks for each run, so that a run starts in no time.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import yaml
from faultserver import FaultServer

from minirouter import checkpoint, record, world
from minirouter.facts import TOPICS

ROOT = Path(__file__).parent.parent
SMALL = (
    "--batch 4 --minibatch 2 --ppo_epochs 1 --questions 8 --eval_questions 2 --save_every 2"
    " --keep_last 99 --print_every 0"
)
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["wholeruns", "train"])
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])  # for the fork server
sys.path.insert(0, str(ROOT))


def _main(folder: str, argv: list[str], prepare: Callable[[], None] | None) -> None:
    """The child: `python train.py ARGV`, its output in FOLDER.log; `prepare` may break something first."""
    log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)
    sys.argv = ["train.py", *argv]
    import train

    if prepare:
        prepare()
    train.main()


def start(
    folder: Path, *argv: str, resume: bool = False, prepare: Callable[[], None] | None = None
) -> BaseProcess:
    """A run in the background."""
    options = ["--resume", str(folder)] if resume else [*SMALL.split(), "--run_dir", str(folder)]
    process = FORKS.Process(target=_main, args=(str(folder), [*options, *argv], prepare))
    process.start()
    return process


def train(folder: Path, *argv: str, timeout: float = 900.0, **options: Any) -> tuple[int | None, str]:
    """A run to its end; -> exit code (-9 if it was killed), output."""
    process = start(folder, *argv, **options)
    process.join(timeout)
    if process.is_alive():
        process.kill()
        raise AssertionError(f"not finished after {timeout} s: {said(folder)[-2000:]}")
    return process.exitcode, said(folder)


def said(folder: Path) -> str:
    return Path(f"{folder}.log").read_text(errors="replace")


def rows(folder: Path, name: str = "metrics") -> list[dict]:
    """Lines of metrics.jsonl or trajectories.jsonl."""
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def untimed(folder: Path) -> list[dict]:
    """Metrics without what a clock says."""
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows(folder)]


def manifest(folder: Path, step: int) -> dict:
    """Sizes and hashes of all that a checkpoint holds: equal ones are equal bit for bit."""
    path = folder / "checkpoints" / f"step-{step:06d}"
    checkpoint.check(path)
    return json.loads((path / "manifest.json").read_text())


def wait_for(condition: Callable[[], bool], seconds: float = 200.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


# What may happen to a run: arguments for `prepare`


def die_in(module: str, name: str, mark: str, calls: int = 1) -> Callable[[], None]:
    """Kill -9 in place of the n-th call of MODULE.NAME with `mark` in its arguments."""
    return partial(_die_in, module, name, mark, calls)


def _die_in(module: str, name: str, mark: str, calls: int) -> None:
    place = {"checkpoint": checkpoint, "os": os, "shutil": checkpoint.shutil}[module]
    real, left = getattr(place, name), [calls]

    def wrapped(*args: Any, **options: Any) -> Any:
        left[0] -= mark in repr(args)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)

    setattr(place, name, wrapped)


def die_writing(name: str, step: int) -> Callable[[], None]:
    """Kill -9 when half of the lines of a step have been written."""
    return partial(_die_writing, name, step)


def _die_writing(name: str, step: int) -> None:
    real = record.Recorder.append

    def wrapped(self: record.Recorder, file: str, new: list[dict]) -> None:
        if file == name and new[-1]["step"] == step:
            text = "".join(json.dumps(row) + "\n" for row in new)
            with open(self.folder / file, "a") as out:
                out.write(text[: len(text) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, file, new)

    record.Recorder.append = wrapped


# A pool behind HTTP that knows the miniature world


class WorldServer(FaultServer):
    """Answers as the simulated candidates would, under the faults of a script."""

    def __init__(self, script: Any = (), **options: Any) -> None:
        names = world.TRAIN_NAMES
        described = [*TOPICS, "middling", "large"]
        self.simulated = world.SimulatedPool(
            tuple(world.Candidate(names[i], 1.0 + i, word) for i, word in enumerate(described))
        )
        self.thread = threading.local()
        super().__init__(script, answer=self.reply, **options)

    def arrived(self, request: dict) -> tuple[int, str]:
        self.thread.model = request["body"]["model"]
        number, behaviour = super().arrived(request)
        request["behaviour"] = behaviour
        return number, behaviour

    def reply(self, question: str) -> str:
        return self.simulated.ask(self.thread.model.removeprefix("model-"), question).text

    def pool_file(self, path: Path, **fields: Any) -> Path:
        """Write a pool file whose candidates all live here."""
        entries = [
            {"name": c.name, "descriptor": c.descriptor, "price": c.price, "model": f"model-{c.name}",
             "base_url": self.url, "max_tokens": 40, **fields}
            for c in self.simulated.candidates
        ]  # fmt: skip
        path.write_text(yaml.safe_dump(entries))
        return path


def question_file(path: Path, n: int = 200) -> Path:
    """Questions of the world in a file of their own."""
    found = world.questions("train", n, 0, "full")
    path.write_text(
        "".join(json.dumps({"question": q.text, "golden_answers": q.golds}) + "\n" for q in found)
    )
    return path


def kill_at_random(process: BaseProcess, rng: random.Random, longest: float) -> bool:
    """Kill -9 after a random time; -> whether the run was still going on."""
    process.join(rng.uniform(0.0, longest))
    alive = process.is_alive()
    process.kill()
    process.join()
    return alive


def spoil(role: str, first: int, times: int = 99) -> Callable[[], None]:
    """NaN in the loss of a role, from its n-th pack on."""
    return partial(_spoil, role, first, times)


def _spoil(role: str, first: int, times: int) -> None:
    from minirouter import update

    real, calls = update.LOSSES[role], [0]

    def wrapped(*args: Any) -> tuple:
        calls[0] += 1
        loss, report = real(*args)
        return (loss * float("nan") if first <= calls[0] < first + times else loss), report

    update.LOSSES[role] = wrapped


def out_of_memory(tokens: int) -> Callable[[], None]:
    """The update runs out of memory in the first pack of more than so many tokens of its second step."""
    return partial(_out_of_memory, tokens)


def _out_of_memory(tokens: int) -> None:
    import torch

    from minirouter import update

    real, calls = update.LOSSES["policy"], [0]

    def wrapped(router: Any, which: list[int], batch: Any, *args: Any) -> tuple:
        calls[0] += 1
        if calls[0] > 2 and batch.input_ids.numel() > tokens:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
        return real(router, which, batch, *args)

    update.LOSSES["policy"] = wrapped


def full_disk(name: str, step: int) -> Callable[[], None]:
    """From that step on, no room for lines of that file; "checkpoint": for no file above 20 kB."""
    return partial(_full_disk, name, step)


def _full_disk(name: str, step: int) -> None:
    import resource

    real = record.Recorder.append

    def wrapped(self: record.Recorder, file: str, new: list[dict]) -> None:
        path = self.folder / file
        if new[-1]["step"] == step and name == file:
            path.rename(f"{path}.kept")
            path.symlink_to("/dev/full")
        real(self, file, new)
        if new[-1]["step"] == step and name == "checkpoint" and file == "metrics.jsonl":
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    record.Recorder.append = wrapped
