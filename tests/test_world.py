"""The miniature world keeps its constants, its splits and its word; the tiny base passes its gate."""

from __future__ import annotations

import random
import re
import runpy
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from minirouter import data, facts, tags, world
from minirouter.reward import exact_match, extract_answer
from minirouter.trajectory import Candidate, Limits

TINY = Path(world.__file__).parent / "assets" / "tiny"
EXPERT = Candidate("kalan", 2.0, "film")
MIDDLING = Candidate("Goran", 4.0, "middling", aliases=("go ran",))
LARGE = Candidate("lumir", 7.0, "large")
POOL = world.SimulatedPool((EXPERT, MIDDLING, LARGE))
MOVIE = facts.ENTITIES["movie"][0]


def share(values) -> float:
    values = list(values)
    return sum(values) / len(values)


# ---- facts and splits


def test_the_world_has_the_size_that_it_promises():
    """Catches a change of constants: an easier world is not a better result."""
    assert len(world.TOPICS) == 5 and len(world.RELATIONS) == 10 + 1
    assert len(world.COMPOSITIONS) == 17 and len(set(world.NEW) & set(world.COMPOSITIONS)) == 4
    assert len(world.TRAIN_NAMES) == 128 and len(world.UNSEEN_NAMES) == 64
    assert len(set(world.NAMES)) == 192 and not set(world.NAMES) & set(world.RELATIONS)
    words = world.vocabulary()
    assert len(words) == len(set(words)) and 400 <= len(words) <= 500
    heads = [head for entities in facts.ENTITIES.values() for head in entities]
    assert len(heads) == len(set(heads)) and all(len(head.split()) == 2 for head in heads)
    assert share(facts.split_of(head) == "test" for head in heads) == pytest.approx(0.3, abs=0.05)


def test_no_question_of_one_split_is_one_of_another():
    """Catches leaking test entities or held-out compositions into training."""
    asked = {split: world.questions(split, 3000, 0) for split in ("train", "dev", "test")}
    heads = {split: {facts.parse(q.text)[1] for q in found} for split, found in asked.items()}
    assert not heads["train"] & heads["test"]
    assert not heads["dev"] & (heads["test"] | heads["train"])
    chains = {split: {facts.parse(q.text)[0] for q in found} for split, found in asked.items()}
    assert not set(world.NEW) & (chains["train"] | chains["dev"]) and set(world.NEW) <= chains["test"]
    assert len([c for c in chains["train"] if len(c) == 2]) == 13
    assert {name for q in asked["train"] for name in q.pool.names} == set(world.TRAIN_NAMES)


def test_the_words_of_held_out_entities_occur_in_training():
    """Catches an entity that the tiny base could not even copy, since a word of it was never trained."""
    heads = [head for entities in facts.ENTITIES.values() for head in entities]
    trained = {word for head in heads if facts.split_of(head) == "train" for word in head.split()}
    assert {word for head in heads for word in head.split()} <= trained


def test_questions_depend_on_the_seed_alone():
    """Catches random state shared between calls."""
    first, other = world.questions("train", 50, 7), world.questions("train", 50, 8)
    assert first == world.questions("train", 50, 7)
    assert [q.text for q in first] != [q.text for q in other]
    assert first[:20] == world.questions("train", 20, 7)
    assert len({q.id for q in first + other}) == 100


def test_a_question_is_repeated_only_when_its_kind_is_used_up():
    """Catches drawing with replacement: a test set that counts some questions twice."""
    texts = [q.text for q in world.questions("test", 400, 0) if q.kind in ("one-hop", "two-hop")]
    assert len(texts) == len(set(texts)) > 200


def test_kinds_come_in_their_shares_and_say_what_they_are():
    """Catches a kind that is rare, missing, or misnamed."""
    found = world.questions("test", 4000, 0)
    kinds = Counter(q.kind for q in found)
    assert kinds["own"] / 4000 == pytest.approx(0.17, abs=0.02)
    assert kinds["two-hop new"] / 4000 == pytest.approx(0.15, abs=0.02)
    for q in found:
        chain, head = facts.parse(q.text)
        assert len(facts.topics(q.text)) == (2 if q.kind.startswith("two-hop") else 1)
        assert (chain in world.NEW) == (q.kind == "two-hop new")
        assert (chain == ("capital",)) == (q.kind == "own")
        assert q.golds == (facts.answer(chain, head),)


def test_a_two_hop_answer_is_the_answer_about_the_answer():
    """Catches hops followed in the order in which they are written."""
    between = facts.answer(("director",), MOVIE)
    assert facts.answer(("director", "spouse"), MOVIE) == facts.answer(("spouse",), between)
    assert facts.parse(f"spouse of director of {MOVIE}") == (("director", "spouse"), MOVIE)
    assert facts.topics(f"spouse of director of {MOVIE}") == ("film", "people")


@pytest.mark.parametrize("frame", ["director of {}", "Who is the DIRECTOR of {}?", " the director of  {} . "])
def test_a_query_is_read_through_its_frame(frame):
    """Catches a parser that knows only the demonstrations' spelling."""
    assert facts.parse(frame.format(MOVIE)) == (("director",), MOVIE)


@pytest.mark.parametrize(
    "query",
    ["", "?", "director", MOVIE, f"price of {MOVIE}", f"coach of {MOVIE}", "director of nobody here",
     f"director of spouse of {MOVIE}", f"star of star of director of {MOVIE}", "director of " * 500],
)  # fmt: skip
def test_nonsense_is_refused_and_paid_for(query):
    """Catches a free or crashing call: nonsense must cost what a refusal costs."""
    assert facts.parse(query) is None and facts.topics(query) == ()
    reply = POOL.ask("kalan", query)
    assert reply.status == "ok" and reply.refused and reply.cost == 5 * 2.0


def test_the_corpus_holds_every_fact_once():
    """Catches a retriever that is asked for what its corpus does not say."""
    documents = facts.corpus()
    assert len({document["id"] for document in documents}) == sum(facts.COUNTS.values())
    by_title = {document["title"]: document["text"] for document in documents}
    for relation, (_, kind, _) in facts.RELATIONS.items():
        for head in facts.ENTITIES[kind]:
            fact = f"the {relation} of {head} is {facts.answer((relation,), head)} ."
            assert by_title[head].count(fact) == 1


# ---- simulated LLMs


def test_replies_cost_their_words_times_the_price():
    """Catches a change of reply lengths (5, 8, 10 tokens) or of the cost rule."""
    for candidate, length in ((EXPERT, 5), (MIDDLING, 8), (LARGE, 10)):
        for head in facts.ENTITIES["movie"]:
            reply = POOL.ask(candidate.name, f"director of {head}")
            assert reply.tokens == len(reply.text.split()) == length
            assert reply.cost == length * candidate.price and reply.price == candidate.price
            assert reply.refused or len(world.told(reply.text).split()) == 2


def test_names_are_found_by_any_accepted_spelling_and_others_are_unknown():
    """Catches a guess at names, and an unknown name that costs something."""
    assert POOL.names == ("kalan", "Goran", "go ran", "lumir")
    assert POOL.ask(" goRAN ", "?").candidate == POOL.ask("Go Ran", "?").candidate == "Goran"
    for name in ("goran2", "", "kal"):
        reply = POOL.ask(name, f"director of {MOVIE}")
        assert reply.status == "unknown" and reply.cost == reply.tokens == 0 and not reply.faulted
    assert POOL.instant and POOL.subset(["lumir", "kalan"]).candidates == (LARGE, EXPERT)


def held_by(descriptor: str, kind: str) -> Counter:
    """How 192 candidates of one descriptor do on facts about movies: right, wrong, refused."""
    found: Counter = Counter()
    for name in world.NAMES:
        candidate = Candidate(name, 1.0, descriptor)
        for relations, head in world.facts("test", kind)[:30]:
            held, truth = world.belief(candidate, relations, head), facts.answer(relations, head)
            found["refused" if held is None else "right" if held == truth else "wrong"] += 1
    return found


@pytest.mark.parametrize(
    ("descriptor", "kind", "right", "wrong_of_rest"),
    [("film", "one-hop", 0.92, 0.1), ("sport", "one-hop", 0.04, 0.1), ("middling", "one-hop", 0.6, 0.3),
     ("large", "one-hop", 0.93, 0.3), ("film", "two-hop", 0.04, 0.1), ("large", "two-hop", 0.4, 0.3)],
)  # fmt: skip
def test_skills_are_the_promised_ones(descriptor, kind, right, wrong_of_rest):
    """Catches a changed skill. 5,760 draws: standard error < .007; the first 30 test facts are movies'."""
    assert {facts.RELATIONS[chain[0]][0] for chain, _ in world.facts("test", kind)[:30]} == {"film"}
    found = held_by(descriptor, kind)
    assert found["right"] / found.total() == pytest.approx(right, abs=0.02)
    assert found["wrong"] / (found["wrong"] + found["refused"]) == pytest.approx(wrong_of_rest, abs=0.05)


def test_two_candidates_of_one_descriptor_err_on_different_facts():
    """Catches a hash that leaves out the name: asking another one would then never help."""
    twins = [Candidate(name, 1.0, "middling") for name in world.NAMES[:2]]
    asked = world.facts("test", "one-hop")
    both = share(all(world.belief(twin, *fact) is None for twin in twins) for fact in asked)
    assert both == pytest.approx(0.28**2, abs=0.05)


def test_a_descriptor_of_any_wording_is_simulated_and_an_empty_one_refused():
    """Catches a pool file that cannot be simulated but is accepted, and would then refuse every question."""
    told = world.level_of(Candidate("a", 1.0, "A specialist in Film and sport."))
    assert told == ("expert", ["film", "sport"])
    assert world.level_of(Candidate("a", 1.0, "large, knows every place"))[0] == "large"
    with pytest.raises(ValueError, match="'a' cannot be simulated") as error:
        world.SimulatedPool((Candidate("a", 1.0, "a model"),))
    assert "\n" not in str(error.value)


def test_drawn_pools_have_the_promised_members():
    """Catches wrong chances (.8, .8, always, .5), equal prices of two copies, and a fixed order."""
    pools = [world.draw_pool(random.Random(i)) for i in range(4000)]
    lines = [Counter(c.descriptor for c in pool.candidates) for pool in pools]
    for descriptor in world.DESCRIPTORS:
        expected = 1.0 if descriptor == "large" else 0.8
        assert share(descriptor in found for found in lines) == pytest.approx(expected, abs=0.03)
    assert share(max(found.values()) == 2 for found in lines) == pytest.approx(0.5, abs=0.03)
    assert max(found.total() - len(found) for found in lines) == 1
    assert share(pool.candidates[0].descriptor == "large" for pool in pools) == pytest.approx(0.17, abs=0.03)
    for pool in pools:
        assert len({c.name for c in pool.candidates}) == len(pool.candidates)
        assert len({(c.descriptor, c.price) for c in pool.candidates}) == len(pool.candidates)
    prices = {(c.descriptor, c.price) for pool in pools for c in pool.candidates}
    assert {price for word, price in prices if word == "film"} == {1, 2, 3}
    assert {price for word, price in prices if word == "middling"} == {2, 3, 4, 5}
    assert {price for word, price in prices if word == "large"} == {5, 6, 7, 8, 9}


def test_full_and_fixed_pools_are_what_they_say():
    """Catches `--pool full` or `--pool PATH` falling back to drawn pools."""
    for q in world.questions("test", 50, 0, pool="full"):
        assert sorted(c.descriptor for c in q.pool.candidates) == sorted(world.DESCRIPTORS)
    assert all(q.pool == POOL for q in world.questions("test", 50, 0, pool=POOL.candidates))


@pytest.mark.parametrize("wrong", [{"split": "tset"}, {"pool": "random"}])
def test_a_wrong_word_is_named_in_one_line(wrong):
    """Catches a misspelt split or pool that silently means something else."""
    with pytest.raises(ValueError, match=next(iter(wrong.values()))):
        world.questions(**({"split": "test", "n": 1, "seed": 0} | wrong))


def test_a_newcomer_replaces_the_missing_expert():
    """Catches newcomer pools that keep the old expert, use a name of training or one twice, or always the
    last line."""
    places = set()
    for q in world.questions("test", 200, 0):
        topic = facts.topics(q.text)[0]
        without, with_one = world.without_expert(q, topic), world.with_newcomer(q, topic)
        assert all(c.descriptor != topic for c in without.pool.candidates)
        (newcomer,) = [c for c in with_one.pool.candidates if c not in without.pool.candidates]
        assert newcomer.descriptor == topic and newcomer.price == 1.0
        assert newcomer.name in world.UNSEEN_NAMES and newcomer.name not in q.pool.names
        assert with_one.text == q.text and with_one == world.with_newcomer(q, topic)
        places.add(with_one.pool.candidates.index(newcomer))
        both = world.with_newcomer(with_one, next(t for t in facts.TOPICS if t != topic))
        assert len(set(both.pool.names)) == len(both.pool.names)
    assert len(places) > 3


def test_renamed_candidates_keep_all_but_their_names():
    """Catches a name of training, two of one name, a line that moved or changed its price, and other LLMs
    behind the names (whose luck would count as what new names cost).
    """
    chosen = []
    for q in world.questions("test", 50, 0):
        new = world.renamed(q)
        assert len(set(new.pool.names)) == len(q.pool.names) and set(new.pool.names) <= set(
            world.UNSEEN_NAMES
        )
        for old_line, new_line in zip(q.pool.candidates, new.pool.candidates, strict=True):
            assert replace(new_line, name="", model="") == replace(old_line, name="")
            said, says = q.pool.ask(old_line.name, q.text), new.pool.ask(new_line.name, q.text)
            assert says == replace(said, candidate=new_line.name)
        assert new.text == q.text and new == world.renamed(q)
        chosen.append(new.pool.names)
    assert len({names[0] for names in chosen}) > 20  # drawn anew for each question


def cheapest(pool, *descriptors: str) -> str:
    """The cheapest candidate of the first descriptor that the pool has."""
    word = next(d for d in descriptors if any(c.descriptor == d for c in pool.candidates))
    return min((c for c in pool.candidates if c.descriptor == word), key=lambda c: c.price).name


def split_and_ask(question, *choices) -> tuple[bool, float]:
    """Hop by hop; after a refusal the next choice (a function of pool and topic). -> right, cost."""
    chain, subject = facts.parse(question.text)
    cost = 0.0
    for relation in chain:
        for choose in choices:
            name = choose(question.pool, facts.RELATIONS[relation][0])
            reply = question.pool.ask(name, facts.ask_for((relation,), subject))
            cost += reply.cost
            if not reply.refused:
                break
        subject = world.told(reply.text)
    return subject in question.golds, cost


def expert(pool, topic: str) -> str:
    return cheapest(pool, topic, "large")


def large(pool, topic: str) -> str:
    return cheapest(pool, "large")


@pytest.mark.parametrize(
    ("pool", "choices", "em", "cost"),
    [("drawn", (expert,), 0.89, 32), ("drawn", (large,), 0.90, 104), ("drawn", (expert, large), 0.965, 39),
     ("full", (expert,), 0.89, 15), ("full", (large,), 0.90, 105)],
)  # fmt: skip
def test_reference_policies_reach_what_the_prototype_saw(pool, choices, em, cost):
    """Catches a world that became easier or cheaper. (Prototype: .87/34 .91/111 .96/42 .87/15 .90/112.)"""
    found = [split_and_ask(q, *choices) for q in world.questions("test", 3000, 1, pool) if q.kind != "own"]
    assert share(right for right, _ in found) == pytest.approx(em, abs=0.02)
    assert share(paid for _, paid in found) == pytest.approx(cost, rel=0.06)


# ---- demonstrations


def test_demonstrations_are_well_formed_and_blind():
    """Catches malformed demonstrations, asking again after a refusal, and knowing whom to ask."""
    matched, firsts, wholes, calls = [], [], [], []
    for question, segments in world.demonstrations(1500, 0):
        text = "".join(text for text, mine in segments if mine)
        assert tags.format_error(text, question.pool.names) is None
        refused: set[str] = set()
        thoughts = re.findall(r"<think> (\w+) ask (\w+) (\w+) </think> <search> (\w+) :", text)
        replies = [text for text, mine in segments if not mine]
        assert len(thoughts) == len(replies) <= 4
        for (need, descriptor, name, called), reply in zip(thoughts, replies, strict=True):
            assert name == called and question.pool.find(name).descriptor == descriptor
            assert descriptor not in refused or len(refused) == len(question.pool.candidates)
            refused |= {descriptor} if reply.strip("<>/info\n").endswith(("know", "that")) else set()
            if need in (c.descriptor for c in question.pool.candidates):
                matched.append(descriptor == need)
        if thoughts:
            firsts.append(question.pool.candidates[0].descriptor == thoughts[0][1])
        if thoughts and question.kind == "two-hop":
            wholes.append(thoughts[0][0] == "both")
        calls.append(len(thoughts))
    assert share(matched) == pytest.approx(0.2 + 0.8 * 0.18, abs=0.04)
    assert share(firsts) == pytest.approx(0.3 + 0.7 * 0.19, abs=0.05)  # more often than any other line
    assert share(wholes) == pytest.approx(0.5, abs=0.06)
    assert 1.0 < share(calls) < 2.0


def test_own_questions_are_sometimes_answered_without_a_call():
    """Catches a base that never shows that it knows something, or that never asks about it."""
    own = [(q, s) for q, s in world.demonstrations(3000, 0) if q.kind == "own"]
    direct = [(q, s[0][0]) for q, s in own if len(s) == 1]
    assert len(direct) / len(own) == pytest.approx(0.2, abs=0.06)
    assert all(tags.find_action(text).text == q.golds[0] for q, text in direct)
    assert {facts.parse(q.text)[1] for q, _ in own} == set(facts.ENTITIES["nation"])


# ---- the tiny base


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def prompt_of(question, show_prices: bool = True) -> str:
    template = data.load_template("tiny")
    return data.render_prompt(template, question.text, question.pool.candidates, show_prices)


def test_a_line_of_the_pool_gives_price_topic_name_in_this_order():
    """Catches another order: causal attention needs what selects before what is selected."""
    question = world.questions("test", 1, 0, pool=POOL.candidates)[0]
    assert "\n$2 film kalan\n$4 middling Goran\n$7 large lumir\n" in prompt_of(question)
    assert "\nfilm kalan\nmiddling Goran\nlarge lumir\n" in prompt_of(question, show_prices=False)


def test_every_word_of_the_world_is_one_token_and_comes_back(tokenizer):
    """Catches unknown words, split tags, and text that does not survive encoding and decoding."""
    for question, segments in world.demonstrations(300, 1):
        for text in (prompt_of(question), *(text for text, _ in segments)):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert tokenizer.unk_token_id not in ids
            spaced = re.sub(r"(</?[a-z]+>)", r" \1 ", text).split()
            assert tokenizer.decode(ids).split() == spaced
    assert len(data.encode_prompt(tokenizer, prompt_of(question))) < 60


def test_tags_are_ordinary_tokens(tokenizer):
    """Catches tags as special tokens: decoding would strip them, neutralising would eat them."""
    for tag in tags.TAGS:
        for text in (f"<{tag}>", f"</{tag}>"):
            (token,) = tokenizer(text, add_special_tokens=False)["input_ids"]
            assert token not in tokenizer.all_special_ids and text not in tokenizer.get_added_vocab()
            assert tokenizer.decode([token], skip_special_tokens=True) == text
    glued = tokenizer("<info>it is .</info>", add_special_tokens=False)["input_ids"]
    assert glued == tokenizer("\n<info> it is . </info>\n", add_special_tokens=False)["input_ids"]


def test_the_chat_template_gives_one_begin_token_and_the_routers_turn(tokenizer):
    """Catches a prompt with two begin tokens or none, or one that ends in the wrong role."""
    ids = data.encode_prompt(tokenizer, "question capital of")
    assert ids.count(tokenizer.bos_token_id) == 1 and ids[0] == tokenizer.bos_token_id
    assert tokenizer.convert_ids_to_tokens(ids)[-2:] == ["<|end|>", "<|assistant|>"]
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}) == 3


def test_the_tiny_base_is_small():
    """Catches a base over half a million parameters or 3 MB, or one whose vocabulary is not this world's."""
    model = AutoModelForCausalLM.from_pretrained(TINY)
    assert model.num_parameters() <= 500_000
    assert sum(file.stat().st_size for file in TINY.iterdir() if file.is_file()) <= 3_000_000
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(TINY))
    assert set(world.vocabulary()) <= set(AutoTokenizer.from_pretrained(TINY).get_vocab())


def read_right(turn: str, pool) -> bool | None:
    """Whether the name that a turn calls stands on a line of the topic that its thought announces."""
    found = re.search(r"<think> \w+ ask (\S+) \S+ </think> <search> (\S+) :", turn)
    if not found:
        return None
    candidate = pool.find(found[2])
    return candidate is not None and candidate.descriptor == found[1]


def sampled(asked, temperature: float):
    """Pairs of question and trajectory of the tiny base as it ships."""
    from minirouter.model import Router
    from minirouter.rollout import rollout

    model, tokenizer = AutoModelForCausalLM.from_pretrained(TINY), AutoTokenizer.from_pretrained(TINY)
    router = Router(model, tokenizer, lora_r=1, critic=False)  # a fresh adapter changes nothing
    prompts = [data.encode_prompt(tokenizer, prompt_of(question)) for question in asked]
    found = rollout(
        router, prompts, [q.pool for q in asked], Limits(4, 120, 64, 320, 64, temperature), seed=0
    )
    return list(zip(asked, found, strict=True))


def exact(pairs) -> float:
    return share(exact_match(extract_answer(t.text) or "", q.golds) for q, t in pairs)


@pytest.mark.slow
def test_the_gate_before_ppo_is_passed():
    """Catches a base that PPO cannot start from (form under .8: it learns silence) or that knows too much.
    Sampled, since greedy decoding hides bad form. 2,000 questions: standard error of EM .011."""
    pairs = sampled(world.questions("test", 2000, 1), temperature=1.0)
    reads = [read for q, t in pairs for turn in t.turns if (read := read_right(turn, q.pool)) is not None]
    assert share(tags.format_error(t.text, q.pool.names) is None for q, t in pairs) >= 0.9
    assert 0.25 <= exact(pairs) <= 0.4
    assert len(reads) >= 1800 and share(reads) >= 0.95
    direct = [(q, t) for q, t in pairs if q.kind == "own" and not t.calls]
    assert len(direct) >= 10 and exact(direct) >= 0.8  # it knows what it was taught
    assert max(len(t.ids) for _, t in pairs) < 320


@pytest.mark.slow
def test_greedy_decoding_does_not_route_either():
    """Catches a base whose likeliest choice is the right one: PPO would get its result for nothing."""
    assert exact(sampled(world.questions("test", 800, 0), temperature=0.0)) < 0.4


@pytest.mark.slow
def test_the_command_makes_the_same_bits_again(tmp_path, monkeypatch):
    """Catches unseeded randomness in the making of the base (a few steps show it as well as all of them)."""
    monkeypatch.setattr("sys.argv", ["make.py", "--seed", "3", "--steps", "3", "--out", str(tmp_path / "a")])
    runpy.run_path(str(TINY / "make.py"), run_name="__main__")
    monkeypatch.setattr("sys.argv", ["make.py", "--seed", "3", "--steps", "3", "--out", str(tmp_path / "b")])
    runpy.run_path(str(TINY / "make.py"), run_name="__main__")
    first, second = ((tmp_path / run / "model.safetensors").read_bytes() for run in "ab")
    assert first == second
