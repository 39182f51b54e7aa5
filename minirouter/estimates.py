"""What is known of every action before the update: what each network says of it, and its advantage.

    estimate     log pi_old, log pi_ref and V at every action, without gradients, one pass a role
    advantages   PPO: KL in the reward, GAE, whitening over the whole batch. GRPO: groups of one question

Unlike the reference implementation's, everything is (B, A): what other LLMs said has no column.

Shape letters: B trajectories, A actions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import ppo
from .packing import packs_of
from .trajectory import Trajectory

# A ratio that is wrong by this much, in nats, is far inside any clip. In float32 sampler and scorer differ by
# about 5e-6; in bfloat16 by .2, so that there the scorer is always asked.
GAP_LIMIT = 1e-3


@dataclass(frozen=True)
class Estimates:
    """What the networks say of every action before the update, (B, A) each, on the router's device."""

    logp: Tensor  # under the policy that drew them, nats
    ref_logp: Tensor  # under the reference, nats
    value: Tensor  # the critic's; 0 where there is none
    entropy: Tensor  # of the policy, nats
    mask: Tensor  # bool
    scored: Tensor | None = None  # bool: where `entropy` is known; None: at every action


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
