"""Log-probs and entropies of many actions without their logits: the vocabulary head, a slice at a time.

1,024 actions of a 152k vocabulary have 600 MB of logits, as much again of log-softmax, and of gradients. Here
the vocabulary is cut into slices, and only the logits of one exist at once: the forward pass sums up, slice
after slice, what log-sum-exp and entropy need, and the backward pass makes each slice again. That is three
products of matrices instead of two, each with all actions at once. The reference implementation has all
logits.

Shape letters: N actions, E hidden size, V vocabulary, S tokens of a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

SLICE_LOGITS = 2**22  # of one slice, N x S
LOWEST = -1e30  # stands for a logit of -inf: 0 x it is 0, not NaN

Logits = Callable[[Tensor, slice], Tensor]  # (N, E), a slice of V -> (N, S)


def logp_entropy(
    logits: Logits, states: Tensor, ids: Tensor, vocab: int, slice_logits: int = SLICE_LOGITS
) -> tuple[Tensor, Tensor]:
    """Log-probability of `ids` (N,), each in [0, vocab), and entropy of the distribution at `states` (N, E):
    (N,) each, nats, float32.

    `logits(states, part)` are the logits of the tokens in `part`; its weights are constants, gradients go to
    `states` alone.
    """
    width = max(1, slice_logits // max(1, len(ids)))
    return _Head.apply(logits, states, ids, vocab, width)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Logits, states: Tensor, ids: Tensor, vocab: int, width: int
    ) -> tuple[Tensor, Tensor]:
        # With z a logit and m the largest so far: sums of exp(z - m) and of exp(z - m) (z - m) over the
        # tokens so far, moved to the new m after each slice.
        top = states.new_full((len(ids),), LOWEST, dtype=torch.float32)
        mass, moment, own = torch.zeros(3, len(ids), device=states.device)
        for part in _slices(vocab, width):
            z = logits(states, part).float()
            own = torch.where(_inside(ids, part), z.gather(1, _place(ids, part))[:, 0], own)
            z = z.clamp(min=LOWEST)  # NaN stays NaN
            highest = torch.maximum(top, z.amax(1))
            shift = top - highest
            z -= highest[:, None]
            p = z.exp()
            moment = shift.exp() * (moment + shift * mass) + z.mul_(p).sum(1)
            mass = shift.exp() * mass + p.sum(1)
            top = highest
        log_mass = mass.log()  # log-sum-exp is top + log_mass; added, it would be rounded at the size of top
        entropy = log_mass - moment / mass
        ctx.logits, ctx.slices = logits, (vocab, width)
        ctx.save_for_backward(states, ids, top, log_mass, entropy)
        return own - top - log_mass, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_logp: Tensor, of_entropy: Tensor) -> tuple[Tensor | None, ...]:
        # d log p_i / d z_j = [i = j] - p_j and d entropy / d z_j = -p_j (log p_j + entropy)
        states, ids, top, log_mass, entropy = ctx.saved_tensors
        found = torch.zeros_like(states, dtype=torch.float32)
        for part in _slices(*ctx.slices):
            with torch.enable_grad():
                leaf = states.detach().requires_grad_()
                z = ctx.logits(leaf, part)
            gradient = z.detach().float().clamp(min=LOWEST) - top[:, None]
            p = gradient.sub_(log_mass[:, None]).exp()  # gradient is log p so far
            gradient.add_(entropy[:, None]).mul_(-of_entropy[:, None]).sub_(of_logp[:, None]).mul_(p)
            gradient.scatter_add_(
                1, _place(ids, part), torch.where(_inside(ids, part), of_logp, 0.0)[:, None]
            )
            found += torch.autograd.grad(z, leaf, gradient.to(z.dtype))[0]
        return None, found.to(states.dtype), None, None, None


def _slices(vocab: int, width: int) -> Iterator[slice]:
    return (slice(start, min(start + width, vocab)) for start in range(0, vocab, width))


def _inside(ids: Tensor, part: slice) -> Tensor:
    return (ids >= part.start) & (ids < part.stop)


def _place(ids: Tensor, part: slice) -> Tensor:
    """Where each id stands in the slice, (N, 1); any place for those outside."""
    return (ids - part.start).clamp(0, part.stop - part.start - 1)[:, None]
