"""Every supported family of models: its own logits, and the same numbers sampled, packed and one by one."""

from __future__ import annotations

import random

import pytest
import torch
from families import FAMILIES
from scripted import EchoPool, limits, plain_logp_entropy, random_ids, random_router, spoken
from torch import tensor

from minirouter.packing import pack
from minirouter.rollout import rollout


@pytest.mark.parametrize("family", FAMILIES)
def test_our_logits_are_the_model_s_own(family):
    """Catches a projection that bypasses soft-capping or takes another head."""
    router = random_router(family)
    ids = tensor([random_ids(random.Random(0), 30)])
    positions = torch.arange(30)[None]
    with torch.no_grad():
        ours = router.logits(router.hidden(ids, positions, None))
        theirs = router.model(input_ids=ids, use_cache=False).logits
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert theirs.std() > 0.5
    cap = getattr(router.config, "final_logit_softcapping", None)
    assert (cap is not None) == (family == "gemma2")
    if cap:
        uncapped = router.model.get_output_embeddings()(router.hidden(ids, positions, None))
        assert (uncapped.abs() > cap).any() and (theirs.abs() < cap).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pack_gives_each_family_s_own_numbers(family):
    """Catches a tree mask that a family's attention adds, ignores or replaces by that of its window."""
    router = random_router(family, temperature=0.7)
    rng = random.Random(0)
    common = random_ids(rng, 24)
    parts = ([5, -9, 4], [3], [2, -3, 4, -11, 6, -2])
    trajectories = [spoken(rng, common + random_ids(rng, b), p) for b, p in enumerate(parts)]
    body = router.model.get_base_model().get_decoder()
    with torch.no_grad():
        batch = pack(trajectories)
        logp, entropy = router.logp(batch)
        for b, t in enumerate(trajectories):
            ids, states = tensor([t.ids]), tensor(t.actions) - 1
            logits = router.model(input_ids=ids, use_cache=False).logits[0, states]
            single = plain_logp_entropy(logits / 0.7, ids[0, states + 1])
            for ours, theirs in zip((logp, entropy), single, strict=True):
                assert torch.allclose(ours[b, : len(states)], theirs, atol=1e-4)
        value = router.value(batch)
        for b, t in enumerate(trajectories):
            hidden = body(input_ids=tensor([t.ids]), use_cache=False).last_hidden_state
            theirs = router.value_head(hidden[0, tensor(t.actions) - 1])[:, 0]
            assert torch.allclose(value[b, : len(t.actions)], theirs, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rollout_s_log_probs_are_the_scored_ones(family):
    """Catches a family whose cached and packed passes differ, and a drawn id that has no token."""
    router = random_router(family, temperature=0.7)
    rng = random.Random(5)
    common = random_ids(rng, 10)
    prompts = [common + random_ids(rng, rng.randrange(1, 9)) for _ in range(6)]
    tight = limits(slots=3, turn_tokens=20, total_tokens=100, reply_tokens=50, temperature=0.7)
    trajectories = rollout(router, prompts, EchoPool(), tight, seed=1)
    logp, _ = router.logp(pack(trajectories))
    for b, t in enumerate(trajectories):
        drawn = [t.logps[i] for i in t.actions]
        assert logp[b, : len(drawn)].tolist() == pytest.approx(drawn, abs=1e-4)
    assert len({i for t in trajectories for i in t.ids[t.prompt_len :]}) > 20
