"""Proximal policy optimisation (Eq. 1 and the appendix of the paper) as pure functions of tensors.

The time axis is the router's own actions: column `a` of a (B, A) tensor belongs to the a-th token that it
drew, and `mask` (B, A) says which columns a row has (right padding). Order of use: `kl`, `shaped_reward`,
`gae`, `whiten`, `policy_loss` and `value_loss`. Losses are per action, not averaged: the caller sums them
and divides once per optimiser step, so that the size of micro-batches changes nothing.

Departures from the reference implementation: it runs GAE, whitening and the value loss over the tokens of
replies too, and ignores the mask in GAE. Here only actions count; nothing at a masked position (NaN and
infinity included) reaches an output or a gradient, outputs there are 0, and degenerate batches give 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

KL_KINDS = ("k1", "abs", "mse", "k3")
K3_LIMIT = 10.0  # nats; the reference implementation's bound on its low-variance estimate


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of `x` over `mask` (same shape; weights are allowed), a scalar; 0 if the mask is empty."""
    count = mask.sum()
    return (_keep(x, mask) * mask).sum() / torch.where(count > 0, count, 1)


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Unbiased variance of `x` over `mask` (same shape), a scalar; 0 if the mask holds fewer than two."""
    squares = (_keep(x, mask) - masked_mean(x, mask)) ** 2 * mask
    degrees = mask.sum() - 1
    return torch.where(degrees > 0, squares.sum() / torch.where(degrees > 0, degrees, 1), 0.0)


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """`x` (B, A) with mean 0 and variance 1 over `mask`, 0 elsewhere; one or equal values give 0."""
    if not mask.any():
        return torch.zeros_like(x)
    x = x - x[mask.bool()][0]  # equal values become exactly 0, not a rounding error blown up by the division
    return _keep((_keep(x, mask) - masked_mean(x, mask)) * torch.rsqrt(masked_var(x, mask) + 1e-8), mask)


def kl(logp: Tensor, ref_logp: Tensor, kind: str) -> Tensor:
    """Per-action estimate of KL(policy, reference) from log-probs of the drawn tokens, same shape, in nats.

    k1 = logp - ref_logp (signed, unbiased), abs = |k1|, mse = k1^2 / 2, k3 = exp(-k1) + k1 - 1, at most 10
    (the reference implementation's "low_var_kl"). Raises ValueError for another kind.
    """
    if kind not in KL_KINDS:
        raise ValueError(f"unknown kind of KL {kind!r}: one of {', '.join(KL_KINDS)}")
    difference = logp - ref_logp
    difference = torch.where(difference.isnan(), 0.0, difference)  # nothing known, or both impossible
    if kind == "k1":
        return difference
    if kind == "abs":
        return difference.abs()
    if kind == "mse":
        square = torch.where(difference.isinf(), 0.0, difference) ** 2 / 2
        return torch.where(difference.isinf(), torch.inf, square)
    bounded = difference.clamp(-2 * K3_LIMIT, 2 * K3_LIMIT)  # beyond, k3 is above its limit anyway
    return (torch.exp(-bounded) + bounded - 1).clamp(max=K3_LIMIT)


def shaped_reward(score: Tensor, kl: Tensor, mask: Tensor, coef: float) -> Tensor:
    """Reward of each action (B, A): -coef * kl (B, A), and besides the score (B,) on a row's last action."""
    still_to_come = mask.bool().flip(1).cumsum(1).flip(1)  # (B, A): actions in this column and after it
    last = mask.bool() & (still_to_come == 1)
    return torch.where(last, score.unsqueeze(1), 0.0) - coef * _keep(kl, mask)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over actions alone: advantages and returns (B, A), not whitened.

    The episode ends with a row's last action: no value is added after it. A masked column is passed over as
    if it were not there: it adds neither reward nor value, and no discount is counted for it.
    """
    rewards, values = _keep(rewards, mask), _keep(values, mask)
    advantages = torch.zeros_like(values)
    advantage = next_value = values.new_zeros(len(values))  # (B,)
    for a in reversed(range(values.shape[1])):
        here = mask[:, a].bool()
        delta = rewards[:, a] + gamma * next_value - values[:, a]
        advantage = torch.where(here, delta + gamma * lam * advantage, advantage)
        next_value = torch.where(here, values[:, a], next_value)
        advantages[:, a] = torch.where(here, advantage, 0.0)
    return advantages, advantages + values


def policy_loss(logp: Tensor, logp_old: Tensor, advantages: Tensor, mask: Tensor, clip: float) -> Tensor:
    """Clipped surrogate loss of each action (B, A): -ratio * advantage, ratio clipped or not, the larger."""
    ratio = torch.exp(_keep(logp, mask) - _keep(logp_old, mask))  # masked before exp: inf * 0 is NaN
    advantages = _keep(advantages, mask)
    return torch.maximum(-ratio * advantages, -ratio.clamp(1 - clip, 1 + clip) * advantages)


def value_loss(value: Tensor, value_old: Tensor, returns: Tensor, mask: Tensor, clip: float) -> Tensor:
    """Half the squared error of each value (B, A), or of the value held within `clip` of the old, if more."""
    value, value_old, returns = (_keep(x, mask) for x in (value, value_old, returns))
    clipped = value.clamp(value_old - clip, value_old + clip)
    return 0.5 * torch.maximum((value - returns) ** 2, (clipped - returns) ** 2)


def group_advantage(score: Tensor, group: Sequence | Tensor, epsilon: float = 1e-6) -> Tensor:
    """GRPO: score (B,) less the mean of its group, over the group's standard deviation + epsilon; (B,).

    `group` (B,) names the group of each row. A group of one, or of equal scores, has advantage 0.
    """
    labels = group.tolist() if isinstance(group, Tensor) else list(group)
    advantages = torch.zeros_like(score)
    for label in set(labels):
        members = torch.tensor([i for i, other in enumerate(labels) if other == label], device=score.device)
        scores = score[members] - score[members[0]]  # equal scores become exactly 0
        if len(members) > 1:
            advantages[members] = (scores - scores.mean()) / (scores.std() + epsilon)
    return advantages


def annealed(start: float, step: int, steps: int, share: float) -> float:
    """A coefficient at a step, from 1: `start`, falling in a line to 0 over the last `share` of the steps."""
    left = 1 - (step - 1) / steps
    return start * min(1.0, left / share) if share else start


def _keep(x: Tensor, mask: Tensor) -> Tensor:
    """`x` where `mask` is set, 0 elsewhere. Unlike a product, `where` stops NaN in the backward pass too."""
    return torch.where(mask.bool(), x, torch.zeros_like(x))
