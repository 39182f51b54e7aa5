"""The candidate LLMs: the pool file, one HTTP call with one deadline, and what each fault means.

The cost of a call in the reward (Eq. 4) is the same when the reply comes from the cache. Departures from the
reference implementation: faults are values (`Reply.status`), not `None` at cost 0; names are listed
spellings, not substrings; one deadline a call, not 500 tries; temperature 0 for all.

A reply under HTTP 200 is billed by its usage, an HTTP error not at all; an attempt that ended in a
timeout, a dropped connection or something unreadable stays reserved at its worst case (ledger.py). Only 408,
409, 429, 5xx and dropped connections are tried again; the endpoint may bill one dropped after sending twice.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
import os
import queue
import random
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from email.utils import mktime_tz, parsedate_tz
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3
import yaml

from minirouter.ledger import Ledger, LedgerError, price_call, read_usage, worst_case
from minirouter.tags import fold
from minirouter.trajectory import Candidate, Reply

HELPER_PROMPT = """Somebody working out a longer question needs help with one part of it. If you know the
answer, state it briefly. If not, give background that bears on it. If you have neither, reply with exactly
this sentence: I do not know. Stay on the topic and keep your reply under 512 tokens.\n\nQuestion: {query}"""
ODD = (ValueError, TypeError, LookupError, OverflowError, RecursionError)  # what odd input does to parsers
MAX_BYTES = 8 << 20  # of a response body
FORMS = {  # text fields that have a form of their own
    "name": (r"[^:<>\n]+", "text without a colon, a line break, < or >"),
    "base_url": (r"https?://[^\s@?#]+", "an http(s) address without credentials or query"),
    "api_key_env": (r"[A-Z][A-Z0-9_]*", "the NAME of an environment variable, in capitals"),
}
REQUIRED = ("name", "model", "base_url", "price")  # a simulated pool needs no endpoint
OURS = ("model", "messages", "temperature", "max_tokens", "max_completion_tokens", "stream", "n")
WORD = re.compile(r"\d{4}-\d\d-\d\d|q\d\w*|[a-z0-9]+(?:\.\d+)*")  # of a model's name; a date is one word
ADDED = re.compile(r"\d{4}[-\d]*|v\d[.\d]*|latest|free|meta|hf|gguf|awq|gptq|b?fp?(8|16)|int[48]|q\d\w*")


class Pool:
    """Candidates behind HTTP endpoints, in the order shown. Thread-safe. `timeout_s` is for a whole call."""

    instant = False  # a call takes time: the rollout asks from a thread

    def __init__(
        self,
        candidates: Iterable[Candidate],
        count_tokens: Callable[[str], int],
        *,
        ledger: Ledger | None = None,
        timeout_s: float = 60.0,
        tries: int = 4,
        backoff_s: float = 0.5,
    ) -> None:
        self.ledger = Ledger(None) if ledger is None else ledger
        self._count = count_tokens
        self._timeout_s, self._tries, self._backoff_s = timeout_s, tries, backoff_s
        self._jitter = random.Random()  # its own: the run's random numbers must not depend on faults
        self._session = requests.Session()
        self._session.headers["Accept-Encoding"] = "identity"
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, requests.adapters.HTTPAdapter(pool_maxsize=64))
        self._seat(candidates)

    @classmethod
    def from_file(cls, path: str | Path, count_tokens: Callable[[str], int], **options: Any) -> Pool:
        """The pool of a YAML file. Raises ValueError, one line naming file and entry, if it is wrong."""
        return cls(read_pool_file(path), count_tokens, **options)

    def subset(self, names: Iterable[str]) -> Pool:
        """The same endpoints and ledger, with these candidates in this order. KeyError if one is unknown."""
        other = copy.copy(self)
        other._seat(self._by_spelling[fold(name)] for name in names)
        return other

    def _seat(self, candidates: Iterable[Candidate]) -> None:
        self.candidates = tuple(candidates)
        self.names = tuple(name for c in self.candidates for name in (c.name, *c.aliases))
        self._by_spelling = {fold(name): c for c in self.candidates for name in (c.name, *c.aliases)}

    def ask(self, name: str, query: str) -> Reply:
        """One call. Never raises for an unknown name or a fault: `Reply.status` says what happened."""
        candidate = self._by_spelling.get(fold(name))
        if candidate is None:
            return Reply("There is no LLM of that name.", "unknown")
        deadline = time.monotonic() + self._timeout_s
        message = {"role": "user", "content": HELPER_PROMPT.replace("{query}", _clean(query))}
        body = {"model": candidate.model, "messages": [message], "max_tokens": candidate.max_tokens}
        body |= {"temperature": candidate.temperature, **candidate.extra}
        request = json.dumps([chat_url(candidate.base_url), body], sort_keys=True)  # determines the reply
        key = hashlib.sha256(request.encode()).hexdigest()
        try:
            if candidate.temperature > 0:  # a new sample each time
                return self._call(candidate, body, deadline)
            with self.ledger.alone(key, self._timeout_s):
                hit = self.ledger.get(key)
                if hit:
                    return self._reply(candidate, body, hit["text"], hit["usage"], cached=True)
                return self._call(candidate, body, deadline, key)
        except LedgerError:  # said in the log by the ledger
            return _fault(candidate, "ledger")

    def _call(self, candidate: Candidate, body: dict, deadline: float, key: str | None = None) -> Reply:
        """Attempts until one succeeds, none is left, or the next could not start before the deadline."""
        status, wait = "timeout", 0.0
        for attempt in range(self._tries):
            if time.monotonic() + wait >= deadline:
                break
            time.sleep(wait)
            number = self.ledger.reserve(candidate.name, worst_case(candidate, body))
            if number is None:
                return _fault(candidate, "budget")
            outcome = self._attempt(candidate, body, deadline)
            status = outcome.status
            reply = self._reply(candidate, body, outcome.text, outcome.usage)
            if outcome.billed is not None:
                self.ledger.settle(number, reply.cost * 1e-6 * outcome.billed, reply.tokens * outcome.billed)
            if status == "ok":
                if key:
                    self.ledger.put(key, {"text": outcome.text, "usage": outcome.usage})
                return reply
            if outcome.again_s is None:
                break
            wait = max(outcome.again_s, self._backoff_s * 2**attempt * self._jitter.uniform(0.5, 1.0))
        return _fault(candidate, status)

    def _attempt(self, candidate: Candidate, body: dict, deadline: float) -> _Outcome:
        """Send once, in a thread that is left behind at the deadline, whatever it hangs in: looking up a
        name, headers that drip in byte by byte. (The timeout of a socket starts anew with each byte.)"""
        box: queue.SimpleQueue[_Outcome] = queue.SimpleQueue()
        threading.Thread(target=lambda: box.put(self._send(candidate, body, deadline)), daemon=True).start()
        try:
            return box.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return _Outcome("timeout")

    def _send(self, candidate: Candidate, body: dict, deadline: float) -> _Outcome:
        """The key is read here, from the environment (as proxies are), and goes nowhere else."""
        options = {"stream": True, "allow_redirects": False, "timeout": deadline - time.monotonic() + 1.0}
        options |= {"headers": {}, "auth": lambda request: request}  # no auth: ~/.netrc would replace the key
        if candidate.api_key_env:
            key = os.environ.get(candidate.api_key_env, "").strip()
            options["headers"]["Authorization"] = f"Bearer {key}"
        try:
            with self._session.post(chat_url(candidate.base_url), json=body, **options) as response:
                if response.status_code > 299:
                    return _refusal(response.status_code, response.headers.get("Retry-After", ""))
                data, late = bytearray(), False
                read = partial(response.raw.read1, 1 << 16, decode_content=True)
                while len(data) <= MAX_BYTES and not late and (chunk := read()):
                    data += chunk
                    late = time.monotonic() > deadline
            cut = "too_large" if len(data) > MAX_BYTES else "timeout" if late else ""
            return _Outcome(cut) if cut else _read(candidate, data)
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, *ODD) as error:
            # Of the error itself nothing goes further: it may quote headers.
            reason = getattr(error.args[0] if error.args else None, "reason", None)
            unsent = isinstance(reason, urllib3.exceptions.NewConnectionError)
            return _Outcome("connection", billed=False if unsent else None, again_s=0.0)

    def _reply(self, candidate: Candidate, body: dict, text: str, usage: dict, cached: bool = False) -> Reply:
        tokens, cost, estimated = price_call(candidate, body, text, usage, self._count)
        refused = text.strip().casefold().startswith("i do not know")
        return Reply(text, "ok", candidate.name, candidate.price, tokens, cost, estimated, cached, refused)


@dataclass(frozen=True)
class _Outcome:
    """How an attempt ended. `billed`: True by usage or count, False certainly not, None unknown."""

    status: str
    text: str = ""
    usage: dict[str, int] = field(default_factory=dict)
    billed: bool | None = None
    again_s: float | None = None  # seconds to wait before another attempt; None: another is of no use


def _fault(candidate: Candidate, status: str) -> Reply:
    """A fault of `candidate`. The text is for the router: a fixed reason, never a word of the endpoint's."""
    return Reply(f"No reply: {status.replace('_', ' ')}.", status, candidate.name, candidate.price)


def _clean(text: str) -> str:
    """NULs and lone surrogates, which tokenizers and encoders choke on, become U+FFFD."""
    return re.sub("[\0\ud800-\udfff]", "\ufffd", text)


def _refusal(code: int, retry_after: str) -> _Outcome:
    """What an HTTP status that is no success means. Retry-After is a number of seconds or an HTTP date."""
    date = parsedate_tz(retry_after) or (1970, 1, 1, 0, 0, 0, 0, 0, 0, 0)
    wait = float(retry_after) if retry_after.isdecimal() else mktime_tz(date) - time.time()
    again = code in (408, 409, 429) or code >= 500
    status = "refused_key" if code in (401, 403) else f"http_{code}"
    billed = None if code in (408, 504) else False  # a timeout on the way: it may have been generated
    return _Outcome(status, billed=billed, again_s=wait if again else None)


def _read(candidate: Candidate, data: bytearray) -> _Outcome:
    """What a body under status 200 says. Usage that can be read is billed, whatever else it says."""
    try:
        answer = json.loads(data)
        usage = read_usage(answer.get("usage"))
        choices = [] if answer.get("error") else answer["choices"]
        text = (choices[0]["message"].get("content") if choices else "") or ""
        text = _clean(text)
    except (AttributeError, *ODD):
        return _Outcome("bad_json")
    status = "ok" if same_model(answer.get("model"), candidate) else "wrong_model"
    if not text.strip():
        status = "error_object" if answer.get("error") else "empty"
    return _Outcome(status, text, usage, billed=True if usage or status == "ok" else None)


def same_model(answered: Any, candidate: Candidate) -> bool:
    """Whether the name in a response may stand for the candidate: its model, name or an alias, up to a prefix
    of the provider and an added date, version or packaging. Another word ("mini", "70b") is another model."""
    if not isinstance(answered, str) or not answered.strip():
        return True
    names = (answered, candidate.model, candidate.name, *candidate.aliases)
    got, *asked = (set(WORD.findall(name.casefold().rpartition("/")[2])) for name in names)
    return any(a - got <= {"latest", "free", "meta"} and all(map(ADDED.fullmatch, got - a)) for a in asked)


def chat_url(base_url: str) -> str:
    """The address of chat completions under `base_url`, which may or may not have a version (/v1) already."""
    base = base_url.strip().rstrip("/").removesuffix("/chat/completions")
    versioned = re.search(r"/v\d+[a-z]*\d*(/|$)", urlsplit(base).path)
    return f"{base}{'' if versioned else '/v1'}/chat/completions"


def read_pool_file(path: str | Path, required: tuple[str, ...] = REQUIRED) -> list[Candidate]:
    """The candidates of a YAML list of mappings. Raises ValueError, one line naming file and entry."""
    try:
        entries = yaml.safe_load(Path(path).read_bytes())
        json.dumps(entries, sort_keys=True)  # neither dates nor loops: what a request can say
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except Exception as error:  # PyYAML answers odd tags with nearly any exception
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else path
        problem = getattr(error, "problem", None) or type(error).__name__
        raise ValueError(f"{where}: not plain YAML ({problem})") from None
    if not isinstance(entries, list) or not entries or not all(isinstance(e, dict) for e in entries):
        raise ValueError(f"{path}: a pool file is a list of candidates, each a mapping of fields")
    candidates = [_candidate(entry, f"{path}: entry {n}", required) for n, entry in enumerate(entries, 1)]
    folded = [fold(name) for c in candidates for name in (c.name, *c.aliases)]
    for name in folded:
        if folded.count(name) > 1:
            raise ValueError(f"{path}: two names or aliases read {name!r}, upper or lower case")
    return candidates


def _candidate(entry: dict, where: str, required: tuple[str, ...]) -> Candidate:
    entry = {key: value for key, value in entry.items() if value is not None}
    where += f" ({entry['name']})" if not _problem("name", entry.get("name")) else ""
    known = [f.name for f in fields(Candidate)]
    for key in (*entry, *required):
        if key not in known:
            nearest = difflib.get_close_matches(str(key), known, 1, cutoff=0.0)[0]
            raise ValueError(f"{where}: unknown field {str(key)[:40]!r}, did you mean {nearest!r}?")
        if problem := _problem(key, entry.get(key)):
            raise ValueError(f"{where}: {'wrong' if key in entry else 'no'} {key}, it must be {problem}")
    env = entry.get("api_key_env")
    if env and not re.fullmatch(r"[!-~]+", os.environ.get(env, "").strip()):
        raise ValueError(f"{where}: the environment variable {env} is not set to a key")
    aliases = tuple(alias.strip() for alias in entry.get("aliases", ()))
    return Candidate(**{**entry, "name": entry["name"].strip(), "aliases": aliases})


def _problem(key: str, value: Any) -> str:
    """What the value of a field must be and is not; "" if it is right."""
    form, must = FORMS.get(key, (r"(?s).+", "text"))
    right = isinstance(value, str) and re.fullmatch(form, value.strip())
    if key in ("price", "price_in", "latency_s", "temperature"):
        right, must = type(value) in (int, float) and 0 <= value <= 1e6, "a number, 0 or more"
    elif key == "max_tokens":
        right, must = type(value) is int and 0 < value <= 1e6, "a whole number above 0"
    elif key == "aliases":
        right = isinstance(value, list) and not any(_problem("name", alias) for alias in value)
        must = "a list of names"
    elif key == "extra":
        right = isinstance(value, dict) and not set(OURS) & set(value)
        must = f"a mapping, without {', '.join(OURS)}"
    return "" if right else must
