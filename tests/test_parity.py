"""Agreement with the reference over all 23 files of data, and every difference a decision that is counted."""

import re
from pathlib import Path

import pytest
from parity_counts import FILES, comparisons, parity_counts, parity_counts_by_file
from parity_rules import COVERED_ELSEWHERE, DATA, DIFFERS, SAME, load

# Row -> cases that it excuses. A number that moves is a decision that moved: say why in the commit.
EXPECTED = {
    "call": 18,
    "name": 183,
    "empty answer": 78,
    "tags inside a reply": 61,
    "router writes `<info>` itself": 26,
    "bad or unknown call": 15,
    "pool fault": 30,
    "fifth call": 3,
    "a turn without an action": 13,
    "answer, then a call in one turn": 38,
    "the count of calls after a bad one": 15,
    "degenerate batches": 27,
    "GRPO group of one": 28,
    "adaptive KL controller": 66,
    "temperature of candidates": 11,
    "cost scale": 175,
    "GAE, whitening, value loss": 25,
    "EM, F1": 82,
    "evaluation": 57,
    "truncation": 3,
    "the mask is born when the token is drawn": 6,
    "a finished slot takes the next question": 2,
}


@pytest.mark.parametrize("file", FILES)
def test_a_case_differs_if_and_only_if_a_row_says_so(file):
    """Catches a silent departure, and an excuse for a case that in fact agrees."""
    found = comparisons(file)
    unexcused = [(case, kind, field) for case, kind, field, agrees, rows in found if not agrees and not rows]
    idle = [(case, kind, field, rows) for case, kind, field, agrees, rows in found if agrees and rows]
    assert not unexcused
    assert not idle
    compared = {case.split("/")[0] for case, *_ in found}
    assert compared == {case["id"] for case in load(file)}, "a case was skipped"


def test_all_files_of_the_data_are_compared():
    """Catches a file that nobody reads."""
    assert {path.name.removesuffix(".jsonl.gz") for path in DATA.glob("*.gz")} == set(FILES)
    assert len(FILES) == 23
    assert sum(len(load(file)) for file in FILES) == 3240


def test_each_row_that_claims_a_difference_excuses_what_was_counted():
    """Catches a row that excuses nothing, and a change of behaviour that hides behind a row."""
    assert parity_counts() == EXPECTED
    assert set(EXPECTED) == set(DIFFERS)
    assert all(count > 0 for count in EXPECTED.values())


def test_rows_that_promise_to_be_the_same_excuse_nothing():
    """Catches a difference in what the table calls "the same"."""
    assert not set(parity_counts_by_file()) & (set(SAME) | set(COVERED_ELSEWHERE))


def test_rows_without_data_have_a_test_of_their_own():
    """Catches a decision that neither the data nor a test would notice."""
    here = Path(__file__).parent
    for place in (COVERED_ELSEWHERE | SAME).values():
        file, name = place.split("::")
        assert re.search(rf"^def {name}\(", (here / file).read_text(encoding="utf-8"), re.MULTILINE), place
