"""From trajectories to optimiser steps: neither what others said nor how a batch is cut changes them."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from scripted import EchoPool, limits, random_ids, random_router, spoken
from torch import tensor

from minirouter import estimates
from minirouter import update as module
from minirouter.estimates import (
    Estimates,
    action_metrics,
    advantages_of,
    estimate,
    per_action,
    trainable,
    with_info_as_actions,
)
from minirouter.packing import pack, packs_of
from minirouter.rollout import rollout
from minirouter.trajectory import Batch, Call, Reply, Trajectory
from minirouter.update import Rules, ratio_sums, update

RULES = Rules(
    minibatch=4, epochs=1, max_tokens=10_000, clip=0.2, value_clip=0.5, max_grad_norm=1e9, entropy_coef=0.01,
    kl_coef=0.0,
)  # fmt: skip
BAD = (math.nan, 1e3, -math.inf)


def trajectories(prefix: int = 30) -> list[Trajectory]:
    """Four of very unequal lengths, one of which ends with a reply."""
    rng = random.Random(0)
    common = random_ids(rng, prefix)
    parts = ([2, -3, 1], [25, -40, 30, -5, 12], [1], [3, -30])
    return [spoken(rng, common + random_ids(rng, 1 + 9 * (b == 2)), p) for b, p in enumerate(parts)]


class Capture(torch.optim.Optimizer):
    """Takes no step, but keeps the gradients that it would have taken it with."""

    def __init__(self, named: dict[str, torch.nn.Parameter]) -> None:
        super().__init__(named.values(), {})
        self.named = named
        self.steps: list[dict[str, torch.Tensor]] = []

    def step(self):
        self.steps.append({name: p.grad.clone() for name, p in self.named.items()})


def captures(router) -> dict[str, Capture]:
    everything = {**dict(router.model.named_parameters()), **dict(router.value_head.named_parameters())}
    names = {id(p): name for name, p in everything.items()}
    return {r: Capture({names[id(p)]: p for p in router.parameters(r)}) for r in ("critic", "policy")}


def one_update(rules: Rules = RULES, ts=None, router=None, seed="s", algo="ppo"):
    """Gradients of every step, and metrics, of an update from some way into it (the ratio is not 1)."""
    router = router or random_router()
    ts = ts or trajectories()
    est = estimate(router, ts, rules.max_tokens, critic=True)
    est = replace(
        est, logp=est.logp + torch.sin(torch.arange(est.logp.numel())).view_as(est.logp) / 8 * est.mask
    )
    scores = tensor([1.0, 0.0, -1.0, 0.5][: len(ts)])
    advantages, returns = advantages_of(est, scores, range(len(ts)), algo, 0.1, 0.9, 0.8)
    optimisers = captures(router)
    metrics = update(router, optimisers, ts, est, advantages, returns, rules, seed)
    return {role: optimiser.steps for role, optimiser in optimisers.items()}, metrics


def agree(a: dict, b: dict, relative: float = 1e-5) -> bool:
    assert a.keys() == b.keys()
    largest = {name: b[name].abs().max() for name in b}
    assert all(x > 0 for x in largest.values())
    return all((a[name] - b[name]).abs().max() <= relative * largest[name] for name in b)


# ---- one denominator


@pytest.mark.parametrize(("prefix", "two"), [(30, 180), (0, 150)])
def test_gradients_do_not_depend_on_the_size_of_micro_batches(prefix, two):
    """Catches a mean per micro-batch, a planned denominator, and a pack that is left out or counted twice."""
    ts = trajectories(prefix)
    router = random_router()
    sizes = {4: 10_000, 2: two, 1: 1}
    found = {}
    for most, max_tokens in sizes.items():
        packs = packs_of(ts, range(4), max_tokens)
        assert max(len(rows) for rows, _ in packs) == most
        found[most] = one_update(replace(RULES, max_tokens=max_tokens), ts, router)
    whole, metrics = found[4]
    for steps, others in (found[2], found[1]):
        for role in ("critic", "policy"):
            assert len(steps[role]) == len(whole[role]) == 1
            assert agree(steps[role][0], whole[role][0])
        assert others == pytest.approx(metrics | {"pack_tokens": others["pack_tokens"]}, rel=1e-4)


def test_the_loss_is_a_mean_over_the_actions_of_the_minibatch():
    """Catches a mean of trajectory means: here the same, computed by hand from one batch of all rows."""
    ts = trajectories()
    router = random_router()
    steps, _ = one_update(RULES, ts, router)
    est = estimate(router, ts, 10_000, critic=True)
    old = est.logp + torch.sin(torch.arange(est.logp.numel())).view_as(est.logp) / 8 * est.mask
    scores = tensor([1.0, 0.0, -1.0, 0.5])
    advantages, returns = advantages_of(replace(est, logp=old), scores, range(4), "ppo", 0.1, 0.9, 0.8)
    mask, batch = est.mask, pack(ts)
    n = sum(len(t.actions) for t in ts)
    assert mask.sum() == n

    logp, entropy = router.logp(batch)
    ratio = (logp - old).exp()
    surrogate = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    ((surrogate - 0.01 * entropy)[mask].sum() / n).backward()
    by_hand = {name: p.grad.clone() for name, p in router.model.named_parameters() if ".policy." in name}
    assert agree(steps["policy"][0], by_hand)

    value = router.value(batch)
    held = est.value + (value - est.value).clamp(-0.5, 0.5)
    (torch.maximum((value - returns) ** 2, (held - returns) ** 2)[mask].sum() / 2 / n).backward()
    by_hand = {name: p.grad.clone() for name, p in router.model.named_parameters() if ".critic." in name}
    by_hand |= {name: p.grad.clone() for name, p in router.value_head.named_parameters()}
    assert agree(steps["critic"][0], by_hand)


def test_every_trajectory_is_trained_on_once_an_epoch():
    """Catches a last minibatch that is dropped, the same order in every epoch, and a step that is skipped."""
    seen = []

    def record(router, rows, batch, est, advantages, returns, rules):
        seen.append(sorted(rows))
        return router.logp(batch)[0].sum(), torch.zeros(3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.LOSSES, "policy", record)
        router = random_router()
        ts = trajectories() + trajectories()[:1]
        est = estimate(router, ts, 10_000, critic=False)
        optimiser = {"policy": captures(router)["policy"]}
        rules = replace(RULES, minibatch=2, epochs=3)
        update(router, optimiser, ts, est, est.logp, est.value, rules, "s")
    assert len(seen) == len(optimiser["policy"].steps) == 9
    for epoch in (seen[:3], seen[3:6], seen[6:]):
        assert sorted(row for rows in epoch for row in rows) == [0, 1, 2, 3, 4]
    assert len({str(seen[i : i + 3]) for i in (0, 3, 6)}) > 1


def test_gradient_checkpointing_changes_no_update():
    """Catches a role's backward pass that recomputes after the other role was switched on."""
    found = [one_update(router=random_router(gradient_checkpointing=on))[0] for on in (False, True)]
    for role in ("critic", "policy"):
        assert agree(found[1][role][0], found[0][role][0])


# ---- what others said, and what is not an action


def test_more_and_longer_replies_change_no_advantage_and_no_return():
    """Catches replies that take part in GAE, in KL, in whitening, or as the place of the reward."""

    def said(long: bool) -> list[Trajectory]:
        rng, others = random.Random(0), random.Random(1)
        out = []
        for parts in ([2, 3], [4], [1, 2, 2]):
            t = Trajectory(prompt_len=5)
            t.append(random_ids(rng, 5))
            for n in parts:
                t.append(random_ids(rng, n), [-1.0] * n)
                t.append(random_ids(others, 50 if long else 2))  # also after the last action
            out.append(t)
        return out

    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randn(3, 5, generator=generator) for _ in range(3)]
    found = []
    for ts in (said(False), said(True)):
        est = Estimates(*numbers, torch.zeros(3, 5), pack(ts).mask)
        found.append(advantages_of(est, tensor([1.0, -1.0, 0.0]), range(3), "ppo", 0.1, 0.9, 0.8))
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)
    assert found[0][0].abs().max() > 0


def test_the_reward_lands_on_the_last_action_even_when_the_trajectory_ends_with_a_reply():
    """Catches a reward one place late, on a reply, or on padding: gamma .5, lambda 1, values 0, by hand."""
    ts = trajectories()
    assert not ts[3].sampled[-1]
    mask = pack(ts).mask
    zero = torch.zeros(mask.shape)
    est = Estimates(zero, zero, zero, zero, mask)
    _, returns = advantages_of(est, tensor([0.0, 0.0, 0.0, 8.0]), range(4), "ppo", 0.0, 0.5, 1.0)
    assert returns[3, :4].tolist() == [2.0, 4.0, 8.0, 0.0]
    assert (returns[:3] == 0).all()


@pytest.mark.parametrize("bad", BAD)
def test_nothing_at_a_place_without_action_reaches_advantages_losses_or_gradients(bad):
    """Catches a product with the mask instead of a choice: inf * 0 is NaN, forward or backward."""
    ts = trajectories()
    router = random_router()
    good = estimate(router, ts, 10_000, critic=True)
    fields = {name: getattr(good, name) for name in ("logp", "ref_logp", "value", "entropy")}
    spoilt = replace(good, **{name: torch.where(good.mask, x, bad) for name, x in fields.items()})
    results = []
    for est in (good, spoilt):
        advantages, returns = advantages_of(
            est, tensor([1.0, 0.0, -1.0, 0.5]), range(4), "ppo", 0.1, 0.9, 0.8
        )
        assert torch.isfinite(advantages).all() and torch.isfinite(returns).all()
        metrics = action_metrics(est, ts, returns)
        if est is spoilt:
            advantages, returns = (torch.where(est.mask, x, bad) for x in (advantages, returns))
        optimisers = captures(router)
        metrics |= update(router, optimisers, ts, est, advantages, returns, replace(RULES, kl_coef=0.3), "s")
        results.append((metrics, per_action(est, advantages), optimisers))
    (metrics, rows, clean), (others, same_rows, dirty) = results
    assert metrics == others
    assert rows == same_rows
    assert all(math.isfinite(x) for x in metrics.values())
    for role in ("critic", "policy"):
        for name, gradient in clean[role].steps[0].items():
            assert torch.equal(gradient, dirty[role].steps[0][name])


def test_the_kl_of_replies_enters_no_return():
    """Catches a KL that is summed over the whole text instead of the actions alone."""
    ts = trajectories()
    router = random_router()
    est = estimate(router, ts, 10_000, critic=False)
    _, returns = advantages_of(est, torch.zeros(4), range(4), "ppo", 0.5, 1.0, 1.0)
    for b, t in enumerate(ts):
        difference = (est.logp - est.ref_logp)[b, : len(t.actions)]
        assert returns[b, 0].item() == pytest.approx(-0.5 * difference.sum().item(), abs=1e-4)


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
@pytest.mark.parametrize("case", ["one action in all", "equal rewards", "lone rows"])
def test_degenerate_batches_stay_finite(case, algo):
    """Catches a variance of one, a division by a spread of 0, and a group of one that is trained on."""
    rng = random.Random(0)
    ts = (
        [spoken(rng, [1, 2, 3], [1])]
        if case == "one action in all"
        else [spoken(rng, [4, 5], [3]) for _ in "abc"]
    )
    router = random_router()
    est = estimate(router, ts, 100, critic=True)
    group = range(len(ts)) if case == "lone rows" else [0] * len(ts)
    scores = torch.arange(len(ts)).float() if case == "lone rows" else torch.full((len(ts),), 0.3)
    advantages, returns = advantages_of(est, scores, group, algo, 0.0, 1.0, 1.0)
    optimisers = {role: torch.optim.AdamW(router.parameters(role), lr=1e-3) for role in ("critic", "policy")}
    metrics = update(router, optimisers, ts, est, advantages, returns, RULES, "s")
    metrics |= action_metrics(est, ts, returns)
    assert all(math.isfinite(x) for x in metrics.values())
    assert metrics["bad_steps"] == 0
    assert all(p.isfinite().all() for role in optimisers for p in router.parameters(role))
    if algo == "grpo" or case == "one action in all":
        assert (advantages == 0).all()


# ---- who is trained on


def call(status: str) -> Call:
    return Call("a", "q", Reply("r", status=status))


def test_faulted_trajectories_rows_without_actions_and_small_groups_are_left_out():
    """Catches training on what the pool broke, on prompts that did not fit, and on a group of one."""
    rng = random.Random(0)
    ok = spoken(rng, [1], [2], [call("ok"), call("malformed"), call("unknown")])
    broken = spoken(rng, [1], [2], [call("ok"), call("timeout")])
    empty = spoken(rng, [1], [])
    assert trainable([ok, broken, empty, ok], 1) == [0, 3]
    assert trainable([ok, broken, ok, ok, empty, broken, ok, ok], 2) == [2, 3, 6, 7]
    assert trainable([ok, broken, ok, empty, ok, broken], 3) == [0, 2]
    assert trainable([broken, empty], 1) == []


def test_the_info_ablation_trains_on_everything_after_the_prompt():
    """Catches an ablation that trains on the prompt, loses a reply, or changes what it was given."""
    t = trajectories()[0]
    before = (list(t.ids), list(t.sampled), list(t.logps))
    copy = with_info_as_actions(t)
    assert copy.actions == list(range(t.prompt_len, len(t.ids)))
    assert copy.ids == t.ids and copy.prompt_len == t.prompt_len
    assert (t.ids, t.sampled, t.logps) == before
    router = random_router()
    est = estimate(router, [copy], 10_000, critic=False)
    [spots] = [[copy.actions.index(i) for i in t.actions]]
    plain = estimate(router, [t], 10_000, critic=False).logp[0]
    assert torch.allclose(est.logp[0, spots], plain, atol=1e-4)
    metrics = action_metrics(est, [copy], torch.zeros_like(est.value))
    assert metrics["trained_share"] == 1.0
    assert metrics["sampler_scorer_gap"] == 0.0


# ---- by hand


def test_ppo_s_metrics_of_two_actions_by_hand():
    """Catches a ratio the wrong way round, a clip fraction of the wrong side, and means over packs."""
    mask = tensor([[True, True, False]])
    logp = tensor([[math.log(0.5), math.log(0.3), 7.0]])
    old = tensor([[math.log(0.4), math.log(0.3), -7.0]])
    total, clipped, largest = ratio_sums(logp, old, mask, 0.2).tolist()
    assert total == pytest.approx(0.25 - math.log(1.25), abs=1e-6)
    assert clipped == 1  # 1.25 is outside .8 to 1.2
    assert largest == pytest.approx(1.25)

    class Two:
        """Log-probs that are parameters: the update's arithmetic without a network."""

        device = torch.device("cpu")

        def __init__(self):
            self.logps = torch.nn.Parameter(logp[:, :2].clone())
            self.values = torch.nn.Parameter(tensor([[1.0, 3.0]]))

        def parameters(self, role):
            return [self.logps if role == "policy" else self.values]

        def logp(self, batch):
            return self.logps * 1, torch.full((1, 2), 2.0)

        def value(self, batch):
            return self.values * 1

    router = Two()
    t = Trajectory(prompt_len=1)
    t.append([5])
    t.append([6, 7], [0.0, 0.0])
    m = mask[:, :2]
    est = Estimates(old[:, :2], tensor([[math.log(0.2), math.log(0.6)]]), tensor([[0.0, 3.2]]), m * 0.0, m)
    optimisers = {role: torch.optim.SGD(router.parameters(role), lr=1.0) for role in ("critic", "policy")}
    rules = replace(RULES, kl_coef=0.5)
    metrics = update(router, optimisers, [t], est, tensor([[1.0, -2.0]]), tensor([[0.2, 2.0]]), rules, "s")
    assert metrics["approx_kl"] == pytest.approx((0.25 - math.log(1.25)) / 2, abs=1e-6)
    assert metrics["clip_fraction"] == 0.5
    assert metrics["ratio_max"] == pytest.approx(1.25)
    assert metrics["bad_steps"] == 0
    # d/dlogp of k3 = 1 - exp(ref - logp); action 1 is clipped (ratio above 1.2, advantage 1), action 2 is not
    first = 0.5 * (1 - 0.2 / 0.5) / 2
    second = (2.0 + 0.5 * (1 - 0.6 / 0.3)) / 2
    assert router.logps.tolist()[0] == pytest.approx(
        [math.log(0.5) - first, math.log(0.3) - second], abs=1e-6
    )
    assert metrics["grad_norm/policy"] == pytest.approx(math.hypot(first, second), rel=1e-5)
    # value 1 moved by more than .5 from 0: the held one, .5, has the smaller error, so the free one counts
    assert router.values.tolist()[0] == pytest.approx([1.0 - 0.8 / 2, 3.0 - 1.0 / 2], abs=1e-6)


def test_gradients_are_clipped_to_the_norm_and_reported_before():
    """Catches a norm reported after clipping, and one that does not clip."""
    router = random_router()
    free, metrics = one_update(router=router)
    clipped, same = one_update(replace(RULES, max_grad_norm=0.01), router=router)
    for role in ("critic", "policy"):
        norm = math.sqrt(sum(g.square().sum().item() for g in free[role][0].values()))
        assert metrics[f"grad_norm/{role}"] == same[f"grad_norm/{role}"] == pytest.approx(norm, rel=1e-5)
        assert norm > 0.01
        after = math.sqrt(sum(g.square().sum().item() for g in clipped[role][0].values()))
        assert after == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("role", ["critic", "policy"])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(role):
    """Catches NaN in weights or moments, a stale gradient in the next step, and a silent skip."""
    router, ts = random_router(), trajectories()
    est = estimate(router, ts, 10_000, critic=True)
    advantages, returns = advantages_of(est, tensor([1.0, 0.0, -1.0, 0.5]), range(4), "ppo", 0.0, 1.0, 1.0)
    (advantages if role == "policy" else returns)[0, 0] = math.nan
    optimisers = {r: torch.optim.AdamW(router.parameters(r), lr=1e-3) for r in ("critic", "policy")}
    before = {r: [p.detach().clone() for p in router.parameters(r)] for r in optimisers}
    metrics = update(router, optimisers, ts, est, advantages, returns, RULES, "s")
    other = {"critic": "policy", "policy": "critic"}[role]
    assert metrics["bad_steps"] == 1
    assert metrics[f"grad_norm/{role}"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before[role], router.parameters(role), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(before[other], router.parameters(other), strict=True))
    assert all(p.grad is None for r in optimisers for p in router.parameters(r))
    assert optimisers[role].state_dict()["state"] == {}


def test_grpo_s_advantages_by_hand():
    """Catches groups out of step with rows, and an advantage spread over padding or replies."""
    mask = tensor([[True, True], [True, False], [True, False], [True, True]])
    zero = torch.zeros(4, 2)
    est = Estimates(zero, zero, zero, zero, mask)
    advantages, returns = advantages_of(
        est, tensor([1.0, 0.0, 0.4, 0.4]), [0, 0, 1, 1], "grpo", 0.0, 1.0, 1.0
    )
    half = 0.5 / math.sqrt(0.5)
    assert advantages.flatten().tolist() == pytest.approx([half, half, -half, 0, 0, 0, 0, 0], abs=1e-5)
    assert (returns == 0).all()


def test_grpo_has_no_critic_and_its_kl_in_the_loss():
    """Catches an update that needs a critic, and a KL that is charged in reward and loss."""
    router, ts = random_router(), trajectories()
    est = estimate(router, ts, 10_000, critic=False)
    assert (est.value == 0).all()
    advantages, returns = advantages_of(est, torch.zeros(4), [0, 0, 1, 1], "grpo", 0.0, 1.0, 1.0)
    critic = [p.detach().clone() for p in router.parameters("critic")]
    optimisers = {"policy": torch.optim.AdamW(router.parameters("policy"), lr=1e-3)}
    rules = replace(RULES, kl_coef=1.0, entropy_coef=0.0, epochs=4)
    metrics = update(router, optimisers, ts, est, advantages, returns, rules, "s")
    assert "grad_norm/critic" not in metrics
    assert all(torch.equal(a, b) for a, b in zip(critic, router.parameters("critic"), strict=True))
    after = estimate(router, ts, 10_000, critic=False)

    def distance(e: Estimates) -> float:
        d = (e.ref_logp - e.logp)[e.mask]
        return (d.clamp(-5, 5).exp() - d.clamp(-5, 5) - 1).mean().item()

    assert distance(after) < distance(est)


# ---- the whole of a step


def test_estimates_hold_what_each_role_says():
    """Catches rows that come back in the order of packs, and roles taken for each other."""
    router, ts = random_router(), trajectories()
    est = estimate(router, ts, 150, critic=True)
    assert len(packs_of(ts, range(4), 150)) > 1
    with torch.no_grad():
        for b, t in enumerate(ts):
            n = len(t.actions)
            assert est.mask[b].tolist() == [True] * n + [False] * (est.mask.shape[1] - n)
            batch = pack([t])
            logp, entropy = router.logp(batch)
            value = router.value(batch)
            with router.reference():
                ref_logp, _ = router.logp(batch)
            found = (est.logp, est.entropy, est.value, est.ref_logp)
            for x, single in zip(found, (logp, entropy, value, ref_logp), strict=True):
                assert torch.allclose(x[b, :n], single[0], atol=1e-4)
                assert (x[b, n:] == 0).all()


def test_before_the_first_update_ratios_are_one_and_kl_is_zero():
    """Catches a first step that starts off-policy, here at temperature .7."""
    router, ts = random_router(shaken=False, temperature=0.7), trajectories()
    est = estimate(router, ts, 10_000, critic=True)
    assert torch.equal(est.logp, est.ref_logp)
    assert (est.value == 0).all()
    advantages, returns = advantages_of(est, tensor([1.0, 0.0, -1.0, 0.5]), range(4), "ppo", 0.1, 1.0, 1.0)
    metrics = update(router, captures(router), ts, est, advantages, returns, RULES, "s")
    assert (metrics["approx_kl"], metrics["clip_fraction"], metrics["ratio_max"]) == (0.0, 0.0, 1.0)
    assert action_metrics(est, ts, returns)["kl"] == 0.0


def test_an_update_moves_both_adapters_and_the_head_and_nothing_else():
    """Catches base weights that move, adapters that do not, and a reference that follows."""
    router, ts = random_router(gradient_checkpointing=True), trajectories()
    before = {name: p.detach().clone() for name, p in router.model.named_parameters()}
    head = router.value_head.weight.detach().clone()
    est = estimate(router, ts, 150, critic=True)
    optimisers = {r: torch.optim.AdamW(router.parameters(r), lr=1e-2) for r in ("critic", "policy")}
    for step in range(2):
        advantages, returns = advantages_of(
            est, tensor([1.0, 0.0, -1.0, 0.5]), range(4), "ppo", 0.1, 1.0, 1.0
        )
        update(router, optimisers, ts, est, advantages, returns, replace(RULES, minibatch=2), f"{step}")
    after = dict(router.model.named_parameters())
    assert all(torch.equal(before[name], p) == ("lora_" not in name) for name, p in after.items())
    assert not torch.equal(head, router.value_head.weight)
    now = estimate(router, ts, 150, critic=True)
    assert torch.equal(now.ref_logp, est.ref_logp)
    assert not torch.allclose(now.logp, est.logp, atol=1e-3)


def test_an_update_makes_rewarded_actions_likelier_and_values_better():
    """Catches a loss with the wrong sign, of either role."""
    router, ts = random_router(shaken=False), trajectories()
    est = estimate(router, ts, 10_000, critic=True)
    advantages, returns = advantages_of(est, tensor([1.0, -1.0, 1.0, -1.0]), range(4), "ppo", 0.0, 1.0, 1.0)
    optimisers = {r: torch.optim.AdamW(router.parameters(r), lr=3e-3) for r in ("critic", "policy")}
    update(router, optimisers, ts, est, advantages, returns, replace(RULES, epochs=3), "s")
    now = estimate(router, ts, 10_000, critic=True)
    change = torch.where(est.mask, now.logp - est.logp, 0.0)
    assert (change * advantages).sum() > 0
    assert ((now.value - returns)[est.mask] ** 2).mean() < ((est.value - returns)[est.mask] ** 2).mean()


def test_action_metrics_by_hand():
    """Catches a share of trained tokens that counts prompts, and a hidden gap of sampler and scorer."""
    t = Trajectory(prompt_len=2)
    t.append([1, 2])
    t.append([3, 4], [-1.0, -2.0])
    t.append([5, 6])
    mask = tensor([[True, True, False]])
    logp, ref = tensor([[-1.0, -2.25, 9.0]]), tensor([[-1.5, -2.25, 0.0]])
    est = Estimates(logp, ref, tensor([[1.0, 2.0, 9.0]]), tensor([[0.5, 1.5, 9.0]]), mask)
    metrics = action_metrics(est, [t], tensor([[2.0, 4.0, 9.0]]))
    assert metrics == pytest.approx(
        {
            "kl": 0.25,
            "entropy": 1.0,
            "explained_variance": 0.75,  # var(1, 2) = .5 of var(2, 4) = 2 is left
            "trained_share": 0.5,
            "sampler_scorer_gap": 0.25,
        }
    )
    rows = per_action(est, tensor([[0.1, 0.2, 9.0]]))
    assert rows[0]["value"] == [1.0, 2.0] and rows[0]["kl"] == [0.5, 0.0] and len(rows[0]["advantage"]) == 2


def test_batches_are_never_changed_in_place():
    """Catches a stage that overwrites what it was given."""
    router, ts = random_router(), trajectories()
    est = estimate(router, ts, 10_000, critic=True)
    copies = [x.clone() for x in (est.logp, est.ref_logp, est.value, est.entropy)]
    scores = tensor([1.0, 0.0, -1.0, 0.5])
    advantages, returns = advantages_of(est, scores, range(4), "ppo", 0.1, 0.9, 0.8)
    kept = (advantages.clone(), returns.clone())
    batch = pack(ts)
    ids = batch.input_ids.clone()
    update(router, captures(router), ts, est, advantages, returns, replace(RULES, epochs=2), "s")
    assert all(map(torch.equal, copies, (est.logp, est.ref_logp, est.value, est.entropy)))
    assert torch.equal(kept[0], advantages) and torch.equal(kept[1], returns)
    assert isinstance(batch, Batch) and torch.equal(ids, batch.input_ids)
    assert scores.tolist() == [1.0, 0.0, -1.0, 0.5]


def drawn_by(router, n: int = 5) -> list[Trajectory]:
    """Trajectories of a rollout with calls, log-probs as they were recorded at the draw."""
    rng = random.Random(3)
    common = random_ids(rng, 20)
    prompts = [common + random_ids(rng, 1 + i) for i in range(n)]
    budgets = limits(turn_tokens=25, total_tokens=200, slots=3, temperature=router.temperature)
    return rollout(router, prompts, EchoPool(), budgets, seed=0)


def counted(router, monkeypatch) -> list[str]:
    """The role of each scoring pass from now on."""
    passes: list[str] = []
    logp = router.logp
    monkeypatch.setattr(router, "logp", lambda batch: (logp(batch), passes.append(router.role))[0])
    return passes


def test_log_probs_of_the_draw_stand_for_those_of_the_policy_and_save_its_pass(monkeypatch):
    """Catches recorded log-probs in other columns or rows, at another temperature, and a pass that is not
    saved."""
    router = random_router(temperature=0.7)
    ts = drawn_by(router)
    packs = len(packs_of(ts, range(len(ts)), 60))
    scored = estimate(router, ts, 60, critic=True)
    passes = counted(router, monkeypatch)
    drawn = estimate(router, ts, 60, critic=True, old_logp="sampler")
    assert packs > 2
    assert (passes.count("policy"), passes.count("reference")) == (1, packs)
    assert torch.allclose(drawn.logp, scored.logp, atol=1e-5)
    assert 0 < drawn.scored.sum() < drawn.mask.sum()
    assert torch.equal(drawn.entropy[drawn.scored], scored.entropy[drawn.scored])
    returns = torch.zeros_like(drawn.logp)
    found = action_metrics(drawn, ts, returns)
    assert found["entropy"] == pytest.approx(float(scored.entropy[drawn.scored].mean()))
    assert 0 < found["sampler_scorer_gap"] < 1e-5


@pytest.mark.parametrize("fault", [2 * estimates.GAP_LIMIT, None])
def test_log_probs_of_the_draw_that_are_off_or_missing_are_scored_again(fault, monkeypatch):
    """Catches trust in a draw by other weights or another precision, and None taken for a number."""
    router = random_router()
    ts = drawn_by(router)
    for t in ts:
        for i in t.actions:
            t.logps[i] = None if fault is None else t.logps[i] + fault
    passes = counted(router, monkeypatch)
    est = estimate(router, ts, 60, critic=False, old_logp="sampler")
    assert passes.count("policy") == len(packs_of(ts, range(len(ts)), 60))
    assert torch.equal(est.logp, estimate(router, ts, 60, critic=False).logp)
    assert torch.equal(est.scored, est.mask)
