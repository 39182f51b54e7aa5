"""One base, three roles: each role trains its own tensors only; nothing moves base or reference."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch
from families import tiny
from scripted import EchoPool, chatty, limits, random_ids, random_router, shake, spoken
from torch import tensor

from minirouter.model import Router
from minirouter.packing import pack
from minirouter.rollout import rollout

SWITCHES = ("policy", "critic", "reference")


def batch_of(seed: int = 0, common: int = 40):
    rng = random.Random(seed)
    prompt = random_ids(rng, common)
    parts = ([5, -9, 4], [3], [2, -3, 4, -11, 6, -2])
    return pack([spoken(rng, prompt + random_ids(rng, 1 + b), p) for b, p in enumerate(parts)])


def snapshot(router: Router, *, adapters: bool) -> dict[str, torch.Tensor]:
    return {
        name: p.detach().clone()
        for name, p in router.model.named_parameters()
        if ("lora_" in name) == adapters
    }


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def steps(router: Router, batch, n: int = 2, roles=("critic", "policy")) -> None:
    """Optimiser steps as the update takes them: the critic's whole minibatch, then the policy's."""
    optimisers = {role: torch.optim.AdamW(router.parameters(role), lr=1e-2) for role in roles}
    for _ in range(n):
        for role, optimiser in optimisers.items():
            loss = (router.value(batch) - 1).square() if role == "critic" else router.logp(batch)[0]
            loss.sum().backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)


@torch.no_grad()
def reference_logp(router: Router, batch) -> torch.Tensor:
    with router.reference():
        return router.logp(batch)[0]


# ---- the reference


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_with_fresh_adapters_kl_is_exactly_zero_and_the_ratio_exactly_one(temperature):
    """Catches adapters that do not start at zero, dropout, and a temperature that one of two passes lacks."""
    router = random_router(shaken=False, temperature=temperature)
    batch = batch_of()
    with torch.no_grad():
        old = router.logp(batch)[0]
    assert torch.equal(old, reference_logp(router, batch))
    now = router.logp(batch)[0]  # with gradients, as in the update
    assert torch.equal(now, old)
    assert torch.equal((now - old).exp(), torch.ones_like(old))


def test_the_reference_is_the_base_without_adapters():
    """Catches a reference with an adapter on, and one that is asked for and not left again."""
    router = random_router()
    batch = batch_of()
    base, _ = tiny("llama")
    plain = Router(base, chatty(), lora_r=2, critic=False)
    bare = plain.logp(batch)[0].detach()
    policy = router.logp(batch)[0].detach()
    assert torch.equal(reference_logp(router, batch), bare)
    assert torch.equal(router.logp(batch)[0], policy)
    assert not torch.allclose(policy, bare, atol=1e-2)


def test_training_moves_neither_base_nor_reference():
    """Catches an optimiser that holds base weights, and a reference that follows the policy."""
    router = random_router()
    batch = batch_of()
    base, reference, policy = (
        snapshot(router, adapters=False),
        reference_logp(router, batch),
        router.logp(batch)[0],
    )
    steps(router, batch)
    assert same(snapshot(router, adapters=False), base)
    assert torch.equal(reference_logp(router, batch), reference)
    assert not torch.allclose(router.logp(batch)[0], policy, atol=1e-2)


def test_after_a_warm_start_the_reference_is_the_frozen_warm_policy():
    """Catches a reference that stays the bare base after a warm start, or shares tensors with the policy."""
    router = random_router()
    batch = batch_of()
    bare, warm = reference_logp(router, batch), router.logp(batch)[0].detach()
    router.freeze_reference()
    assert torch.equal(reference_logp(router, batch), warm)
    assert torch.equal(router.logp(batch)[0], warm)
    steps(router, batch)
    assert torch.equal(reference_logp(router, batch), warm)
    assert not torch.allclose(router.logp(batch)[0], warm, atol=1e-2)
    assert not torch.allclose(warm, bare, atol=1e-2)
    assert not [
        name for name, p in router.model.named_parameters() if ".reference." in name and p.requires_grad
    ]


# ---- who is trained


def trained(router: Router) -> set[str]:
    return {name for name, p in router.model.named_parameters() if p.requires_grad}


def test_each_role_has_its_own_named_tensors():
    """Catches an optimiser that is empty, shared, or built from whatever happened to require gradients."""
    router = random_router()
    policy, critic = ({id(p) for p in router.parameters(role)} for role in ("policy", "critic"))
    by_name = dict(router.model.named_parameters())
    assert policy == {id(p) for name, p in by_name.items() if ".policy." in name}
    assert critic == {id(p) for n, p in by_name.items() if ".critic." in n} | {
        id(router.value_head.weight),
        id(router.value_head.bias),
    }
    assert not policy & critic
    assert len(policy) == 2 * 7 * 3  # A and B of seven projections in three layers; no head, no embedding
    for role in SWITCHES:  # whatever is active
        router._switch(role)
        assert {id(p) for p in router.parameters("policy")} == policy
    without, _ = tiny("llama")
    assert Router(without, chatty(), lora_r=2, critic=False).parameters("critic") == []


@pytest.mark.parametrize("warm", [False, True])
def test_flags_follow_every_switch(warm):
    """Catches an adapter that a switch freezes for good, and a base or a frozen reference that it thaws."""
    router = random_router()
    if warm:
        router.freeze_reference()
    names = {
        role: {n for n in dict(router.model.named_parameters()) if f".{role}." in n} for role in SWITCHES
    }
    for before in SWITCHES:
        for after in SWITCHES:
            router._switch(before)
            router._switch(after)
            assert trained(router) == (names[after] if after != "reference" else set()), (before, after)
    assert bool(names["reference"]) == warm


def test_the_critic_s_steps_move_the_critic_alone_and_the_policy_s_the_policy():
    """Catches gradients of one role that reach the other's adapter or head."""
    router = random_router()
    batch = batch_of()
    for role, other in (("critic", "policy"), ("policy", "critic")):
        before, head = snapshot(router, adapters=True), router.value_head.weight.detach().clone()
        steps(router, batch, roles=(role,))
        after = snapshot(router, adapters=True)
        for name, tensor_ in before.items():
            assert torch.equal(after[name], tensor_) == (f".{other}." in name), name
        assert torch.equal(router.value_head.weight, head) == (role == "policy")
        assert all(p.grad is None for p in router.parameters(other))


def test_a_fresh_critic_says_zero_and_learns_with_adapter_and_head():
    """Catches a critic whose head starts at random, and one whose adapter never gets a gradient."""
    router = random_router(shaken=False)
    batch = batch_of()
    assert (router.value(batch) == 0).all()
    steps(router, batch, n=3, roles=("critic",))
    assert all(p.abs().max() > 0 for n, p in router.model.named_parameters() if ".critic." in n)
    assert (router.value(batch)[batch.mask] != 0).all()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_gradient_checkpointing_changes_no_gradient_of_either_role(family):
    """Catches a backward pass that recomputes with the adapter of another role."""
    batch = batch_of()
    found = {}
    for on in (False, True):
        router = random_router(family, gradient_checkpointing=on, slice_logits=70)
        before = {name: p.detach().clone() for name, p in router.model.named_parameters()}
        logp, entropy = router.logp(batch)
        (logp.sum() + entropy.sum()).backward()
        router.value(batch).square().sum().backward()  # the policy's gradients must stay what they are
        logp, entropy = router.logp(batch)
        (logp.sum() - 3 * entropy.sum()).backward()
        parameters = {**dict(router.model.named_parameters()), **dict(router.value_head.named_parameters())}
        found[on] = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        assert router.model.training
        assert len(found[on]) == 2 * 2 * 7 * 3 + 2
        assert all(torch.equal(before[name], p) for name, p in router.model.named_parameters())
    assert found[True].keys() == found[False].keys()
    for name, gradient in found[False].items():
        assert gradient.abs().max() > 0, name
        assert (found[True][name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


def test_checkpointing_really_computes_again():
    """Catches gradient checkpointing that is asked for and silently off (it works in train mode only)."""
    calls = []
    for on in (False, True):
        router = random_router(gradient_checkpointing=on)
        layer = router.model.get_base_model().model.layers[0].self_attn.q_proj
        hook = layer.register_forward_hook(lambda *_: calls.append(on))  # noqa: B023
        router.logp(batch_of())[0].sum().backward()
        hook.remove()
    assert (calls.count(False), calls.count(True)) == (1, 2)


def test_the_slices_of_the_head_change_nothing():
    """Catches a slice of the vocabulary that is lost, doubled or out of order."""
    batch = batch_of()
    whole, small = random_router(), random_router(slice_logits=70)
    for a, b in zip(whole.logp(batch), small.logp(batch), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_a_part_of_the_logits_is_a_part_of_them():
    """Catches a bias of the head that is lost, or that of other tokens."""
    router = random_router()
    head = router.model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.randn(head.out_features))
    hidden = torch.randn(3, head.in_features)
    assert torch.allclose(router.logits(hidden, slice(5, 90)), router.logits(hidden)[:, 5:90], atol=1e-5)


def wide_router(seed: int = 0, **more) -> Router:
    """One whose feed-forward layers and head are large enough to be packed."""
    base, _ = tiny("llama", hidden_size=256, intermediate_size=1024, **more)
    router = Router(base, chatty(), lora_r=4)
    shake(router, seed)
    return router


def replaced(router: Router) -> list[torch.nn.Module]:
    return [layer for layer in router.model.modules() if "forward" in vars(layer)]


def test_without_onednn_nothing_is_packed(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    router = wide_router()
    with router.decoding():
        assert not replaced(router)


@pytest.mark.parametrize("bias", [False, True])
def test_packed_layers_are_those_of_the_policy_while_decoding_and_nothing_is_left_of_them(bias):
    """Catches a copy of another adapter or of none, a lost bias, and copies that stay."""
    router = wide_router(mlp_bias=bias)
    layer = router.model.get_base_model().model.layers[1].mlp.up_proj
    if bias:
        layer.bias.data.normal_()
    before = snapshot(router, adapters=False) | snapshot(router, adapters=True)
    x = torch.randn(2, 30, 256)
    with torch.no_grad():
        slow = layer(x)
        with router.decoding():
            assert len(replaced(router)) == 3 * 3 + 1  # gate, up and down of three layers, and the head
            fast = layer(x)
        assert torch.equal(layer(x), slow)
    assert torch.allclose(fast, slow, atol=1e-5)
    assert not torch.equal(fast, slow)  # another order of sums
    assert not replaced(router)
    assert same(before, snapshot(router, adapters=False) | snapshot(router, adapters=True))


def test_packed_layers_decode_the_same_before_and_after_the_policy_changes(monkeypatch):
    """Catches copies of a policy of yesterday."""
    router = wide_router()
    prompts = [list(range(5, 90)) + [91 + i] * (1 + 20 * i) for i in range(4)]
    roomy = limits(slots=2, turn_tokens=12, total_tokens=300)
    for seed in range(2):
        shake(router, seed)
        fast = rollout(router, prompts, EchoPool(), roomy, seed=0)
        with monkeypatch.context() as without:
            without.setattr(Router, "decoding", lambda self: nullcontext())
            slow = rollout(router, prompts, EchoPool(), roomy, seed=0)
        assert fast != slow  # or nothing was packed
        for a, b in zip(fast, slow, strict=True):
            assert a.ids == b.ids
            logps = [(x, y) for x, y in zip(a.logps, b.logps, strict=True) if x is not None]
            assert all(abs(x - y) < 1e-4 for x, y in logps)


def test_packed_layers_go_when_a_rollout_fails():
    router = wide_router()
    router.model.get_base_model().model.norm.weight.data.fill_(torch.nan)
    with pytest.raises(ValueError, match="finite"):
        rollout(router, [[5, 6]], EchoPool(), limits(slots=1), seed=0)
    assert not replaced(router)


# ---- train, then roll out


def test_a_rollout_right_after_a_training_step_equals_one_of_a_fresh_router():
    """Catches train mode or checkpointing left on (no cache), another role left active, and stale weights."""
    prompts = [[5, 6, 7, 8 + i] for i in range(4)]
    tight = limits(slots=2, turn_tokens=12, total_tokens=70, reply_tokens=40)
    used = random_router(gradient_checkpointing=True)
    steps(used, batch_of(), n=1)
    used.value(batch_of())  # the critic is active, and the model in train mode
    fresh = random_router(shaken=False, gradient_checkpointing=False)
    fresh.model.load_state_dict(used.model.state_dict())
    shake(used, 1)
    shake(fresh, 1)
    after = rollout(used, prompts, EchoPool(), tight, seed=0)
    assert after == rollout(fresh, prompts, EchoPool(), tight, seed=0)
    used.model.eval()
    for t in after:
        with torch.no_grad():
            logits = used.model(input_ids=tensor([t.ids]), use_cache=False).logits[0]
        scored = [logits[i - 1].log_softmax(-1)[t.ids[i]].item() for i in t.actions]
        assert [t.logps[i] for i in t.actions] == pytest.approx(scored, abs=1e-4)


def test_rolling_out_inside_an_update_leaves_roles_as_they_should_be():
    """Catches a switch that is remembered wrongly: every order of roles gives the same numbers."""
    router = random_router()
    batch = batch_of()
    first = {
        "policy": router.logp(batch)[0],
        "critic": router.value(batch),
        "reference": reference_logp(router, batch),
    }
    for order in ("critic policy", "reference critic", "critic reference policy", "policy critic policy"):
        for role in order.split():
            now = {
                "policy": lambda: router.logp(batch)[0],
                "critic": lambda: router.value(batch),
                "reference": lambda: reference_logp(router, batch),
            }[role]()
            assert torch.equal(now, first[role]), order
        rollout(router, [[1, 2, 3]], EchoPool(), limits(turn_tokens=2), seed=0)


def test_log_probs_are_float32_and_padding_is_zero():
    """Catches numbers at places that hold no action."""
    router, batch = random_router(), batch_of()
    for output in (*router.logp(batch), router.value(batch)):
        assert output.dtype == torch.float32
        assert output.shape == batch.mask.shape
        assert (output[~batch.mask] == 0).all()
        assert (output[batch.mask] != 0).all()


def test_adapters_and_reference_survive_saving(tmp_path):
    """Catches an adapter that is loaded under another's name, frozen, or not at all."""
    router, batch = random_router(), batch_of()
    router.freeze_reference()
    shake(router, 5)
    router.save(tmp_path)
    other = random_router(shaken=False)
    other.load_adapters(tmp_path)
    other.value_head.load_state_dict(router.value_head.state_dict())
    assert torch.equal(other.logp(batch)[0], router.logp(batch)[0])
    assert torch.equal(other.value(batch), router.value(batch))
    assert torch.equal(reference_logp(other, batch), reference_logp(router, batch))
    other.logp(batch)
    assert all(".policy." in name for name in trained(other)) and trained(other)
