"""What the benchmarks share: a model, turns that end where a plan says, alternating measurement, the table.

The versions of a comparison take turns (A B A B ...) in one process, so that whatever else the machine does
meets both alike. What is reported is the ratio of their medians, with the smallest and the largest ratio
of two neighbouring runs. Times in seconds are not comparable between machines; ratios nearly are.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, StoppingCriteria

import minirouter.rollout as rollout_module
from minirouter.load import load_model
from minirouter.model import PackedLinear, Router
from minirouter.rollout import Episode, rollout
from minirouter.trajectory import Candidate, Limits, Reply, Trajectory

OUT = Path(__file__).parent / "out"
LAST_START = 60.0  # seconds: so that a benchmark takes minutes on a slow machine too
BASE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 16384}  # 31 M
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 256}


# ---- models


def options(doc: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc.split("\n")[0])
    parser.add_argument("--model", default="", help="folder of a real model; default: a random Llama, 31 M")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each version, at most")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes: does it run, no figures")
    parser.add_argument("--threads", type=int, default=0, help="of torch; default: as it likes")
    given = parser.parse_args(argv)
    keep_freed_memory()
    if given.threads:
        torch.set_num_threads(given.threads)
    return given


def keep_freed_memory() -> None:
    """Stop glibc from giving the memory of large tensors back to the system after each use, for both sides:
    fresh pages cost a third of the time of a long prefill.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(-4, 0)  # M_MMAP_MAX: no block of its own for any tensor
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def word_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """One token a word, "0" to "SIZE - 1": texts and ids have the same length, both ways."""
    core = Tokenizer(models.WordLevel({str(i): i for i in range(size)}, unk_token="0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="0", eos_token="1", padding_side="left")


def base(given: argparse.Namespace) -> tuple[Any, Any]:
    """(model, tokenizer), float32 and frozen: the same numbers at every call."""
    if given.model:
        model, tokenizer = load_model(given.model, dtype=torch.float32)
        tokenizer.padding_side = "left"
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return model, tokenizer
    shape = TINY if given.tiny else BASE
    config = LlamaConfig(
        **shape,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=shape["hidden_size"] // 8,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        eos_token_id=None,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    return model.eval().requires_grad_(False), word_tokenizer(shape["vocab_size"])


def router_of(given: argparse.Namespace, **more: Any) -> Router:
    """The base with adapters of rank 16 that are not zero, as minirouter runs it."""
    torch.manual_seed(0)
    model, tokenizer = base(given)
    router = Router(model, tokenizer, **({"lora_r": 16} | more))
    for name, p in router.model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(std=0.01)
    return router


def library_router(given: argparse.Namespace, **more: Any) -> Router:
    """The same numbers as the library keeps and attends to them, without what `model.prepare` does."""
    router = router_of(given, **more)
    for layer in router.model.modules():
        if isinstance(layer, PackedLinear):
            layer.__class__ = nn.Linear
    router.model.get_base_model().set_attn_implementation("sdpa")
    router.reads_prefix = False
    return router


# ---- turns that end where a plan says


@dataclass(frozen=True)
class Plan:
    """One trajectory: tokens of each turn, and tokens and delay in seconds of each reply between them."""

    turns: tuple[int, ...]
    replies: tuple[int, ...]
    delays: tuple[float, ...]


class PlannedPool:
    """Answers call after call of one trajectory as planned."""

    names = ("a",)
    candidates = (Candidate("a", 1.0),)

    def __init__(self, plan: Plan, words: list[str]) -> None:
        self.plan = plan
        self.words = words
        self.asked = 0
        self.instant = not any(plan.delays)

    def ask(self, name: str, query: str) -> Reply:
        n, self.asked = self.asked, self.asked + 1
        time.sleep(self.plan.delays[n])
        return Reply(" ".join(self.words[: self.plan.replies[n]]))


@dataclass(frozen=True)
class Ending:
    """Stands in for `rollout.Speech` in the decision whether a drawn token ends the turn, and how."""

    text: str = ""
    stop_ids: frozenset[int] = frozenset()

    @property
    def closers(self) -> Any:
        return range(10**9) if self.text else ()

    def decode(self, ids: list[int]) -> str:
        return self.text


CALL, ANSWER, ON = Ending("<search> a: b </search>"), Ending("<answer> c </answer>"), Ending()


class PlannedEpisode(Episode):
    """An episode whose turns end at the planned token. Whatever is computed is computed as always."""

    def take(self, token: int, logp: float, speech: Any, limits: Limits) -> Any:
        turns, turn = self.pool.plan.turns, len(self.trajectory.calls)
        over = len(self.turn) + 1 == turns[turn]
        return super().take(token, logp, (CALL if turn < len(turns) - 1 else ANSWER) if over else ON, limits)


def planned_rollout(
    router: Router, prompts: list[list[int]], plans: list[Plan], limits: Limits, words: list[str]
) -> list[Trajectory]:
    """minirouter's rollout of the plans."""
    with patch.object(rollout_module, "Episode", PlannedEpisode):
        return rollout(router, prompts, [PlannedPool(plan, words) for plan in plans], limits, seed=0)


class EndOfTurn(StoppingCriteria):
    """Rows end after their own numbers of new tokens."""

    def __init__(self, start: int, lengths: list[int]) -> None:
        self.ends = torch.tensor([start + n for n in lengths])

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.ends.to(input_ids.device) <= input_ids.shape[1]


def lockstep_rollout(
    router: Router, prompts: list[str], plans: list[Plan], limits: Limits, words: list[str]
) -> list[str]:
    """What a competent user writes around `model.generate`: batches of `slots` questions, left-padded; in
    each turn all contexts are encoded and prefilled whole, all replies are awaited together, and only
    episodes that go on are in the next turn.
    """
    tokenizer, texts = router.tokenizer, list(prompts)
    pools = [PlannedPool(plan, words) for plan in plans]
    with ThreadPoolExecutor(max_workers=limits.slots) as threads:
        for first in range(0, len(texts), limits.slots):
            live = list(range(first, min(first + limits.slots, len(texts))))
            while live:
                inputs = tokenizer(
                    [texts[i] for i in live], return_tensors="pt", padding=True, add_special_tokens=False
                )
                inputs = {name: inputs[name].to(router.device) for name in ("input_ids", "attention_mask")}
                start = inputs["input_ids"].shape[1]
                lengths = [plans[i].turns[pools[i].asked] for i in live]
                out = router.model.generate(
                    **inputs,
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    max_new_tokens=max(lengths),
                    eos_token_id=None,
                    pad_token_id=tokenizer.pad_token_id,
                    stopping_criteria=[EndOfTurn(start, lengths)],
                )
                for i, row, n in zip(live, out[:, start:].tolist(), lengths, strict=True):
                    texts[i] += " " + tokenizer.decode(row[:n])
                live = [i for i in live if pools[i].asked < len(plans[i].replies)]
                for i, reply in zip(live, threads.map(lambda i: pools[i].ask("a", "b"), live), strict=True):
                    texts[i] += " " + reply.text
    return texts


def prompts_of(router: Router, n: int, common: int, own: int) -> tuple[list[list[int]], list[str], list[str]]:
    """n prompts with a common beginning, as ids and as text, and words for replies (one token each)."""
    rng = random.Random(0)
    vocab = min(router.config.vocab_size, len(router.tokenizer))
    ids = [rng.randrange(2, vocab) for _ in range(common)]
    rows = [ids + [rng.randrange(2, vocab) for _ in range(own)] for _ in range(n)]
    words = [router.tokenizer.decode([rng.randrange(2, vocab)]) for _ in range(1024)]
    return rows, [router.tokenizer.decode(row) for row in rows], words


# ---- measurement


@dataclass(frozen=True)
class Timing:
    """Seconds of each run: on the clock, and of processor time, summed over threads."""

    wall: list[float]
    cpu: list[float]


def alternate(versions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Timing]:
    """Run the versions in turn, `rounds` times each, but begin no round after a minute; the caller has warmed
    them up.
    """
    timings = {name: Timing([], []) for name in versions}
    start = time.perf_counter()
    for n in range(rounds):
        if n and time.perf_counter() - start > LAST_START:
            break
        for name, work in versions.items():
            wall, cpu = time.perf_counter(), time.process_time()
            work()
            timings[name].wall.append(time.perf_counter() - wall)
            timings[name].cpu.append(time.process_time() - cpu)
    return timings


def spread(values: Sequence[float], unit: str = "") -> str:
    """Median, and in brackets the smallest and the largest."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.3g}{unit} [{low:.3g} .. {high:.3g}]"


def compare(timings: dict[str, Timing], slow: str, fast: str, per: float = 1.0) -> dict[str, Any]:
    """One row of a table: both times (divided by `per`), and how many times faster `fast` is."""
    a, b = timings[slow], timings[fast]
    ratios = [x / y for x, y in zip(a.wall, b.wall, strict=True)]
    cpu = [x / y for x, y in zip(a.cpu, b.cpu, strict=True)]
    return {
        f"{slow}, s": spread([x / per for x in a.wall]),
        f"{fast}, s": spread([x / per for x in b.wall]),
        "ratio": f"{statistics.median(a.wall) / statistics.median(b.wall):.2f}x "
        f"[{min(ratios):.2f} .. {max(ratios):.2f}]",
        "ratio of CPU time": f"{statistics.median(a.cpu) / statistics.median(b.cpu):.2f}x "
        f"[{min(cpu):.2f} .. {max(cpu):.2f}]",
    }


def report(name: str, given: argparse.Namespace, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print the rows as a Markdown table and, unless the sizes are tiny, keep them as JSON."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns), *([str(row.get(c, "")) for c in columns] for row in rows)]
    print(f"\n### {name} ({given.model or 'random Llama, 31 M'}, {machine()})\n")
    print("\n".join("| " + " | ".join(line) + " |" for line in lines), flush=True)
    if not given.tiny:
        OUT.mkdir(exist_ok=True)
        record = {"benchmark": name, "model": given.model, "machine": machine(), "rows": rows}
        (OUT / f"{name}{'-real' * bool(given.model)}.json").write_text(json.dumps(record, indent=1) + "\n")
    return rows


def machine() -> str:
    """Threads and load, which say how far the figures can be trusted."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    load = f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}"
    return f"{device}, {load}, torch {torch.__version__}"
