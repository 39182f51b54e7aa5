"""The collected table, question x candidate -> answer, EM, F1, tokens, cost, that learned routers learn from.

One JSON line a pair, made once (`evaluate.py --collect`) through the same cached pool, and resumable. A pair
is scored as a single round is used: the candidate is asked the question, the untrained base writes the answer
from its reply. (The paper samples each pair several times; here candidates answer at temperature 0, once.)

A column of the table is a *label* (record.label): the name of a candidate, or, where pools are drawn for each
episode, its one-word descriptor, because there names and prices mean nothing in the next episode. Where a
pool has two candidates of one label, the cheaper one fills the cell; a candidate that a pool lacks leaves
NaN.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from minirouter.record import label
from minirouter.reward import exact_match, f1
from minirouter.trajectory import Question

from .prompts import Bench
from .systems import everybody

CHUNK = 64  # questions between two writes


@dataclass(frozen=True)
class Table:
    """Q questions, L labels; NaN where a question's pool lacked the candidate."""

    questions: tuple[str, ...]
    labels: tuple[str, ...]
    descriptors: Mapping[str, str]
    em: np.ndarray  # (Q, L)
    f1: np.ndarray  # (Q, L)
    cost: np.ndarray  # (Q, L), USD per 1M such questions
    replies: tuple[tuple[str | None, ...], ...]  # (Q, L) texts
    price: Mapping[str, float]  # mean price of each label, USD per 1M tokens

    def best(self) -> np.ndarray:
        """(Q,) the column with the highest EM, then F1, then the lowest cost; -1 where nobody is right at
        all.
        """
        worth = np.nan_to_num(self.em * 1e3 + self.f1, nan=-1e9)
        costs = np.nan_to_num(self.cost, nan=1e9)
        order = np.lexsort((costs, -worth), axis=1)[:, 0]
        rows = np.arange(len(order))
        return np.where(np.nan_to_num(self.f1[rows, order]) > 0, order, -1)


def collect(bench: Bench, questions: Sequence[Question], path: Path) -> Iterator[int]:
    """Add to the table at `path` the questions that it lacks; yields how many it holds, chunk by chunk. One
    that met a fault of the pool does not count: it is asked again the next time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = _whole(path)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    done = {row["id"] for row in rows}
    missing = [question for question in questions if question.id not in done]
    held = len(done)
    yield held
    for start in range(0, len(missing), CHUNK):
        chunk = missing[start : start + CHUNK]
        answered = everybody(bench, chunk)
        lines = [
            json.dumps(_row(question, candidate, outcome, left=len(tried) - 1 - k), ensure_ascii=False) + "\n"
            for question, tried in zip(chunk, answered, strict=True)
            for k, (candidate, outcome) in enumerate(tried)
        ]
        with open(path, "a", encoding="utf-8") as file:
            file.writelines(lines)
        held += sum(all(outcome.calls[0].reply.status == "ok" for _, outcome in tried) for tried in answered)
        yield held


def _row(question: Question, candidate: Any, outcome: Any, left: int) -> dict[str, Any]:
    """One pair; `left` pairs of the same question follow, so that a torn file is noticed."""
    reply = outcome.calls[0].reply
    return {
        "id": question.id,
        "question": question.text,
        "label": label(candidate),
        "name": candidate.name,
        "descriptor": candidate.descriptor,
        "price": candidate.price,
        "reply": reply.text,
        "status": reply.status,
        "answer": outcome.answer,
        "em": exact_match(outcome.answer, question.golds),
        "f1": f1(outcome.answer, question.golds),
        "tokens": reply.tokens,
        "cost": reply.cost,
        "left": left,
    }


def _whole(path: Path) -> list[dict[str, Any]]:
    """The rows of questions that are complete and met no fault of the pool."""
    rows = []
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break  # a line that was not finished: what comes after it cannot be trusted
    finished = {row["id"] for row in rows if row["left"] == 0}
    faulted = {row["id"] for row in rows if row["status"] != "ok"}
    return [row for row in rows if row["id"] in finished - faulted]


def read_table(path: Path) -> Table:
    """The table of a JSONL file. Raises ValueError, one line, if there is none."""
    rows = _whole(path)
    if not rows and path.exists():
        raise ValueError(
            f"{path}: no question whose candidates all answered; evaluate.py --collect asks again"
        )
    if not rows:
        raise ValueError(f"{path}: no collected table; make it with evaluate.py --collect")
    ids = {name: i for i, name in enumerate(dict.fromkeys(row["id"] for row in rows))}
    labels = sorted({row["label"] for row in rows})
    grids = {key: np.full((len(ids), len(labels)), np.nan) for key in ("em", "f1", "cost")}
    replies: list[list[str | None]] = [[None] * len(labels) for _ in ids]
    for row in sorted(rows, key=lambda row: -row["price"]):  # the cheaper of two fills the cell last
        i, j = ids[row["id"]], labels.index(row["label"])
        for key, grid in grids.items():
            grid[i, j] = row[key]
        replies[i][j] = row["reply"]
    texts = {row["id"]: row["question"] for row in rows}
    prices = {name: float(np.mean([row["price"] for row in rows if row["label"] == name])) for name in labels}
    descriptors = {row["label"]: row["descriptor"] for row in rows}
    questions = tuple(texts[name] for name in ids)
    cells = (grids["em"], grids["f1"], grids["cost"], tuple(map(tuple, replies)))
    return Table(questions, tuple(labels), descriptors, *cells, prices)
