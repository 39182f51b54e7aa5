"""The command line: presets, overrides, and one line for every mistake."""

import sys
from dataclasses import asdict

import pytest
import yaml

import evaluate
import train
from minirouter.config import PRESETS, Config, load_config, read_yaml


def error_of(capsys, *argv: str) -> str:
    """The one line that a bad command line ends with; fails unless the exit code is 2."""
    with pytest.raises(SystemExit) as caught:
        load_config(list(argv))
    assert caught.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


def test_the_default_is_the_tiny_preset_and_flags_win():
    """Catches defaults that hide a preset, and a preset that hides what was typed."""
    config = load_config([])
    assert (config.model, config.pool, config.alpha) == ("tiny", "drawn", 0.6)
    assert load_config(["--alpha", "0.9"]).alpha == 0.9
    assert load_config(["--alpha=0"]).alpha == 0.0


def test_values_keep_their_types(tmp_path):
    """Catches YAML's `1e-5`, which PyYAML reads as a string, and numbers that begin with a minus sign."""
    path = tmp_path / "own.yaml"
    path.write_text("lr: 1e-5\nload_in_4bit: true\npool: full\nmax_usd: null\nshow_prices: false\n")
    config = load_config(["--config", str(path)])
    assert config.lr == 1e-5 and config.load_in_4bit is True
    assert config.max_usd is None and config.show_prices is False
    path.write_text("kl_coef: -1\n")
    with pytest.raises(SystemExit):
        load_config(["--config", str(path)])


def test_a_saved_configuration_is_the_same_one(tmp_path):
    """Catches a field that does not survive config.yaml, so that a resumed run would be another."""
    grpo = ["--algo", "grpo", "--samples_per_question", "8", "--kl_in", "loss"]
    config = load_config(["--alpha", "0.9", "--no_show_prices", *grpo])
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    assert load_config(["--config", str(path)]) == config


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["--alhpa", "0.9"], "did you mean --alpha"),
        (["--alpha", "much"], "alpha"),
        (["--alpha", "1.5"], "alpha 1.5 must be between 0 and 1"),
        (["--alpha", "nan"], "alpha"),
        (["--steps", "1.5"], "steps"),
        (["--metric", "bleu"], "metric"),
        (["--max_calls", "0"], "max_calls 0 must be positive"),
        (["--max_calls", "-1"], "max_calls -1 must be positive"),
        (["--batch", "0"], "batch"),
        (["--minibatch", "65"], "minibatch 65 must not exceed batch 64"),
        (["--samples_per_question", "7"], "multiple of samples_per_question"),
        (["--algo", "grpo"], "samples_per_question"),
        (["--algo", "grpo", "--samples_per_question", "8"], "kl_in"),
        (["--config", "tinny"], "did you mean tiny"),
        (["--config", "no/such/file.yaml"], "no preset or file"),
        (["--resume", "no/such/run"], "not a run folder"),
        (["--data", "x.jsonl"], "pool"),
        (["--max_usd", "-1"], "max_usd"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(capsys, argv, part):
    """Catches tracebacks, screens of usage, and values that are silently accepted."""
    assert part in error_of(capsys, *argv)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("alhpa: 0.9\n", "unknown key 'alhpa'; did you mean alpha?"),
        ("alpha: [1, 2]\n", "alpha takes one plain value"),
        ("alpha: {a: 1}\n", "alpha takes one plain value"),
        ("just words\n", "key: value"),
        ("alpha: 0.9\n  lr: 1\n", "own.yaml"),
        ("steps: many\n", "steps"),
        ("", "key: value"),
    ],
)
def test_a_mistake_in_a_file_names_the_file_or_the_key(capsys, tmp_path, text, part):
    """Catches unknown keys that are ignored and YAML errors that end in a traceback."""
    path = tmp_path / "own.yaml"
    path.write_text(text)
    assert part in error_of(capsys, "--config", str(path))


@pytest.mark.parametrize("path", sorted(PRESETS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_preset_is_valid_and_says_nothing_twice(path):
    """Catches presets that rot, and keys that only repeat a default under another value's name."""
    config = load_config(["--config", path.stem])
    values = read_yaml(path)
    assert all(getattr(config, key) == type(getattr(config, key))(value) for key, value in values.items())


def test_the_paper_preset_has_the_papers_hyper_parameters():
    """Catches drift from Table 8 of the paper and the reference implementation (but for LoRA's rates)."""
    config = asdict(load_config(["--config", "qwen2.5-3b"]))
    wanted = {
        "steps": 225, "batch": 64, "minibatch": 32, "ppo_epochs": 1, "gamma": 1.0, "lam": 1.0, "clip": 0.2,
        "value_clip": 0.5, "entropy_coef": 0.001, "kl_coef": 0.001, "kl_in": "reward", "max_grad_norm": 1.0,
        "temperature": 1.0, "max_calls": 4, "turn_tokens": 1024, "reply_tokens": 600,
        "total_tokens": 4096, "alpha": 0.0, "metric": "em", "lr": 1e-5, "critic_lr": 1e-4,
        "data": "nq,hotpotqa", "load_in_4bit": True,
    }  # fmt: skip
    assert {key: config[key] for key in wanted} == wanted


@pytest.mark.parametrize("script", [train, evaluate])
def test_help_is_readable(script, monkeypatch, capsys):
    """Catches a help text that cannot be printed (a bare percent sign ends argparse in a traceback)."""
    monkeypatch.setattr(sys, "argv", [script.__name__ + ".py", "--help"])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert "--alpha" in shown and "default: 0.6" not in shown
    assert max(map(len, shown.splitlines())) < 130


def test_yaml_is_read_safely(tmp_path):
    """Catches a loader that runs what a file says."""
    path = tmp_path / "own.yaml"
    path.write_text("alpha: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(ValueError, match="own"):
        read_yaml(path)
    assert yaml.safe_load(Config().to_yaml())["alpha"] == 0.0
