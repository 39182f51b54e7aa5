"""Each fault of an endpoint is a value with a rule; pool files are right or refused; keys stay secret."""

import dataclasses
import email.utils
import json
import logging
import random
import re
import sqlite3
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from faultserver import HIDDEN_TOKENS, FaultServer

from minirouter.ledger import Ledger
from minirouter.pool import HELPER_PROMPT, Pool, chat_url, read_pool_file, same_model
from minirouter.trajectory import Candidate

POOLS = Path(__file__).parent.parent / "configs" / "pools"
KEY = "sk-Distinctive/Key+0123456789"


def words(text):
    return len(text.split())


def make_pool(server, *, ledger=None, timeout_s=20.0, **fields):
    """A pool of one candidate, A, alias Ann, at USD 2 per 1M output tokens and .5 per 1M prompt tokens."""
    fields = {"name": "A", "aliases": ("Ann",), "model": "model-a", "price": 2.0, "price_in": 0.5} | fields
    candidate = Candidate(base_url=server.url, **fields)
    return Pool([candidate], words, ledger=ledger, timeout_s=timeout_s, backoff_s=0.01)


# Calls that succeed


def test_a_call_sends_one_message_and_is_priced_by_its_usage():
    """Caught: usage ignored, max_tokens left out, a temperature other than 0, extra fields lost."""
    with FaultServer() as server:
        pool = make_pool(server, max_tokens=77, extra={"seed": 42})
        reply = pool.ask(" aNN ", "Who? When: 10:30?")
    (request,) = server.requests
    prompt = HELPER_PROMPT.replace("{query}", "Who? When: 10:30?")
    assert request["path"] == "/v1/chat/completions"
    assert request["body"] == {
        "model": "model-a",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 77,
        "temperature": 0.0,
        "seed": 42,
    }
    assert "Authorization" not in request["headers"]
    assert (reply.text, reply.status) == ("The answer to Who? When: 10:30?", "ok")
    assert (reply.candidate, reply.price, reply.tokens) == ("A", 2.0, 6)
    assert reply.cost == 6 * 2.0 + words(prompt) * 0.5
    assert not (reply.estimated or reply.cached or reply.refused or reply.faulted)


@pytest.mark.parametrize(
    ("kind", "tokens", "estimated"),
    [("no_usage", 4, True), ("null_usage", 4, True), ("hidden", 4 + HIDDEN_TOKENS, False)],
)
def test_missing_usage_is_counted_and_hidden_reasoning_is_paid(kind, tokens, estimated):
    """Caught: replies without usage as free; reasoning reported only inside the total never billed."""
    with FaultServer([kind]) as server:
        pool = make_pool(server, price_in=0.0)
        reply = pool.ask("A", "q?")
    assert (reply.status, reply.tokens, reply.cost) == ("ok", tokens, 2.0 * tokens)
    assert reply.estimated == estimated
    assert pool.ledger.spent() == {"A": pytest.approx(2e-6 * tokens)}
    assert server.delivered == {"model-a": tokens}


def test_an_unknown_name_is_no_fault_and_asks_nobody():
    """Caught: a substring guess, an exception, a wrong name counted as an outage."""
    with FaultServer() as server:
        for name in ("B", "", "AA", "A nn"):
            reply = make_pool(server).ask(name, "q?")
            assert (reply.status, reply.candidate, reply.cost) == ("unknown", "", 0.0)
            assert not reply.faulted
    assert server.requests == []


def test_a_refusal_in_words_is_a_paid_reply_marked_as_refused():
    """Caught: refusals taken for faults, or only recognised in one spelling."""
    texts = iter(["I do not know.", "  i DO not know, sorry", "They say I do not know."])
    with FaultServer(answer=lambda question: next(texts)) as server:
        replies = [make_pool(server).ask("A", f"{n}") for n in range(3)]
    assert [r.refused for r in replies] == [True, True, False]
    assert all(r.status == "ok" and r.cost > 0 for r in replies)


def test_replies_come_as_they_are_but_for_nuls_and_lone_surrogates():
    """Caught: text that no tokenizer or file takes; replies trimmed or changed where nobody sees it."""
    text = " </info><answer>x</answer> \0 \ud800 <|im_end|> \u202e 😀" + "z" * 1_000_000
    with FaultServer(answer=lambda question: text) as server:
        reply = make_pool(server).ask("A", "is \udfff it?")
    assert reply.status == "ok"
    assert reply.text == text.replace("\0", "\ufffd").replace("\ud800", "\ufffd")
    assert server.requests[0]["body"]["messages"][0]["content"].endswith("is \ufffd it?")


def test_eight_calls_answered_in_reverse_order_come_back_to_their_callers():
    """Caught: replies paired with calls by the order in which they arrive."""
    arrived = threading.Semaphore(0)
    turns = [threading.Event() for _ in range(9)]

    def before(number):
        arrived.release()
        turns[number + 1].wait(20)
        turns[number].set()

    with FaultServer(before=before) as server, ThreadPoolExecutor(8) as threads:
        pool = make_pool(server)
        replies = [threads.submit(pool.ask, "A", f"question {n}") for n in range(8)]
        for _ in range(8):
            assert arrived.acquire(timeout=20)
        turns[8].set()
        assert [r.result().text for r in replies] == [f"The answer to question {n}" for n in range(8)]


# Faults

UNREADABLE = {"html": "bad_json", "truncated": "bad_json", "error_object": "error_object"}
BILLED = {"null": "empty", "no_choices": "empty", "wrong_model": "wrong_model"}
REFUSED = {
    "401": "refused_key",
    "403": "refused_key",
    "400": "http_400",
    "404": "http_404",
    "302": "http_302",
}
RETRIED = {code: f"http_{code}" for code in ("409", "429", "500", "503", "529")}
UNKNOWN_RETRIED = {"408": "http_408", "504": "http_504", "reset": "connection", "cut": "connection"}
HANGS = {"timeout": "timeout", "drip": "timeout", "header_drip": "timeout"}
FAULTS = UNREADABLE | BILLED | REFUSED | RETRIED | UNKNOWN_RETRIED | HANGS | {"huge": "too_large"}


@pytest.mark.parametrize("kind", FAULTS)
def test_each_fault_has_its_status_its_tries_and_its_place_in_the_account(kind):
    """Caught: null content that crashes, retries of what cannot succeed, a refused key tried again, faults as
    free replies, unknown outcomes as unbilled. Worst case by hand: 512 x 2 + bytes of the request x .5."""
    hang = kind in HANGS
    with FaultServer(lambda number: kind) as server:
        pool = make_pool(server, timeout_s=0.6 if hang else 20.0)
        start = time.monotonic()
        reply = pool.ask("A", "q?")
        took = time.monotonic() - start
    tries = 4 if kind in RETRIED | UNKNOWN_RETRIED else 1
    assert (reply.status, reply.faulted, len(server.requests)) == (FAULTS[kind], True, tries)
    assert (reply.tokens, reply.cost, reply.candidate) == (0, 0.0, "A")
    assert reply.text.startswith("No reply") and "secret" not in reply.text and len(reply.text) < 60
    assert (0.6 if hang else 0.0) <= took < 10.0
    account = pool.ledger.account()["A"]
    worst = 1e-6 * (512 * 2.0 + len(json.dumps(server.requests[0]["body"])) * 0.5)
    unknown = kind in UNREADABLE | UNKNOWN_RETRIED | HANGS or kind == "huge"
    assert account["attempts"] == tries
    assert account["held_usd"] == pytest.approx(worst * tries if unknown else 0.0)
    paid = 1e-6 * (4 * 2.0 + server.prompts["model-a"] * 0.5) if kind in BILLED else 0.0
    assert account["usd"] == pytest.approx(paid)


@pytest.mark.parametrize("kind", ["408", "409", "429", "500", "reset", "cut"])
def test_a_passing_fault_is_tried_again_and_only_then(kind):
    """Caught: POST that is never retried; a retry that repeats the fault's result."""
    with FaultServer([kind, kind, "ok"]) as server:
        reply = make_pool(server).ask("A", "q?")
    assert (reply.status, reply.text, len(server.requests)) == ("ok", "The answer to q?", 3)


def test_nobody_listening_is_a_fault_that_costs_nothing():
    """Caught: an outage that eats the cap by reservations for what was never sent."""
    with FaultServer() as server:
        pass
    pool = make_pool(server)
    assert pool.ask("A", "q?").status == "connection"
    assert pool.ledger.committed() == 0.0


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_after_is_waited_for_and_no_longer(form):
    """Caught: 429 retried too early; Retry-After as a date dropped."""
    date = email.utils.formatdate(time.time() + 2, usegmt=True)  # whole seconds: 1 to 2 s from now
    with FaultServer(["429:1" if form == "seconds" else f"429:{date}", "ok"]) as server:
        assert make_pool(server).ask("A", "q?").status == "ok"
    first, second = (request["at"] for request in server.requests)
    assert 0.95 <= second - first < 10.0


@pytest.mark.parametrize("value", ["60", "9" * 400, "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_retry_after_beyond_the_deadline_ends_the_call_at_once(value):
    """Caught: a retry earlier than allowed, or a wait for a retry that can never be in time."""
    with FaultServer([f"429:{value}"]) as server:
        start = time.monotonic()
        assert make_pool(server).ask("A", "q?").status == "http_429"
    assert len(server.requests) == 1 and time.monotonic() - start < 10.0


@pytest.mark.parametrize("value", ["-5", "nan", "soon", "Wed, 99 Foo 99999999999 99:99:99 GMT", "1e9"])
def test_a_senseless_retry_after_is_a_plain_back_off(value):
    """Caught: an exception out of date parsing; a sleep of nan seconds."""
    with FaultServer([f"429:{value}", "ok"]) as server:
        reply = make_pool(server).ask("A", "q?")
    assert (reply.status, len(server.requests)) == ("ok", 2)


def test_one_deadline_covers_all_tries():
    """Caught: a timeout that starts anew with each try. Of tries of .1 s each, .35 s holds three."""
    with FaultServer(lambda number: "429", before=lambda number: time.sleep(0.1)) as server:
        candidate = Candidate("A", 1.0, model="a", base_url=server.url)
        pool = Pool([candidate], words, timeout_s=0.35, tries=30, backoff_s=1e-9)
        assert pool.ask("A", "q?").status in ("http_429", "timeout")
    assert 1 <= len(server.requests) <= 4


def test_a_hang_leaves_no_thread_behind_for_long():
    """Caught: an outage that ends in thousands of threads, each reading a byte a second."""
    before = threading.active_count()
    with FaultServer(lambda number: "drip") as server:
        pool = make_pool(server, timeout_s=0.1)
        assert [pool.ask("A", f"q{n}").status for n in range(3)] == ["timeout"] * 3
        deadline = time.monotonic() + 10
        while (
            threading.active_count() > before + 1 and time.monotonic() < deadline
        ):  # one is the server's own
            time.sleep(0.02)
        assert threading.active_count() <= before + 1


BODIES = [
    b"",
    b"null",
    b"[]",
    b"7",
    b'"text"',
    b"{}",
    b'{"choices": {}}',
    b'{"choices": [null]}',
    b"\xff\xfe",
]
BODIES += [b'{"choices": [{"message": "x"}]}', b'{"choices": [{"message": {"content": 7}}]}', b"[" * 100_000]
BODIES += [b'{"choices": [{"text": "old"}]}', b'{"usage": {"total_tokens": ' + b"9" * 5000 + b"}}"]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_any_other_body_is_a_fault_too(body):
    """Caught: an exception out of the reading of a response (deep nesting, giant numbers, wrong types)."""
    server = FaultServer()
    handler = server._server.RequestHandlerClass
    server._server.RequestHandlerClass = type(
        "Other", (handler,), {"_reply": lambda self, *_: self._send(body)}
    )
    with server:
        assert make_pool(server).ask("A", "q?").status in ("bad_json", "empty")


def test_faults_leave_the_random_numbers_of_the_run_alone():
    """Caught: jitter from the global generator, which makes a run depend on the weather of its endpoints."""
    random.seed(1)
    before = random.getstate()
    with FaultServer(["500", "500"]) as server:
        make_pool(server).ask("A", "q?")
    assert random.getstate() == before


@pytest.mark.parametrize(
    ("answered", "same"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", True),
        ("accounts/x/models/llama-3.1-8b-instruct", True),
        ("llama-3.1-8b-instruct-2024-08-06", True),
        ("Llama-3.1-8B-Instruct-FP8", True),
        ("/models/llama-3.1-8b-instruct-q4_k_m.gguf", True),
        ("llama-3.1-8b-instruct:free", True),
        ("Our Llama", True),
        ("", True),
        (None, True),
        (["llama"], True),
        ("llama-3.1-70b-instruct", False),
        ("llama-3.2-8b-instruct", False),
        ("llama-3.1-8b-instruct-mini", False),
        ("llama-3.1-8b", False),
        ("qwen2.5-7b-instruct", False),
        ("gpt-4o", False),
    ],
)
def test_another_model_is_told_from_another_spelling(answered, same):
    """Caught: a silent fall-back of the provider to another model, and a fault made of a date or a prefix."""
    candidate = Candidate("Our-Llama", 1.0, model="meta/llama-3.1-8b-instruct")
    assert same_model(answered, candidate) == same


# Cache and spend


def test_a_cached_reply_bills_nothing_and_costs_the_same(tmp_path):
    """Caught: a reward that depends on the state of the cache; a second bill for an equal call."""
    with FaultServer(["hidden"]) as server:
        first = make_pool(server, ledger=Ledger(tmp_path / "l.sqlite")).ask("A", "q?")
        pool = make_pool(server, ledger=Ledger(tmp_path / "l.sqlite"))
        again = pool.ask("ann", "q?")
        assert len(server.requests) == 1
        assert pool.ledger.account()["A"]["attempts"] == 1
        assert again == dataclasses.replace(first, cached=True)
        for change in ({"max_tokens": 9}, {"model": "Ann"}, {"extra": {"seed": 1}}):
            assert not make_pool(server, ledger=pool.ledger, **change).ask("A", "q?").cached
        assert not pool.ask("A", "q").cached
        extra = {"seed": 2, "top_p": 1.0}
        make_pool(server, ledger=pool.ledger, extra=extra).ask("A", "q?")
        assert (
            make_pool(server, ledger=pool.ledger, extra=dict(reversed(extra.items()))).ask("A", "q?").cached
        )
    assert len(server.requests) == 6


def test_faults_and_samples_are_not_cached():
    """Caught: a fault served for ever; one sample of a hot candidate for all."""
    with FaultServer(["null", "wrong_model", "html", "401"]) as server:
        pool = make_pool(server)
        assert [pool.ask("A", "q?").faulted for _ in range(6)] == [True] * 4 + [False, False]
        hot = make_pool(server, temperature=0.7)
        assert [hot.ask("A", "q?").cached for _ in range(2)] == [False, False]
    assert len(server.requests) == 7


def test_equal_calls_in_flight_are_one_request():
    """Caught: sixteen samples of one prompt that pay sixteen times for one answer."""
    with FaultServer(before=lambda number: time.sleep(0.1)) as server, ThreadPoolExecutor(8) as threads:
        pool = make_pool(server)
        replies = list(threads.map(lambda _: pool.ask("A", "q?"), range(8)))
    assert len(server.requests) == 1
    assert sorted(r.cached for r in replies) == [False] + [True] * 7
    assert len({r.cost for r in replies}) == 1


def test_the_cap_refuses_calls_before_they_are_sent():
    """Caught: a cap looked at after the money is gone. 512 tokens at 2 USD a million reserved, 4 paid."""
    worst, paid = 512 * 2e-6, 4 * 2e-6
    with FaultServer() as server, ThreadPoolExecutor(8) as threads:
        ledger = Ledger(None, max_usd=worst + 20 * paid)
        pool = make_pool(server, ledger=ledger, price_in=0.0)
        replies = list(threads.map(lambda n: pool.ask("A", f"q{n}"), range(40)))
        statuses = Counter(r.status for r in replies)
        assert set(statuses) == {"ok", "budget"} and ledger.exhausted
        assert server.delivered["model-a"] == 4 * statuses["ok"] == 4 * len(server.requests)
        assert ledger.committed() <= ledger.max_usd
        one_by_one = [pool.ask("A", f"r{n}").status for n in range(25)]
        assert one_by_one == sorted(one_by_one, reverse=True) and one_by_one[-1] == "budget"
        assert statuses["ok"] + one_by_one.count("ok") == 21
        assert pool.ask("A", "r0").cached or one_by_one[0] == "budget", "cached replies stay free"


def test_the_account_equals_what_the_server_delivered_when_one_call_in_four_fails(tmp_path):
    """Caught: retries billed twice, faults unbilled, attempts lost between threads."""
    kinds = ["500", "null", "429", "wrong_model", "reset", "hidden", "truncated", "no_usage", "html", "401"]
    with FaultServer(lambda n: kinds[n // 4 % 10] if n % 4 == 0 else "ok") as server:
        pool = make_pool(server, ledger=Ledger(tmp_path / "l.sqlite"))
        with ThreadPoolExecutor(8) as threads:
            replies = list(threads.map(lambda n: pool.ask("A", f"q {n}"), range(100)))
    account = Ledger(tmp_path / "l.sqlite").account()["A"]
    assert account["attempts"] == len(server.requests)
    assert account["tokens"] == server.delivered["model-a"]
    usd = 1e-6 * (2.0 * server.delivered["model-a"] + 0.5 * server.prompts["model-a"])
    assert account["usd"] == pytest.approx(usd, rel=1e-9)
    ok = [r for r in replies if r.status == "ok"]
    assert all(r.text == f"The answer to q {n}" for n, r in enumerate(replies) if r.status == "ok")
    assert len(ok) > 80 and account["usd"] > 1e-6 * sum(r.cost for r in ok)


def test_a_broken_account_is_a_fault_and_nothing_is_sent(tmp_path):
    """Caught: spending without an account when the disk is full or the file is gone bad."""
    with FaultServer() as server:
        pool = make_pool(server, ledger=Ledger(tmp_path / "l.sqlite"))
        pool.ledger._db.execute("PRAGMA query_only = 1")
        reply = pool.ask("A", "q?")
    assert (reply.status, reply.faulted, server.requests) == ("ledger", True, [])


# Keys


def test_the_key_is_sent_and_found_nowhere_else(tmp_path, monkeypatch, caplog, capfd):
    """Caught: keys in logs, caches, error texts and replies; a password of ~/.netrc in place of the key."""
    monkeypatch.setenv("SOME_API_KEY", f" {KEY}\n")
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login wrong password wrong")
    monkeypatch.setenv("NETRC", str(netrc))
    ledger = Ledger(tmp_path / "l.sqlite")
    said, sent = [], 0
    with caplog.at_level(logging.DEBUG):
        for kind in ["ok", "hidden", "429:0", *FAULTS]:
            with FaultServer(lambda number, kind=kind: kind) as server:
                options = {"ledger": ledger, "timeout_s": 0.2 if kind in HANGS else 20.0}
                pool = make_pool(server, api_key_env="SOME_API_KEY", **options)
                said.append(repr((pool.ask("A", kind), pool.candidates, vars(pool))))
            assert all(r["headers"]["Authorization"] == f"Bearer {KEY}" for r in server.requests)
            assert not any(KEY in json.dumps(r["body"]) for r in server.requests)
            sent += len(server.requests)
        monkeypatch.setenv("SOME_API_KEY", "bad\u20acTokén" + KEY)
        with FaultServer() as server:
            said.append(repr(make_pool(server, api_key_env="SOME_API_KEY").ask("A", "q?")))
        path = tmp_path / "pool.yaml"
        entry = f"- {{name: A, model: a, price: 1, base_url: 'http://x', api_key_env: {KEY}}}"
        for text in (entry, entry.replace(KEY, "SOME_API_KEY"), entry.replace("api_key_env", "api_key")):
            path.write_text(text)
            with pytest.raises(ValueError) as caught:
                read_pool_file(path)
            said.append(str(caught.value))
    out, err = capfd.readouterr()
    ledger.close()
    files = b"".join(p.read_bytes() for p in tmp_path.iterdir() if p.name.startswith("l.sqlite"))
    everything = "".join([*said, caplog.text, out, err]) + files.decode("latin-1")
    assert len(everything) > 10_000 and sent > 20
    assert KEY not in everything and "0123456789" not in everything


def test_a_keyless_candidate_sends_no_password(tmp_path, monkeypatch):
    """Caught: requests that takes a password for the host out of ~/.netrc by itself."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password private")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with FaultServer() as server:
        make_pool(server).ask("A", "q?")
    assert "Authorization" not in server.requests[0]["headers"]


# Pool files

GOOD = {"name": "A", "model": "a", "base_url": "http://localhost:1", "price": 1.0}


def write(tmp_path, *entries):
    path = tmp_path / "pool.yaml"
    path.write_text(yaml.safe_dump(list(entries)))
    return path


def test_a_pool_file_sets_every_field(tmp_path):
    """Caught: a field that is read by nobody, a default that hides what was written."""
    entry = GOOD | {
        "price_in": 0.25,
        "latency_s": 1.5,
        "example": "Q: x A: y",
        "descriptor": "Knows\nmuch.",
        "aliases": ["a-1", " A one "],
        "temperature": 0.5,
        "max_tokens": 64,
        "extra": {"seed": 42, "chat_template_kwargs": {"enable_thinking": False}},
    }
    (candidate,) = read_pool_file(write(tmp_path, entry))
    assert candidate == Candidate(**(entry | {"aliases": ("a-1", "A one")}))
    assert {f.name for f in dataclasses.fields(Candidate)} == {*entry, "api_key_env"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"price": None}, "no price"),
        ({"price": -1}, "wrong price"),
        ({"price": float("nan")}, "wrong price"),
        ({"price": float("inf")}, "wrong price"),
        ({"price": True}, "wrong price"),
        ({"price": "1.0"}, "wrong price"),
        ({"price_in": -0.1}, "wrong price_in"),
        ({"latency_s": "fast"}, "wrong latency_s"),
        ({"temperature": -1}, "wrong temperature"),
        ({"max_tokens": 0}, "wrong max_tokens"),
        ({"max_tokens": 5.5}, "wrong max_tokens"),
        ({"name": "A:B"}, "wrong name"),
        ({"name": "A\nB"}, "wrong name"),
        ({"name": "<think>"}, "wrong name"),
        ({"name": "  "}, "wrong name"),
        ({"name": 7}, "wrong name"),
        ({"name": None}, "no name"),
        ({"aliases": ["x:y"]}, "wrong aliases"),
        ({"aliases": "x"}, "wrong aliases"),
        ({"aliases": ["a"]}, "'a'"),
        ({"model": ""}, "wrong model"),
        ({"model": None}, "no model"),
        ({"base_url": None}, "no base_url"),
        ({"base_url": "localhost:1"}, "wrong base_url"),
        ({"base_url": "https://user:pass@host/v1"}, "credentials"),
        ({"base_url": "https://host/v1?key=abc"}, "wrong base_url"),
        ({"extra": {"max_tokens": 9}}, "wrong extra"),
        ({"extra": {"stream": True}}, "wrong extra"),
        ({"extra": [1]}, "wrong extra"),
        ({"pricee": 1}, "unknown field 'pricee', did you mean 'price'"),
        ({"descripton": "x"}, "did you mean 'descriptor'"),
        ({"api_key": "x"}, "did you mean 'api_key_env'"),
        ({"api_key_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE"),
        ({"api_key_env": "nvapi-secret"}, "NAME of an environment variable"),
    ],
)
def test_a_mistake_in_an_entry_is_one_line_with_file_entry_and_reason(tmp_path, change, said):
    """Caught: a model without a price that costs 0, a name no call can spell, typing errors passed over."""
    entry = {key: value for key, value in (GOOD | {"name": "B"} | change).items() if value is not None}
    if change.get("aliases") == ["a"]:
        said = "pool.yaml: two names or aliases read 'a'"
    path = write(tmp_path, GOOD, entry)
    with pytest.raises(ValueError) as caught:
        Pool.from_file(path, words)
    message = str(caught.value)
    assert said in message and str(path) in message and "\n" not in message
    assert "entry 2" in message or "two names" in message
    assert "secret" not in message and "pass@" not in message


def test_names_and_aliases_equal_after_case_folding_are_refused(tmp_path):
    """Caught: two candidates under one spelling, of which one can never be called."""
    for second in ({"name": " a "}, {"name": "B", "aliases": ["A"]}, {"name": "B", "aliases": ["b"]}):
        with pytest.raises(ValueError, match="two names or aliases"):
            read_pool_file(write(tmp_path, GOOD, GOOD | second))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "a list of candidates"),
        (b"[]", "a list of candidates"),
        (b"name: A", "a list of candidates"),
        (b"- just text", "a list of candidates"),
        (b"- name: A\n  model: [unclosed\n", "line 3"),
        (b"- name: A\n\t- x", "line 2"),
        (b"- !!python/object/apply:os.system [ls]", "line 1"),
        (b"- !!timestamp x", "plain YAML"),
        (b"- !!bool x", "plain YAML"),
        (b"- {name: A, extra: {since: 2024-01-01}}", "plain YAML"),
        (b"- &a {name: A, extra: *a}", "plain YAML"),
        (b"- name: \xff\xfe\x00", "plain YAML"),
        (b"[" * 1000, "plain YAML"),
    ],
)
def test_a_file_that_is_no_pool_is_one_line(tmp_path, text, said):
    """Caught: tracebacks of the YAML reader; objects made by a pool file."""
    path = tmp_path / "pool.yaml"
    path.write_bytes(text)
    with pytest.raises(ValueError) as caught:
        read_pool_file(path)
    assert said in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path):
    """Caught: a traceback instead of the name that was mistyped."""
    for path in (tmp_path / "absent.yaml", tmp_path):
        with pytest.raises(ValueError, match=re.escape(str(path))):
            Pool.from_file(path, words)


@pytest.mark.parametrize(
    ("base_url", "url"),
    [
        ("http://h:1", "http://h:1/v1/chat/completions"),
        ("http://h:1/", "http://h:1/v1/chat/completions"),
        ("http://h:1/v1", "http://h:1/v1/chat/completions"),
        ("http://h:1/v1/", "http://h:1/v1/chat/completions"),
        ("https://h/api/v1//", "https://h/api/v1/chat/completions"),
        ("https://h/v1/chat/completions", "https://h/v1/chat/completions"),
        ("https://h/v1beta/openai/", "https://h/v1beta/openai/chat/completions"),
        ("https://h/api/paas/v4", "https://h/api/paas/v4/chat/completions"),
        ("https://v1.example.org/vault", "https://v1.example.org/vault/v1/chat/completions"),
    ],
)
def test_the_version_in_an_address_is_neither_doubled_nor_lost(base_url, url):
    """Caught: /v1/v1, or no version at all (AP faults)."""
    assert chat_url(base_url) == url


def test_a_subset_has_its_own_order_and_the_same_ledger_and_endpoints():
    """Caught: an episode's pool that opens a second account, or changes the pool it was taken from."""
    with FaultServer() as server:
        one = {"base_url": server.url, "price": 1.0}
        candidates = [Candidate(n, aliases=(n * 2,), model=n, **one) for n in ("a", "b", "c")]
        pool = Pool(candidates, words)
        part = pool.subset(["C", "aa"])
        assert [c.name for c in part.candidates] == ["c", "a"] and part.names == ("c", "cc", "a", "aa")
        assert pool.names == ("a", "aa", "b", "bb", "c", "cc") and not part.instant
        assert part.ask("b", "q?").status == "unknown"
        assert part.ask("CC", "q?").status == "ok" and pool.ask("c", "q?").cached
        assert part.ledger is pool.ledger
        with pytest.raises(KeyError):
            pool.subset(["d"])


# The shipped pools

SIX = {
    "Qwen2.5-7B-Instruct": 0.30,
    "LLaMA-3.1-8B-Instruct": 0.18,
    "LLaMA-3.1-70B-Instruct": 0.88,
    "Mistral-7B-Instruct": 0.20,
    "Mixtral-8x22B-Instruct": 1.20,
    "Gemma-2-27B-Instruct": 0.80,
}
UNSEEN = {"Palmyra-Creative-122B": 1.80, "LLaMA3-ChatQA-1.5-8B": 0.18}


@pytest.mark.parametrize(
    ("file", "prices"), [("paper", SIX), ("paper-unseen", SIX | UNSEEN), ("local", None)]
)
def test_shipped_pools_have_the_reference_prices_and_short_descriptors(file, prices, monkeypatch):
    """Caught: a price that drifts from the paper's, a copied essay for a descriptor, a key for localhost."""
    monkeypatch.setenv("NVIDIA_API_KEY", "x")
    if file == "local":
        monkeypatch.delenv("NVIDIA_API_KEY")
    pool = Pool.from_file(POOLS / f"{file}.yaml", words)
    if prices:
        assert {c.name: c.price for c in pool.candidates} == prices
        assert list(prices) == [c.name for c in pool.candidates]
    for candidate in pool.candidates:
        assert 2 <= len(re.findall(r"[.!](\s|$)", candidate.descriptor)) <= 4, candidate.name
        assert candidate.temperature == 0 and candidate.max_tokens == 512
        assert not re.search(r"[<>{}$]", candidate.descriptor)


def test_the_six_of_both_paper_pools_are_the_same(monkeypatch):
    """Caught: an edit to one of the two files."""
    monkeypatch.setenv("NVIDIA_API_KEY", "x")
    six, eight = (read_pool_file(POOLS / f"{file}.yaml") for file in ("paper", "paper-unseen"))
    assert eight[:6] == six


def test_the_cache_file_is_readable_without_this_program(tmp_path):
    """Caught: replies that nobody can look at, and pickles."""
    with FaultServer() as server:
        make_pool(server, ledger=Ledger(tmp_path / "l.sqlite")).ask("A", "q?")
    with sqlite3.connect(tmp_path / "l.sqlite") as raw:
        ((key, value),) = raw.execute("SELECT key, value FROM replies").fetchall()
    assert re.fullmatch("[0-9a-f]{64}", key)
    assert json.loads(value)["text"] == "The answer to q?"
