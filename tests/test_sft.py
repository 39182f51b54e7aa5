"""Supervised steps learn what the router writes, and nothing else."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from minirouter import data, sft, tags, world
from minirouter.trajectory import Candidate, Question

TINY = Path(world.__file__).parent / "assets" / "tiny"
QUESTIONS = [Question(f"q{i}", f"Who wrote book {i}?", (f"Author {i}", "somebody")) for i in range(20)]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


class Bigrams(torch.nn.Module):
    """Logits that depend on the last token alone, from a (V, V) table; counts how it was called."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(vocabulary, vocabulary))
        self.masks: list[torch.Tensor] = []

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.masks.append(mask)
        return self.table[ids]


# ---- examples


def test_an_example_is_laid_out_as_the_rollout_does(tokenizer):
    """Catches learning the prompt or a reply, and encoding a reply together with the text around it."""
    call, reply, last = "<search> kalan : capital of x </search>", "it is x .", "<answer> x </answer>"
    prompt = data.encode_prompt(tokenizer, "question capital of")
    info = tags.render_reply(reply)
    ids, learnt = sft.encode_segments(tokenizer, prompt, [(call, True), (info, False), (last, True)])
    parts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (call, info, last)]
    assert ids == [*prompt, *parts[0], *parts[1], *parts[2]]
    sizes = [len(prompt), *map(len, parts)]
    assert learnt == [mine for size, mine in zip(sizes, (False, True) * 2, strict=True) for _ in range(size)]


@pytest.mark.parametrize(
    ("segments", "ended"),
    [([("<answer> x </answer>", True)], False), ([("<answer> x </answer>\n", True)], False),
     ([("<think> know </think>", True)], True), ([("x", True), ("y", False)], False)],
)  # fmt: skip
def test_the_end_token_is_learnt_only_where_the_router_draws_it(tokenizer, segments, ended):
    """Catches an end token after an answer: no rollout ever holds one there."""
    ids, learnt = sft.encode_segments(tokenizer, [5], segments)
    assert (ids[-1] == tokenizer.eos_token_id) == ended
    assert learnt[-1] == segments[-1][1] and len(ids) == len(learnt)


# ---- loss


def test_the_loss_is_the_mean_over_learnt_tokens_of_all_examples():
    """Catches a shifted mask, learning unmarked tokens, and a mean of means. Worked out by hand: the logit of
    2 after 1 is ln 3 among four, so -ln(3/6); every other token has -ln(1/4)."""
    model = Bigrams(4)
    model.table.data[1, 2] = math.log(3)
    examples = [([0, 1, 2], [False, False, True]), ([1, 2, 3, 3, 1], [False, True, True, False, True])]
    loss = sft.token_loss(model, examples)
    assert loss.item() == pytest.approx((2 * math.log(2) + 2 * math.log(4)) / 4, abs=1e-6)
    assert model.masks[0].tolist() == [[True] * 3 + [False] * 2, [True] * 5]


def test_unmarked_tokens_get_no_gradient():
    """Catches a loss on replies: the row of a token that only precedes unmarked ones must stay untouched."""
    model = Bigrams(5)
    sft.token_loss(model, [([1, 2, 3, 4], [False, True, False, False])]).backward()
    touched = model.table.grad.abs().sum(1) > 0
    assert touched.tolist() == [False, True, False, False, False]


def test_padding_changes_neither_loss_nor_gradient():
    """Catches padding that is learnt or that dilutes the mean."""
    short, long = ([1, 2], [False, True]), ([3, 1, 2, 0, 0, 1, 2], [False] * 7)
    alone, padded = Bigrams(4), Bigrams(4)
    one, two = sft.token_loss(alone, [short]), sft.token_loss(padded, [short, long])
    one.backward(), two.backward()
    assert one.item() == two.item() and torch.equal(alone.table.grad, padded.table.grad)


def test_a_batch_without_learnt_tokens_is_finite():
    """Catches 0 / 0: one such batch would make every weight NaN."""
    model = Bigrams(4)
    losses = list(sft.supervised_steps(model, model.parameters(), [[([1, 2], [False, False])]], 1, 0.1))
    assert losses == [0.0] and torch.isfinite(model.table).all()


# ---- steps


def test_steps_learn_what_is_marked_and_stop_when_told():
    """Catches steps that do not learn, go on after the batches end, or run before anybody iterates."""
    model = Bigrams(4)
    batch = [([1, 2, 3], [False, True, True])]
    steps = sft.supervised_steps(model, model.parameters(), iter([batch] * 60), 60, 0.1)
    assert model.masks == []
    losses = list(steps)
    assert len(losses) == 60 and losses[0] == pytest.approx(math.log(4)) and losses[-1] < 0.1
    assert len(list(sft.supervised_steps(model, model.parameters(), [batch] * 3, 60, 0.1))) == 3


@pytest.mark.parametrize(("cosine", "moved_late"), [(True, False), (False, True)])
def test_the_rate_starts_above_zero_and_falls_along_a_cosine(cosine, moved_late):
    """Catches a first step at rate 0 and a schedule that ends too early or not at all."""
    model = Bigrams(3)
    batch = [([1, 2], [False, True])]
    moves, before = [], model.table.detach().clone()
    for _ in sft.supervised_steps(model, model.parameters(), [batch] * 100, 100, 0.1, cosine=cosine):
        moves.append((model.table.detach() - before).abs().max().item())
        before = model.table.detach().clone()
    assert moves[0] > 0.01 and (moves[-1] > 1e-3) == moved_late


def test_only_the_given_parameters_move():
    """Catches an optimiser over everything: the base must stay frozen in a warm start."""
    model, other = Bigrams(4), torch.nn.Parameter(torch.ones(3))
    list(sft.supervised_steps(model, [other], [[([1, 2], [False, True])]] * 3, 3, 0.1))
    assert torch.equal(model.table, torch.zeros(4, 4))


# ---- demonstrations for real pools


POOL = world.SimulatedPool(tuple(Candidate(name, 1.0, "large") for name in ("Qwen2.5-7B", "a b", "c", "d")))


def test_protocol_demonstrations_are_well_formed_and_call_at_random():
    """Catches a warm start that teaches bad form, whom to ask, or an answer that no reply gave."""
    called, answers = set(), set()
    for question, segments in sft.protocol_demonstrations(QUESTIONS, POOL, 300, 0):
        text = "".join(text for text, mine in segments if mine)
        assert tags.format_error(text, POOL.names) is None
        actions = [tags.find_action(text) for text, mine in segments if mine]
        names = [action.name for action in actions[:-1]]
        assert 1 <= len(names) == len(set(names)) <= 3
        assert all(action.query == question.text for action in actions[:-1])
        called |= set(names)
        told = question.golds[0] in "".join(text for text, mine in segments if not mine)
        assert actions[-1].text == (question.golds[0] if told else "unknown")
        answers.add(told)
    assert called == set(POOL.names) and answers == {True, False}


def test_protocol_demonstrations_repeat_by_seed_and_use_the_questions_own_pool():
    """Catches hidden random state, the wrong info tag, and names that the prompt does not list."""
    first = list(sft.protocol_demonstrations(QUESTIONS, POOL, 20, 1, info_tag="information"))
    assert first == list(sft.protocol_demonstrations(QUESTIONS, POOL, 20, 1, info_tag="information"))
    assert all("<information>" in segments[1][0] for _, segments in first)
    for question, segments in sft.protocol_demonstrations(world.questions("train", 20, 0), POOL, 40, 0):
        assert tags.find_action(segments[0][0]).name in question.pool.names
