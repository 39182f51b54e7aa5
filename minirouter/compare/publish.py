"""Put a finished comparison into README.md and docs/paper: `python -m minirouter.compare.publish [FOLDER]`.

README shows some of its tables, between a pair of comments each; a test holds them equal to docs/paper.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from itertools import dropwhile, takewhile
from pathlib import Path

from minirouter.config import fail

from .stats import markdown

ROOT = Path(__file__).parents[2]
TABLES: dict[str, tuple[str, Sequence[str]]] = {  # in README: the heading above it, the columns (all if none)
    "seeds": ("### Seeds", ()),
    "names": ("All candidates under names that training never used", ()),
    "newcomers": ("Questions about a topic whose expert is missing", ()),
    "main": (
        "### drawn pools",
        ("system", "EM", "EM one-hop", "EM two-hop", "EM two-hop new", "EM own", "cost", "calls"),
    ),
    "ablations": ("## 9. One option each", ()),
}


def table(text: str, heading: str, columns: Sequence[str] = ()) -> str:
    """The first table below a heading, or some of its columns. Raises ValueError if there is none."""
    section = takewhile(lambda line: not line.startswith("#"), text.partition(heading)[2].splitlines())
    below = dropwhile(lambda line: not line.startswith("|"), section)
    lines = [line.strip("|").split("|") for line in takewhile(lambda line: line.startswith("|"), below)]
    if not lines:
        raise ValueError(f"no table below {heading!r}")
    head, _, *rows = ([cell.strip() for cell in line] for line in lines)
    kept = [head.index(column) for column in columns] or range(len(head))
    return markdown([head[i] for i in kept], [[row[i] for i in kept] for row in rows])


def fill(readme: str, paper: str) -> str:
    """README with its tables replaced by those of paper.md."""
    for name, wanted in TABLES.items():
        start, end = f"<!-- {name} -->\n", f"\n<!-- /{name} -->"
        before, _, rest = readme.partition(start)
        _, closed, after = rest.partition(end)
        if not closed:
            raise ValueError(f"README has no place for {name!r}")
        readme = before + start + table(paper, *wanted) + end + after
    return readme


def main(argv: Sequence[str] | None = None) -> None:
    arguments = sys.argv[1:] if argv is None else argv
    folder = Path(arguments[0] if arguments else "runs/paper")
    try:
        if not (folder / "paper.md").exists():
            raise ValueError(f"no {folder}/paper.md: python -m minirouter.compare.paper makes it")
        readme = fill((ROOT / "README.md").read_text("utf-8"), (folder / "paper.md").read_text("utf-8"))
    except (OSError, ValueError) as error:
        fail(error)
    (ROOT / "README.md").write_text(readme, encoding="utf-8")
    for path in (*folder.glob("*.png"), folder / "paper.md"):
        shutil.copy(path, ROOT / "docs" / "paper")


if __name__ == "__main__":
    main()
