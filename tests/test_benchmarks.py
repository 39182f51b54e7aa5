"""The benchmarks run, at tiny sizes: so that they cannot rot. Their figures are not looked at."""

from __future__ import annotations

import importlib

import pytest
import torch

from benchmarks import gpu
from benchmarks.common import Plan, lockstep_rollout, planned_rollout, prompts_of
from benchmarks.measure import options as read_options
from benchmarks.ragged import ragged_plans
from benchmarks.rollout import library_router, router_of
from minirouter.trajectory import Limits

NAMES = ("rollout", "ragged", "latency", "decode", "update", "head", "growth")


@pytest.fixture(autouse=True)
def one_place(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.measure.OUT", tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs_and_ends_with_its_table(name, capsys):
    """Catches a benchmark that a change of the code has left behind."""
    rows = importlib.import_module(f"benchmarks.{name}").main(["--tiny", "--rounds", "1"])
    printed = capsys.readouterr().out.strip().splitlines()
    assert len(rows) >= 1
    assert len(printed) >= 2 + len(rows)
    assert all(line.startswith("|") for line in printed[-len(rows) :])


def test_update_benchmark_compares_equal_gradients(capsys):
    """Catches a comparison of different work."""
    [row] = importlib.import_module("benchmarks.update").main(["--tiny", "--rounds", "1"])
    assert float(row["largest gradient difference"].split()[0]) < 1e-5


def test_the_gpu_script_runs_on_a_cpu_with_tiny_shapes(capsys):
    """Catches a script that fails when at last there is a GPU."""
    rows = gpu.main(["--tiny"])
    assert sum("decode" in row["what"] for row in rows) == 2
    assert sum("whole PPO step" in row["what"] for row in rows) == len(gpu.CARDS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_gpu_script_refuses_without_a_gpu_in_one_line():
    """Catches a traceback, or figures of a CPU passed off as a GPU's."""
    with pytest.raises(SystemExit, match="no GPU") as refusal:
        gpu.main([])
    assert "\n" not in refusal.value.code


def encoded(router, texts):
    return router.tokenizer(texts, add_special_tokens=False)["input_ids"]


def test_both_sides_of_a_rollout_race_do_the_planned_work():
    """Catches a baseline that reads, generates or hears more than the plan, and a plan that is not kept."""
    given = read_options("", ["--tiny"])
    plans = [*ragged_plans(3, (1, 6), 5, (0, 0)), Plan((4, 2), (3,), (0.0,))]
    ours, theirs = router_of(given), library_router(given)
    prompts, texts, words = prompts_of(ours, len(plans), 12, own=4)
    limits = Limits(4, 10**9, 5, 200, 2, 1.0)
    assert encoded(theirs, texts) == prompts
    trajectories = planned_rollout(ours, prompts, plans, limits, words)
    contexts = lockstep_rollout(theirs, texts, plans, limits, words)
    for plan, t, ids, prompt in zip(plans, trajectories, encoded(theirs, contexts), prompts, strict=True):
        assert t.finish == "answer"
        assert len(t.actions) == sum(plan.turns)
        assert len(t.calls) == len(plan.replies)
        assert t.ids[: len(prompt)] == prompt
        assert len(t.ids) == len(prompt) + sum(plan.turns) + sum(plan.replies)
        assert len(ids) == len(t.ids)


def test_the_librarys_side_computes_the_same_model(monkeypatch):
    """Catches a baseline that was made slower, or other, than the library's."""
    given = read_options("", ["--tiny"])
    ours, theirs = router_of(given), library_router(given)
    ids = torch.arange(3, 20)[None]
    assert torch.allclose(ours.model(input_ids=ids).logits, theirs.model(input_ids=ids).logits, atol=1e-5)
    assert theirs.model.get_base_model().config._attn_implementation == "sdpa"
    monkeypatch.setattr("minirouter.model.PACKED_SIZE", 0)
    with ours.decoding():  # copies of weights on our side alone
        packed = [any("forward" in vars(x) for x in router.model.modules()) for router in (ours, theirs)]
    assert packed == [True, False]
