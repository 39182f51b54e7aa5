"""The vocabulary head in slices: equal to all logits at once, in numbers, gradients and odd cases."""

from __future__ import annotations

import math

import pytest
import torch
from scripted import plain_logp_entropy
from torch import tensor

from minirouter.head import logp_entropy


def identity(states: torch.Tensor, part: slice) -> torch.Tensor:
    """A head whose states are the logits."""
    return states[:, part]


def close(a, b, rtol: float = 1e-5) -> bool:
    return torch.allclose(a, torch.as_tensor(b, dtype=a.dtype), rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_log_prob_and_entropy_by_hand(width):
    """Catches a log-prob of the neighbouring token, 0 x log 0 = NaN, and a slice of nothing else."""
    rows = [[0.0, math.log(3.0), -math.inf], [5.0, 5.0, 5.0], [-math.inf, -math.inf, 2.0]]
    logits = tensor(rows, requires_grad=True)
    logp, entropy = logp_entropy(identity, logits, tensor([1, 2, 2]), 3, 3 * width)
    never = logp_entropy(identity, logits, tensor([2, 0, 0]), 3, 3 * width)[0]
    assert never.isinf().tolist() == [True, False, True]
    assert close(logp, [math.log(0.75), -math.log(3.0), 0.0])
    assert close(entropy, [-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), math.log(3.0), 0.0])
    logp[0].backward(retain_graph=True)
    assert close(logits.grad[0], [-0.25, 0.25, 0.0])
    entropy.sum().backward()
    assert logits.grad.isfinite().all()
    assert close(logits.grad[1], [0.0, 0.0, 0.0])  # the uniform distribution has the highest entropy


@pytest.mark.parametrize("width", [1, 7, 49, 50, 1000])
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_slices_change_neither_numbers_nor_gradients(width, scale):
    """Catches a maximum that is not moved along, a last slice that is short, and an id on an edge."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 6, generator=generator)
    states = (scale * torch.randn(9, 6, generator=generator)).requires_grad_()
    ids = tensor([0, 6, 7, 48, 49, 13, 14, 20, 49])

    def head(h: torch.Tensor, part: slice = slice(None)) -> torch.Tensor:
        return 50 * torch.tanh(h @ weight[part].T / 50)

    mine, plain = logp_entropy(head, states, ids, 50, 9 * width), plain_logp_entropy(head(states), ids)
    weights = torch.randn(2, 9, generator=generator)
    found = []
    for logp, entropy in (mine, plain):
        (weights[0] * logp + weights[1] * entropy).sum().backward()
        found.append(states.grad)
        states.grad = None
    assert all(close(a, b, 1e-4) for a, b in zip(mine, plain, strict=True))
    assert found[1].abs().max() > 0
    assert (found[0] - found[1]).abs().max() <= 1e-5 * found[1].abs().max()


@pytest.mark.parametrize("offset", [-1e6, -200.0, 1e4, 1e6])
def test_a_constant_added_to_all_logits_changes_nothing(offset):
    """Catches a maximum that starts at 0, and a log-sum-exp that is rounded at the size of the logits."""
    logits = tensor([[0.0, -1.0, 2.0, 1.5, -3.0, 0.5]]) + offset
    found = []
    for x in (logits, logits - offset):
        x = x.requires_grad_()
        logp, entropy = logp_entropy(identity, x, tensor([3]), 6, 2)
        (logp + 2 * entropy).sum().backward()
        found.append((logp, entropy, x.grad))
    assert all(close(a, b) for a, b in zip(*found, strict=True))


def test_more_actions_than_logits_of_a_slice_still_give_slices_of_one_token():
    logits = torch.randn(7, 4)
    found = logp_entropy(identity, logits, tensor([0, 1, 2, 3, 0, 1, 2]), 4, 3)
    plain = plain_logp_entropy(logits, tensor([0, 1, 2, 3, 0, 1, 2]))
    assert all(close(a, b) for a, b in zip(found, plain, strict=True))


def test_gradients_agree_with_finite_differences():
    """Catches a wrong derivative of the entropy."""
    generator = torch.Generator().manual_seed(0)
    weight, states = (torch.randn(n, 3, generator=generator) for n in (5, 2))
    direction = torch.randn(2, 3, generator=generator)

    def loss(h: torch.Tensor) -> torch.Tensor:
        logp, entropy = logp_entropy(lambda h, part: h @ weight[part].T, h, tensor([1, 4]), 5, 4)
        return (tensor([0.7, -1.3]) * logp + tensor([2.0, 0.4]) * entropy).sum()

    h = states.clone().requires_grad_()
    loss(h).backward()
    slope = (loss(states + 1e-2 * direction) - loss(states - 1e-2 * direction)) / 2e-2
    assert torch.allclose((h.grad * direction).sum(), slope, rtol=2e-3)


def test_bfloat16_states_give_float32_numbers_and_bfloat16_gradients():
    """Catches sums over slices that are kept in bfloat16."""
    states = torch.randn(4, 8).bfloat16().requires_grad_()
    logp, entropy = logp_entropy(identity, states, tensor([0, 3, 5, 7]), 8, 12)
    assert logp.dtype == entropy.dtype == torch.float32
    (logp + entropy).sum().backward()
    assert states.grad.dtype == torch.bfloat16
    assert all(
        close(a, b)
        for a, b in zip((logp, entropy), plain_logp_entropy(states, tensor([0, 3, 5, 7])), strict=True)
    )


def test_gradients_of_many_slices_are_summed_in_float32():
    weight, states = torch.full((512, 1), 1.0), torch.ones(1, 1).bfloat16().requires_grad_()
    weight[0] = -1000.0  # the only token without a share; each other one adds -1 / 511

    def head(h: torch.Tensor, part: slice) -> torch.Tensor:
        return h.float() @ weight[part].T

    logp_entropy(head, states, tensor([0]), 512, 1)[0].sum().backward()
    assert states.grad.item() == pytest.approx(-1000 - 1, rel=4e-3)
    assert abs(states.grad.item() + 1001) <= 4  # the nearest numbers of bfloat16 are 4 apart


def test_what_is_not_finite_stays_visible():
    """Catches a NaN that is made a number: the step must be counted as a bad one."""
    for bad in (math.nan, math.inf):
        logits = tensor([[0.0, bad, 1.0], [0.0, 1.0, 2.0]])
        logp, entropy = logp_entropy(identity, logits, tensor([0, 0]), 3, 4)
        assert not logp[0].isfinite()
        assert not entropy[0].isfinite()
        assert logp[1].isfinite()


def test_no_actions_give_nothing():
    logp, entropy = logp_entropy(identity, torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), 5)
    assert logp.shape == entropy.shape == (0,)
