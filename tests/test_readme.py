"""What the README says of the code is so."""

import ast
import re
from pathlib import Path

import pytest
from parity_counts import parity_counts

from minirouter.compare.publish import TABLES, table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(title: str) -> list[list[str]]:
    """The cells of a section's table, without head and rule."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def names_in(path: Path) -> set[str]:
    """Functions and classes of a module, methods as Class.method."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            found |= {f"{node.name}.{sub.name}" for sub in ast.walk(node) if isinstance(sub, ast.FunctionDef)}
    return found


def test_the_readme_opens_with_two_sentences_and_two_commands():
    """Catches a README whose first screen grows."""
    intro = README.partition("\n")[2].partition("\nTrain a router")[0]
    assert len(re.findall(r"\.(?=\s)", intro)) == 2
    blocks = re.findall(r"```bash\n(.*?)\n```", README.partition("\n## ")[0], re.DOTALL)
    assert len(blocks) == 2 and all(len(block.splitlines()) == 1 for block in blocks)
    assert "train.py" in blocks[0] and "pytest" in blocks[1]


@pytest.mark.parametrize("row", rows("Equation by equation"), ids=lambda row: row[0])
def test_every_name_of_the_ledger_exists(row):
    """Catches a ledger that points to functions or tests that are gone."""
    _, where, reference, test = row
    module, _, name = where.strip("`").partition("::")
    assert name in names_in(ROOT / "minirouter" / module)
    file, _, test_name = test.strip("`").partition("::")
    assert test_name in names_in(ROOT / "tests" / file)
    assert reference.startswith(("same", "differs"))


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_of_the_comparison_are_those_of_its_pages(name):
    """Catches a figure that was changed by hand, or in one place."""
    shown = README.partition(f"<!-- {name} -->\n")[2].partition(f"\n<!-- /{name} -->")[0]
    assert shown == table((ROOT / "docs" / "paper" / "paper.md").read_text("utf-8"), *TABLES[name])


def test_the_counts_of_the_differences_are_those_of_the_parity_tests():
    """Catches numbers in the table of differences that no test prints."""
    printed = {row[0]: int(row[3]) for row in rows("Where minirouter differs") if row[3].isdigit()}
    assert {row: count for row, count in printed.items() if count} == {
        re.sub(r"\s+", " ", row): count for row, count in parity_counts().items()
    }


def test_every_relative_link_leads_somewhere():
    """Catches links to files that moved."""
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
