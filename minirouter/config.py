"""The configuration: one flat dataclass, presets in configs/*.yaml, overrides on the command line.

A preset's YAML is turned into command-line arguments, so that its values are checked as strictly as those
typed by hand; what is typed stands behind them and wins. A mistake ends in one line and exit code 2.
"""

from __future__ import annotations

import difflib
import math
import sys
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml

PRESETS = Path(__file__).parent.parent / "configs"
POSITIVE = (
    *("max_calls", "turn_tokens", "reply_tokens", "total_tokens", "slots", "timeout_s"),
    *("steps", "batch", "minibatch", "samples_per_question", "ppo_epochs", "max_tokens_per_pack", "lora_r"),
    *(
        "lr",
        "critic_lr",
        "sft_lr",
        "clip",
        "value_clip",
        "max_grad_norm",
        "max_bad_steps",
        "save_every",
        "keep_last",
    ),
)
NOT_NEGATIVE = (
    *("questions", "sft_steps", "eval_every", "eval_questions", "print_every", "seed"),
    *("kl_coef", "entropy_coef", "temperature", "eval_temperature"),
)
SHARES = ("alpha", "gamma", "lam", "drop_candidates", "lr_decay", "entropy_decay")


def knob(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass
class Config:
    """Every knob. Units: tokens, nats, USD per 1M output tokens."""

    # the router and what it is asked
    model: str = knob("tiny", "base model: tiny (ships with minirouter), a folder, or a name on the hub")
    load_in_4bit: bool = knob(False, "NF4 base through bitsandbytes")
    trust_remote_code: bool = knob(False, "let the base model bring its own code")
    prompt: str = knob("tiny", "prompt template: tiny, paper, or a path")
    info_tag: Literal["info", "information"] = knob(
        "info", "tag of a reply (published checkpoints: information)"
    )
    data: str = knob(
        "world", "questions: world (the miniature), a .jsonl or .parquet file, or nq,hotpotqa,..."
    )
    questions: int = knob(0, "training questions to draw (of each set); 0 = the default of the data")
    # the pool
    pool: str = knob("drawn", "candidates: drawn or full (the miniature world), or a pool file")
    show_prices: bool = knob(True, "show prices (and latency, example) in the descriptors")
    shuffle_candidates: bool = knob(False, "training: draw the order of the candidates anew for each episode")
    drop_candidates: float = knob(
        0.0, "training: leave each candidate out of an episode with this probability"
    )
    timeout_s: float = knob(60.0, "total deadline of one call, retries included, seconds")
    ledger: str | None = knob(None, "account and reply cache (sqlite); default: in the run folder")
    max_usd: float | None = knob(None, "spend cap: the run stops before it is passed")
    # the reward (Eq. 5)
    alpha: float = knob(0.0, "weight of the cost reward against the outcome")
    metric: Literal["em", "f1"] = knob("em", "the outcome that is rewarded")
    cost_when_wrong: bool = knob(False, "pay the cost reward for wrong answers too (Eq. 5 as printed)")
    no_format_reward: bool = knob(False, "ablation: malformed text is not punished")
    # limits of a rollout
    max_calls: int = knob(4, "calls a question")
    turn_tokens: int = knob(1024, "own tokens a turn")
    reply_tokens: int = knob(600, "tokens of a reply, tags included; longer ones are cut")
    total_tokens: int = knob(4096, "prompt, own tokens and replies together")
    temperature: float = knob(1.0, "sampling temperature in training")
    eval_temperature: float = knob(
        0.0, "temperature of evaluation; 0 = greedy (the reference implementation: 1)"
    )
    top_p: float = knob(1.0, "nucleus of evaluation (the reference implementation: .95)")
    slots: int = knob(16, "trajectories decoded at once")
    # optimisation
    algo: Literal["ppo", "grpo"] = knob("ppo", "PPO with a critic, or GRPO with group advantages and none")
    steps: int = knob(225, "training steps")
    batch: int = knob(64, "trajectories a step")
    samples_per_question: int = knob(1, "trajectories of each question (the group of GRPO)")
    minibatch: int = knob(32, "trajectories an optimiser step")
    ppo_epochs: int = knob(1, "passes over a batch")
    lr: float = knob(1e-5, "learning rate of the policy adapter")
    critic_lr: float = knob(1e-4, "learning rate of the critic adapter and the value head")
    lr_decay: float = knob(0.0, "share of the steps, the last ones, over which both rates fall to 0")
    gamma: float = knob(1.0, "discount")
    lam: float = knob(1.0, "lambda of GAE")
    clip: float = knob(0.2, "clip of the probability ratio")
    value_clip: float = knob(0.5, "clip of the value's change")
    entropy_coef: float = knob(0.001, "entropy bonus")
    entropy_decay: float = knob(0.0, "share of the steps, the last ones, over which the bonus falls to 0")
    kl_coef: float = knob(0.001, "weight of the KL to the reference")
    kl_in: Literal["reward", "loss"] = knob("reward", "k1 in the reward, or k3 in the loss")
    max_grad_norm: float = knob(1.0, "gradient norms are clipped to this")
    train_on_info: bool = knob(False, "ablation: treat the tokens of replies as actions")
    lora_r: int = knob(16, "rank of the adapters (alpha is twice that)")
    old_logp: Literal["scorer", "sampler"] = knob(
        "scorer", "log-probs before the update: scored again, or those of the draw (one forward pass saved)"
    )
    gradient_checkpointing: bool = knob(True, "compute activations again in the backward pass")
    max_tokens_per_pack: int = knob(16384, "memory knob of the update: tokens of one forward pass")
    sft_steps: int = knob(0, "supervised warm start on demonstrations of the protocol, steps")
    sft_lr: float = knob(3e-4, "learning rate of the warm start")
    # the run
    seed: int = knob(0, "seeds everything")
    run_dir: str | None = knob(None, "run folder; default runs/PRESET-SEED-DATE")
    resume: str | None = knob(None, "run folder to continue")
    save_every: int = knob(20, "steps between checkpoints")
    keep_last: int = knob(2, "checkpoints kept (and the best by EM on dev questions)")
    eval_every: int = knob(0, "steps between evaluations on dev questions; 0 = never")
    eval_questions: int = knob(400, "questions of an evaluation (of each set); 0 = all")
    print_every: int = knob(20, "steps between printed trajectories; 0 = never")
    max_bad_steps: int = knob(5, "steps with a loss or gradient that is not finite before the run stops")

    def __post_init__(self) -> None:
        """Raises ValueError, one line, for values that cannot work."""
        for name in POSITIVE:
            _require(getattr(self, name) > 0, name, getattr(self, name), "must be positive")
        for name in NOT_NEGATIVE:
            _require(getattr(self, name) >= 0, name, getattr(self, name), "must not be negative")
        for name in SHARES:
            _require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "must be between 0 and 1")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "must be above 0 and at most 1")
        _require(self.drop_candidates < 1, "drop_candidates", self.drop_candidates, "must be below 1")
        _require(self.max_usd is None or self.max_usd >= 0, "max_usd", self.max_usd, "must not be negative")
        _require(
            self.minibatch <= self.batch, "minibatch", self.minibatch, f"must not exceed batch {self.batch}"
        )
        _require(
            self.batch % self.samples_per_question == 0,
            "batch",
            self.batch,
            f"must be a multiple of samples_per_question {self.samples_per_question}",
        )
        if self.algo == "grpo":
            _require(
                self.samples_per_question > 1, "samples_per_question", 1, "must be above 1 for --algo grpo"
            )
            _require(self.kl_in == "loss", "kl_in", self.kl_in, "must be loss for --algo grpo")
        _require((self.data == "world") or self.pool not in ("drawn", "full"), "pool", self.pool,
                 "is of the miniature world; for other data give a pool file")  # fmt: skip

    def to_yaml(self) -> str:
        return yaml.safe_dump(asdict(self), sort_keys=False)


def _require(ok: bool, name: str, value: Any, what: str) -> None:
    if not ok or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{name} {value!r} {what}")


def load_config(argv: list[str] | None = None, extra: type | None = None) -> Any:
    """The configuration that the command line asks for: `--config NAME|PATH` (default tiny), then overrides.

    `extra` is a second dataclass with options of the entry point's own; with it, -> (config, extra).
    `--resume DIR` and `--run DIR` take the configuration of that run folder. A mistake ends the program
    with one line, exit code 2.
    """
    from transformers import HfArgumentParser  # a second to import

    argv = [part for arg in (sys.argv[1:] if argv is None else argv) for part in _split(arg)]
    classes = [Config] if extra is None else [Config, extra]
    parser = HfArgumentParser(classes, allow_abbrev=False, description=extra.__doc__ if extra else __doc__)
    parser.add_argument("--config", default="tiny", help="preset in configs/, or a YAML file")
    parser.error = fail  # argparse's own prints the usage first, two screens of it
    known = {name for action in parser._actions for name in action.option_strings}
    try:
        for arg in argv:
            if arg.startswith("--") and arg not in known:
                raise ValueError(f"unknown option {arg}{_nearest(arg, known)}")
        values = vars(parser.parse_args([*_yaml_arguments(_preset(argv)), *argv]))
        parts = [cls(**{f.name: values[f.name] for f in fields(cls)}) for cls in classes]
    except ValueError as error:
        fail(error)
    return parts[0] if extra is None else tuple(parts)


def fail(error: Exception) -> NoReturn:
    """End the program as argparse does for a bad option: one line, exit code 2."""
    print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
    sys.exit(2)


def _split(arg: str) -> list[str]:
    return arg.split("=", 1) if arg.startswith("--") and "=" in arg else [arg]


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""


def _preset(argv: list[str]) -> Path:
    """The YAML file that the command line starts from."""
    given = {flag: value for flag, value in pairwise(argv) if flag in ("--config", "--resume", "--run")}
    run = given.get("--resume") or given.get("--run")
    if run and "--config" not in given:
        if not (Path(run) / "config.yaml").is_file():
            raise ValueError(f"{run} is not a run folder: it has no config.yaml")
        return Path(run) / "config.yaml"
    name = given.get("--config", "tiny")
    path = PRESETS / f"{name}.yaml"
    if path.is_file():
        return path
    if Path(name).is_file():
        return Path(name)
    presets = sorted(p.stem for p in PRESETS.glob("*.yaml"))
    raise ValueError(f"no preset or file {name!r}{_nearest(name, presets)} (presets: {', '.join(presets)})")


def read_yaml(path: Path) -> dict[str, Any]:
    """The keys of a configuration file; raises ValueError, one line, for anything but known keys with plain
    values.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
    names = [f.name for f in fields(Config)]
    if not isinstance(values, dict):
        raise ValueError(f"{path}: not a list of `key: value` lines")
    for key, value in values.items():
        if key not in names:
            raise ValueError(f"{path}: unknown key {key!r}{_nearest(str(key), names)}")
        if isinstance(value, dict | list):
            raise ValueError(f"{path}: {key} takes one plain value")
    return values


def _yaml_arguments(path: Path) -> list[str]:
    # one argument with "=" a key: a value may begin with "-". null leaves the default
    return [f"--{key}={value}" for key, value in read_yaml(path).items() if value is not None]
