"""The facts of the miniature world: invented people, movies, teams, elements, cities, nations, and relations.

They stand in for what the benchmarks of the paper (section 4) ask, with answers that no model can have seen.
All follows from fixed seeds and hashes. An entity is of one split: what is tested was never trained on.
"""

from __future__ import annotations

import functools
import hashlib
import random
import re
from collections.abc import Sequence

TOPICS = ("film", "sport", "science", "place", "people")
RELATIONS = {  # relation: (topic, kind of its head, kind of its tail)
    "director": ("film", "movie", "person"),
    "star": ("film", "movie", "person"),
    "coach": ("sport", "team", "person"),
    "home": ("sport", "team", "city"),
    "discoverer": ("science", "element", "person"),
    "namer": ("science", "element", "person"),
    "country": ("place", "city", "nation"),
    "mayor": ("place", "city", "person"),
    "birthplace": ("people", "person", "city"),
    "spouse": ("people", "person", "person"),
    "capital": ("place", "nation", "city"),  # "own": the demonstrations teach all of these to the router
}
COMPOSITIONS = tuple(  # (asked first, asked second): 17
    (first, second)
    for first, (_, _, between) in RELATIONS.items()
    for second, (_, head, _) in RELATIONS.items()
    if between == head and "capital" not in (first, second) and (first, second) != ("spouse", "spouse")
)
NEW = (("star", "spouse"), ("coach", "birthplace"), ("namer", "birthplace"), ("home", "mayor"))  # test only
COUNTS = {"movie": 72, "team": 72, "element": 72, "city": 72, "nation": 40, "person": 144}


def unit(*parts: object) -> float:
    """A number in [0, 1) that depends on the parts alone."""
    digest = hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def invented_words(count: int, endings: str) -> list[str]:
    """Invented words of two syllables, each ending in one of `endings`; none twice, none a relation's."""
    rng = random.Random(f"words {endings}")
    words: dict[str, None] = {}
    while len(words) < count:
        syllables = [rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(2)]
        word = "".join(syllables) + rng.choice(endings)
        words |= {} if word in RELATIONS else {word: None}
    return list(words)


FIRST, SECOND = invented_words(80, "lm"), invented_words(80, "sk")
_every_pair = [f"{a} {b}" for a in FIRST for b in SECOND]
_pairs = iter(random.Random("entities 33").sample(_every_pair, sum(COUNTS.values())))  # each word in training
ENTITIES = {kind: tuple(next(_pairs) for _ in range(count)) for kind, count in COUNTS.items()}


def split_of(head: str) -> str:
    """The split that questions about this entity belong to: 30 % test, 10 % dev, the rest train."""
    draw = unit("split", head)
    return "test" if draw < 0.3 else "dev" if draw < 0.4 else "train"


def other(entities: Sequence[str], excluded: str, *key: object) -> str:
    """One of the entities, chosen by a hash, never the excluded one."""
    rest = [entity for entity in entities if entity != excluded]
    return rest[int(unit(*key) * len(rest))]


@functools.cache
def answer(relations: tuple[str, ...], head: str) -> str:
    """The true answer: each relation in turn, the first one of `head`."""
    for relation in relations:
        head = other(ENTITIES[RELATIONS[relation][2]], head, "fact", relation, head)
    return head


def ask_for(relations: Sequence[str], head: str) -> str:
    """The text that `parse` reads: "spouse of director of HEAD" for the relations (director, spouse)."""
    return " of ".join([*reversed(relations), head])


def parse(query: str) -> tuple[tuple[str, ...], str] | None:
    """What a query asks for: the relations in the order to follow them, and the head. None for nonsense."""
    words = [
        word
        for word in re.findall(r"\w+", query.casefold())
        if word not in ("of", "the", "who", "what", "is")
    ]
    relations, head = tuple(reversed(words[:-2])), " ".join(words[-2:])
    known = relations in COMPOSITIONS or (len(relations) == 1 and relations[0] in RELATIONS)
    return (relations, head) if known and head in ENTITIES[RELATIONS[relations[0]][1]] else None


def topics(text: str) -> tuple[str, ...]:
    """The topic of each hop of a question or query, in the order to ask for them; none for nonsense."""
    parsed = parse(text)
    return tuple(RELATIONS[relation][0] for relation in parsed[0]) if parsed else ()


def corpus() -> list[dict[str, str]]:
    """Every fact as text, one document an entity: what a retriever searches."""
    documents = []
    for entity, kind in ((entity, kind) for kind, entities in ENTITIES.items() for entity in entities):
        asked = [relation for relation, (_, head, _) in RELATIONS.items() if head == kind]
        text = " ".join(
            f"the {relation} of {entity} is {answer((relation,), entity)} ." for relation in asked
        )
        documents.append({"id": entity.replace(" ", "-"), "title": entity, "text": text})
    return documents
