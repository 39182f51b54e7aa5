"""The entry points: a short training run does what it promises, and mistakes end in one line."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import evaluate
import train

ROOT = Path(__file__).parent.parent
SHORT = ["--steps", "2", "--batch", "8", "--minibatch", "4", "--questions", "64", "--eval_questions", "16"]


def run(script: str, *argv: str, ok: bool = True) -> subprocess.CompletedProcess:
    """Run an entry point as a user would."""
    done = subprocess.run(
        [sys.executable, script, *argv], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert not ok or done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "short"
    done = run("train.py", *SHORT, "--run_dir", str(folder), "--print_every", "1", "--eval_every", "1")
    return folder, done


def test_a_run_leaves_everything_behind(short_run):
    """Catches a run folder that cannot be looked at, resumed or evaluated."""
    folder, done = short_run
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.yaml", "metrics.jsonl", "trajectories.jsonl", "curves.png", "checkpoints"}
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert [row["step"] for row in metrics] == [1, 2]
    assert [row["lr"] for row in metrics] == [0.001, 0.001]  # falls over the second half, to 0 after its last
    rows = [json.loads(line) for line in (folder / "trajectories.jsonl").open()]
    assert [(row["step"], row["index"]) for row in rows] == [(s, i) for s in (1, 2) for i in range(8)]
    assert "before" in done.stdout and "after" in done.stdout and "| all | 16 |" in done.stdout
    assert "<answer>" in done.stdout  # two trajectories are printed, tags kept
    assert (folder / "checkpoints/step-000002/policy/adapter_model.safetensors").is_file()


def test_every_metric_is_defined_in_the_readme(short_run):
    """Catches a metric that nobody can interpret."""
    folder, _ = short_run
    table = (ROOT / "README.md").read_text().partition("## Metrics")[2].partition("\n## ")[0]
    known = set(re.findall(r"`([^`]+)`", table))
    for line in (folder / "metrics.jsonl").open():
        for key in json.loads(line):
            family = re.sub(r"^(calls/of/|finish/).*", lambda m: m[1], key)
            assert key in known or any(name.startswith(family) for name in known if family.endswith("/")), key


def test_actions_line_up_with_the_routers_tokens(short_run):
    """Catches a record in which log-probs, values or advantages belong to other tokens."""
    folder, _ = short_run
    for row in map(json.loads, (folder / "trajectories.jsonl").open()):
        own = sum(len(s["tokens"]) for s in row["segments"] if s["by"] == "router")
        assert row["actions"] is not None
        assert {len(values) for values in row["actions"].values()} == {own}


@pytest.mark.slow
def test_evaluation_needs_the_run_folder_alone(tmp_path):
    """Catches paths of the training machine that a moved run folder still needs, and dropped questions."""
    moved = tmp_path / "moved"
    run("train.py", *SHORT[:-2], "--eval_questions", "8", "--steps", "1", "--pool", "configs/pools/tiny.yaml",
        "--run_dir", str(tmp_path / "first"))  # fmt: skip
    (tmp_path / "first").rename(moved)
    done = run("evaluate.py", "--run", str(moved), "--eval_questions", "21")
    assert "step-000001, 21 test questions" in done.stdout
    assert len((moved / "test.jsonl").read_text().splitlines()) == 21


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--run", "{run}", "--at", "999"], "no checkpoint 999"),
        (["--search_run", "no/such/run"], "no/such/run: no checkpoint newest"),
        (["--search_run", "{run}", "--retriever", "no/such.jsonl"], "no/such.jsonl"),
    ],
)
def test_what_an_evaluation_lacks_is_found_out_before_anybody_is_asked(
    short_run, argv, part, monkeypatch, capsys
):
    """Catches an evaluation that pays for the other systems first, and then has no router to compare."""
    asked = []
    monkeypatch.setattr(evaluate.methods, "run_method", lambda *given: asked.append(given))
    argv = [arg.replace("{run}", str(short_run[0])) for arg in argv]
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *argv, "--methods", "Largest LLM"])
    with pytest.raises(SystemExit) as stopped:
        evaluate.main()
    assert stopped.value.code == 2
    assert part in capsys.readouterr().err.splitlines()[-1]
    assert not asked


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--model", "no/such/model"], "no/such/model"),
        (["--prompt", "no/such/prompt.txt"], "no/such/prompt.txt"),
        (["--data", "no/such/file.jsonl", "--pool", "configs/pools/local.yaml"], "no/such/file.jsonl"),
        (["--pool", "no/such/pool.yaml"], "no/such/pool.yaml"),
        (["--total_tokens", "20"], "total_tokens 20"),
        (["--pool", "{tmp}/unpriced.yaml"], "price"),
        (["--data", "{tmp}/empty.jsonl", "--pool", "configs/pools/local.yaml"], "empty.jsonl"),
        (["--data", "{tmp}/blank.jsonl", "--pool", "configs/pools/local.yaml"], "blank.jsonl:1"),
    ],
)
def test_a_bad_input_is_one_line_and_leaves_no_run_folder(tmp_path, argv, part, monkeypatch, capsys):
    """Catches tracebacks and half-written run folders."""
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "blank.jsonl").write_text('{"question": " ", "golden_answers": ["x"]}\n')
    (tmp_path / "unpriced.yaml").write_text(
        "- name: ada\n  descriptor: film\n  base_url: http://127.0.0.1:9\n"
    )
    argv = [arg.replace("{tmp}", str(tmp_path)) for arg in argv]
    folder = tmp_path / "run"
    monkeypatch.setattr(sys, "argv", ["train.py", *argv, "--run_dir", str(folder)])
    with pytest.raises(SystemExit) as stopped:
        train.main()
    errors = capsys.readouterr().err.splitlines()
    lines = [line for line in errors if line and "Loading weights" not in line]
    assert stopped.value.code == 2
    assert len(lines) == 1 and lines[0].startswith("train.py: error: ") and part in lines[0]
    assert not folder.exists()


def test_a_second_run_does_not_overwrite_the_first(short_run, monkeypatch, capsys):
    """Catches a run that mixes its lines with another's."""
    folder, _ = short_run
    monkeypatch.setattr(sys, "argv", ["train.py", *SHORT, "--run_dir", str(folder)])
    with pytest.raises(SystemExit) as stopped:
        train.main()
    assert stopped.value.code == 2 and "--resume" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    """Catches an interrupt that loses the steps since the last checkpoint."""
    folder = tmp_path / "run"
    argv = [sys.executable, "train.py", *SHORT[2:], "--steps", "500", "--run_dir", str(folder)]
    process = subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=os.environ)
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1 and f"python train.py --resume {folder}" in errors
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["step"]
    done = run("train.py", "--resume", str(folder), "--steps", str(last + 1), "--eval_questions", "16")
    assert "after" in done.stdout
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").open()]
    assert steps == list(range(1, last + 2))
