"""What surrounds the algorithm: the state of a run, saving and resuming it, and the reasons to stop."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from . import checkpoint
from .data import QuestionStream
from .ppo import annealed
from .record import Recorder, replace_text
from .reward import CostScale
from .task import Task
from .trajectory import Question

# A resumed run must be the same run: only what cannot change its numbers may differ, and its length: what
# falls to 0 with the last step then does so with the new one.
HARMLESS = {
    *("steps", "save_every", "keep_last", "eval_every", "eval_questions", "print_every", "max_bad_steps"),
    *("max_usd", "timeout_s", "run_dir", "resume"),
}
# Fields of Run that a checkpoint keeps beside the step, and files that are cut back to it.
COUNTERS = ("best_em", "best_step", "bad_steps", "outage", "pack_tokens")
FILES = ("metrics.jsonl", "trajectories.jsonl")


@dataclass
class Run:
    """What a training step works with. A checkpoint holds all of it that changes."""

    config: Any
    router: Any
    task: Task
    stream: QuestionStream
    scale: CostScale
    optimisers: Mapping[str, Any]  # in the order of their steps: the critic first
    recorder: Recorder
    held_out: Mapping[str, Sequence[Question]] = field(default_factory=dict)  # "dev", "test"
    step: int = 0
    best_em: float = -1.0  # on dev questions
    best_step: int | None = None
    bad_steps: int = 0  # optimiser steps left out because a gradient was not finite
    outage: int = 0  # steps in a row in which the pool failed over half of the trajectories
    pack_tokens: int = 0  # of one forward pass; halved when they were too many for the memory

    def __post_init__(self) -> None:
        self.pack_tokens = self.pack_tokens or self.config.max_tokens_per_pack

    def set_rates(self) -> dict[str, float]:
        """Give the optimisers the learning rates of this step; -> the policy's, as a metric."""
        c = self.config
        full = {"critic": c.critic_lr, "policy": c.lr}
        rates = {role: annealed(rate, self.step, c.steps, c.lr_decay) for role, rate in full.items()}
        for role, optimiser in self.optimisers.items():
            for group in optimiser.param_groups:
                group["lr"] = rates[role]
        return {"lr": rates["policy"]}

    def begin(self) -> None:
        """Make the folder of a new run one that can be resumed and evaluated alone. The configuration is
        written last: a folder without it holds no run yet.
        """
        folder = self.recorder.folder
        for name, path in (("pool.yaml", self.config.pool), ("prompt.txt", self.config.prompt)):
            (folder / name).unlink(missing_ok=True)
            if Path(path).is_file():
                shutil.copy(path, folder / name)
        self.save()
        replace_text(folder / "config.yaml", self.config.to_yaml())

    def save(self) -> Path:
        """Write a checkpoint of the step that has just ended; -> its folder. Raises OSError."""
        state = {name: getattr(self, name) for name in COUNTERS}
        state |= {"stream": self.stream.state(), "scale": self.scale.state()}
        folder = self.recorder.folder / "checkpoints"
        for name in FILES:
            if (self.recorder.folder / name).exists():
                checkpoint.sync(self.recorder.folder / name)
        path = checkpoint.save(folder, self.step, self.router, self.optimisers, state)
        checkpoint.prune(folder, self.step, self.config.keep_last, self.best_step)
        return path

    def resume(self) -> list[str]:
        """Go on from the newest whole checkpoint; -> what is wrong with newer ones. What was written after
        it is cut away. Raises ValueError if there is none."""
        path, torn = checkpoint.newest(self.recorder.folder / "checkpoints")
        if path is None:
            raise ValueError(f"{self.recorder.folder}: no whole checkpoint to resume from {' '.join(torn)}")
        state = checkpoint.load(path, self.router, self.optimisers)
        self.stream.load_state(state.pop("stream"))
        self.scale.load_state(state.pop("scale"))
        for name, value in state.items():
            setattr(self, name, value)
        for name in FILES:
            self.recorder.cut(name, self.step)
        return torn

    def count(self, metrics: Mapping[str, float]) -> None:
        """Take note of what a step says about the run itself."""
        self.bad_steps += int(metrics.get("bad_steps", 0))
        self.outage = self.outage + 1 if metrics["faulted"] > 0.5 else 0
        if metrics.get("dev/em", -1.0) > self.best_em:
            self.best_em, self.best_step = metrics["dev/em"], self.step

    def reason_to_stop(self, interrupted: bool) -> str | None:
        """Why to stop after this step, in one line; None to go on."""
        if interrupted:
            return "interrupted"
        if self.outage >= 3:
            return "the pool failed over half of the trajectories in three steps running"
        if self.bad_steps >= self.config.max_bad_steps:
            return f"{self.bad_steps} optimiser steps had a loss or gradient that is not finite"
        if self.task.exhausted:
            return f"the spend cap of {self.config.max_usd} USD is reached"
        return None

    def stop(self, reason: object) -> NoReturn:
        """End the program with exit code 1 and one line: why, what was spent, and how to go on."""
        folder, bill = self.recorder.folder, self.task.bill()
        why = " ".join(f"{reason} ({bill})".split()) if bill else " ".join(str(reason).split())
        sys.exit(f"stopped at step {self.step}: {why}. To go on: python train.py --resume {folder}")


def refuse_faults(results: Sequence[Any]) -> None:
    """Raise ValueError, one line, if the pool was at fault in over half of the results of an evaluation."""
    faulted = [result.trajectory for result in results if result.trajectory.faulted]
    if len(faulted) > len(results) / 2:
        said = Counter(call.reply.status for t in faulted for call in t.calls if call.reply.faulted)
        what = ", ".join(f"{status} {n} times" for status, n in said.most_common())
        raise ValueError(f"the pool failed in {len(faulted)} of {len(results)} questions ({what})")


def refuse_changes(config: Any, saved: Mapping[str, Any]) -> None:
    """Raise ValueError if a resumed run would differ from the saved one in more than HARMLESS fields."""
    changed = [
        name for name, value in saved.items() if name not in HARMLESS and getattr(config, name) != value
    ]
    if changed:
        what = ", ".join(f"{name} to {getattr(config, name)!r} from {saved[name]!r}" for name in changed)
        raise ValueError(f"a resumed run cannot change {what}")


class Interrupt:
    """Ctrl-C as a flag that is looked at when a step ends; a second one ends the program at once, without
    saving and whatever calls are in flight.
    """

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGINT, self._ask)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def find_checkpoint(run: Path, at: str) -> Path:
    """The folder of a run's checkpoint: "newest", "best" (by EM on dev questions) or a step. Raises
    ValueError if there is none, or if it is torn.
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
    return path


def restore(router: Any, run: Path, at: str) -> str:
    """Put a run's trained adapters on the router; -> the name of the checkpoint. Raises ValueError as
    `find_checkpoint` does.
    """
    path = find_checkpoint(run, at)
    router.load_adapters(path)
    return path.name
