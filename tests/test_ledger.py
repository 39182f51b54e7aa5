"""The account is exact, survives, and is never passed; the cache holds JSON; damage is set aside."""

import json
import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from minirouter.ledger import Ledger, LedgerError, price_call, read_usage, worst_case
from minirouter.trajectory import Candidate

WORKER = """
import sys, threading
from minirouter.ledger import Ledger
path, cap, tries = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
ledger = Ledger(path, max_usd=cap)
def work(name):
    for i in range(tries):
        number = ledger.reserve(name, 0.003)
        if number is not None:
            print("reserved\\n", end="", flush=True)  # one write: threads must not mix lines
            if i % 2:
                ledger.settle(number, 0.002, 7)
                print("settled\\n", end="", flush=True)
threads = [threading.Thread(target=work, args=(f"c{n}",)) for n in range(3)]
[t.start() for t in threads]
[t.join() for t in threads]
"""


def start_worker(path, cap, tries):
    args = [sys.executable, "-c", WORKER, str(path), str(cap), str(tries)]
    return subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_reservations_fill_the_cap_exactly_and_one_more_is_refused():
    """Caught: float sums that refuse the tenth of ten tenths, or take an eleventh."""
    ledger = Ledger(None, max_usd=1.0)
    numbers = [ledger.reserve("a", 0.1) for _ in range(10)]
    assert None not in numbers and len(set(numbers)) == 10
    assert not ledger.exhausted
    assert ledger.reserve("a", 0.1) is None
    assert ledger.exhausted
    assert ledger.reserve("free", 0.0) is not None, "what costs nothing still fits"
    tiny = Ledger(None, max_usd=1e-12)
    assert tiny.reserve("a", 4e-13) is not None
    assert tiny.reserve("a", 4e-13) is None, "reservations are rounded up"


def test_settling_gives_back_what_was_not_spent():
    """Caught: a cap on worst cases instead of on money; spend that forgets who spent it."""
    ledger = Ledger(None, max_usd=1.0)
    first = ledger.reserve("a", 0.9)
    assert ledger.reserve("b", 0.9) is None
    ledger.settle(first, 0.05, tokens=50)
    second = ledger.reserve("b", 0.9)
    assert second is not None
    assert ledger.spent() == {"a": 0.05, "b": 0.0}
    assert ledger.account()["b"] == {"attempts": 1, "tokens": 0, "usd": 0.0, "held_usd": 0.9}
    assert ledger.committed() == pytest.approx(0.95, abs=1e-12)
    ledger.settle(second, 0.0)
    assert ledger.committed() == 0.05


@pytest.mark.parametrize("cap", [float("nan"), float("inf"), -1.0])
def test_a_cap_that_is_no_sum_of_money_is_refused(cap):
    """Caught: NaN, which compares false with everything and would be no cap at all."""
    with pytest.raises(ValueError, match="max_usd"):
        Ledger(None, max_usd=cap)


def test_threads_and_processes_together_never_pass_the_cap(tmp_path):
    """Caught: check-then-write without a transaction, which lets several writers through at once."""
    path = tmp_path / "ledger.sqlite"
    workers = [start_worker(path, 0.1, 30) for _ in range(3)]
    said = [w.communicate(timeout=60) for w in workers]
    assert [errors for _, errors in said] == ["", "", ""]
    lines = [line for lines, _ in said for line in lines.split()]
    ledger = Ledger(path, max_usd=0.1)
    rows = ledger.account().values()
    assert sum(r["attempts"] for r in rows) == lines.count("reserved")
    assert sum(r["tokens"] for r in rows) == 7 * lines.count("settled")
    assert 0.097 < ledger.committed() <= 0.1
    assert ledger.reserve("late", 0.003) is None


def test_kill_9_loses_nothing_that_was_said_to_be_reserved(tmp_path):
    """Caught: an account in memory or in an open transaction; reservations of the dead that vanish."""
    path = tmp_path / "ledger.sqlite"
    worker = start_worker(path, 1e6, 10**6)
    heard = [worker.stdout.readline().strip() for _ in range(60)]
    os.kill(worker.pid, signal.SIGKILL)
    heard += worker.stdout.read().split()
    worker.communicate()
    rows = Ledger(path).account().values()
    attempts, settled = sum(r["attempts"] for r in rows), sum(r["tokens"] for r in rows) // 7
    assert heard.count("reserved") <= attempts <= heard.count("reserved") + 3
    assert heard.count("settled") <= settled <= heard.count("settled") + 3
    held = sum(r["held_usd"] for r in rows)
    assert held == pytest.approx(0.003 * (attempts - settled), rel=1e-9)


def test_the_cap_counts_what_earlier_runs_on_the_same_file_spent(tmp_path):
    """Caught: a cap that starts anew with every resume."""
    path = tmp_path / "deep" / "ledger.sqlite"
    first = Ledger(path, max_usd=1.0)
    first.settle(first.reserve("a", 0.5), 0.3)
    first.reserve("a", 0.6)  # never settled: outcome unknown
    first.close()
    second = Ledger(path, max_usd=1.0)
    assert second.reserve("a", 0.2) is None
    assert second.reserve("a", 0.1) is not None
    assert Ledger(path, max_usd=2.0).reserve("a", 0.9) is not None, "a higher cap makes room again"


def test_the_cache_keeps_the_first_reply_as_json_across_processes(tmp_path):
    """Caught: pickles; a reply that changes after it was used."""
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    assert ledger.get("k") is None
    ledger.put("k", {"text": "naïve ✓", "usage": {"total": 3}})
    ledger.put("k", {"text": "other", "usage": {}})
    assert Ledger(path).get("k") == {"text": "naïve ✓", "usage": {"total": 3}}
    with sqlite3.connect(path) as raw:
        (value,) = raw.execute("SELECT value FROM replies").fetchone()
        assert json.loads(value)["text"] == "naïve ✓"
        assert raw.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def damage_header(path):
    path.write_bytes(b"this is no database at all" * 100)


def damage_middle(path):
    data = bytearray(path.read_bytes())
    data[-4096:] = b"\xff" * 4096
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [damage_header, damage_middle])
def test_a_damaged_file_is_set_aside_and_rebuilt_with_a_warning(tmp_path, caplog, damage):
    """Caught: a run that dies of a broken cache; evidence thrown away; damage that passes unsaid."""
    path = tmp_path / "ledger.sqlite"
    ledger = Ledger(path)
    ledger.settle(ledger.reserve("a", 0.5), 0.25, 10)
    for i in range(20):
        ledger.put(f"key {i}", {"text": "x" * 1500, "usage": {}})
    ledger.close()
    damage(path)
    broken = path.read_bytes()
    with caplog.at_level(logging.WARNING):
        fresh = Ledger(path, max_usd=0.3)
    assert (tmp_path / "ledger.sqlite.corrupt-1").read_bytes() == broken
    assert str(path) in caplog.text and "corrupt-1" in caplog.text
    salvaged = damage is damage_middle
    assert fresh.spent() == ({"a": 0.25} if salvaged else {})
    assert (fresh.reserve("a", 0.1) is None) == salvaged, "what could be read of the account still counts"
    fresh.put("k", {"text": "works", "usage": {}})
    fresh.close()
    damage_header(path)
    assert Ledger(path).get("k") is None
    assert (tmp_path / "ledger.sqlite.corrupt-2").exists()


@pytest.mark.parametrize("before", [b"", b"no database at all" * 300], ids=["new", "damaged"])
def test_many_open_the_same_file_at_once_and_share_one_account(tmp_path, before):
    """Caught: "database is locked" where two make a new file; an account set aside by the second to find
    damage."""
    for n in range(20):
        path = tmp_path / f"{n}.sqlite"
        path.write_bytes(before)
        start = threading.Barrier(4)

        def open_and_pay(path=path, start=start):
            start.wait()
            ledger = Ledger(path)
            ledger.settle(ledger.reserve("a", 0.5), 0.25)
            return ledger

        with ThreadPoolExecutor(4) as threads:
            ledgers = [f.result() for f in [threads.submit(open_and_pay) for _ in range(4)]]
        assert [ledger.spent() for ledger in ledgers] == [{"a": 1.0}] * 4


def test_a_path_that_cannot_be_used_is_one_line_naming_it(tmp_path):
    """Caught: a traceback from sqlite in the user's face."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "ledger.sqlite"):
        with pytest.raises(ValueError, match="ledger") as caught:
            Ledger(path)
        assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_full_disk_raises_and_is_said_once_and_leaves_the_account_whole(tmp_path, caplog):
    """Caught: an attempt sent although its reservation could not be written; a log of a thousand lines."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.reserve("a", 0.5)
    ledger._db.execute("PRAGMA max_page_count = 1")
    for _ in range(3):
        with pytest.raises(LedgerError, match="full"):
            ledger.put("k", {"text": "x" * 100_000, "usage": {}})
    ledger._db.execute("PRAGMA query_only = 1")
    with pytest.raises(LedgerError, match="readonly"):
        ledger.reserve("a", 0.5)
    ledger._db.execute("PRAGMA query_only = 0")
    with pytest.raises(TypeError):
        ledger.put("k", {"text": object()})
    assert len(caplog.records) == 1
    assert ledger.account()["a"]["held_usd"] == 0.5


def test_equal_calls_go_one_at_a_time_and_others_do_not_wait():
    """Caught: one lock for all, or no lock for equals; locks that pile up."""
    ledger = Ledger(None)
    inside, most = [], []
    barrier = threading.Barrier(4)

    def call(key):
        barrier.wait()
        with ledger.alone(key, 5.0) as acquired:
            inside.append(key)
            most.append(inside.count("same"))
            inside.remove(key)
            return acquired

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, ["same"] * 4))
    assert max(most) == 1
    with ledger.alone("same", 1.0), ledger.alone("other", 0.0) as other, ledger.alone("same", 0.01) as late:
        assert other and not late
    assert ledger._flights == {}


CANDIDATE = Candidate("A", price=2.0, price_in=0.5, max_tokens=100)
BODY = {"messages": [{"role": "user", "content": "one two three"}]}


@pytest.mark.parametrize(
    ("text", "usage", "tokens", "cost", "estimated"),
    [
        ("a b", {"prompt_tokens": 8, "completion_tokens": 5, "total_tokens": 13}, 5, 14.0, False),
        ("a b", {"prompt_tokens": 8, "completion_tokens": 5, "total_tokens": 53}, 45, 94.0, False),  # hidden
        ("a b", {"prompt_tokens": 8, "completion_tokens": 5, "total_tokens": 1}, 5, 14.0, False),
        ("a b", {"prompt_tokens": 8, "total_tokens": 13}, 5, 14.0, False),
        ("a b", {"prompt_tokens": 8, "completion_tokens": 0, "total_tokens": 8}, 2, 8.0, True),  # a stub
        ("a b", {"prompt_tokens": 8, "completion_tokens": -5, "total_tokens": "13"}, 2, 8.0, True),
        ("a b", {"prompt_tokens": 8, "completion_tokens": True}, 2, 8.0, True),
        ("a b", {"completion_tokens": 5}, 5, 11.5, True),
        ("a b", {"prompt_tokens": float("nan"), "completion_tokens": 1e300}, 2, 5.5, True),
        ("a b", None, 2, 5.5, True),
        (
            "",
            {"prompt_tokens": 8, "completion_tokens": 5},
            5,
            14.0,
            False,
        ),  # an empty reply was generated too
        ("", [], 0, 1.5, True),
    ],
)
def test_price_by_hand(text, usage, tokens, cost, estimated):
    """Caught: missing usage as free, hidden reasoning unpaid, stub counts believed (RC faults). By hand:
    tokens x 2 + prompt x .5, where text is counted in words."""
    got = price_call(CANDIDATE, BODY, text, read_usage(usage), lambda t: len(t.split()))
    assert got == (tokens, pytest.approx(cost), estimated)


def test_the_worst_case_bounds_every_prompt_by_its_bytes():
    """Caught: a reservation by the router's tokenizer, which may count fewer tokens than the endpoint."""
    body = {"messages": [{"role": "user", "content": "東京" * 100}]}
    assert worst_case(CANDIDATE, body) >= 1e-6 * (100 * 2.0 + len(("東京" * 100).encode()) * 0.5)
