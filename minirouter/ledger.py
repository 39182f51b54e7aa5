"""What calls cost: a cache of replies, the account of every attempt, and the cap on spending, in one sqlite
file.

Not in the paper, whose cost is a reward only (Eq. 4); here it is money too. The reference implementation
keeps neither account nor cap nor cache.

Two rules keep spending under the cap (`max_usd`) with any number of threads and processes, and through kill
-9:

* The worst case of an attempt is *reserved, on disk, before* the attempt is sent, and refused if it does not
  fit. Afterwards the real figure takes the place of the reservation (`settle`).
* An attempt whose outcome is never learned (a timeout, a connection dropped while waiting, a crash of this
  process) is never settled: it stays *held* at its worst case for good.

A retry after such an attempt has a reservation of its own. The endpoint may bill both; the account counts
both, so that it can be above the bill and never below it. (An endpoint that bills more tokens than it was
allowed can pass the cap, by that excess of the calls in flight.)

Sums are kept in whole picodollars (1e-12 USD), so that they are exact. Replies are JSON text, found by a hash
of everything that determines them. Keys of endpoints never come here.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minirouter.trajectory import Candidate

PICO = 10**12  # picodollars in a dollar
TABLES = (
    "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS attempts (id INTEGER PRIMARY KEY, candidate TEXT NOT NULL,"
    " held INTEGER NOT NULL, paid INTEGER NOT NULL, tokens INTEGER NOT NULL)",
)
log = logging.getLogger(__name__)


class LedgerError(RuntimeError):
    """The ledger cannot be read or written any more (disk full, file damaged while in use)."""


class Ledger:
    """The account and reply cache at `path`; in memory, for this process alone, where `path` is None.

    `max_usd` caps everything that the account holds, earlier runs on the same file included; None is no cap.
    Raises ValueError, one line, if the cap is not a sum of money or the file cannot be used. A damaged file
    is set aside as `PATH.corrupt-N` with a warning, and a new one takes over what can be read of the account.

    Methods may be called from any thread; they raise LedgerError. One connection under a lock serves all
    threads (sqlite has one writer at a time anyway); processes wait for each other inside sqlite.
    """

    def __init__(self, path: str | Path | None, max_usd: float | None = None) -> None:
        if max_usd is not None and not (math.isfinite(max_usd) and max_usd >= 0):
            raise ValueError(f"max_usd must be a sum of dollars, 0 or more, not {max_usd}")
        self.max_usd = max_usd
        self.exhausted = False  # True once an attempt was refused: time to stop cleanly
        self._name = ":memory:" if path is None else str(path)
        self._lock = threading.Lock()
        self._flights: dict[str, list] = {}  # key -> [lock, how many use it]
        self._complained = False
        try:
            if path is not None:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
            with _alone_with(self._name):
                self._db = _open_or_rebuild(self._name)
        except (sqlite3.Error, OSError) as error:
            raise ValueError(f"{self._name}: cannot be used as a ledger ({error})") from None

    def close(self) -> None:
        """Close the file. Held reservations stay held."""
        with self._lock:
            self._db.close()

    # The account

    def reserve(self, candidate: str, worst_usd: float) -> int | None:
        """Hold `worst_usd` for an attempt about to be sent. Its number, or None if it would pass the cap."""
        worst = math.ceil(worst_usd * PICO)
        with self._transaction() as db:
            if self.max_usd is not None:
                (total,) = db.execute("SELECT coalesce(sum(held + paid), 0) FROM attempts").fetchone()
                if total + worst > round(self.max_usd * PICO):
                    self.exhausted = True
                    return None
            row = db.execute("INSERT INTO attempts VALUES (NULL, ?, ?, 0, 0)", (candidate, worst))
            return row.lastrowid

    def settle(self, attempt: int, usd: float, tokens: int = 0) -> None:
        """What attempt number `attempt` did cost (0 if certainly nothing was generated) replaces what it
        holds."""
        with self._transaction() as db:
            row = (round(usd * PICO), tokens, attempt)
            db.execute("UPDATE attempts SET held = 0, paid = ?, tokens = ? WHERE id = ?", row)

    def account(self) -> dict[str, dict[str, float]]:
        """For each candidate: attempts, output tokens paid, USD spent, USD held (in flight or outcome
        unknown)."""
        with self._transaction() as db:
            rows = db.execute(
                "SELECT candidate, count(*), sum(tokens), sum(paid), sum(held) FROM attempts"
                " GROUP BY candidate ORDER BY candidate"
            ).fetchall()
        return {
            name: {"attempts": n, "tokens": tokens, "usd": paid / PICO, "held_usd": held / PICO}
            for name, n, tokens, paid, held in rows
        }

    def spent(self) -> dict[str, float]:
        """USD spent by candidate: what endpoints reported, or an estimate where they did not."""
        return {name: row["usd"] for name, row in self.account().items()}

    def committed(self) -> float:
        """USD that count against the cap: spent and held."""
        return sum(row["usd"] + row["held_usd"] for row in self.account().values())

    # The reply cache

    def get(self, key: str) -> dict[str, Any] | None:
        """The cached value of `key`, or None."""
        with self._transaction() as db:
            row = db.execute("SELECT value FROM replies WHERE key = ?", (key,)).fetchone()
        return json.loads(row[0]) if row else None

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Keep a JSON value. The first one stays: a reply that was used once must not change."""
        with self._transaction() as db:
            db.execute("INSERT OR IGNORE INTO replies VALUES (?, ?)", (key, json.dumps(value)))

    @contextmanager
    def alone(self, key: str, timeout_s: float) -> Iterator[bool]:
        """Equal calls of this process, one at a time: the second finds the first one's reply in the cache.

        Yields False if the wait took longer than `timeout_s`.
        """
        with self._lock:
            flight = self._flights.setdefault(key, [threading.Lock(), 0])
            flight[1] += 1
        acquired = flight[0].acquire(timeout=max(0.0, timeout_s))
        try:
            yield acquired
        finally:
            if acquired:
                flight[0].release()
            with self._lock:
                flight[1] -= 1
                if not flight[1]:
                    del self._flights[key]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Everything in the block is committed to disk when it ends, or nothing is. Raises LedgerError."""
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield self._db
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                if not self._complained:
                    log.warning(
                        "%s: the ledger cannot be read or written (%s); calls fail", self._name, error
                    )
                    self._complained = True
                raise LedgerError(f"{self._name}: {error}") from None
            finally:
                if self._db.in_transaction:
                    self._db.rollback()


def read_usage(reported: Any) -> dict[str, int]:
    """The whole numbers in the `usage` of a response: prompt, completion and total tokens, those that are
    there."""
    if not isinstance(reported, dict):
        return {}
    numbers = {part: reported.get(f"{part}_tokens") for part in ("prompt", "completion", "total")}
    return {part: n for part, n in numbers.items() if type(n) is int and 0 <= n <= 10**7}


def worst_case(candidate: Candidate, body: dict[str, Any]) -> float:
    """USD that one attempt with this request body can cost: a prompt has at most one token a byte."""
    return 1e-6 * (candidate.max_tokens * candidate.price + len(json.dumps(body)) * candidate.price_in)


def price_call(
    candidate: Candidate, body: dict, text: str, usage: dict[str, int], count_tokens: Callable[[str], int]
) -> tuple[int, float, bool]:
    """Output tokens paid for, their cost (USD per 1M such calls), and whether tokens had to be counted here.

    Output is max(completion, total - prompt), so that hidden reasoning is paid. What usage does not say, or
    says to be nothing, is counted with the router's tokenizer.
    """
    asked = usage.get("prompt")
    hidden = usage["total"] - asked if "total" in usage and asked is not None else 0
    tokens = max(usage.get("completion", 0), hidden)
    estimated = tokens == 0 and text != ""
    if estimated:
        tokens = count_tokens(text)
    if asked is None and candidate.price_in > 0:
        asked, estimated = count_tokens(body["messages"][0]["content"]), True
    return tokens, tokens * candidate.price + (asked or 0) * candidate.price_in, estimated


@contextmanager
def _alone_with(name: str) -> Iterator[None]:
    """Processes open the file one after the other: sqlite fails, rather than waits, where two make a new one
    WAL; and two that find damage would set each other's new file aside. The lock ends with its process."""
    lock = _connect(name if name == ":memory:" else f"{name}.lock")
    try:
        lock.execute("BEGIN EXCLUSIVE")
        yield
    finally:
        lock.close()


def _open_or_rebuild(name: str) -> sqlite3.Connection:
    """Open the file, or set a damaged one aside and start anew with the attempts that it still yields."""
    db = _connect(name)
    try:
        return _prepare(db)
    except sqlite3.DatabaseError as error:
        if not _is_damage(error):
            db.close()
            raise
    attempts = _salvage(db)
    db.close()
    aside = _set_aside(name)
    fresh = _prepare(_connect(name))
    fresh.execute("BEGIN IMMEDIATE")
    fresh.executemany("INSERT INTO attempts VALUES (NULL, ?, ?, ?, ?)", attempts)
    fresh.execute("COMMIT")
    log.warning(
        "%s is damaged: set aside as %s and started anew. %d attempts of its account could be read;"
        " the cap counts only these",
        name,
        aside,
        len(attempts),
    )
    return fresh


def _connect(name: str) -> sqlite3.Connection:
    return sqlite3.connect(name, timeout=60.0, isolation_level=None, check_same_thread=False)


def _prepare(db: sqlite3.Connection) -> sqlite3.Connection:
    """Check the file, make the tables. Of what was committed a crash loses nothing, a power cut the last."""
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=NORMAL")  # FULL waits for the disk at each write: 60 ms on a busy one
    (verdict,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise _Damaged(verdict)
    db.execute("BEGIN IMMEDIATE")  # a file that cannot be written fails here, not in the middle of a run
    for table in TABLES:
        db.execute(table)
    db.execute("COMMIT")
    return db


class _Damaged(sqlite3.DatabaseError):
    """sqlite's own check found damage."""


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Damage, as against a file that is locked, read-only or on a full disk."""
    code = getattr(error, "sqlite_errorname", "")
    return isinstance(error, _Damaged) or code.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))


def _salvage(db: sqlite3.Connection) -> list[tuple]:
    """The attempts that can be read before the damage is met."""
    rows: list[tuple] = []
    try:
        for row in db.execute("SELECT candidate, held, paid, tokens FROM attempts"):
            if isinstance(row[0], str) and all(isinstance(n, int) for n in row[1:]):
                rows.append(row)
    except sqlite3.Error as error:
        log.debug("salvage ended: %s", error)
    return rows


def _set_aside(name: str) -> str:
    """Rename the file and its journal files to the first free `NAME.corrupt-N`."""
    number = 1
    while os.path.exists(f"{name}.corrupt-{number}"):
        number += 1
    aside = f"{name}.corrupt-{number}"
    for suffix in ("", "-wal", "-shm"):
        if os.path.exists(name + suffix):
            os.rename(name + suffix, aside + suffix)
    return aside
