"""Runs that are killed go on exactly: the same weights, moments, place in the data, metrics, bit for bit."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from wholeruns import (
    die_in,
    die_writing,
    kill_at_random,
    lines,
    manifest,
    rows,
    said,
    start,
    train,
    untimed,
    wait_for,
)

from minirouter.checkpoint import newest
from minirouter.config import Config
from minirouter.record import Recorder, write_rows
from minirouter.run import HARMLESS, Run, refuse_changes

STEPS = 6
SAME = ("--steps", str(STEPS))


def whole_run(tmp_path_factory, *argv: str) -> Path:
    folder = tmp_path_factory.mktemp("straight") / "run"
    code, text = train(folder, *SAME, *argv)
    assert code == 0, text
    return folder


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Six steps without a break, of four of eight questions each: an epoch ends at steps 2, 4 and 6."""
    return whole_run(tmp_path_factory)


def equal(folder: Path, other: Path, step: int = STEPS) -> None:
    """Everything of two runs but the clock, bit for bit."""
    assert [row["step"] for row in untimed(folder)] == list(range(1, step + 1))
    assert untimed(folder) == untimed(other)[:step]
    assert manifest(folder, step) == manifest(other, step)
    length = sum(row["step"] <= step for row in rows(other, "trajectories"))
    assert rows(folder, "trajectories") == rows(other, "trajectories")[:length]


def test_a_run_killed_in_a_step_goes_on_bit_for_bit(straight, tmp_path):
    """Catches state that is in no checkpoint: moments, value head, cost window, place in the data."""
    folder = tmp_path / "run"
    process = start(folder, *SAME, prepare=die_writing("trajectories.jsonl", 4))
    process.join(900)
    assert process.exitcode == -9, said(folder)
    assert [row["step"] for row in rows(folder)] == [1, 2, 3]
    code, text = train(folder, resume=True)
    assert code == 0, text
    equal(folder, straight)
    assert any(row["reward/cost"] != 0.5 for row in untimed(folder)), "the cost window matters"


@pytest.mark.slow
@pytest.mark.parametrize(
    "death",
    [
        die_writing("trajectories.jsonl", 1),
        die_writing("metrics.jsonl", 3),
        die_writing("metrics.jsonl", 5),
        die_in("checkpoint", "save_file", "step-000000"),
        die_in("checkpoint", "save_file", "step-000004"),
        die_in("checkpoint", "_sha256", "step-000004", calls=3),
        die_in("checkpoint", "sync", "step-000004", calls=2),
        die_in("os", "replace", "step-000004"),
        die_in("checkpoint", "prune", "6, 99"),
    ],
    ids=["line-1", "line-3", "line-5", "save-0", "tensors", "hashes", "sync", "rename", "prune"],
)
def test_wherever_a_run_is_killed_nothing_is_lost_or_doubled(straight, tmp_path, death):
    """Catches half a line, half a checkpoint or half a beginning that cannot be gone on from."""
    folder = tmp_path / "run"
    process = start(folder, *SAME, prepare=death)
    process.join(900)
    assert process.exitcode == -9, said(folder)
    begun = (folder / "config.yaml").exists()
    code, text = train(folder, resume=True) if begun else train(folder, *SAME)
    assert code == 0, text
    equal(folder, straight)
    assert not list(folder.rglob("*.partial"))


@pytest.mark.slow
def test_a_run_killed_again_and_again_at_any_moment_ends_as_if_it_had_not_been(straight, tmp_path):
    """Catches any moment that the other tests do not think of."""
    folder, rng, deaths = tmp_path / "run", random.Random(0), 0
    length = sum(row["time/step"] for row in rows(straight))
    for _ in range(12):
        begun = (folder / "config.yaml").exists()
        process = start(folder, *([] if begun else SAME), resume=begun)
        deaths += kill_at_random(process, rng, 1.5 * length)
    code, text = train(folder, *([] if begun else SAME), resume=begun)
    assert code == 0, text
    assert deaths >= 3
    equal(folder, straight)


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv",
    [
        ("--algo", "grpo", "--samples_per_question", "2", "--kl_in", "loss", "--kl_coef", "0.1"),
        ("--sft_steps", "2", "--kl_coef", "0.5"),
        ("--pool", "configs/pools/tiny.yaml", "--shuffle_candidates", "true", "--drop_candidates", "0.3"),
        ("--eval_every", "3", "--ppo_epochs", "2", "--batch", "3", "--minibatch", "2"),
    ],
    ids=["grpo", "warm", "pools", "dev"],
)
def test_every_kind_of_run_goes_on_bit_for_bit(tmp_path_factory, tmp_path, argv):
    """Catches a reference, a group, a drawn pool or a best score that is lost on the way."""
    other, folder = whole_run(tmp_path_factory, *argv), tmp_path / "run"
    process = start(folder, *SAME, *argv, prepare=die_writing("metrics.jsonl", 5))
    process.join(900)
    assert process.exitcode == -9, said(folder)
    code, text = train(folder, resume=True)
    assert code == 0, text
    equal(folder, other)


@pytest.fixture
def cut_short(straight, tmp_path):
    """The straight run as it was after step 4, then killed in step 5."""
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    shutil.rmtree(folder / "checkpoints" / "step-000006")
    shutil.copytree(folder / "checkpoints" / "step-000004", folder / "checkpoints" / ".step-000006.partial")
    with open(folder / "metrics.jsonl", "r+") as file:
        file.truncate(sum(map(len, file.readlines()[:5])) + 40)
    return folder


def test_torn_checkpoints_are_named_and_the_newest_whole_one_is_used(straight, cut_short):
    """Catches a run that starts from ruins, that ends at them, or that passes them over in silence."""
    torn = cut_short / "checkpoints" / "step-000004"
    (torn / "critic" / "adapter_model.safetensors").write_bytes(b"")
    code, text = train(cut_short, resume=True)
    assert code == 0, text
    assert f"passed over: {torn} is not whole: critic/adapter_model.safetensors is missing or damaged" in text
    equal(cut_short, straight)
    assert [row["step"] for row in rows(cut_short)] == [1, 2, 3, 4, 5, 6]
    assert not list(cut_short.rglob("*.partial"))


def test_a_finished_run_says_so_and_more_steps_go_on(straight, tmp_path):
    """Catches 0 steps trained in silence, and a stream that is at its end when an epoch is."""
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    code, text = train(folder, resume=True)
    assert code == 0 and "nothing to train: step 6 is done" in text
    equal(folder, straight)
    code, text = train(folder, "--steps", "7", resume=True)
    assert code == 0 and "nothing to train" not in text
    assert [row["step"] for row in rows(folder)] == [1, 2, 3, 4, 5, 6, 7]
    assert manifest(folder, 7) != manifest(folder, 6)


def test_what_matters_cannot_change_and_is_named(straight):
    """Catches a run that goes on as another one."""
    for argv, said_ in (
        (("--lr", "0.5", "--batch", "8"), "a resumed run cannot change batch to 8 from 4, lr to 0.5 from"),
        (("--questions", "9"), "cannot change questions to 9 from 8"),
    ):
        code, text = train(straight, *argv, resume=True)
        assert code == 2 and said_ in text and "Traceback" not in text
        assert len([line for line in text.splitlines() if "error" in line]) == 1


def test_every_field_is_either_harmless_or_refused():
    """Catches a field that is in neither class, and one that is in the wrong one."""
    config = Config()
    for name, value in vars(config).items():
        if name in HARMLESS:
            refuse_changes(config, {name: "something else"})
        else:
            with pytest.raises(ValueError, match=f"cannot change {name} to "):
                refuse_changes(config, {name: "something else"})
        refuse_changes(config, {name: value})
    assert set(vars(config)) > HARMLESS
    assert {"steps", "save_every", "eval_every", "max_usd", "keep_last"} <= HARMLESS
    assert not {"seed", "lr", "slots", "max_tokens_per_pack", "pool", "data", "alpha"} & HARMLESS


def test_two_processes_cannot_write_to_one_run(tmp_path):
    """Catches two writers that mix their lines and prune each other's checkpoints."""
    folder = tmp_path / "run"
    process = start(folder, "--steps", "500")
    try:
        wait_for(lambda: lines(folder / "metrics.jsonl") >= 1)
        shutil.copy(f"{folder}.log", f"{folder}.first")
        process_id, before = process.pid, said(folder)
        code, text = train(folder, resume=True)
        assert code == 2 and f"{folder}: another process is writing to this run folder" in text
        assert process.is_alive() and process.pid == process_id and before
    finally:
        process.kill()
        process.join()
    recorder = Recorder(folder)  # a lock dies with its process
    with pytest.raises(ValueError, match="another process"):
        Recorder(folder)
    recorder.lock.close()
    Recorder(folder).lock.close()


@pytest.mark.slow
def test_the_newest_and_the_best_checkpoint_are_kept(tmp_path):
    """Catches a best checkpoint that is pruned, or not written off the beat of save_every."""
    folder = tmp_path / "run"
    argv = (
        "--steps",
        "6",
        "--save_every",
        "4",
        "--keep_last",
        "1",
        "--eval_every",
        "1",
        "--eval_questions",
        "8",
    )
    code, text = train(folder, *argv, "--lr", "0.01")
    assert code == 0, text
    scores = [row["dev/em"] for row in rows(folder)]
    best = 1 + scores.index(max(scores))
    found = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert found == sorted({f"step-{best:06d}", "step-000006"})
    state = json.loads((folder / "checkpoints" / "step-000006" / "state.json").read_text())
    assert (state["best_step"], state["best_em"]) == (best, max(scores))


# The files of a run


@pytest.fixture
def recorder(tmp_path):
    recorder = Recorder(tmp_path / "run")
    yield recorder
    recorder.lock.close()


def test_lines_after_the_step_and_half_a_last_line_are_cut(recorder):
    """Catches doubled lines, and a half line that the next one is glued to."""
    path = recorder.folder / "metrics.jsonl"
    for tail in ("", '{"step": 2, "re', '{"step": 2}', '{"step"', "\0\0\0"):
        path.write_text('{"step": 1}\n{"step": 2, "a": 1}\n{"step": 2, "a": 2}\n{"step": 3}\n' + tail)
        recorder.cut("metrics.jsonl", 2)
        assert path.read_text() == '{"step": 1}\n{"step": 2, "a": 1}\n{"step": 2, "a": 2}\n'
    recorder.cut("metrics.jsonl", 0)
    assert path.read_text() == ""
    recorder.cut("nothing.jsonl", 2)
    assert not (recorder.folder / "nothing.jsonl").exists()


@pytest.mark.parametrize(
    "bad", ["{", "[]", '{"step": "x"}', "", '{"a": 1}', "\ufeff{}", '{"step": 2}{"step": 3}']
)
def test_a_bad_line_in_the_middle_is_named_and_nothing_is_lost(recorder, bad):
    """Catches lines thrown away because one before them cannot be read."""
    path = recorder.folder / "metrics.jsonl"
    text = f'{{"step": 1}}\n{bad}\n{{"step": 2}}\n'
    path.write_text(text)
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2: not a line of a run"):
        recorder.cut("metrics.jsonl", 2)
    assert path.read_text() == text


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    """Catches results of an evaluation lost when the next one cannot be written."""
    path = tmp_path / "test.jsonl"
    write_rows(path, [{"a": 1}])
    with pytest.raises(TypeError):
        write_rows(path, [{"a": object()}])
    assert path.read_text() == '{"a": 1}\n'
    write_rows(path, [{"a": 2}, {"a": "\ud800"}])
    assert [json.loads(line)["a"] for line in path.open()] == [2, "\ud800"]
    assert [file.name for file in tmp_path.iterdir()] == ["test.jsonl"]


def test_no_checkpoint_is_one_line_and_a_beginning_can_be_begun_again(tmp_path):
    """Catches a folder that can neither be resumed nor started."""
    folder = tmp_path / "run"
    process = start(folder, *SAME, prepare=die_in("os", "replace", "config.yaml"))
    process.join(900)
    assert process.exitcode == -9 and not (folder / "config.yaml").exists()
    code, text = train(folder, resume=True)
    assert code == 2 and f"{folder} is not a run folder: it has no config.yaml" in text
    code, text = train(folder, "--steps", "1")
    assert code == 0, text
    path, _ = newest(folder / "checkpoints")
    assert path.name == "step-000001"
    shutil.rmtree(folder / "checkpoints")
    code, text = train(folder, resume=True)
    assert code == 2 and f"{folder}: no whole checkpoint to resume from" in text and "Traceback" not in text


def test_the_rates_of_a_step():
    """Catches a schedule that is only reported, or that gives the critic the policy's rate."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimisers = {role: torch.optim.AdamW([weight], lr=9.0) for role in ("critic", "policy")}
    config = Config(steps=8, lr=0.8, critic_lr=0.4, lr_decay=0.5)
    for step, rate in ((1, 0.8), (5, 0.8), (8, 0.2)):
        run = SimpleNamespace(step=step, config=config, optimisers=optimisers)
        assert Run.set_rates(run) == {"lr": pytest.approx(rate)}
        rates = {role: optimiser.param_groups[0]["lr"] for role, optimiser in optimisers.items()}
        assert rates == {"critic": pytest.approx(rate / 2), "policy": pytest.approx(rate)}
