"""A run folder as one HTML page to look at: `python -m minirouter.view runs/x [-o FILE] [--every K]`.

Curves, calls by candidate, warnings of the collapse watch, and every trajectory with its tokens coloured by
who wrote them, which is the loss mask. The page needs no network. What it shows goes in as JSON and comes out
through textContent, so that no text of a question, a router or a pool is ever read as HTML.
"""

from __future__ import annotations

import argparse
import html
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .watch import watch

FIGURES = ("logp", "value", "advantage", "kl")  # of every action, nats where they have a unit
COLUMNS = (
    *("step", "index", "question", "golds", "kind", "score", "em", "f1", "format_error", "cost"),
    *("cost_reward", "finish", "faulted", "prompt_text", "segments", "calls", "actions"),
)
SIZE_LIMIT = 100_000_000  # bytes of trajectories.jsonl that go in whole; the page has a quarter of its size
GAP = 8  # characters that may lie between two tokens of a text: white space that decoding one by one loses

Row = dict[str, Any]
Intern = Callable[[str | None], int | None]


@dataclass(frozen=True)
class Page:
    """The page and what it holds."""

    html: str  # ASCII
    shown: int  # trajectories
    total: int  # trajectories of the run
    notes: list[str]


def read_lines(path: Path, notes: list[str]) -> Iterator[tuple[int, Row]]:
    """(line number, object) of a JSONL file. A last line that is not finished is left out, with a note.

    Raises ValueError naming the file, and the line if that is what is wrong.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below, where nesting is less
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; is {path.parent} a run folder?") from None
    with file:
        for number, line in enumerate(file, 1):
            row = _parse(line)
            if row is not None:
                yield number, row
            elif line.endswith(b"\n"):
                raise ValueError(f"{path}, line {number}: not a JSON object")
            else:
                notes.append(f"{path.name}: line {number}, the last, is not finished and was left out.")


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def aligned(text: str, tokens: list[str]) -> list[str]:
    """Tokens as the pieces of `text` that they stand for, so that the pieces joined are the text.

    A token decoded alone may lack its white space, or be half a character; its piece is then longer, or
    empty. Where the two cannot be brought together the tokens are given back.
    """
    pieces, at = [], 0
    for token in tokens:
        start = text.find(token, at, at + len(token) + GAP)
        end = start + len(token) if start >= 0 else at
        pieces.append(text[at:end])
        at = end
    if not pieces or len(text) - at > GAP:
        return tokens
    return [*pieces[:-1], pieces[-1] + text[at:]]


def finite(value: Any) -> Any:
    """The value as JSON can hold it: NaN and infinities become None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def rounded(value: float) -> float | int | None:
    """Three decimals, in few characters."""
    if not math.isfinite(value):
        return None
    short = round(value, 3)
    return int(short) if short == int(short) else short


def compact(row: Row, intern: Intern) -> list[Any]:
    """A line of trajectories.jsonl in the order of COLUMNS, every string a number in the table of strings."""
    actions = row["actions"]
    values = {
        **{name: row[name] for name in COLUMNS},
        **{name: intern(row[name]) for name in ("question", "kind", "format_error", "finish", "prompt_text")},
        **{name: rounded(row[name]) for name in ("score", "em", "f1", "cost", "cost_reward")},
        "golds": [intern(gold) for gold in row["golds"]],
        "faulted": int(row["faulted"]),
        "segments": [
            [int(part["by"] == "router"), [intern(piece) for piece in aligned(part["text"], part["tokens"])]]
            for part in row["segments"]
        ],
        "calls": [
            [*(intern(call[key]) for key in ("name", "query", "candidate", "status")),
             rounded(call["cost"]), call["tokens"], int(call["refused"])]
            for call in row["calls"]
        ],
        "actions": actions and [[rounded(x) for x in actions[name]] for name in FIGURES],
    }  # fmt: skip
    return [values[name] for name in COLUMNS]


def _trajectories(path: Path, chosen: Callable[[int], bool], notes: list[str]) -> tuple[list, list[str], int]:
    """Compact rows of the chosen steps, their table of strings, and the number of all rows."""
    table: dict[str, int] = {}

    def intern(text: str | None) -> int | None:
        return None if text is None else table.setdefault(text, len(table))

    rows, total = [], 0
    for number, row in read_lines(path, notes):
        total += 1
        try:
            if chosen(row["step"]):
                rows.append(compact(row, intern))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: not a trajectory ({error!r})") from None
    return rows, list(table), total


def build(folder: Path, every: int | None = None) -> Page:
    """The page of a run folder, with the trajectories of every `every`-th step, counted back from the last.

    By default all of them are shown, or as many steps as keep within SIZE_LIMIT. Raises ValueError, one
    line, if a file is missing or not what it should be.
    """
    notes: list[str] = []
    metrics = [row for _, row in read_lines(folder / "metrics.jsonl", notes)]
    if not metrics or not all(isinstance(row.get("step"), int) for row in metrics):
        raise ValueError(f"{folder / 'metrics.jsonl'}: no step to show")
    path, last = folder / "trajectories.jsonl", metrics[-1]["step"]
    by_size = math.ceil(path.stat().st_size / SIZE_LIMIT) if path.exists() else 1
    stride = every or max(1, by_size)
    rows, strings, total = _trajectories(path, lambda step: (last - step) % stride == 0, notes)
    if len(rows) < total:
        notes.append(
            f"Shown are {len(rows):,} of {total:,} trajectories, those of one step in {stride} counted back "
            f"from step {last}; --every K chooses another stride, and --every 1 shows all."
        )
    config = folder / "config.yaml"
    data = {
        "run": folder.resolve().name,
        "config": config.read_text("utf-8", errors="replace") if config.exists() else "",
        "metrics": [{key: finite(value) for key, value in row.items()} for row in metrics],
        "warnings": [text for _, text in watch(metrics)],
        "notes": notes,
        "total": total,
        "columns": COLUMNS,
        "figures": FIGURES,
        "strings": strings,
        "rows": rows,
    }
    return Page(render(data), len(rows), total, notes)


def render(data: dict[str, Any]) -> str:
    """The template with the data in it. "<" is written as its JSON escape, so no text can end the script
    element or open a comment; other characters beyond ASCII, lone surrogates too, are escaped by json.
    """
    template = (Path(__file__).parent / "assets" / "view.html").read_text("utf-8")
    before, after = template.split("{{data}}")
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    title = html.escape(data["run"]).encode("ascii", "xmlcharrefreplace").decode()
    return before.replace("{{title}}", title) + text.replace("<", "\\u003c") + after


def _positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="view", description="Make one HTML page of a run folder.")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("-o", "--output", type=Path, help="default: view.html in the run folder")
    parser.add_argument("--every", type=_positive, metavar="K", help="trajectories of every K-th step only")
    options = parser.parse_args(argv)
    output = options.output or options.run / "view.html"
    try:
        page = build(options.run, options.every)
        output.write_text(page.html, encoding="ascii")
    except ValueError as error:
        parser.exit(2, f"view: error: {error}\n")
    except OSError as error:
        parser.exit(2, f"view: error: {output}: {error.strerror}\n")
    for note in page.notes:
        print(note)
    print(f"{output}: {page.shown:,} of {page.total:,} trajectories, {len(page.html) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
