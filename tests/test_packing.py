"""A packed forward pass gives the numbers of one forward pass a trajectory: log-probs, values, gradients."""

from __future__ import annotations

import random

import pytest
import torch
from scripted import VOCAB, plain_logp_entropy, random_ids, random_router, spoken
from torch import tensor

from minirouter.attention import tree_mask
from minirouter.packing import common_prefix, micro_batches, pack, shared_prefix
from minirouter.trajectory import Trajectory

# What follows the prompt: own tokens (> 0) and replies (< 0)
PARTS = ([5, -9, 4], [3], [2, -3, 4, -11, 6, -2], [1, -20, 1])


def a_tree() -> list[Trajectory]:
    """Prompts with much in common, each with an end of its own."""
    rng = random.Random(0)
    common = random_ids(rng, 60)
    return [spoken(rng, common + random_ids(rng, 1 + b), parts) for b, parts in enumerate(PARTS)]


def rows() -> list[Trajectory]:
    """Prompts with nothing in common."""
    rng = random.Random(1)
    return [spoken(rng, [b, *random_ids(rng, 4 * b + 2)], parts) for b, parts in enumerate(PARTS)]


def a_group() -> list[Trajectory]:
    """Samples of one question: the last position of the prompt is the state of each one's first action."""
    rng = random.Random(2)
    prompt = random_ids(rng, 40)
    return [spoken(rng, prompt, parts) for parts in PARTS]


def twins() -> list[Trajectory]:
    """Samples of one question that came out the same."""
    rng = random.Random(3)
    one = spoken(rng, random_ids(rng, 30), [4, -6, 5])
    return [one, one, spoken(rng, one.ids[:30], [1]), one]


def one_token_prompts() -> list[Trajectory]:
    rng = random.Random(4)
    return [spoken(rng, [7], [3]), spoken(rng, [7], [1, -2, 2])]


CASES = {make.__name__: make for make in (a_tree, rows, a_group, twins)}


def alone(router, role: str, t: Trajectory):
    """The same of one trajectory by the model's own forward pass: (log-probs, entropies) or values."""
    router._switch(role)
    ids, states = tensor([t.ids]), tensor(t.actions) - 1
    if role == "critic":
        body = router.model.get_base_model().get_decoder()
        hidden = body(input_ids=ids, use_cache=False).last_hidden_state[0, states]
        return (router.value_head(hidden)[:, 0],)
    logits = router.model(input_ids=ids, use_cache=False).logits[0, states]
    return plain_logp_entropy(logits / router.temperature, ids[0, states + 1])


def weights(b: int, n: int, k: int) -> torch.Tensor:
    """Arbitrary weights of n actions, so that a gradient at one place cannot stand in for another's."""
    return torch.sin(torch.arange(n) * 1.7 + 3 * b + k) + 0.3


def gradients(router, role: str) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in router.model.named_parameters() if f".{role}." in name}
    if role == "critic":
        found |= {name: p.grad.clone() for name, p in router.value_head.named_parameters()}
    for p in router.parameters(role):
        p.grad = None
    return found


def packed(router, role: str, batch):
    return router.logp(batch) if role == "policy" else (router.value(batch),)


def close(a: torch.Tensor, b: torch.Tensor, relative: float) -> bool:
    return bool((a - b).abs().max() <= relative * b.abs().max())


@pytest.mark.parametrize("role", ["policy", "critic"])
@pytest.mark.parametrize("case", CASES)
def test_packed_equals_one_by_one_in_numbers_and_gradients(case, role):
    """Catches a branch that sees another, positions that go on over branches, a state of the wrong branch
    (whole prompts shared), the state after an action's token, a prefix that carries no gradient, and a mask
    for other attentions that says something else."""
    trajectories = CASES[case]()
    router = random_router(temperature=0.7)
    singles = [alone(router, role, t) for t in trajectories]
    weighted = [(x * weights(b, len(x), k)).sum() for b, xs in enumerate(singles) for k, x in enumerate(xs)]
    sum(weighted).backward()
    theirs = gradients(router, role)
    assert all(gradient.abs().max() > 0 for gradient in theirs.values())
    assert router.reads_prefix
    for router.reads_prefix in (True, False):
        batch = pack(trajectories)
        loss = 0.0
        for k, output in enumerate(packed(router, role, batch)):
            for b, t in enumerate(trajectories):
                n = len(t.actions)
                assert torch.allclose(output[b, :n], singles[b][k], atol=1e-4)
                assert (output[b, n:] == 0).all()
                loss = loss + (output[b, :n] * weights(b, n, k)).sum()
        loss.backward()
        ours = gradients(router, role)
        assert ours.keys() == theirs.keys()
        assert all(close(ours[name], theirs[name], 1e-4) for name in theirs)


@pytest.mark.parametrize("case", CASES)
def test_columns_are_the_drawn_tokens_in_order(case):
    """Catches a reply with a column, a column out of place, and a mask that is not right padding."""
    trajectories = CASES[case]()
    batch = pack(trajectories)
    for b, t in enumerate(trajectories):
        n = len(t.actions)
        assert batch.mask[b].tolist() == [True] * n + [False] * (batch.mask.shape[1] - n)
        assert batch.action_ids[b, :n].tolist() == [t.ids[i] for i in t.actions]
        before = batch.input_ids[0, batch.action_index[b, :n]]
        assert before.tolist() == [t.ids[i - 1] for i in t.actions]


def test_a_pack_computes_every_distinct_token_once():
    """Catches a prefix that is shorter than it could be, and padding."""
    trajectories = a_tree()
    batch = pack(trajectories)
    assert shared_prefix(trajectories) == 60
    assert batch.input_ids.shape == (1, 60 + sum(len(t.ids) - 60 for t in trajectories))


def test_a_prefix_ends_with_the_shortest_prompt_and_leaves_each_branch_a_token():
    """Catches a prefix that runs into what was drawn: identical samples would share their actions."""
    assert shared_prefix(twins()) == shared_prefix(twins()[:2]) == 30
    assert shared_prefix(a_group()) == 40
    assert shared_prefix(rows()) == 0
    bare = Trajectory(prompt_len=5)
    bare.append([1, 2, 3, 4, 5])
    assert shared_prefix([bare, spoken(random.Random(0), [1, 2, 3, 4, 5], [2])]) == 4


def test_the_tree_mask_and_positions_by_hand():
    """Catches a mask that is not causal, that leaks between branches, or that hides the prefix."""
    a, b = Trajectory(prompt_len=3), Trajectory(prompt_len=2)
    for t, prompt, own in ((a, [4, 5, 6], [7, 8]), (b, [4, 5], [9, 10])):
        t.append(prompt)
        t.append(own, [0.0] * len(own))
    batch = pack([a, b])
    assert batch.input_ids.tolist() == [[4, 5, 6, 7, 8, 9, 10]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 2, 3]]
    assert batch.branches == (2, 3, 2)
    assert tree_mask(batch.branches)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1, 1],
    ]
    # b's first action: the last position of the prefix
    assert batch.action_index.tolist() == [[2, 3], [1, 5]]
    assert batch.action_ids.tolist() == [[7, 8], [9, 10]]


def test_prompts_with_nothing_in_common_by_hand():
    """Catches positions that go on over branches, and an index that forgets the branches before."""
    a, b = Trajectory(prompt_len=1), Trajectory(prompt_len=2)
    a.append([4])
    a.append([7], [0.0])
    b.append([5, 6])
    b.append([8], [0.0])
    b.append([9])
    b.append([3], [0.0])
    batch = pack([a, b])
    assert batch.branches == (0, 2, 5)
    assert batch.input_ids.tolist() == [[4, 7, 5, 6, 8, 9, 3]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 3, 4]]
    assert batch.action_index.tolist()[1] == [3, 5]
    assert batch.action_index[0, 0] == 0
    assert batch.action_ids[0, 0] == 7
    assert batch.mask.tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize("make", [a_tree, rows, a_group, twins, one_token_prompts])
def test_packs_hold_each_row_once_and_keep_to_their_size(make):
    """Catches a row that is lost or doubled at a cut, and a pack that outgrows the memory knob."""
    trajectories = make()
    longest = max(len(t.ids) for t in trajectories)
    for max_tokens in (1, 60, 100, 130, 10_000):
        packs = micro_batches(trajectories, max_tokens)
        assert sorted(i for group in packs for i in group) == list(range(len(trajectories)))
        for group in packs:
            tokens = pack([trajectories[i] for i in group]).input_ids.numel()
            assert tokens <= max(max_tokens, longest)
            assert len(group) == 1 or tokens <= max_tokens
    assert len(micro_batches(trajectories, 1)) == len(trajectories)
    assert len(micro_batches(trajectories, 10_000)) == 1
    assert micro_batches([], 100) == []


def test_the_common_prefix_of_rows():
    """Catches a prefix of neighbours instead of all rows, and one past the end of a row."""
    assert common_prefix([[1, 2, 3], [1, 2, 4], [1, 2]], 9) == 2
    assert common_prefix([[1, 2, 3], [1, 5, 3], [1, 2, 3]], 9) == 1
    assert common_prefix([[1, 2, 3]], 2) == 2
    assert common_prefix([[], [1]], 5) == 0
    rng = random.Random(0)
    for _ in range(200):
        many = [[rng.randrange(2) for _ in range(rng.randrange(6))] for _ in range(rng.randrange(1, 4))]
        n = common_prefix(many, 4)
        assert all(row[:n] == many[0][:n] and len(row) >= n for row in many) and n <= 4
        assert n == 4 or len({tuple(row[: n + 1]) for row in many}) > 1 or min(map(len, many)) == n


def test_no_id_is_taken_for_padding():
    """Catches masks made from ids: prompts, actions and replies made of pad and end ids alone."""
    router = random_router()
    rng = random.Random(0)
    prompts = [[0] * 20, [0] * 20 + [2, 0], [0] * 21]
    trajectories = [spoken(rng, prompt, [2, -3, 2]) for prompt in prompts]
    for t in trajectories:
        t.ids[t.prompt_len :] = [i % 3 for i in t.ids[t.prompt_len :]]
    logp, _ = router.logp(pack(trajectories))
    for b, t in enumerate(trajectories):
        assert torch.allclose(logp[b], alone(router, "policy", t)[0], atol=1e-4)
    changed = spoken(rng, prompts[0], [2, -3, 2])
    changed.ids = [0] * 10 + [5] + trajectories[0].ids[11:]
    # the pads are attended to
    assert not torch.allclose(router.logp(pack([changed]))[0], logp[:1], atol=1e-3)


def test_the_same_trajectory_scores_the_same_in_any_company():
    """Catches numbers that depend on the rest of the pack, exactly those that make KL differ from 0."""
    router = random_router()
    trajectories = a_tree()
    with torch.no_grad():
        whole = router.logp(pack(trajectories))[0]
        for b, t in enumerate(trajectories):
            single = router.logp(pack([t]))[0][0]
            assert torch.allclose(whole[b, : len(single)], single, atol=1e-4)
    assert max(max(t.ids) for t in trajectories) < VOCAB
