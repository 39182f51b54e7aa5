"""The miniature world: simulated LLMs, pools, questions about `facts`, and demonstrations of the protocol.

It stands in for the benchmarks and the candidate LLMs of the paper (section 4), so that PPO on a tiny
transformer shows every effect of the method on a laptop: answers that the router cannot know, cheap
specialists, a dear and wordy generalist, and a pool drawn anew for each episode, so that only reading the
descriptors helps. Unlike in the paper, a candidate is right or wrong by a hash of its name and the fact.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from minirouter import tags
from minirouter.facts import (
    COMPOSITIONS,
    ENTITIES,
    FIRST,
    NEW,
    RELATIONS,
    SECOND,
    TOPICS,
    answer,
    ask_for,
    invented_words,
    other,
    parse,
    split_of,
    unit,
)
from minirouter.trajectory import Candidate, Question, Reply

NAMES = tuple(invented_words(192, "nr"))
TRAIN_NAMES, UNSEEN_NAMES = NAMES[:128], NAMES[128:]  # of candidates; the latter no demonstration has

# ---- simulated LLMs


class Level(NamedTuple):
    """How good, how dear and how wordy a simulated LLM is: shares of facts, USD per 1M tokens."""

    prices: tuple[int, ...]
    right: float  # on one hop; an expert's, in its topic
    two_hop: float  # on a whole two-hop question
    wrong: float  # of what it does not know: a wrong fact; otherwise it says so
    told: str
    refusal: str


LEVELS = {  # replies of 5, 8 and 10 tokens
    "expert": Level((1, 2, 3), 0.92, 0.04, 0.1, "it is {} .", "sorry i do not know"),
    "middling": Level(
        (2, 3, 4, 5), 0.6, 0.15, 0.3, "i think the answer is {} .", "sorry but i do not know about that"
    ),
    "large": Level(
        (5, 6, 7, 8, 9),
        0.93,
        0.4,
        0.3,
        "based on what i know it is {} .",
        "i am sorry but i do not know about that",
    ),
}
ELSEWHERE = 0.04  # an expert on one hop of another topic
DESCRIPTORS = (*TOPICS, "middling", "large")
_FUNCTION_WORDS = (
    "pool question of : . ? ask both know stop unknown no such candidate call must read name query"
)


def vocabulary() -> list[str]:
    """Every word that a prompt, a reply or a demonstration can hold, tags left out: for the tokenizer."""
    words = [*_FUNCTION_WORDS.split(), *DESCRIPTORS, *RELATIONS, *(f"${price}" for price in range(10))]
    words += [word for level in LEVELS.values() for word in f"{level.told} {level.refusal}".split()]
    return [word for word in dict.fromkeys([*words, *NAMES, *FIRST, *SECOND]) if word != "{}"]


def level_of(candidate: Candidate) -> tuple[str, list[str]]:
    """The level and the topics that the words of a descriptor announce. Raises ValueError if none does."""
    said = [word for word in re.findall(r"\w+", candidate.descriptor.casefold()) if word in DESCRIPTORS]
    if not said:
        expected = f"none of {', '.join(DESCRIPTORS)} in its descriptor"
        raise ValueError(f"candidate {candidate.name!r} cannot be simulated: {expected}")
    return next((word for word in said if word in LEVELS), "expert"), [
        word for word in said if word in TOPICS
    ]


def belief(candidate: Candidate, relations: Sequence[str], head: str) -> str | None:
    """What this candidate holds to be the answer, right or wrong; None if it says that it does not know.

    A hash of the fact and of the LLM behind the name: its `model`, if it has one.
    """
    name, truth, key = candidate.model or candidate.name, answer(relations, head), ask_for(relations, head)
    level_name, expert_in = level_of(candidate)
    level = LEVELS[level_name]
    stranger = level_name == "expert" and RELATIONS[relations[0]][0] not in expert_in
    skill = level.two_hop if len(relations) == 2 else ELSEWHERE if stranger else level.right
    if unit("knows", name, key) < skill:
        return truth
    if unit("errs", name, key) < level.wrong:
        return other(ENTITIES[RELATIONS[relations[-1]][2]], truth, "error", name, key)
    return None


@dataclass(frozen=True)
class SimulatedPool:
    """Candidates that answer as their descriptors announce. Raises ValueError where one announces nothing."""

    candidates: tuple[Candidate, ...]
    instant = True

    def __post_init__(self) -> None:
        for candidate in self.candidates:
            level_of(candidate)

    @property
    def names(self) -> tuple[str, ...]:
        """Every accepted spelling."""
        return tuple(name for candidate in self.candidates for name in (candidate.name, *candidate.aliases))

    def find(self, name: str) -> Candidate | None:
        """The candidate that this spelling means, after case-folding and trimming."""
        found = [c for c in self.candidates if tags.resolve(name, (c.name, *c.aliases)) is not None]
        return found[0] if found else None

    def subset(self, names: Sequence[str]) -> SimulatedPool:
        """The same pool with these candidates (canonical names) in this order."""
        by_name = {candidate.name: candidate for candidate in self.candidates}
        return SimulatedPool(tuple(by_name[name] for name in names))

    def ask(self, name: str, query: str) -> Reply:
        """Answer at once. Cost = words of the reply x price; nonsense is refused, and paid for."""
        candidate = self.find(name)
        if candidate is None:
            return Reply("no such candidate", status="unknown")
        level, parsed = LEVELS[level_of(candidate)[0]], parse(query)
        held = belief(candidate, *parsed) if parsed else None
        text = level.refusal if held is None else level.told.format(held)
        spoken, price = len(text.split()), candidate.price
        return Reply(
            text,
            candidate=candidate.name,
            price=price,
            tokens=spoken,
            cost=spoken * price,
            refused=held is None,
        )


def _prices(descriptor: str) -> tuple[int, ...]:
    return LEVELS[descriptor if descriptor in LEVELS else "expert"].prices


def draw_pool(rng: random.Random, full: bool = False) -> SimulatedPool:
    """A pool for one episode, its names, prices and order drawn. Full: each descriptor once. Otherwise the
    large one, each of the others with .8, and with .5 a second copy of a line at another price."""
    described = [word for word in DESCRIPTORS if full or word == "large" or rng.random() < 0.8]
    lines = [(word, rng.choice(_prices(word))) for word in described]
    if not full and rng.random() < 0.5:
        word, price = rng.choice(lines)
        lines.append((word, rng.choice([other for other in _prices(word) if other != price])))
    rng.shuffle(lines)
    drawn = rng.sample(TRAIN_NAMES, len(lines))
    return SimulatedPool(tuple(Candidate(n, float(p), w) for n, (w, p) in zip(drawn, lines, strict=True)))


# ---- questions


def facts(split: str, kind: str) -> list[tuple[tuple[str, ...], str]]:
    """All (relations, head) of a kind of question in a split, in a fixed order."""
    chains = {
        "one-hop": [(relation,) for relation in RELATIONS if relation != "capital"],
        "two-hop": [chain for chain in COMPOSITIONS if chain not in NEW],
        "two-hop new": NEW,
        "own": [("capital",)],
    }[kind]
    return [(c, head) for c in chains for head in ENTITIES[RELATIONS[c[0]][1]] if split_of(head) == split]


def questions(split: str, n: int, seed: int, pool: str | Sequence[Candidate] = "drawn") -> list[Question]:
    """n questions of a split (train, dev, test), each with its pool: "drawn", "full", or fixed candidates.

    A fact comes again only after every other of its kind. Kinds: "one-hop", "two-hop", "own" (the router
    knows the answer) and, in test, "two-hop new" (compositions that no other split has). Raises ValueError
    for an unknown split or pool.
    """
    if split not in ("train", "dev", "test"):
        raise ValueError(f"{split!r} is none of train, dev, test")
    if isinstance(pool, str) and pool not in ("drawn", "full"):
        raise ValueError(f"the miniature world has drawn and full pools, not {pool!r}")
    shares = {"one-hop": 0.41, "two-hop": 0.27, "two-hop new": 0.15, "own": 0.17}
    if split != "test":
        shares["two-hop"] += shares.pop("two-hop new")
    rng = random.Random(f"questions {split} {seed}")
    decks: dict[str, list] = {kind: [] for kind in shares}
    found = []
    for i in range(n):
        kind = rng.choices(list(shares), list(shares.values()))[0]
        if not decks[kind]:
            decks[kind] = rng.sample(every := facts(split, kind), len(every))
        relations, head = decks[kind].pop()
        drawn = draw_pool(rng, pool == "full") if isinstance(pool, str) else SimulatedPool(tuple(pool))
        text, golds = ask_for(relations, head), (answer(relations, head),)
        found.append(Question(f"{split}-{seed}-{i}", text, golds, kind, drawn))
    return found


def without_expert(question: Question, topic: str) -> Question:
    """The same question with a pool that lacks the topic's expert."""
    kept = [candidate.name for candidate in question.pool.candidates if candidate.descriptor != topic]
    return replace(question, pool=question.pool.subset(kept))


def with_newcomer(question: Question, topic: str, price: float = 1.0) -> Question:
    """The same question with the topic's experts replaced by one whose name training never shows."""
    lines = list(without_expert(question, topic).pool.candidates)
    rng = random.Random(f"newcomer {question.id} {topic}")
    name = rng.choice([name for name in UNSEEN_NAMES if name not in question.pool.names])
    lines.insert(rng.randint(0, len(lines)), Candidate(name, price, topic))
    return replace(question, pool=SimulatedPool(tuple(lines)))


def renamed(question: Question) -> Question:
    """The same question and the same LLMs, which know what they knew, all under names that training never
    shows.
    """
    lines = question.pool.candidates
    names = random.Random(f"renamed {question.id}").sample(UNSEEN_NAMES, len(lines))
    new = (replace(line, name=name, model=line.name) for line, name in zip(lines, names, strict=True))
    return replace(question, pool=SimulatedPool(tuple(new)))


# ---- demonstrations

Segments = list[tuple[str, bool]]  # texts in turn, True where the router wrote them


def demonstrations(n: int, seed: int) -> Iterator[tuple[Question, Segments]]:
    """Training questions and a way to treat each: right in form, blind to whom to ask and when to ask twice.

    A thought reads "NEED ask TOPIC NAME": the topic needed ("both" for a whole two-hop question), then a line
    of the pool: with .2 one that matches, with .3 the first one (two habits of instruct models), else any.
    "know" or "stop" (a refusal) ends it. Nothing that refused is asked again.
    """
    for question in questions("train", n, seed + 1_000_000):  # pools of their own
        rng = random.Random(f"demonstration {question.id}")
        if question.kind == "own":  # all of these facts, whatever their split: the router knows them
            head = rng.choice(ENTITIES["nation"])
            question = replace(
                question, text=ask_for(("capital",), head), golds=(answer(("capital",), head),)
            )
        direct = question.kind == "own" and rng.random() < 0.2
        yield question, [last_turn("know", question.golds[0])] if direct else _ask_around(question, rng)


def _ask_around(question: Question, rng: random.Random) -> Segments:
    """Calls hop by hop, or (.5) once for all; goes on after a refusal with .15, from hop to hop with .65."""
    relations, subject = parse(question.text)
    hops = [relations] if rng.random() < 0.5 else [(relation,) for relation in relations]
    segments: Segments = []
    refused: set[str] = set()  # descriptors
    for _ in range(4):
        need = RELATIONS[hops[0][0]][0] if len(hops[0]) == 1 else "both"
        lines = [candidate for candidate in question.pool.candidates if candidate.descriptor not in refused]
        matching = [candidate for candidate in lines if candidate.descriptor == need]
        taste = rng.random()
        shown = matching if matching and taste < 0.2 else lines[:1] if taste < 0.5 else lines
        line = rng.choice(shown or question.pool.candidates)
        query = ask_for(hops[0], subject)
        reply = question.pool.ask(line.name, query)
        thought = f"<think> {need} ask {line.descriptor} {line.name} </think>"
        segments += [(f"{thought} <search> {line.name} : {query} </search>", True)]
        segments += [(tags.render_reply(reply.text), False)]
        if reply.refused:
            refused.add(line.descriptor)
        else:
            subject, hops = told(reply.text), hops[1:]
        if not hops or rng.random() > (0.15 if reply.refused else 0.65):
            break
    return [*segments, last_turn("stop", "unknown") if reply.refused else last_turn("know", subject)]


def last_turn(thought: str, text: str) -> tuple[str, bool]:
    """The turn that ends an episode."""
    return f"<think> {thought} </think> <answer> {text} </answer>", True


def told(reply: str) -> str:
    """The entity that a reply tells."""
    return " ".join(reply.split()[-3:-1])
