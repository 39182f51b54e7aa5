"""The run folder: one JSON line of metrics a step, every trajectory, and the curves.

    config.yaml  metrics.jsonl  trajectories.jsonl  curves.png  checkpoints/

Every metric has one key and one definition (README, "Metrics"). Keys that begin with `time/` hold
wall-clock figures, so that two runs can be compared without them.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .trajectory import FINISHES, Candidate, Question, Reward, Trajectory

CURVES = (
    ("reward", ("reward", "reward/outcome", "reward/cost")),
    ("EM and format", ("em", "format_rate")),
    ("calls a question", ("calls", "calls/none")),
    ("cost (USD per 1M questions)", ("cost",)),
    ("KL to the reference (nats)", ("kl",)),
    ("entropy (nats)", ("entropy",)),
)


def mean(values: Iterable[float]) -> float:
    """The mean, 0.0 of nothing."""
    values = list(values)
    return math.fsum(values) / len(values) if values else 0.0


def label(candidate: Candidate) -> str:
    """What calls are counted under: the descriptor where it is one word (names of drawn pools change), else
    the name.
    """
    return (
        candidate.descriptor if candidate.descriptor and " " not in candidate.descriptor else candidate.name
    )


def labels(pool: Any) -> dict[str, str]:
    return {candidate.name: label(candidate) for candidate in pool.candidates}


def summarise(
    trajectories: Sequence[Trajectory], rewards: Sequence[Reward], pools: Sequence[Any]
) -> dict[str, float]:
    """The metrics of a set of trajectories that their text, calls and rewards give."""
    metrics: dict[str, float] = {
        "reward": mean(r.score for r in rewards),
        "reward/format": mean(-1.0 if r.format_error else 0.0 for r in rewards),
        "reward/outcome": mean(r.em for r in rewards),
        "reward/cost": mean(r.cost_reward for r in rewards),
        "em": mean(r.em for r in rewards),
        "f1": mean(r.f1 for r in rewards),
        "format_rate": mean(r.format_error is None for r in rewards),
        "calls": mean(len(t.calls) for t in trajectories),
        "calls/none": mean(not t.calls for t in trajectories),
        "cost": mean(t.cost for t in trajectories),
        "faulted": mean(t.faulted for t in trajectories),
        "own_tokens": mean(len(t.actions) for t in trajectories),
    }
    metrics |= {f"finish/{finish}": mean(t.finish == finish for t in trajectories) for finish in FINISHES}
    return metrics | _call_metrics(trajectories, pools)


def _call_metrics(trajectories: Sequence[Trajectory], pools: Sequence[Any]) -> dict[str, float]:
    """Who is called, how often a call is no good, and what follows a refusal."""
    calls = [(call, pool) for t, pool in zip(trajectories, pools, strict=True) for call in t.calls]
    known = Counter(labels(pool).get(call.reply.candidate, "nobody") for call, pool in calls)
    after = [
        (first.reply, second.reply)
        for t in trajectories
        for first, second in zip(t.calls, t.calls[1:], strict=False)
        if first.reply.refused
    ]
    metrics = {f"calls/of/{name}": count / len(calls) for name, count in sorted(known.items())}
    return metrics | {
        "calls/invalid": mean(call.reply.status in ("malformed", "unknown") for call, _ in calls),
        "calls/refused": mean(call.reply.refused for call, _ in calls),
        "after_refusal/dearer": mean(second.price > first.price for first, second in after),
        "after_refusal/same": mean(second.candidate == first.candidate for first, second in after),
    }


def trajectory_row(
    trajectory: Trajectory, question: Question, reward: Reward, tokenizer: Any, **more: Any
) -> dict[str, Any]:
    """One trajectory as JSON: what the model saw, cut where the writer changes, and its reward in parts."""
    t = trajectory
    edges = [
        i for i in range(t.prompt_len, len(t.ids)) if i == t.prompt_len or t.sampled[i] != t.sampled[i - 1]
    ]
    segments = [
        {
            "by": "router" if t.sampled[start] else "pool",
            "text": tokenizer.decode(t.ids[start:end]),
            "tokens": [tokenizer.decode([i]) for i in t.ids[start:end]],
        }
        for start, end in zip(edges, [*edges[1:], len(t.ids)], strict=True)
    ]
    known = labels(question.pool) if question.pool else {}
    calls = [
        {
            "name": call.name,
            "query": call.query,
            "candidate": call.reply.candidate,
            "label": known.get(call.reply.candidate, call.reply.candidate),
            "status": call.reply.status,
            "cost": call.reply.cost,
            "tokens": call.reply.tokens,
            "refused": call.reply.refused,
        }
        for call in t.calls
    ]
    return {
        "question": question.text,
        "golds": list(question.golds),
        "kind": question.kind,
        "score": reward.score,
        "em": reward.em,
        "f1": reward.f1,
        "format_error": reward.format_error,
        "cost": reward.cost,
        "cost_reward": reward.cost_reward,
        "finish": t.finish,
        "faulted": t.faulted,
        "prompt_text": tokenizer.decode(t.ids[: t.prompt_len]),
        "segments": segments,
        "calls": calls,
        **more,
    }


def transcript(row: dict[str, Any]) -> str:
    """A trajectory for reading: tags kept, replies on lines of their own."""
    head = f"[{row['kind']}] {row['question']}   gold: {' | '.join(row['golds'])}"
    body = "".join(segment["text"] for segment in row["segments"]).strip()
    tail = f"score {row['score']:.3f}   cost {row['cost']:.1f}   {row['format_error'] or 'well formed'}"
    return f"{head}\n{body}\n{tail}"


class Recorder:
    """Appends to the files of a run folder, a line at a time, flushed."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError if another process writes to the folder, or if it cannot be written to."""
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.lock = open(folder / ".lock", "w")  # noqa: SIM115 - held until the process ends
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder}: another process is writing to this run folder") from None
        except OSError as error:
            raise ValueError(f"{folder}: cannot be written to ({error.strerror})") from None

    def append(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        """Add lines to a file. Raises OSError naming the file if they cannot be written (a full disk)."""
        path = self.folder / name
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.writelines(map(_line, rows))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None

    def read(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / name
        if not path.exists():
            return []
        with path.open(encoding="utf-8", newline="\n") as file:  # a bare carriage return ends no line
            return [json.loads(line) for line in file]

    def cut(self, name: str, step: int) -> None:
        """Drop the lines of steps after `step`, and a last line that was not finished: a resumed run writes
        them again. Raises ValueError naming the line if another one cannot be read; nothing is lost then.
        """
        path = self.folder / name
        if not path.exists():
            return
        end = 0
        with open(path, "r+b") as file:
            for number, line in enumerate(file, start=1):
                at = _step_of(line)
                if at is None and line.endswith(b"\n"):
                    raise ValueError(f"{path}:{number}: not a line of a run, so it cannot be continued")
                if at is None or at > step:
                    break
                end += len(line)
            file.truncate(end)

    def plot(self) -> None:
        """Draw curves.png from metrics.jsonl."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt

        rows = self.read("metrics.jsonl")
        figure, axes = plt.subplots(2, 3, figsize=(14, 7), layout="constrained")
        for axis, (title, keys) in zip(axes.flat, CURVES, strict=True):
            for key in keys:
                points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
                axis.plot(*zip(*points, strict=True), label=key) if points else None
            axis.set(title=title, xlabel="step")
            axis.legend(frameon=False)
            axis.grid(alpha=0.3)
        figure.savefig(self.folder / "curves.png", dpi=110)
        plt.close(figure)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """A file of JSON lines in place of what was there."""
    replace_text(path, "".join(map(_line, rows)))


def replace_text(path: Path, text: str) -> None:
    """Write a file beside and rename it: it is there as it was or as it will be, never in parts."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _line(row: dict[str, Any]) -> str:
    return json.dumps(row) + "\n"  # ASCII: a lone surrogate must not stop a run


def _step_of(line: bytes) -> int | None:
    """The step that a whole line belongs to; None if it is no such line."""
    try:
        step = json.loads(line.decode("utf-8"))["step"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) else None
