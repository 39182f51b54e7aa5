"""Supervised steps on demonstrations: make the tiny base, warm-start small models, and are the SFT baseline.

The loss is cross-entropy on the tokens that the router is to write and on no others: replies are attended to,
never learnt, as in the paper's RL objective (section 3). One denominator a step: the number of those tokens.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from minirouter import tags
from minirouter.packing import micro_batches, pack
from minirouter.trajectory import Question, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Segments = list[tuple[str, bool]]  # texts in turn, True where the router wrote them
Example = tuple[list[int], list[bool]]  # ids, and True where a token is learnt


def encode_segments(
    tokenizer: PreTrainedTokenizerBase, prompt_ids: Sequence[int], segments: Iterable[tuple[str, bool]]
) -> Example:
    """The ids of an episode as the rollout lays them out: the prompt, then each text encoded alone.

    `segments` are (text, whether the router wrote it). The end token is added, and learnt, only after an
    episode that the router ended without an answer: with one, the rollout ends it at the closing tag.
    """
    ids, learnt = list(prompt_ids), [False] * len(prompt_ids)
    segments = list(segments)
    encoded = tokenizer([text for text, _ in segments], add_special_tokens=False)["input_ids"]
    for new, (_, mine) in zip(encoded, segments, strict=True):
        ids += new
        learnt += [mine] * len(new)
    text, mine = segments[-1]
    if mine and not text.rstrip().endswith("</answer>"):
        ids.append(tokenizer.eos_token_id)
        learnt.append(True)
    return ids, learnt


def protocol_demonstrations(
    questions: Sequence[Question], pool: Any, n: int, seed: int, info_tag: str = tags.INFO
) -> Iterator[tuple[Question, Segments]]:
    """n episodes in the paper's format for any pool, to teach the form alone: calls go to random candidates.

    Nobody is really asked: a made-up reply holds a gold answer (.6) or a refusal, so that the router learns
    to take answers from replies, and to go on or give up with "unknown" without one. At most three calls, no
    candidate twice. A question that brings its own pool uses that.
    """
    rng = random.Random(f"protocol {seed}")
    for _ in range(n):
        question = rng.choice(questions)
        candidates = (question.pool or pool).candidates
        segments: Segments = []
        thought, found = "I have to find out who can help with this question.", "unknown"
        for candidate in rng.sample(candidates, min(3, len(candidates))):
            call = tags.render("search", f"{candidate.name}: {question.text}")
            segments.append((f"{tags.render('think', thought)}\n{call}", True))
            known = rng.random() < 0.6
            reply = f"The answer is {question.golds[0]}." if known else "I do not know."
            segments.append((tags.render_reply(reply, info_tag), False))
            thought = "The reply says it." if known else "The reply does not help."
            if known:
                found = question.golds[0]
            if known or rng.random() < 0.3:
                break
        segments.append((f"{tags.render('think', thought)}\n{tags.render('answer', found)}", True))
        yield question, segments


def token_loss(
    logits_of: Callable, examples: Sequence[Example], device: str | torch.device = "cpu"
) -> torch.Tensor:
    """Mean cross-entropy (nats) over the learnt tokens of the examples, as one right-padded forward pass.

    `logits_of(ids (B, T), mask (B, T))` gives logits (B, T, V); padding has id 0 and nothing looks at it.
    """
    longest = max(len(ids) for ids, _ in examples)
    rows = [ids + [0] * (longest - len(ids)) for ids, _ in examples]
    marks = [learnt + [False] * (longest - len(learnt)) for _, learnt in examples]
    lengths = torch.tensor([len(ids) for ids, _ in examples], device=device)
    ids, learnt = torch.tensor(rows, device=device), torch.tensor(marks, device=device)  # (B, T)
    logits = logits_of(ids, torch.arange(longest, device=device) < lengths[:, None])[:, :-1]
    targets = learnt[:, 1:]  # position t predicts token t + 1
    losses = torch.nn.functional.cross_entropy(logits[targets].float(), ids[:, 1:][targets], reduction="sum")
    return losses / targets.sum().clamp(min=1)  # a batch without learnt tokens: 0, not NaN


def supervised_steps(
    logits_of: Callable,
    parameters: Iterable[torch.nn.Parameter],
    batches: Iterable[Sequence[Example]],
    steps: int,
    lr: float,
    cosine: bool = True,
    device: str | torch.device = "cpu",
) -> Iterator[float]:
    """AdamW for `steps` steps, one batch each. After 2 % of warm-up the rate stays, or falls along a cosine.

    Yields the loss of each step, in nats a token: nothing happens unless you iterate, and you may stop early.
    It stops by itself when the batches end.
    """
    parameters = list(parameters)
    optimiser = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01, betas=(0.9, 0.98))
    for step, batch in zip(range(steps), batches, strict=False):
        warm = min(1.0, (step + 1) / max(1, steps // 50))
        for group in optimiser.param_groups:
            group["lr"] = lr * warm * (0.5 + 0.5 * math.cos(math.pi * step / steps) if cosine else 1.0)
        loss = token_loss(logits_of, batch, device)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        yield loss.item()


def warm_start(
    router: Any,
    task: Any,
    questions: Sequence[Question],
    steps: int,
    lr: float,
    seed: int,
    batch: int = 8,
    max_tokens: int = 8192,
) -> list[float]:
    """Teach the policy adapter the form of the protocol; a frozen copy of the result becomes the reference.

    `steps` steps on `batch` episodes each of `protocol_demonstrations`, by the packed forward pass of the
    update: the loss is minus the mean log-prob of what the router is to write. -> loss of each step, nats.
    """
    shown = []
    for question, segments in protocol_demonstrations(
        questions, task.pool, steps * batch, seed, task.info_tag
    ):
        prompt = task.prompts([question])[0]
        ids, learnt = encode_segments(router.tokenizer, prompt, segments)
        shown.append(Trajectory(len(prompt), ids, learnt, [None] * len(ids)))
    optimiser = torch.optim.AdamW(router.parameters("policy"), lr=lr, weight_decay=0.01)
    losses = []
    for start in range(0, len(shown), batch):
        chosen = shown[start : start + batch]
        learnt = sum(len(t.actions) for t in chosen)
        losses.append(0.0)
        for rows in micro_batches(chosen, max_tokens):
            loss = -router.logp(pack([chosen[i] for i in rows]))[0].sum() / learnt
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(router.parameters("policy"), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
    router.freeze_reference()
    return losses
