"""The task of a run: which questions, which pool, and how both are put to the router (x ~ D and P in Eq. 1).

train.py, evaluate.py and the comparison all ask here, so that they cannot differ in a prompt or a pool.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import world
from .data import encode_prompt, load_questions, load_template, render_prompt, special_strings
from .ledger import Ledger, LedgerError
from .pool import Pool, read_pool_file
from .trajectory import Question

WORLD_SIZES = {"train": 6400, "dev": 200, "test": 1000}


def open_pool(pool: str, data: str, tokenizer: Any, timeout_s: float = 60.0) -> Any:
    """ "drawn" and "full" as they are (each question of the world brings its own); a pool file as a pool:
    simulated in the world, behind HTTP otherwise. Raises ValueError, one line, for a pool file with a
    mistake in it."""
    if pool in ("drawn", "full"):
        return pool
    if data == "world":
        return world.SimulatedPool(tuple(read_pool_file(pool, ("name", "price", "descriptor"))))

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    return Pool.from_file(pool, count_tokens, timeout_s=timeout_s)


@dataclass
class Task:
    """Questions, pool and prompt, from plain values; raises ValueError, one line, for what cannot be used."""

    tokenizer: Any
    data: str = "world"  # "world", a file, or a comma list of benchmarks
    pool: Any = "drawn"  # "drawn", "full", or a pool
    prompt: str = "tiny"
    show_prices: bool = True
    info_tag: str = "info"
    max_calls: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        self.template = load_template(self.prompt)
        self.specials = special_strings(self.tokenizer)

    def questions(self, split: str, n: int = 0) -> list[Question]:
        """n questions of "train", "dev" or "test" (0: as many as is usual), each with its own pool in the
        world.
        """
        if self.data != "world":
            return load_questions(self.data, split, n or None, self.seed)
        # training draws by the run's seed; dev and test questions are the same for every run
        seed = self.seed if split == "train" else 0
        own = isinstance(self.pool, str)
        found = world.questions(split, n or WORLD_SIZES[split], seed, self.pool if own else "full")
        return found if own else [replace(question, pool=None) for question in found]  # all ask the task's

    def fitting(
        self, questions: Sequence[Question], total_tokens: int
    ) -> tuple[list[Question], list[list[int]]]:
        """The questions whose prompt leaves room for a token, and their prompts."""
        kept = [
            (q, p) for q, p in zip(questions, self.prompts(questions), strict=True) if len(p) < total_tokens
        ]
        return [q for q, _ in kept], [p for _, p in kept]

    def keep_account(self, path: str | Path, max_usd: float | None) -> None:
        """From now on calls are cached and accounted for in the file `path`, capped at `max_usd` if given."""
        if self.remote:
            self.pool.ledger = Ledger(path, max_usd)

    @property
    def exhausted(self) -> bool:
        """True once a call was refused because of the spend cap."""
        return self.remote and self.pool.ledger.exhausted

    @property
    def remote(self) -> bool:
        """True if the candidates are real: their calls take time, cost money and can fail."""
        return isinstance(self.pool, Pool)

    def spending(self) -> dict[str, float]:
        """USD spent so far, as metrics by candidate; none for simulated ones, or if the ledger is broken."""
        try:
            spent = self.pool.ledger.spent() if self.remote else {}
        except LedgerError:  # said in the log by the ledger; every call is a fault now
            spent = {}
        return {f"spent/{name}": usd for name, usd in spent.items()}

    def bill(self) -> str:
        """What the ledger holds, in one line; "" if nothing was paid for."""
        if not self.spending():
            return ""
        account = self.pool.ledger.account()
        parts = ", ".join(f"{name} {row['usd']:.6f}" for name, row in account.items())
        spent, held = (math.fsum(row[key] for row in account.values()) for key in ("usd", "held_usd"))
        return f"spent {spent:.6f} USD: {parts}; held for calls of unknown outcome: {held:.6f}"

    def pools(self, questions: Sequence[Question]) -> list[Any]:
        """The pool of each question: its own, or the task's."""
        return [self.pool if question.pool is None else question.pool for question in questions]

    def prompts(self, questions: Sequence[Question]) -> list[list[int]]:
        """Ids of the prompt of each question."""
        return [
            encode_prompt(
                self.tokenizer,
                render_prompt(
                    self.template,
                    question.text,
                    pool.candidates,
                    self.show_prices,
                    self.info_tag,
                    self.max_calls,
                    self.specials,
                ),
            )
            for question, pool in zip(questions, self.pools(questions), strict=True)
        ]
