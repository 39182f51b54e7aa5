"""How many cases of the parity data each row of "Where minirouter differs" excuses."""

import functools
from collections import Counter, defaultdict

from parity_rules import TEXT_FILES
from parity_tensors import TENSOR_FILES

FILES = TEXT_FILES | TENSOR_FILES


@functools.cache
def comparisons(file: str) -> list[tuple[str, str, str, bool, frozenset[str]]]:
    """(case id, kind, field, agrees, rows) of everything that is compared in one file."""
    return [
        (c["id"], c.get("kind", ""), field, bool(ok), frozenset(rows)) for field, c, ok, rows in FILES[file]()
    ]


def parity_counts() -> dict[str, int]:
    """Row -> number of cases that it excuses: distinct cases, however many fields of them differ."""
    return {row: sum(files.values()) for row, files in parity_counts_by_file().items()}


def parity_counts_by_file() -> dict[str, dict[str, int]]:
    """Row -> file -> number of cases excused."""
    excused = defaultdict(set)
    for file in FILES:
        for case, _, _, _, rows in comparisons(file):
            for row in rows:
                excused[row].add((file, case))
    return {row: dict(Counter(file for file, _ in sorted(cases))) for row, cases in excused.items()}
