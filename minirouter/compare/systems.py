"""The systems that the paper compares with (Tables 1 and 4), each a function (bench, questions) -> outcomes.

As in the paper, a single-round router picks one candidate, and the *untrained base* writes the final answer
from its reply. All systems get the same questions and pools, pay by `Reply.cost`, and are scored by the same
EM. Choices the paper leaves open: where nobody is picked the base answers alone; "Largest" is the dearest
candidate (as Mixtral is in the paper's pool); the starred versions ask in turn through the base's own
protocol where the base is the tiny one, and split first, then ask, where it is an instruct model.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from minirouter import facts, sft, world
from minirouter.record import label
from minirouter.reward import exact_match, extract_answer
from minirouter.rollout import rollout
from minirouter.tags import format_error
from minirouter.trajectory import Call, Candidate, Question, Reply, Trajectory

from . import prompts
from .prompts import Bench


@dataclass(frozen=True)
class Outcome:
    """What came of one question: the answer, the calls made for it, and the text where a router wrote it."""

    answer: str | None
    calls: tuple[Call, ...] = ()
    trajectory: Trajectory | None = None
    format_ok: bool = True

    @property
    def cost(self) -> float:
        """USD per 1M such questions."""
        return sum(call.reply.cost for call in self.calls)


System = Callable[[Bench, Sequence[Question]], list[Outcome]]
Choose = Callable[[Question, Any], Candidate | None]  # question and pool -> whom to ask; None: nobody


# ---- the base alone, and with a retriever


def direct(bench: Bench, questions: Sequence[Question]) -> list[Outcome]:
    """The base answers at once."""
    return [Outcome(prompts.answer_of(t), trajectory=t) for t in prompts.direct(bench, questions)]


def cot(bench: Bench, questions: Sequence[Question]) -> list[Outcome]:
    """The base thinks, then answers."""
    return [Outcome(prompts.answer_of(t), trajectory=t) for t in prompts.direct(bench, questions, "CoT")]


def sft_baseline(bench: Bench, questions: Sequence[Question]) -> list[Outcome]:
    """Supervised LoRA on question -> `<answer>`, then as Direct; afterwards the base is as it was."""
    router, lr = bench.base, 1e-3 if bench.protocol else 2e-4
    rng = random.Random(f"sft {bench.seed}")
    known = bench.task.questions("train")

    def batches():
        while True:
            drawn = rng.sample(known, min(32, len(known)))
            asked = prompts.direct_prompts(bench, drawn)
            yield [
                sft.encode_segments(router.tokenizer, ids, [(f"<answer> {q.golds[0]} </answer>", True)])
                for ids, q in zip(asked, drawn, strict=True)
            ]

    def logits_of(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return router.logits(router.hidden(ids, positions, None))  # right padding: nobody looks at it

    weights = router.parameters("policy")
    with borrowed(weights):
        router.model.train()
        for _ in sft.supervised_steps(
            logits_of, weights, batches(), bench.sft_steps, lr, device=router.device
        ):
            pass
        return direct(bench, questions)


@contextmanager
def borrowed(weights: Sequence[torch.nn.Parameter], values: Sequence[torch.Tensor] | None = None):
    """Train or replace weights inside; afterwards they are what they were."""
    before = [w.detach().clone() for w in weights]
    _put(weights, values or before)
    try:
        yield
    finally:
        _put(weights, before)


def rag(bench: Bench, questions: Sequence[Question]) -> list[Outcome]:
    """One retrieval with the question, one answer."""
    pools = [bench.retriever] * len(questions)
    return single_round(bench, questions, lambda question, pool: pool.candidates[0], pools)


# ---- single-round routers


def single_round(
    bench: Bench, questions: Sequence[Question], choose: Choose, pools: Sequence[Any] | None = None
) -> list[Outcome]:
    """Ask the chosen candidate the question itself; its reply goes to the base, which answers."""
    pools = pools or bench.task.pools(questions)
    chosen = [choose(q, pool) for q, pool in zip(questions, pools, strict=True)]
    return answer_with(bench, questions, pools, chosen)


def answer_with(
    bench: Bench, questions: Sequence[Question], pools: Sequence[Any], chosen: Sequence[Candidate | None]
) -> list[Outcome]:
    """The same for candidates that are chosen already."""
    asked = [i for i, candidate in enumerate(chosen) if candidate]
    alone = [i for i, candidate in enumerate(chosen) if not candidate]
    calls = prompts.ask(bench, [(pools[i], chosen[i], questions[i].text) for i in asked])
    written = prompts.with_replies(
        bench, [questions[i] for i in asked], [pools[i] for i in asked], [[c] for c in calls]
    )
    found = {i: Outcome(prompts.answer_of(t), (c,), t) for i, t, c in zip(asked, written, calls, strict=True)}
    found |= dict(zip(alone, direct(bench, [questions[i] for i in alone]), strict=True))
    return [found[i] for i in range(len(questions))]


def dearest(question: Question, pool: Any) -> Candidate:
    """Largest LLM: the candidate with the highest price."""
    return max(pool.candidates, key=lambda candidate: candidate.price)


def anybody(question: Question, pool: Any) -> Candidate:
    """Random, but the same for the same question."""
    return random.Random(f"anybody {question.id}").choice(pool.candidates)


def only(wanted: str) -> Choose:
    """A single LLM: the cheapest line of that label, the dearest candidate where a drawn pool has none."""

    def choose(question: Question, pool: Any) -> Candidate:
        return cheapest_of(pool, wanted) or dearest(question, pool)

    return choose


def cheapest_of(pool: Any, wanted: str) -> Candidate | None:
    """The cheapest candidate with that label (record.label), or None."""
    mine = [candidate for candidate in pool.candidates if label(candidate) == wanted]
    return min(mine, key=lambda candidate: candidate.price, default=None)


def prompt_llm(bench: Bench, questions: Sequence[Question]) -> list[Outcome]:
    """The untrained base picks."""
    pools = bench.task.pools(questions)
    return answer_with(bench, questions, pools, prompts.pick(bench, questions, pools))


def everybody(bench: Bench, questions: Sequence[Question]) -> list[list[tuple[Candidate, Outcome]]]:
    """For each question, every candidate of its pool and what comes of asking it: the collected table."""
    pools = bench.task.pools(questions)
    pairs = [(q, pool, c) for q, pool in zip(questions, pools, strict=True) for c in pool.candidates]
    outcomes = iter(answer_with(bench, *map(list, zip(*pairs, strict=True))))
    return [[(c, next(outcomes)) for c in pool.candidates] for pool in pools]


def oracle(bench: Bench, questions: Sequence[Question]) -> list[Outcome]:
    """With hindsight: the cheapest single round, or no call at all, that gives the right answer; else no
    call.
    """
    best = direct(bench, questions)
    for i, (question, tried) in enumerate(zip(questions, everybody(bench, questions), strict=True)):
        right = [o for o in (best[i], *(o for _, o in tried)) if exact_match(o.answer, question.golds)]
        best[i] = min(right, key=lambda outcome: outcome.cost, default=best[i])
    return best


# ---- several rounds


def loop(bench: Bench, questions: Sequence[Question], router: Any = None) -> list[Outcome]:
    """The protocol itself: minirouter and Search-R1 with a trained `router`, else the untrained base."""
    pools, task = bench.task.pools(questions), bench.task
    trajectories = rollout(
        router or bench.base, task.prompts(questions), pools, bench.limits, bench.seed, task.info_tag
    )
    return [
        Outcome(extract_answer(t.text), tuple(t.calls), t, format_error(t.text, pool.names) is None)
        for t, pool in zip(trajectories, pools, strict=True)
    ]


@dataclass(frozen=True)
class Redirected:
    """A pool in which somebody else decides who answers a query: for the starred routers of the tiny base."""

    pool: Any
    choose: Choose

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)

    def ask(self, name: str, query: str) -> Reply:
        candidate = self.choose(Question("", query, ()), self.pool)
        return self.pool.ask(candidate.name if candidate else name, query)


def starred(bench: Bench, questions: Sequence[Question], choose: Choose | None = None) -> list[Outcome]:
    """Prompt LLM* (the base also picks) and, with `choose`, KNN Router*: sub-questions first, then the
    answer.
    """
    if bench.protocol:
        pools = bench.task.pools(questions)
        shown = [
            replace(q, pool=Redirected(p, choose) if choose else p)
            for q, p in zip(questions, pools, strict=True)
        ]
        return loop(bench, shown)
    pools, parts = bench.task.pools(questions), prompts.split(bench, questions)
    flat = [(Question(q.id, part, ()), pool) for q, pool, own in zip(questions, pools, parts, strict=True)
            for part in own]  # fmt: skip
    if choose:
        chosen = [choose(part, pool) for part, pool in flat]
    else:
        chosen = prompts.pick(bench, [part for part, _ in flat], [pool for _, pool in flat])
    wanted = [
        (pool, c or dearest(part, pool), part.text) for (part, pool), c in zip(flat, chosen, strict=True)
    ]
    made = iter(prompts.ask(bench, wanted))
    calls = [[next(made) for _ in own] for own in parts]
    written = prompts.with_replies(bench, questions, pools, calls)
    return [Outcome(prompts.answer_of(t), tuple(c), t) for t, c in zip(written, calls, strict=True)]


def by_hand(bench: Bench, questions: Sequence[Question]) -> list[Outcome]:
    """The miniature's ceiling, written by somebody who knows the world: each hop to the cheapest expert, to
    the dearest candidate if that is missing or refuses; what the router knows itself it answers itself.
    """
    alone, outcomes = direct(bench, questions), []
    for question, pool, own in zip(questions, bench.task.pools(questions), alone, strict=True):
        relations, subject = facts.parse(question.text)
        calls: list[Call] = []
        for relation in relations if question.kind != "own" else ():
            calls += _expert_first(question, pool, relation, subject)
            subject = world.told(calls[-1].reply.text)
        outcomes.append(Outcome(subject, tuple(calls)) if calls else own)
    return outcomes


def _expert_first(question: Question, pool: Any, relation: str, subject: str) -> list[Call]:
    """The calls for one hop: the cheapest expert if there is one, the dearest candidate if it refused."""
    query, calls = facts.ask_for((relation,), subject), []
    for candidate in filter(None, (cheapest_of(pool, facts.RELATIONS[relation][0]), dearest(question, pool))):
        if not calls or calls[-1].reply.refused:
            calls.append(Call(candidate.name, query, pool.ask(candidate.name, query)))
    return calls


def _put(weights: Sequence[torch.nn.Parameter], values: Sequence[torch.Tensor]) -> None:
    with torch.no_grad():
        for weight, value in zip(weights, values, strict=True):
            weight.copy_(value)
