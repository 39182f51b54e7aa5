"""Whole training runs against a server that fails: they finish or stop in order, and the account is true."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sqlite3
import time
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from scripted import random_ids, random_router, spoken
from wholeruns import (
    WorldServer,
    full_disk,
    lines,
    manifest,
    out_of_memory,
    question_file,
    rows,
    said,
    spoil,
    start,
    train,
    untimed,
    wait_for,
)

from minirouter import update as update_module
from minirouter import view
from minirouter.checkpoint import newest
from minirouter.estimates import advantages_of, estimate
from minirouter.ledger import Ledger
from minirouter.record import Recorder
from minirouter.report import Result, table
from minirouter.trajectory import Call, Question, Reply, Reward, Trajectory
from minirouter.update import Rules

DEADLINE = 5.0  # seconds of a call: hangs last that long, and a good reply on a busy machine must not
KINDS = ("timeout", "reset", "429:1", "500", "html", "truncated", "null", "drip", "wrong_model")
UNKNOWN = {"timeout", "reset", "html", "truncated", "drip"}  # may have been billed: held at the worst case
BILLED = {"ok", "null", "wrong_model"}
ASKED = ("--batch", "16", "--minibatch", "16", "--questions", "0", "--max_calls", "3", "--save_every", "1")


def one_in_ten(n: int) -> str:
    """Every tenth request fails, each kind in turn."""
    return KINDS[n // 10 % len(KINDS)] if n % 10 == 9 else "ok"


def options(server: WorldServer, tmp_path: Path, timeout_s: float = DEADLINE, **fields) -> list[str]:
    pool, data = (
        server.pool_file(tmp_path / "pool.yaml", **fields),
        question_file(tmp_path / "questions.jsonl"),
    )
    return ["--pool", str(pool), "--data", str(data), "--timeout_s", str(timeout_s), *ASKED]


def account(folder: Path) -> dict[str, dict[str, float]]:
    ledger = Ledger(folder / "ledger.sqlite")
    found = ledger.account()
    ledger.close()
    return found


def faulted(folder: Path) -> list[dict]:
    return [row for row in rows(folder, "trajectories") if row["faulted"]]


def nothing_faulted_was_trained_on(folder: Path) -> None:
    for row in rows(folder, "trajectories"):
        bad = [
            call["status"] for call in row["calls"] if call["status"] not in ("ok", "malformed", "unknown")
        ]
        assert row["faulted"] == bool(bad)
        assert (row["actions"] is None) == row["faulted"]


def the_account_is_the_servers(folder: Path, server: WorldServer) -> None:
    """Tokens and money paid are those that the server delivered, to the last one."""
    found = account(folder)
    assert {f"model-{name}": row["tokens"] for name, row in found.items() if row["tokens"]} == dict(
        server.delivered
    )
    price = {c.name: c.price for c in server.simulated.candidates}
    for name, row in found.items():
        assert row["usd"] == pytest.approx(server.delivered[f"model-{name}"] * price[name] * 1e-6, abs=1e-12)
    held = sum(1 for n in attempts(folder, "held > 0"))
    assert held == sum(r["behaviour"] in UNKNOWN for r in server.requests)


def attempts(folder: Path, where: str) -> list[tuple]:
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        return db.execute(f"SELECT candidate, held, paid, tokens FROM attempts WHERE {where}").fetchall()


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """Eight steps in which one request in ten fails: (folder, server, output)."""
    tmp_path = tmp_path_factory.mktemp("faulty")
    with WorldServer(one_in_ten) as server:
        code, text = train(tmp_path / "run", *options(server, tmp_path), "--steps", "8")
        assert code == 0, text
        yield tmp_path / "run", server, text


@pytest.mark.slow
def test_a_run_in_which_one_request_in_ten_fails_finishes(faulty):
    """Catches a fault that ends the run, or that a trajectory is trained on in spite of."""
    folder, server, _ = faulty
    assert [row["step"] for row in rows(folder)] == list(range(1, 9))
    assert {r["behaviour"] for r in server.requests} == {"ok", *KINDS}, "each kind came"
    assert 0 < len(faulted(folder)) < len(rows(folder, "trajectories")) / 2
    assert {call["status"] for row in faulted(folder) for call in row["calls"]} > {"timeout", "bad_json"}
    nothing_faulted_was_trained_on(folder)
    for row in rows(folder):
        share = [t["faulted"] for t in rows(folder, "trajectories") if t["step"] == row["step"]]
        assert row["faulted"] == sum(share) / len(share)


@pytest.mark.slow
def test_nothing_is_billed_twice_and_the_account_is_what_the_server_delivered(faulty):
    """Catches retries, cached replies and faults that are charged again, or not at all."""
    folder, server, text = faulty
    the_account_is_the_servers(folder, server)
    whole = Counter(json.dumps(r["body"]) for r in server.requests if r["behaviour"] == "ok")
    assert set(whole.values()) == {1}, "a reply that came is never asked for again"
    paid = attempts(folder, "paid > 0")
    assert len(paid) == sum(r["behaviour"] in BILLED for r in server.requests)
    metrics = rows(folder)[-1]
    spent = {name: row["usd"] for name, row in account(folder).items()}
    for name in spent:
        assert metrics.get(f"spent/{name}", 0.0) <= spent[name]
        assert f"{name} {spent[name]:.6f}" in text
    assert sum(v for k, v in metrics.items() if k.startswith("spent/")) > 0
    assert f"spent {sum(spent.values()):.6f} USD" in text


@pytest.mark.slow
def test_a_step_waits_no_longer_than_its_calls_may(faulty):
    """The bound: a row makes max_calls calls of timeout_s each, and all rows wait side by side (16 rows, 64
    slots). Catches deadlines that add up over tries or over rows."""
    folder, _, _ = faulty
    usual = sorted(row["time/rollout"] for row in rows(folder))[0]
    assert max(row["time/rollout"] for row in rows(folder)) < 3 * DEADLINE + usual + 5.0


@pytest.mark.slow
def test_the_order_of_replies_changes_no_sample_of_a_run(tmp_path):
    """Catches replies that are paired by arrival, and random numbers that depend on it."""
    texts = []
    for seed in (1, 2):
        rng = random.Random(seed)
        (tmp_path / str(seed)).mkdir()
        with WorldServer(before=lambda n, rng=rng: time.sleep(rng.uniform(0, 0.2))) as server:
            folder = tmp_path / str(seed) / "run"
            code, text = train(folder, *options(server, tmp_path / str(seed), 60.0), "--steps", "3")
            assert code == 0, text
        texts.append([
            [(s["by"], s["text"]) for s in row["segments"]] + [row["score"], row["cost"]]
            for row in rows(folder, "trajectories")
        ])  # fmt: skip
    assert texts[0] == texts[1] and len(texts[0]) == 48


@pytest.mark.slow
def test_an_outage_of_half_a_minute_is_lived_through(tmp_path):
    """Catches a run that a bad minute ends: everything hangs for 30 s, three deadlines of a call."""
    began = []

    def script(n: int) -> str:
        if n == 40:
            began.append(time.monotonic())
        return "timeout" if began and time.monotonic() < began[0] + 30 else "ok"

    with WorldServer(script) as server:
        code, text = train(tmp_path / "run", *options(server, tmp_path, 10.0), "--steps", "6")
    assert code == 0, text
    assert len(rows(tmp_path / "run")) == 6
    hung = [r["at"] for r in server.requests if r["behaviour"] == "timeout"]
    assert max(hung) - min(hung) > 10.0
    assert len(faulted(tmp_path / "run")) >= 12
    nothing_faulted_was_trained_on(tmp_path / "run")
    assert rows(tmp_path / "run")[-1]["faulted"] < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["timeout", "500", "401"])
def test_a_pool_that_is_down_for_good_stops_the_run_with_a_checkpoint(tmp_path, kind):
    """The bound: three steps of max_calls calls of timeout_s. Catches a run that goes on learning from
    nothing, waits for ever, or cannot go on later."""
    died = []

    def script(n: int) -> str:
        if n >= 60:
            died.append(time.monotonic())
        return kind if n >= 60 else "ok"

    folder = tmp_path / "run"
    with WorldServer(script) as server:
        code, text = train(folder, *options(server, tmp_path, 1.0), "--steps", "30")
        ended = time.monotonic()
    stopped = len(rows(folder))
    usual = min(row["time/step"] for row in rows(folder))
    assert ended - died[0] < 4 * (3 * 1.0 + usual + 3.0)
    assert code == 1 and stopped < 30
    last = [line for line in text.splitlines() if line.strip()][-1]
    assert last.startswith(
        f"stopped at step {stopped}: the pool failed over half of the trajectories in three steps"
    )
    assert last.endswith(f"To go on: python train.py --resume {folder}") and "Traceback" not in text
    assert (folder / "checkpoints" / f"step-{stopped:06d}").is_dir()
    nothing_faulted_was_trained_on(folder)

    with WorldServer() as server:  # it is up again, elsewhere: the run's own pool file says where
        entries = yaml.safe_load((folder / "pool.yaml").read_text())
        (folder / "pool.yaml").write_text(yaml.safe_dump([e | {"base_url": server.url} for e in entries]))
        code, text = train(folder, "--steps", str(stopped + 2), "--timeout_s", "20", resume=True)
    assert code == 0, text
    assert [row["step"] for row in rows(folder)] == list(range(1, stopped + 3))
    assert rows(folder)[-1]["faulted"] == 0.0


def test_a_pool_where_nobody_answers_is_one_line_before_anything_else(tmp_path):
    """Catches an hour of evaluation against a mistyped address, and scores of a router without a pool."""
    with WorldServer(lambda n: "404") as server:
        code, text = train(
            tmp_path / "run", *options(server, tmp_path), "--steps", "2", "--eval_questions", "8"
        )
    last = text.splitlines()[-1]
    assert code == 1 and last.startswith("stopped at step 0: the pool failed in ")
    assert "of 8 questions (http_404 " in last and "Traceback" not in text
    assert len(server.requests) <= 8 * 3
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_scores_of_a_pool_that_failed_say_so():
    """Catches a table of a faulty pool that looks like one of a good one."""
    result = Result(None, None, Trajectory(calls=[Call("a", "q", Reply("", "timeout"))]), Reward(*[0.0] * 6))
    good = replace(result, trajectory=Trajectory())
    question = Question("1", "q", ("x",))
    shown = [table([replace(r, question=question) for r in rs]) for rs in ([good, good], [good, result])]
    assert "failed" not in shown[0]
    assert shown[1].endswith("The pool failed in 1 of these questions; they count as they are.")


@pytest.mark.slow
def test_a_dying_run_says_so_in_the_log_and_in_the_viewer(tmp_path):
    """Catches a collapse that nobody is told of: a learning rate a hundred times too high."""
    folder = tmp_path / "run"
    code, text = train(folder, "--steps", "10", "--lr", "0.1", "--batch", "8")
    assert code in (0, 1) and "Traceback" not in text, "it may stop before its last step"
    told = [line for row in rows(folder) for line in row["warnings"]]
    assert told and len(set(told)) == len(told)
    page = view.build(folder).html
    for line in told:
        assert f"warning: {line}" in text
        assert json.dumps(line)[1:-1] in page


def worst(server: WorldServer) -> float:
    return max(c.price for c in server.simulated.candidates) * 40 * 1e-6


@pytest.mark.slow
def test_the_cap_is_never_passed_and_stops_the_run_with_a_checkpoint(tmp_path):
    """Catches a cap that is looked at after the money is gone, and a run that goes on without a pool."""
    folder, cap = tmp_path / "run", 0.01
    with WorldServer() as server:
        argv = options(server, tmp_path, 30.0, price_in=0.0)
        code, text = train(folder, *argv, "--steps", "90", "--max_usd", str(cap))
        price = {f"model-{c.name}": c.price for c in server.simulated.candidates}
        bill = sum(price[model] * n * 1e-6 for model, n in server.delivered.items())
        stopped = len(rows(folder))
        last = text.splitlines()[-1]
        assert code == 1 and 0 < stopped < 90
        assert last.startswith(
            f"stopped at step {stopped}: the spend cap of {cap} USD is reached (spent 0.00"
        )
        assert cap - 17 * worst(server) < bill <= cap
        assert sum(row["usd"] for row in account(folder).values()) == pytest.approx(bill, abs=1e-12)
        spent = [sum(v for k, v in row.items() if k.startswith("spent/")) for row in rows(folder)]
        assert spent == sorted(spent) and spent[-1] <= cap
        assert (folder / "checkpoints" / f"step-{stopped:06d}").is_dir()
        nothing_faulted_was_trained_on(folder)
        code, text = train(folder, "--max_usd", "1", "--steps", str(stopped + 1), resume=True)
        assert code == 0, text
        the_account_is_the_servers(folder, server)


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_calls(tmp_path):
    """Catches a program that cannot be ended while somebody does not answer."""
    with WorldServer(lambda n: "ok" if n < 40 else "timeout") as server:
        process = start(tmp_path / "run", *options(server, tmp_path, 60.0), "--steps", "6")
        wait_for(lambda: len(server.requests) > 40)
        for _ in range(2):
            time.sleep(1.0)
            os.kill(process.pid, signal.SIGINT)
        process.join(10)
        assert process.exitcode == -signal.SIGINT, said(tmp_path / "run")


@pytest.mark.slow
def test_kill_9_loses_no_money_from_the_account(tmp_path):
    """Catches a bill that the account forgets: what was in flight stays held, and paid replies are not paid
    for again when the killed step is repeated."""
    folder, rng = tmp_path / "run", random.Random(0)
    with WorldServer(before=lambda n: time.sleep(0.05)) as server:
        argv = [*options(server, tmp_path, 30.0), "--steps", "4"]
        process = start(folder, *argv)
        for seen in (1, 2):
            wait_for(lambda seen=seen: lines(folder / "metrics.jsonl") >= seen)
            until = len(server.requests) + rng.randint(2, 9)
            wait_for(lambda n=until: len(server.requests) > n)
            process.kill()
            process.join()
            assert process.exitcode == -9, said(folder)
            process = start(folder, resume=True)
        process.join(900)
        assert process.exitcode == 0, said(folder)
        time.sleep(0.2)
        delivered = defaultdict(
            int, {model.removeprefix("model-"): n for model, n in server.delivered.items()}
        )
    price = {c.name: c.price for c in server.simulated.candidates}
    for name, row in account(folder).items():
        assert row["tokens"] <= delivered[name]
        assert row["usd"] + row["held_usd"] >= delivered[name] * price[name] * 1e-6 - 1e-12
    lost = sum(delivered.values()) - sum(row["tokens"] for row in account(folder).values())
    held = len(attempts(folder, "held > 0"))
    assert held <= 2 * 16 and lost <= 10 * held, "only what was in flight"
    whole = Counter(json.dumps(r["body"]) for r in server.requests)
    assert sum(n - 1 for n in whole.values()) <= held, "only what was in flight is asked for again"


# Full disks, numbers that are none, and too little memory


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trajectories.jsonl", "metrics.jsonl", "checkpoint"])
def test_a_full_disk_is_one_line_and_the_run_goes_on_when_there_is_room(tmp_path, name):
    """Catches a traceback without a file name, and steps, lines or checkpoints that are lost or doubled."""
    folder, other = tmp_path / "run", tmp_path / "other"
    code, text = train(folder, "--steps", "4", prepare=full_disk(name, 4))
    last = text.splitlines()[-1]
    assert code == 1 and last.startswith("stopped at step 4: [Errno ") and "Traceback" not in text
    where = "checkpoints/step-000004" if name == "checkpoint" else name
    assert str(folder / where) in last and f"--resume {folder}" in last
    if name != "checkpoint":
        assert "No space left on device" in last
        Path(f"{folder / name}.kept").replace(folder / name)
    assert newest(folder / "checkpoints")[0] == folder / "checkpoints" / "step-000002"
    assert train(folder, resume=True)[0] == train(other, "--steps", "4")[0] == 0
    assert untimed(folder) == untimed(other)
    assert rows(folder, "trajectories") == rows(other, "trajectories")
    assert manifest(folder, 4) == manifest(other, 4)


@pytest.mark.parametrize("place", ["/proc/run", "{file}/run"])
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, place):
    """Catches a traceback, and a run that trains before it finds out."""
    (tmp_path / "file").write_text("")
    folder = Path(place.replace("{file}", str(tmp_path / "file")))
    with pytest.raises(ValueError, match=f"^{folder}: cannot be written to"):
        Recorder(folder)


@pytest.mark.slow
def test_losses_that_are_not_finite_change_nothing_and_stop_the_run(tmp_path):
    """Catches NaN in weights or moments, a silent skip, and a run that goes on for days without learning."""
    folder = tmp_path / "run"
    argv = ("--steps", "9", "--save_every", "1", "--max_bad_steps", "5")
    code, text = train(folder, *argv, prepare=spoil("policy", first=3))
    last = text.splitlines()[-1]
    assert code == 1 and last.startswith(
        "stopped at step 4: 6 optimiser steps had a loss or gradient that is not"
    )
    assert [row["bad_steps"] for row in rows(folder)] == [0, 2, 2, 2]
    found = [manifest(folder, step) for step in range(5)]
    policy, critic = (f"{role}/adapter_model.safetensors" for role in ("policy", "critic"))
    assert found[0][policy] != found[1][policy] == found[2][policy] == found[4][policy]
    assert len({found[step][critic][1] for step in range(5)}) == 5, "the critic learns on"
    state = json.loads((folder / "checkpoints/step-000004/state.json").read_text())
    assert state["bad_steps"] == 6


@pytest.mark.slow
def test_out_of_memory_halves_the_packs_for_good_and_changes_nothing_else(tmp_path):
    """Catches gradients of the packs before counted twice, and a run that meets the same wall each step."""
    folder, other = tmp_path / "run", tmp_path / "other"
    argv = ("--steps", "4", "--minibatch", "4", "--max_tokens_per_pack", "500")
    code, text = train(folder, *argv, prepare=out_of_memory(250))
    assert code == 0, text
    sizes = [row["pack_tokens"] for row in rows(folder)]
    assert sizes[:2] == [500, 500] and sizes[-1] == 250 and sizes == sorted(sizes, reverse=True)
    assert train(other, *argv)[0] == 0
    for ours, theirs in zip(untimed(folder), untimed(other), strict=True):
        for key in theirs.keys() - {"pack_tokens", "warnings"}:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-3, abs=1e-4), key
    state = json.loads((folder / "checkpoints/step-000004/state.json").read_text())
    assert state["pack_tokens"] == 250
    code, text = train(folder, "--steps", "5", resume=True)
    assert code == 0 and rows(folder)[-1]["pack_tokens"] == 250


def one_update(max_tokens: int, monkeypatch=None, fails=()):
    """An update of a tiny router; the calls of a loss numbered in `fails` run out of memory. -> weights,
    metrics."""
    router, rng = random_router(), random.Random(0)
    common = random_ids(rng, 30)
    ts = [spoken(rng, common + random_ids(rng, 1 + i), (5 + i, -9, 4)) for i in range(6)]
    est = estimate(router, ts, 10_000, critic=True)
    advantages, returns = advantages_of(est, torch.arange(6.0), range(6), "ppo", 0.0, 1.0, 1.0)
    optimisers = {r: torch.optim.SGD(router.parameters(r), lr=0.1) for r in ("critic", "policy")}
    rules = Rules(3, 1, max_tokens, 0.2, 0.5, 1e9, 0.01, 0.0)
    calls = iter(range(1, 99))

    def failing(loss):
        def wrapped(*args):
            if next(calls) in fails:
                raise torch.OutOfMemoryError
            return loss(*args)

        return wrapped

    with monkeypatch.context() as patch:
        for role, loss in update_module.LOSSES.items():
            patch.setitem(update_module.LOSSES, role, failing(loss))
        metrics = update_module.update(router, optimisers, ts, est, advantages, returns, rules, "s")
    assert all(p.grad is None for r in optimisers for p in router.parameters(r))
    return [p.detach() for r in optimisers for p in router.parameters(r)], metrics


def test_a_minibatch_is_done_again_whole_in_smaller_packs(monkeypatch):
    """Catches gradients of an unfinished pass that stay, roles that step twice, a minibatch left out."""
    small, said_small = one_update(40, monkeypatch)
    large, said_large = one_update(80, monkeypatch)
    assert (said_small["pack_tokens"], said_large["pack_tokens"]) == (40, 80)
    for fails in ({1}, {2}, {3}, {4}):  # of either role, in the first of two packs and in the second
        weights, metrics = one_update(80, monkeypatch, fails)
        assert metrics["pack_tokens"] == 40 and metrics["bad_steps"] == 0
        assert metrics["grad_norm/policy"] == pytest.approx(said_large["grad_norm/policy"], rel=1e-4)
        for a, b in zip(weights, large, strict=True):
            assert torch.allclose(a, b, atol=1e-5)
    weights, _ = one_update(80, monkeypatch, {1})
    assert all(torch.equal(a, b) for a, b in zip(weights, small, strict=True)), "from the first pack on"


def test_out_of_memory_twice_is_the_end(monkeypatch):
    """Catches a pack size that shrinks to nothing, pass by pass."""
    with pytest.raises(torch.OutOfMemoryError, match="packs of 40 tokens do not fit into the memory"):
        one_update(80, monkeypatch, {1, 2})


def test_an_infinite_loss_is_left_out_though_its_gradient_is_finite(monkeypatch):
    """Catches a check of gradients alone."""
    real = update_module.LOSSES["policy"]
    before, _ = one_update(500, monkeypatch)

    def endless(*args):
        loss, report = real(*args)
        return loss + math.inf, report

    monkeypatch.setitem(update_module.LOSSES, "policy", endless)
    after, metrics = one_update(500, monkeypatch)
    assert metrics["bad_steps"] == 2 and metrics["grad_norm/policy"] == 0.0
    assert metrics["grad_norm/critic"] > 0
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(a.isfinite().all() for a in after)
