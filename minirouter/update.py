"""The optimiser steps of one batch: the critic's and the policy's clipped losses, on minibatches.

A loss is a sum over actions divided once by the number of actions of the minibatch, counted beforehand: how
the minibatch is cut into packs is a matter of memory only (the reference implementation averages means).
The backward pass of one role ends before the forward pass of the next begins.

Shape letters: B trajectories, A actions.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import ppo
from .estimates import Estimates
from .packing import Packs, packs_of
from .trajectory import Batch, Trajectory


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


def minibatches(n: int, rules: Rules, seed: str) -> Iterator[list[int]]:
    """Rows of each minibatch: every row once an epoch, in an order of its own."""
    for epoch in range(rules.epochs):
        order = random.Random(f"{seed}/{epoch}").sample(range(n), n)
        yield from (order[start : start + rules.minibatch] for start in range(0, n, rules.minibatch))


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
    for minibatch in minibatches(len(trajectories), rules, seed):
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
            norms[role].append(_step(optimiser, rules.max_grad_norm, loss))
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


def _step(optimiser: torch.optim.Optimizer, max_norm: float, loss: float) -> float:
    """Clip, step and clear; -> the norm before clipping, NaN if that or the loss is not finite: then nothing
    changes.
    """
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
    good = math.isfinite(norm) and math.isfinite(loss)
    if good:
        optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return norm if good else math.nan
