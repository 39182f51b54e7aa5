"""A router without a network, behind the real cache interface, and what else the tests of rollouts need.

The scripted router writes each id that it is fed, with its position, as a key into the cache, reads back the
columns that its mask lets it see, and requires that these are ids at positions 0..n-1 without a gap. What
comes next it asks of `follow`, which knows nothing but these ids. A misplaced key, a wrong mask, a wrong
position, a lost or a doubled token therefore fails at once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any

import torch
from families import SHAPE, byte_tokenizer, tiny

from minirouter.model import Router
from minirouter.trajectory import Candidate, Limits, Reply, Trajectory

VOCAB = SHAPE["vocab_size"]
LAYERS = 2
NEVER = -1e4  # a logit whose probability is exactly 0 in fp32

Follow = Callable[[list[int]], torch.Tensor]


class ScriptedRouter:
    """`follow` maps the ids of a row so far to logits (V,). `fed` counts ids, `shapes` lists (R, T)."""

    device = torch.device("cpu")

    def __init__(self, follow: Follow, tokenizer: Any = None, stop_ids: Sequence[int] = (2,)) -> None:
        self.follow = follow
        self.tokenizer = tokenizer or byte_tokenizer()
        self.stop_ids = frozenset(stop_ids)
        self.fed = 0
        self.shapes: list[tuple[int, int]] = []

    def forward_cached(self, ids, positions, mask, cache):
        """(R, T) ids on top of a cache -> hidden states (R, T, V), which are the logits."""
        told = torch.stack([ids, positions], dim=-1)[:, None].float()  # (R, 1, T, 2)
        for layer in range(LAYERS):
            keys, values = cache.update(told + layer, -told - layer, layer)
            keys = keys - layer  # (R, 1, C, 2)
            values = values + layer
        assert mask.dtype == torch.bool
        assert mask.shape == (ids.shape[0], 1, ids.shape[1], keys.shape[2])
        hidden = torch.full((*ids.shape, VOCAB), torch.nan)  # padding stays NaN: reading it fails
        for r, t in product(*map(range, ids.shape)):
            if t > 0 and positions[r, t] == 0:  # padding of a ragged chunk
                continue
            visible = mask[r, 0, t]
            seen, places = keys[r, 0, visible].long().T.tolist()
            assert places == list(range(int(positions[r, t]) + 1)), f"positions {places}"
            assert seen[-1] == ids[r, t]
            assert torch.equal(values[r, 0, visible], -keys[r, 0, visible])
            hidden[r, t] = self.follow(seen)
            self.fed += 1
        self.shapes.append(tuple(ids.shape))
        return hidden

    def logits(self, hidden):
        return hidden

    def decoding(self):
        return nullcontext()


def plans(*rows: list[int]) -> Follow:
    """Follow whichever of the whole sequences begins with what was seen; anything else is a fault."""

    def follow(seen: list[int]) -> torch.Tensor:
        row = next((row for row in rows if row[: len(seen)] == seen), None)
        assert row is not None, f"no plan begins with what the router sees: {seen}"
        assert len(seen) < len(row), "fed after the end of its plan"
        return one_hot(row[len(seen)])

    return follow


def one_hot(token: int) -> torch.Tensor:
    logits = torch.full((VOCAB,), NEVER)
    logits[token] = 0.0
    return logits


def babble(tokenizer: Any, names: Sequence[str] = ("a", "b"), letters: str = "klmn") -> Follow:
    """Random thoughts, calls and answers, byte by byte, that depend on every id seen: the same ids give the
    same logits, bit for bit, in any batch."""

    def follow(seen: list[int]) -> torch.Tensor:
        text = tokenizer.decode(seen)
        own = text[max(text.rfind(end) + len(end) for end in ("</info>\n\n", "assistant\n")) :]
        noise = random.Random(repr(seen))
        tag, _, rest = own.partition("<")
        if tag == own:
            choices = {letter: noise.gauss(0, 1) for letter in letters} | {"<": -0.5}
        elif not rest:
            choices = {"s": 1.0, "a": 0.0}
        else:
            name = names[len(tag) % len(names)]
            whole = f"search>{name}: {tag}</search>" if rest[0] == "s" else f"answer>{tag}</answer>"
            choices = {whole[len(rest)] if whole.startswith(rest) and rest != whole else "k": 0.0}
        logits = torch.full((VOCAB,), NEVER)
        for letter, logit in choices.items():
            logits[tokenizer.convert_tokens_to_ids(letter.replace(" ", "Ġ"))] = logit
        return logits

    return follow


class EchoPool:
    """Answers "NAME heard QUERY", or what `say` makes of both, at once; in a thread unless `instant`."""

    def __init__(self, say: Callable[[str, str], str] | None = None, instant: bool = True) -> None:
        self.instant = instant
        self.say = say or (lambda name, query: f"{name} heard {query}")
        self.names = ("a", "b")
        self.candidates = tuple(Candidate(name, 1.0) for name in self.names)
        self.asked: list[tuple[str, str]] = []

    def ask(self, name: str, query: str) -> Reply:
        self.asked.append((name, query))
        return Reply(self.say(name, query), candidate=name, price=1.0, tokens=7, cost=7.0)


class LatePool(EchoPool):
    """Holds two of its replies back until three later ones are out, however slow the machine is."""

    HELD = (0, 3)

    def __init__(self) -> None:
        super().__init__(instant=False)
        self.answered: list[tuple[str, str]] = []

    def ask(self, name: str, query: str) -> Reply:
        held = len(self.asked) in self.HELD
        reply = super().ask(name, query)
        wanted, give_up = len(self.answered) + 3, time.monotonic() + 60
        while held and len(self.answered) < wanted and time.monotonic() < give_up:
            time.sleep(0.005)
        self.answered.append((name, query))
        return reply


def limits(**changes: Any) -> Limits:
    """Wide budgets, with `changes`."""
    wide = {"max_calls": 4, "turn_tokens": 200, "reply_tokens": 200, "total_tokens": 500}
    return Limits(**(wide | {"slots": 4, "temperature": 1.0} | changes))


def chatty() -> Any:
    """The byte tokenizer with tokens that are whole calls and answers, so that a random model makes some."""
    tokenizer = byte_tokenizer()
    calls = [f"<search>{name}: {i}</search>" for name in "ab" for i in range(14)]
    tokenizer.add_tokens([*calls, "<answer>x</answer>", "<answer>y</answer>"])
    return tokenizer


def random_router(family: str = "llama", seed: int = 0, shaken: bool = True, **options: Any) -> Router:
    """A tiny random model with both adapters, far from zero unless not `shaken`."""
    model, _ = tiny(family, seed)
    torch.manual_seed(seed)
    router = Router(model, chatty(), **({"lora_r": 4} | options))
    if shaken:
        shake(router, seed)
    return router


@torch.no_grad()
def shake(router: Router, seed: int = 0) -> None:
    """Give every adapter and the value head random values: fresh adapters change nothing yet."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in router.model.named_parameters():
        if "lora_B" in name:
            p.copy_(0.1 * torch.randn(p.shape, generator=generator))
    for p in router.value_head.parameters():
        p.copy_(0.3 * torch.randn(p.shape, generator=generator))


def random_ids(rng: random.Random, n: int) -> list[int]:
    """Any ids, the pad and end ids among them."""
    return [rng.randrange(VOCAB) for _ in range(n)]


def spoken(rng: random.Random, prompt: list[int], parts: Sequence[int], calls: Sequence = ()) -> Trajectory:
    """Random ids after the prompt: n of the router's own for each n > 0, a reply of -n for each n < 0."""
    t = Trajectory(prompt_len=len(prompt), calls=list(calls), finish="answer")
    t.append(list(prompt))
    for n in parts:
        t.append(random_ids(rng, abs(n)), [-1.0] * n if n > 0 else None)
    return t


def plain_logp_entropy(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What `head.logp_entropy` must equal, from finite logits (N, V) all at once."""
    logps = logits.float().log_softmax(-1)
    return logps.gather(-1, ids[:, None])[:, 0], -(logps.exp() * logps).sum(-1)
