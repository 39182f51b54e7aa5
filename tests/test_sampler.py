"""Drawing by inverse CDF, and a ragged cache whose rows see just their own ids at their own positions."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
import torch
from families import FAMILIES
from scripted import VOCAB, ScriptedRouter, one_hot, random_ids, random_router
from torch import tensor

from minirouter.attention import attention
from minirouter.sampler import RaggedCache, Sampler, draw, nucleus

# ---- drawing


def drawn(logits: list[float], u: float, temperature: float = 1.0, top_p: float = 1.0) -> tuple[int, float]:
    ids, logps = draw(tensor([logits]), tensor([u]), temperature, top_p)
    return ids.item(), logps.item()


@pytest.mark.parametrize(
    ("u", "token"), [(0.0, 0), (0.24, 0), (0.25, 1), (0.49, 1), (0.5, 2), (0.99, 2), (1.0, 2)]
)
def test_a_uniform_number_picks_the_token_whose_share_it_falls_into(u, token):
    """Catches `side` left, an index one too high, and a number rounded up to 1 that falls off the end."""
    picked, logp = drawn([math.log(0.25), math.log(0.25), math.log(0.5)], u)
    assert picked == token
    assert logp == pytest.approx(math.log([0.25, 0.25, 0.5][token]), abs=1e-6)


@pytest.mark.parametrize("u", [0.0, 0.3, 1 - 2**-24, 1.0])
def test_an_impossible_token_is_never_drawn(u):
    """Catches a token of probability 0 before the first, between, or behind the last possible one."""
    picked, logp = drawn([-math.inf, 0.0, -math.inf, 0.0, -math.inf, -1e4], u)
    assert picked in (1, 3)
    assert logp == pytest.approx(math.log(0.5))


def test_frequencies_are_those_of_the_distribution_at_the_temperature():
    """Catches a temperature that multiplies, or one that is left out of draw or log-prob."""
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(0)) * 2
    n = 40_000
    u = (torch.arange(n) + 0.5) / n
    ids, logps = draw(logits.expand(n, -1), u, 0.7)
    p = torch.softmax(logits[0] / 0.7, dim=-1)
    assert torch.allclose(ids.bincount(minlength=12) / n, p, atol=1e-4)
    assert torch.allclose(logps, p.log()[ids], atol=1e-5)


def test_temperature_zero_is_greedy_with_the_log_probs_of_temperature_one():
    """Catches a division by zero, and log-probs of 0 or NaN at temperature 0."""
    assert drawn([1.0, 3.0, 2.0], 0.01, temperature=0) == drawn([1.0, 3.0, 2.0], 0.99, temperature=0)
    picked, logp = drawn([1.0, 3.0, 2.0], 0.01, temperature=0)
    assert picked == 1
    assert logp == pytest.approx(2 - math.log(math.exp(0) + math.exp(1) + math.exp(2)), abs=1e-6)


def test_top_p_keeps_the_fewest_tokens_that_reach_it_and_leaves_log_probs_alone():
    """Catches a nucleus one token short or long, and log-probs of the cut distribution."""
    p = tensor([[0.1, 0.5, 0.15, 0.25]])
    assert nucleus(p, 0.5).tolist() == [[0, 0.5, 0, 0]]
    assert nucleus(p, 0.6).tolist() == [[0, 0.5, 0, 0.25]]
    assert torch.equal(nucleus(p, 0.999), p)
    assert nucleus(p, 1e-9).tolist() == [[0, 0.5, 0, 0]]  # never empty
    picked, logp = drawn(p.log()[0].tolist(), 0.99, top_p=0.6)
    assert picked == 3
    assert logp == pytest.approx(math.log(0.25), abs=1e-6)


# ---- the cache


class Mirror:
    """What each row of a sampler must hold, kept by plain lists; the router's `follow` checks against it."""

    def __init__(self, prefix: list[int]) -> None:
        self.prefix = prefix
        self.rows: dict[int, list[int]] = {}

    def follow(self, seen: list[int]) -> torch.Tensor:
        rows = [*self.rows.values(), self.prefix]
        assert any(row[: len(seen)] == seen for row in rows), f"no row begins with {seen}"
        return one_hot(sum(seen) % VOCAB)


def test_rows_that_come_go_wait_and_hear_see_exactly_their_own_ids():
    """Catches a key in another row's or column's place, a swap that forgets columns or a length, stale
    columns of a former row, padding written over a live column, and an id fed twice or not at all."""
    rng = random.Random(0)
    slots, capacity = 5, 60
    mirror = Mirror(random_ids(rng, 4))
    router = ScriptedRouter(mirror.follow)
    sampler = Sampler(router, slots, capacity, mirror.prefix, temperature=1.0)
    fresh, waiting = iter(range(10_000)), 4
    for _ in range(250):
        keys = [key for key in mirror.rows if rng.random() < 0.7]
        if sampler.free and rng.random() < 0.6:
            keys.append(next(fresh))
            mirror.rows[keys[-1]] = list(mirror.prefix)
        rng.shuffle(keys)
        pending = {key: random_ids(rng, rng.choice([1, 1, 1, 2, 5, 17])) for key in keys}
        pending = {k: new[: capacity - len(mirror.rows[k])] for k, new in pending.items()}
        pending = {k: new for k, new in pending.items() if new}
        for key, new in pending.items():
            mirror.rows[key] += new
        waiting += sum(map(len, pending.values()))
        if pending:
            draws = sampler.advance(pending, {key: rng.random() for key in pending})
            assert draws == {key: (sum(mirror.rows[key]) % VOCAB, 0.0) for key in pending}
        for key in [key for key in mirror.rows if len(mirror.rows[key]) >= capacity or rng.random() < 0.08]:
            if len(mirror.rows[key]) > len(mirror.prefix):
                sampler.drop(key)
                del mirror.rows[key]
    assert router.fed == waiting
    assert sampler.free == slots - len(mirror.rows)
    assert any(t > 1 and r > 1 for r, t in router.shapes)


def test_decoding_is_not_padded_to_the_length_of_a_reply():
    """Catches one forward pass for rows with one id and a row with a long reply."""
    router = ScriptedRouter(lambda seen: one_hot(5))
    sampler = Sampler(router, 3, 100, [7], 1.0)
    sampler.advance({"a": [8], "b": [9], "c": [10, 11]}, dict.fromkeys("abc", 0.5))
    sampler.advance({"a": [5], "b": [5], "c": [5, *range(20, 50)]}, dict.fromkeys("abc", 0.5))
    assert router.shapes == [(1, 1), (2, 1), (1, 2), (2, 1), (1, 31)]


def test_a_row_may_fill_its_slot_to_the_last_column():
    """Catches a scratch column for padding that is one of the columns promised to rows."""
    mirror = Mirror([])
    mirror.rows = {0: [], 1: []}
    sampler = Sampler(ScriptedRouter(mirror.follow), 2, 6, [], 1.0)
    for new in ({0: [1], 1: [2]}, {0: [3, 4], 1: [5, 6, 7, 8, 9]}, {0: [10, 11, 12]}):
        for key, ids in new.items():
            mirror.rows[key] += ids
        draws = sampler.advance(new, {0: 0.5, 1: 0.5})
        assert draws == {key: (sum(mirror.rows[key]), 0.0) for key in new}
    assert list(map(len, mirror.rows.values())) == [6, 6]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error(bad):
    """Catches a token drawn from NaN as if nothing had happened."""
    sampler = Sampler(ScriptedRouter(lambda seen: torch.full((VOCAB,), bad)), 1, 10, [], 1.0)
    with pytest.raises(ValueError, match="not finite"):
        sampler.advance({0: [1]}, {0: 0.5})


# ---- real networks

PROMPTS = (3, 11, 1, 7, 5)  # ids after the common prefix
REPLIES = {0: {2: 5, 7: 1}, 1: {4: 9}, 2: {4: 3, 5: 2}, 3: {}, 4: {1: 14}}  # row -> own tokens drawn -> ids
WAITS = {0: (3, 4, 5), 2: (2,)}  # steps at which a row is not advanced
LENGTHS = (10, 6, 9, 4, 8)  # own tokens of each row


def converse(router, rows: tuple[int, ...], slots: int, temperature: float):
    """Rows through a sampler of `slots`, with replies on the way; -> row: (ids, places, draws, uniforms)."""
    rng = random.Random(1)
    common = random_ids(rng, 9)
    prompts = [random_ids(rng, n) for n in PROMPTS]
    replies = {row: {at: random_ids(rng, n) for at, n in r.items()} for row, r in REPLIES.items()}
    numbers = {row: random.Random(row) for row in range(len(PROMPTS))}
    prefix = common if slots > 1 else []
    sampler = Sampler(router, slots, 60, prefix, temperature)
    told = {row: (common + prompts[row], [], [], []) for row in rows}
    unseen = {row: (common + prompts[row])[len(prefix) :] for row in rows}
    queue, live, step = list(rows), [], 0
    while queue or live:
        while queue and len(live) < slots:
            live.append(queue.pop(0))
        going = [row for row in live if step not in WAITS.get(row, ()) or slots == 1]
        u = {row: numbers[row].random() for row in going}
        for row, draw_ in sampler.advance({row: unseen[row] for row in going}, u).items():
            ids, places, draws, uniforms = told[row]
            places.append(len(ids))
            draws.append(draw_)
            uniforms.append(u[row])
            unseen[row] = [draw_[0], *replies[row].get(len(draws), [])]
            ids += unseen[row]
            if len(draws) == LENGTHS[row]:
                sampler.drop(row)
                live.remove(row)
        step += 1
    return told


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_ragged_batch_equals_each_row_alone_equals_one_forward_pass_without_cache(family, temperature):
    """Catches positions counted over padding or holes, a mask that leaks or hides, a boolean mask added by
    eager attention, lost soft-capping, and a reply that is fed without the token before it."""
    router = random_router(family, temperature=temperature)
    together = converse(router, (0, 1, 2, 3, 4), 3, temperature)
    router.model.eval()
    for row, (ids, places, draws, uniforms) in together.items():
        own_ids, _, alone, _ = converse(router, (row,), 1, temperature)[row]
        assert own_ids == ids
        with torch.no_grad():
            logits = router.model(input_ids=tensor([ids]), use_cache=False).logits[0, tensor(places) - 1]
        scored_ids, scored = draw(logits, tensor(uniforms), temperature)
        assert scored_ids.tolist() == [token for token, _ in draws]
        for other in (scored.tolist(), [logp for _, logp in alone]):
            assert other == pytest.approx([logp for _, logp in draws], abs=1e-4)
    assert len({token for _, _, draws, _ in together.values() for token, _ in draws}) > 5


def test_greedy_decoding_is_finite_and_the_largest_logit():
    """Catches log-probs at temperature 0 that are not those of temperature 1."""
    router = random_router()
    for ids, places, draws, _ in converse(router, (0, 1, 2), 3, 0.0).values():
        with torch.no_grad():
            logits = router.model(input_ids=tensor([ids]), use_cache=False).logits[0, tensor(places) - 1]
        assert [token for token, _ in draws] == logits.argmax(-1).tolist()
        assert [logp for _, logp in draws] == pytest.approx(
            logits.log_softmax(-1).amax(-1).tolist(), abs=1e-4
        )


def test_other_uniform_numbers_give_other_samples():
    """Catches a sampler that ignores its random numbers."""
    router = random_router()
    first = {u: Sampler(router, 1, 20, [], 1.0).advance({0: [5, 6]}, {0: u})[0][0] for u in (0.05, 0.5, 0.95)}
    assert len(set(first.values())) == 3


# ---- fast paths


@torch.no_grad()
def attended(dtype: torch.dtype, apart: bool) -> torch.Tensor:
    """One decode step's attention of 5 rows to 40 shared columns and up to 9 of their own, (5, 1, 8, 16)."""
    generator = torch.Generator().manual_seed(0)
    common = RaggedCache(1, 41)
    common.layers = [tuple(torch.randn(1, 2, 41, 16, generator=generator).to(dtype) for _ in "kv")]
    cache = RaggedCache(5, 10, common)
    cache.layers = [tuple(torch.randn(5, 2, 10, 16, generator=generator).to(dtype) for _ in "kv")]
    query = 3 * torch.randn(5, 8, 1, 16, generator=generator)
    new = [torch.randn(5, 2, 1, 16, generator=generator).to(dtype) for _ in "kv"]
    places = tensor([[3], [8], [0], [5], [7]])
    cache.aim(0, places, 9)
    cache.apart = apart
    key, value = cache.update(*new, 0)
    mask = torch.where(torch.arange(-40, 9) <= places[:, :, None], 0.0, torch.finfo(dtype).min)[:, None]
    module = SimpleNamespace(layer_idx=0, num_key_value_groups=4, is_causal=True)
    shared = {"shared": cache.prefix} if apart else {}
    out, _ = attention(module, query.to(dtype), key, value, mask.to(dtype), scaling=0.25, **shared)
    return out.float()


def test_a_prefix_that_is_read_once_is_attended_to_as_if_each_row_had_a_copy():
    """Catches query heads that meet another head's keys, rows that are mixed up in folding, and a mask that
    is out of place; in bfloat16, rounding that is worse than the library's own."""
    exact = attended(torch.float32, apart=False)
    assert torch.allclose(attended(torch.float32, apart=True), exact, atol=1e-6)
    errors = {apart: (attended(torch.bfloat16, apart) - exact).abs().mean() for apart in (True, False)}
    assert 0 < errors[True] < 2 * errors[False]


def test_the_prefix_is_kept_once_and_not_copied_to_the_rows():
    """Catches memory that grows with the prefix times the rows."""
    sampler = Sampler(random_router(), 4, 100, random_ids(random.Random(0), 60), 1.0)
    sampler.advance({0: [5], 1: [6, 7]}, {0: 0.5, 1: 0.5})
    assert all(t.shape[0] == 4 and t.shape[2] == 41 for layer in sampler.cache.layers for t in layer)
    assert all(t.shape[0] == 1 and t.shape[2] == 60 for layer in sampler.cache.prefix for t in layer)


def test_decoding_reads_the_prefix_apart_where_attention_can_be_exchanged():
    """Catches a fast path that is never taken."""
    for family, fast in (("llama", True), ("gemma3", True), ("gemma2", False)):
        router = random_router(family)
        sampler = Sampler(router, 2, 50, [5, 6, 7], 1.0)
        sampler.advance({0: [8]}, {0: 0.5})
        assert (router.reads_prefix, sampler.cache.apart) == (fast, fast)
        sampler.advance({0: [8, 9]}, {0: 0.5})
        assert not sampler.cache.apart  # a chunk goes through the library's attention
