"""What the benchmarks share: a model, and turns that end where a plan says."""

from __future__ import annotations

import argparse
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, StoppingCriteria

import minirouter.rollout as rollout_module
from minirouter.load import load_model
from minirouter.model import Router
from minirouter.rollout import Episode, rollout
from minirouter.trajectory import Candidate, Limits, Reply, Trajectory

BASE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 16384}  # 31 M
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 256}


# ---- models


def word_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """One token a word, "2" to "SIZE - 1": texts and ids have the same length, both ways. Special tokens are
    found inside words too, so that theirs hold no digit.
    """
    words = ["<pad>", "<eos>", *map(str, range(2, size))]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, padding_side="left", **special)


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
    """The same model with the library's own attention."""
    router = router_of(given, **more)
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
    """n prompts with a common beginning, as ids and as text, and words for replies.

    A word is one token, so that nothing grows when text is encoded again.
    """
    rng, tokenizer = random.Random(0), router.tokenizer
    vocab = min(router.config.vocab_size, len(tokenizer))
    found = (tokenizer.decode([i]).strip() for i in rng.sample(range(2, vocab), min(4096, vocab - 2)))
    words = [w for w in found if w.isalnum() and len(_encode(tokenizer, f"{w} {w}")) == 2]
    start = rng.choices(words, k=common)
    texts = [" ".join(start + rng.choices(words, k=own)) for _ in range(n)]
    return [_encode(tokenizer, text) for text in texts], texts, words


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)
