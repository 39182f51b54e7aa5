"""One batch of trajectories -> what is known of every action, its advantage, and the optimiser steps.

    estimate     log pi_old, log pi_ref and V at every action, without gradients, one pass a role
    advantages   PPO: KL in the reward, GAE, whitening over the whole batch. GRPO: groups of one question
    update       the critic's and the policy's clipped losses on minibatches

A loss is a sum over actions divided once by the number of actions of the minibatch, counted beforehand: how
the minibatch is cut into packs is a matter of memory only (the reference implementation averages means).
The backward pass of one role ends before the forward pass of the next begins.

Shape letters: B trajectories, A actions.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import ppo
from .packing import micro_batches, pack
from .trajectory import Batch, Trajectory

# A ratio that is wrong by this much, in nats, is far inside any clip. In float32 sampler and scorer differ by
# about 5e-6; in bfloat16 by .2, so that there the scorer is always asked.
GAP_LIMIT = 1e-3

Packs = list[tuple[list[int], Batch]]  # (rows of the batch of trajectories, the same laid out)


@dataclass(frozen=True)
class Estimates:
    """What the networks say of every action before the update, (B, A) each, on the router's device."""

    logp: Tensor  # under the policy that drew them, nats
    ref_logp: Tensor  # under the reference, nats
    value: Tensor  # the critic's; 0 where there is none
    entropy: Tensor  # of the policy, nats
    mask: Tensor  # bool
    scored: Tensor | None = None  # bool: where `entropy` is known; None: at every action


def packs_of(trajectories: Sequence[Trajectory], rows: Sequence[int], max_tokens: int) -> Packs:
    """The given rows as packs of at most `max_tokens` tokens."""
    chosen = [trajectories[i] for i in rows]
    groups = micro_batches(chosen, max_tokens)
    return [([rows[i] for i in group], pack([chosen[i] for i in group])) for group in groups]


@torch.no_grad()
def estimate(
    router: Any, trajectories: Sequence[Trajectory], max_tokens: int, critic: bool, old_logp: str = "scorer"
) -> Estimates:
    """Score all actions with each role in turn. Every trajectory must have an action.

    `old_logp` "sampler": what was recorded at the draw stands for log pi_old, which saves a forward pass. The
    first pack is scored all the same; if its log-probs differ by more than `GAP_LIMIT`, all packs are.
    """
    packs = packs_of(trajectories, range(len(trajectories)), max_tokens)
    width = max(len(t.actions) for t in trajectories)
    logp, entropy, ref_logp, value = torch.zeros(4, len(trajectories), width, device=router.device)
    mask, scored = torch.zeros(2, *logp.shape, dtype=torch.bool, device=router.device)
    drawn = torch.zeros_like(logp)
    for b, t in enumerate(trajectories):
        logps = [math.nan if t.logps[i] is None else t.logps[i] for i in t.actions]
        drawn[b, : len(logps)] = torch.tensor(logps)
    trusted = old_logp == "sampler" and not bool(drawn.isnan().any())
    for n, (rows, batch) in enumerate(packs):
        a = batch.mask.shape[1]
        mask[rows, :a] = batch.mask.to(router.device)
        if trusted and n > 0:
            logp[rows, :a] = drawn[rows, :a]
            continue
        logp[rows, :a], entropy[rows, :a] = router.logp(batch)
        scored[rows, :a] = mask[rows, :a]
        trusted = trusted and float((drawn - logp)[rows].abs().max()) <= GAP_LIMIT
    with router.reference():
        for rows, batch in packs:
            ref_logp[rows, : batch.mask.shape[1]] = router.logp(batch)[0]
    for rows, batch in packs if critic else ():
        value[rows, : batch.mask.shape[1]] = router.value(batch)
    return Estimates(logp, ref_logp, value, entropy, mask, scored)


def trainable(trajectories: Sequence[Trajectory], group_size: int) -> list[int]:
    """Rows that may be trained on: the pool was not at fault and there is an action; of a group, at least
    two.
    """
    rows = [i for i, t in enumerate(trajectories) if not t.faulted and t.actions]
    members = Counter(i // group_size for i in rows)
    return [i for i in rows if members[i // group_size] >= min(2, group_size)]


def with_info_as_actions(t: Trajectory) -> Trajectory:
    """Ablation: a copy in which everything after the prompt counts as drawn by the router, replies too."""
    own = len(t.ids) - t.prompt_len
    return replace(t, sampled=[False] * t.prompt_len + [True] * own, logps=[None] * len(t.ids))


def advantages_of(
    est: Estimates, scores: Tensor, group: Sequence[int], algo: str, kl_coef: float, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns (B, A) from scores (B,). `kl_coef` 0: the KL is in the loss instead.

    "ppo": KL in the reward, GAE, whitened over the batch. "grpo": the advantage of a trajectory within its
    group, at each of its actions; there is no critic, so returns are 0.
    """
    if algo == "grpo":
        advantages = torch.where(est.mask, ppo.group_advantage(scores, group)[:, None], 0.0)
        return advantages, torch.zeros_like(advantages)
    rewards = ppo.shaped_reward(scores, ppo.kl(est.logp, est.ref_logp, "k1"), est.mask, kl_coef)
    advantages, returns = ppo.gae(rewards, est.value, est.mask, gamma, lam)
    return ppo.whiten(advantages, est.mask), returns


def action_metrics(est: Estimates, trajectories: Sequence[Trajectory], returns: Tensor) -> dict[str, float]:
    """What the estimates say of a batch before its update, means over actions."""
    drawn = [(b, a, t.logps[i]) for b, t in enumerate(trajectories) for a, i in enumerate(t.actions)]
    gaps = [abs(logp - est.logp[b, a].item()) for b, a, logp in drawn if logp is not None]
    spread = ppo.masked_var(returns, est.mask)
    left = ppo.masked_var(returns - est.value, est.mask)
    tokens = sum(len(t.ids) - t.prompt_len for t in trajectories)
    return {
        "kl": float(ppo.masked_mean(ppo.kl(est.logp, est.ref_logp, "k1"), est.mask)),
        "entropy": float(ppo.masked_mean(est.entropy, est.mask if est.scored is None else est.scored)),
        "explained_variance": float(1 - left / spread) if spread > 0 else 0.0,
        "trained_share": int(est.mask.sum()) / tokens,
        "sampler_scorer_gap": max(gaps, default=0.0),
    }


def per_action(est: Estimates, advantages: Tensor) -> list[dict[str, list[float]]]:
    """For the record: log-prob, value, advantage and KL of every action of each trajectory."""
    k1 = ppo.kl(est.logp, est.ref_logp, "k1")
    columns = {"logp": est.logp, "value": est.value, "advantage": advantages, "kl": k1}
    return [{name: x[b][est.mask[b]].tolist() for name, x in columns.items()} for b in range(len(advantages))]


@dataclass(frozen=True)
class Rules:
    """How a batch is turned into optimiser steps."""

    minibatch: int  # trajectories an optimiser step
    epochs: int
    max_tokens: int  # of one pack
    clip: float
    value_clip: float
    max_grad_norm: float
    entropy_coef: float
    kl_coef: float  # of k3 in the loss; 0 when the KL is in the reward


def critic_loss(
    router: Any, rows: list[int], batch: Batch, est: Estimates, _: Tensor, returns: Tensor, rules: Rules
) -> tuple[Tensor, Tensor]:
    """Sum over the actions of a pack of the clipped squared error; nothing to report."""
    at = (rows, slice(batch.mask.shape[1]))
    losses = ppo.value_loss(router.value(batch), est.value[at], returns[at], est.mask[at], rules.value_clip)
    return losses.sum(), torch.zeros(3)


def actor_loss(
    router: Any, rows: list[int], batch: Batch, est: Estimates, advantages: Tensor, _: Tensor, rules: Rules
) -> tuple[Tensor, Tensor]:
    """Sum over the actions of a pack of clipped surrogate, KL and entropy bonus; and its `ratio_sums`."""
    at = (rows, slice(batch.mask.shape[1]))
    logp, entropy = router.logp(batch)
    surrogate = ppo.policy_loss(logp, est.logp[at], advantages[at], est.mask[at], rules.clip)
    penalty = rules.kl_coef * ppo.kl(logp, est.ref_logp[at], "k3") - rules.entropy_coef * entropy
    return (surrogate + penalty).sum(), ratio_sums(logp.detach(), est.logp[at], est.mask[at], rules.clip)


def ratio_sums(logp: Tensor, logp_old: Tensor, mask: Tensor, clip: float) -> Tensor:
    """(sum of (ratio - 1) - log ratio, count outside the clip, largest ratio) over the actions of a pack."""
    change = torch.where(mask, logp - logp_old, 0.0)
    ratio = change.exp()
    return torch.stack([(ratio - 1 - change).sum(), ((ratio - 1).abs() > clip).sum(), ratio.max()]).cpu()


LOSSES = {"critic": critic_loss, "policy": actor_loss}


def update(
    router: Any,
    optimisers: dict[str, torch.optim.Optimizer],
    trajectories: Sequence[Trajectory],
    est: Estimates,
    advantages: Tensor,
    returns: Tensor,
    rules: Rules,
    seed: str,
) -> dict[str, float]:
    """Passes over the batch in minibatches of trajectories, one optimiser step of each role a minibatch.

    -> metrics. An optimiser step whose loss or gradient is not finite is left out and counted in "bad_steps".
    Where memory runs out, packs are halved, once, and the minibatch is done again: its gradient does not
    depend on them. Raises torch.OutOfMemoryError if that is not enough.
    """
    sums: dict[str, list[Tensor]] = {role: [] for role in optimisers}
    norms: dict[str, list[float]] = {role: [] for role in optimisers}
    given, size = (est, advantages, returns, rules), rules.max_tokens
    for epoch in range(rules.epochs):
        order = random.Random(f"{seed}/{epoch}").sample(range(len(trajectories)), len(trajectories))
        for start in range(0, len(order), rules.minibatch):
            minibatch = order[start : start + rules.minibatch]
            packs = packs_of(trajectories, minibatch, size)
            for role, optimiser in optimisers.items():
                done = _backward(router, role, packs, given)
                if done is None and size == rules.max_tokens:
                    size //= 2
                    packs = packs_of(trajectories, minibatch, size)
                    optimiser.zero_grad(set_to_none=True)
                    done = _backward(router, role, packs, given)
                if done is None:
                    raise torch.OutOfMemoryError(f"packs of {size} tokens do not fit into the memory")
                loss, reports = done
                sums[role] += reports
                norms[role].append(_step(optimiser, router.parameters(role), rules.max_grad_norm, loss))
    kl_sum, clipped, _ = torch.stack(sums["policy"]).sum(0).tolist()
    actions = rules.epochs * int(est.mask.sum())
    finite = {role: [n for n in norms[role] if math.isfinite(n)] for role in norms}
    return {
        "approx_kl": kl_sum / actions,
        "clip_fraction": clipped / actions,
        "ratio_max": max(report[2].item() for report in sums["policy"]),
        "bad_steps": sum(map(len, norms.values())) - sum(map(len, finite.values())),
        "pack_tokens": size,
        **{f"grad_norm/{role}": sum(n) / len(n) if n else 0.0 for role, n in finite.items()},
    }


def _backward(router: Any, role: str, packs: Packs, given: tuple) -> tuple[float, list[Tensor]] | None:
    """Gradients of a role on a minibatch; -> its loss, and what each pack reports. None: out of memory."""
    actions = sum(int(batch.mask.sum()) for _, batch in packs)
    total, reports = 0.0, []
    try:
        for rows, batch in packs:
            loss, report = LOSSES[role](router, rows, batch, *given)
            (loss / actions).backward()
            total += float(loss.detach())
            reports.append(report)
    except torch.OutOfMemoryError:
        return None
    return total / actions, reports


def _step(optimiser: torch.optim.Optimizer, parameters: list[Tensor], max_norm: float, loss: float) -> float:
    """Clip, step and clear; -> the norm before clipping, NaN if that or the loss is not finite: then nothing
    changes.
    """
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
    good = math.isfinite(norm) and math.isfinite(loss)
    if good:
        optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return norm if good else math.nan
