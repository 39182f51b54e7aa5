"""Random hostile input for everything that reads text of others: `python tests/fuzz.py TARGET CASES [SEED]`.

Each target takes a random generator, makes one case and checks what must hold of it. The suite runs a few
hundred of each (test_hostile.py); this program runs a million. A case that fails can be made again from its
seed.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from minirouter import pool
from minirouter.config import read_yaml
from minirouter.data import load_questions
from minirouter.ledger import price_call
from minirouter.record import Recorder
from minirouter.reward import extract_answer
from minirouter.tags import ANY_TAG, TAGS, find_action, format_error, neutralise, render_reply
from minirouter.trajectory import Candidate

SPECIALS = ("<|im_end|>", "<|im_start|>", "</s>", "<s>", "[INST]", "<<<", "a<a")
WORDS = [
    "<",
    ">",
    "/",
    ":",
    " ",
    "\n",
    "...",
    "Ada",
    "llm-name",
    "‹",
    "é",
    "\0",
    "\ud800",
    "\u202e",
    "\u2028",
]
PIECES = [f"<{slash}{tag}>" for tag in TAGS for slash in ("", "/")] + list(SPECIALS) + WORDS
NAMES = ("Ada", "Bo b", "ADA:")
CANDIDATE = Candidate("Ada", 2.0, model="vendor/ada-7b", price_in=0.5)
GOOD_REPLY = {
    "model": "ada-7b",
    "choices": [{"message": {"role": "assistant", "content": "x <info>"}, "index": 0}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 9},
    "error": None,
}
GOOD_ROW = {"id": 1, "question": "who?", "golden_answers": ["x", "y"], "answer": "z", "kind": "k"}
GOOD_POOL = """- name: Ada
  aliases: [ann, "b"]
  model: vendor/ada
  base_url: http://127.0.0.1:1
  price: 1.5
  extra: {seed: 1}
- {name: Bo, model: b, base_url: "https://b.test/v1", price: 0, max_tokens: 5, descriptor: 'says "no"'}
"""
GOOD_CONFIG = "model: tiny\nsteps: 3\nlr: 1.0e-5\nshow_prices: true\nmax_usd: null\nrun_dir: 'a b'\n"
SCRAPS = [
    "null",
    "NaN",
    "1e999",
    "-1",
    '"',
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\\u0000",
    "\\ud800",
    "true",
    "&a",
    "*a",
]
SCRAPS += [
    "!!python/object/apply:os.system ['x']",
    "? ",
    "- ",
    "|",
    ">",
    "#",
    "%",
    "@",
    "`",
    "\t",
    "\n",
    "  ",
    "<<: *a",
]
SCRAPS += [
    "\ufeff",
    "\x85",
    "\x00",
    "\ud800",
    "9" * 400,
    "[" * 60,
    "2024-01-01",
    "0o17",
    "1_000",
    ".inf",
    "~",
    "---\n",
]


def text(rng: random.Random) -> str:
    """Words of the protocol, of templates and of nothing, in any order."""
    parts = rng.choices(PIECES, k=rng.randint(0, 14))
    if rng.random() < 0.2:
        parts.insert(0, rng.choice(PIECES) * rng.randint(1, 9))
    return "".join(parts)


def damaged(rng: random.Random, data: bytes) -> bytes:
    """The same with a few bytes lost, changed, doubled, moved, or scraps put in."""
    for _ in range(rng.randint(0, 4)):
        a, b = sorted(rng.randint(0, len(data)) for _ in range(2))
        b = min(b, a + 20)
        scrap = rng.choice(SCRAPS).encode("utf-8", "surrogatepass")
        data = rng.choice([
            data[:a] + data[b:],
            data[:a] + bytes([rng.randrange(256)]) + data[a + 1 :],
            data[:a] + scrap + data[a:],
            data[:a] + scrap + data[b:],
            data[:a] + data[a:b] + data[a:],
            data[:b],
        ])  # fmt: skip
    return data


def tags(rng: random.Random) -> None:
    """No text crashes the protocol, and neutralised text holds neither tags nor special strings."""
    t = text(rng)
    action, error = find_action(t), format_error(t, NAMES)
    assert action is None or action.kind in ("search", "answer")
    if error is None:
        assert action is not None
        assert extract_answer(t)
    safe = neutralise(t, SPECIALS)
    assert find_action(safe) is None and not ANY_TAG.search(safe)
    assert not any("<" in special and special in safe for special in SPECIALS)
    assert neutralise(safe, SPECIALS) == safe
    assert safe.replace("‹", "<") == t.replace("‹", "<")
    assert [tag[0] for tag in ANY_TAG.finditer(render_reply(t, "info", SPECIALS))] == ["<info>", "</info>"]


def reply(rng: random.Random) -> None:
    """Any body is an outcome: text that can be encoded, whole numbers, a price."""
    body = json.loads(json.dumps(GOOD_REPLY))
    if rng.random() < 0.5:
        body["choices"][0]["message"]["content"] = text(rng)
    for _ in range(rng.randint(0, 2)):
        where = rng.choice([body, body["usage"], body["choices"][0]["message"], body["choices"][0]])
        odd = rng.choice([None, [], {}, "", "x", -1, 1.5, 10**30, True, [None], math.nan, {"content": "y"}])
        if isinstance(where, dict) and where:
            where[rng.choice(list(where))] = odd
        if not all(isinstance(body.get(key), kind) for key, kind in (("usage", dict), ("choices", list))):
            break
        if not body["choices"] or not isinstance(body["choices"][0], dict):
            break
        if not isinstance(body["choices"][0].get("message"), dict):
            break
    outcome = pool._read(CANDIDATE, bytearray(damaged(rng, json.dumps(body).encode())))
    outcome.text.encode()
    assert "\0" not in outcome.text
    assert outcome.status in ("ok", "bad_json", "wrong_model", "empty", "error_object")
    assert outcome.status != "ok" or outcome.text.strip()
    request = {"messages": [{"content": "q"}]}
    tokens, cost, _ = price_call(CANDIDATE, request, outcome.text, outcome.usage, lambda t: len(t.split()))
    assert type(tokens) is int and tokens >= 0 and 0 <= cost < math.inf


def one_line(error: ValueError, path: Path) -> None:
    assert str(path) in str(error) and "\n" not in str(error), str(error)


@cache
def folder() -> Path:
    shared = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="fuzz", dir=shared if os.access(shared, os.W_OK) else None))


def jsonl(rng: random.Random) -> None:
    """Questions, or one line that names file and line."""
    path = folder() / "questions.jsonl"
    rows = [GOOD_ROW | {"id": i, "question": text(rng) or "q"} for i in range(rng.randint(1, 3))]
    end = rng.choice(["\n", "\r\n", "\n\n"])
    data = end.join(json.dumps(row, ensure_ascii=rng.random() < 0.7) for row in rows)
    path.write_bytes(damaged(rng, data.encode("utf-8", "surrogatepass")))
    try:
        questions = load_questions(str(path), "train")
    except ValueError as error:
        one_line(error, path)
        assert re.search(r"jsonl:\d+: |no questions|empty", str(error)), str(error)
        return
    for question in questions:
        assert question.text.strip() and all(gold.strip() for gold in question.golds)
        "".join([question.text, question.id, question.kind, *question.golds]).encode()


def pool_yaml(rng: random.Random) -> None:
    """Candidates with every field in order, or one line that names the file."""
    path = folder() / "pool.yaml"
    path.write_bytes(damaged(rng, GOOD_POOL.encode()))
    try:
        candidates = pool.read_pool_file(path)
    except ValueError as error:
        one_line(error, path)
        return
    for candidate in candidates:
        assert candidate.name.strip() and ":" not in candidate.name and candidate.price >= 0
        json.dumps(candidate.extra)


def config_yaml(rng: random.Random) -> None:
    """Known keys with plain values, or one line that names the file."""
    path = folder() / "config.yaml"
    path.write_bytes(damaged(rng, GOOD_CONFIG.encode()))
    try:
        values = read_yaml(path)
    except ValueError as error:
        one_line(error, path)
        return
    assert not any(isinstance(value, dict | list) for value in values.values())


def record(rng: random.Random) -> None:
    """A run's lines are cut to a beginning of what was there, or one line names the one that is wrong."""
    recorder = recorder_of()
    path = recorder.folder / "metrics.jsonl"
    rows = [{"step": i + 1, "reward": rng.random(), "text": text(rng)} for i in range(rng.randint(1, 4))]
    data = damaged(rng, "".join(json.dumps(row) + "\n" for row in rows).encode())
    path.write_bytes(data)
    step = rng.randint(0, 4)
    try:
        recorder.cut("metrics.jsonl", step)
    except ValueError as error:
        one_line(error, path)
        assert path.read_bytes() == data
        return
    left = path.read_bytes()
    assert data.startswith(left)
    assert all(row["step"] <= step for row in recorder.read("metrics.jsonl"))
    recorder.append("metrics.jsonl", [{"step": step + 1}])
    assert recorder.read("metrics.jsonl")[-1] == {"step": step + 1}


@cache
def recorder_of() -> Recorder:
    return Recorder(folder() / "run")


TARGETS: dict[str, Callable[[random.Random], None]] = {
    f.__name__: f for f in (tags, reply, jsonl, pool_yaml, config_yaml, record)
}


def fuzz(target: str, cases: int, seed: int = 0) -> None:
    """Run cases until one fails; the failure says how to make it again."""
    for case in range(cases):
        try:
            TARGETS[target](random.Random(f"{seed}/{case}"))
        except Exception as error:
            raise AssertionError(
                f"{target}, seed {seed}, case {case}: {type(error).__name__}: {error}"
            ) from error


if __name__ == "__main__":
    name, count, *first = sys.argv[1:]
    start = time.monotonic()
    fuzz(name, int(count), int(first[0]) if first else 0)
    print(f"{name}: {count} cases in {time.monotonic() - start:.0f} s, none failed", flush=True)
