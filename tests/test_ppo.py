"""PPO quantities by hand, their invariants under masking, and batches that have almost nothing in them."""

import math

import pytest
import torch
from torch import tensor

from minirouter import ppo

BAD = (math.nan, math.inf, -math.inf, 1e3)
MASK = tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])


def close(a, b) -> bool:
    return torch.allclose(a, torch.as_tensor(b, dtype=a.dtype), atol=1e-6)


def test_masked_mean_and_variance_by_hand():
    """Catches a mean over the padding, and a biased variance."""
    x, mask = tensor([[1.0, 2.0, 6.0, 99.0]]), tensor([[1, 1, 1, 0]])
    assert close(ppo.masked_mean(x, mask), 3.0)
    assert close(ppo.masked_var(x, mask), 7.0)  # (4 + 1 + 9) / (3 - 1)
    assert close(ppo.whiten(x, mask), [[-2 / 7**0.5, -1 / 7**0.5, 3 / 7**0.5, 0.0]])


def test_whitening_is_over_the_whole_batch():
    """Catches a mean per row, or per micro-batch, and values left outside the mask."""
    generator = torch.Generator().manual_seed(0)
    x = 3 + 5 * torch.randn(4, 6, generator=generator)
    mask = torch.arange(6) < tensor([[6], [2], [0], [4]])
    white = ppo.whiten(x, mask)
    assert close(white[mask].mean(), 0.0)
    assert close(white[mask].var(), 1.0)
    assert (white[~mask] == 0).all()


def test_kl_kinds_by_hand():
    """Catches a sign, an estimator under another's name, and k3 without its bound."""
    logp, ref_logp = tensor([-1.0, -2.0, -9.0, -0.5]), tensor([-1.5, -1.0, -1.0, -60.0])
    assert close(ppo.kl(logp, ref_logp, "k1"), [0.5, -1.0, -8.0, 59.5])
    assert close(ppo.kl(logp, ref_logp, "abs"), [0.5, 1.0, 8.0, 59.5])
    assert close(ppo.kl(logp, ref_logp, "mse"), [0.125, 0.5, 32.0, 59.5**2 / 2])
    assert close(ppo.kl(logp, ref_logp, "k3"), [math.exp(-0.5) - 0.5, math.e - 2, 10.0, 10.0])
    with pytest.raises(ValueError, match="unknown kind of KL 'full'"):
        ppo.kl(logp, ref_logp, "full")


def test_k3_pulls_towards_the_reference():
    """Catches a KL loss whose gradient pushes the policy away, as that of k1 does on average not at all."""
    logp = tensor([-1.0, -2.0], requires_grad=True)
    ppo.kl(logp, tensor([-1.5, -1.0]), "k3").sum().backward()
    assert close(logp.grad, [1 - math.exp(-0.5), 1 - math.e])
    assert logp.grad[0] > 0 > logp.grad[1]


def test_the_score_is_paid_on_the_last_action():
    """Catches a score one place late (on a pad), on the last column, or lost with a reply at the end."""
    score, kl = tensor([0.9, -1.0, 0.5]), torch.full((3, 4), 10.0)
    assert close(
        ppo.shaped_reward(score, kl, MASK, 0.01), [[-0.1, -0.1, 0.8, 0], [-1.1, 0, 0, 0], [0, 0, 0, 0]]
    )


def test_gae_by_hand():
    """Catches a wrong shift of the values, and a value after the end that leaks in below lambda 1."""
    rewards, values = tensor([[0.0, 0.0, 1.0, 9.0]]), tensor([[0.5, 0.2, 0.4, 7.0]])
    advantages, returns = ppo.gae(rewards, values, tensor([[1, 1, 1, 0]]), 0.9, 0.5)
    last = 1.0 - 0.4
    middle = 0.9 * 0.4 - 0.2 + 0.45 * last
    first = 0.9 * 0.2 - 0.5 + 0.45 * middle
    assert close(advantages, [[first, middle, last, 0.0]])
    assert close(returns, [[first + 0.5, middle + 0.2, last + 0.4, 0.0]])


def test_gae_passes_over_masked_columns_as_if_they_were_not_there():
    """Catches a return that restarts at an inner masked token, and discounts counted over it."""
    generator = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(2, 3, generator=generator), torch.randn(2, 3, generator=generator)
    mask = tensor([[1, 0, 0, 1, 1, 0], [0, 1, 1, 0, 0, 1]])
    wide = [torch.full((2, 6), math.nan).masked_scatter(mask.bool(), x) for x in (rewards, values)]
    short = ppo.gae(rewards, values, torch.ones(2, 3), 0.9, 0.8)
    for with_holes, without in zip(ppo.gae(*wide, mask, 0.9, 0.8), short, strict=True):
        assert close(with_holes[mask.bool()], without.flatten())
        assert (with_holes[mask == 0] == 0).all()


def test_gae_at_lambda_one_is_return_minus_value():
    """Catches a recursion that starts at the wrong end."""
    generator = torch.Generator().manual_seed(2)
    rewards, values = torch.randn(3, 4, generator=generator), torch.randn(3, 4, generator=generator)
    advantages, returns = ppo.gae(rewards, values, MASK, 1.0, 1.0)
    to_go = (rewards * MASK).flip(1).cumsum(1).flip(1) * MASK
    assert close(returns, to_go)
    assert close(advantages, (to_go - values) * MASK)


def gae_over_replies(gamma: float, lam: float):
    """Ten actions, a reply of 200 tokens, ten actions; the score 1 at the end; values of .5 at actions.

    What GAE gives the first action, straight over the reply (values .3) and over actions
    alone: (advantage, value target) of each.
    """
    own = torch.cat([torch.ones(10), torch.zeros(200), torch.ones(10)]).unsqueeze(0)
    rewards = torch.zeros(1, 220)
    rewards[0, -1] = 1.0
    values = torch.where(own.bool(), 0.5, 0.3)
    straight = ppo.gae(rewards, values, torch.ones(1, 220), gamma, lam)
    ours = ppo.gae(rewards, values, own, gamma, lam)
    return [tuple(round(x[0, 0].item(), 4) for x in pair) for pair in (straight, ours)]


def test_what_gae_over_reply_tokens_does_to_the_actions_before_a_reply():
    """Catches a reply that counts as time: at gamma = lambda = 1 both agree, which hides it.

    Below 1 the credit for a good end is lost on the way. At gamma 1, lambda .95, straight over the reply the
    first action has advantage -.1260 and value target .3740; over actions alone +.1887 and .6887, which is
    .5 x .95^19 and .5 more. The call is blamed for values that the critic gave to somebody else's text.
    """
    assert gae_over_replies(1.0, 1.0) == [(0.5, 1.0), (0.5, 1.0)]
    assert gae_over_replies(1.0, 0.95) == [(-0.1260, 0.3740), (0.1887, 0.6887)]
    assert gae_over_replies(0.99, 0.95) == [(-0.1798, 0.3202), (0.098, 0.598)]


def test_policy_loss_by_hand():
    """Catches a clip that helps where it must only hold back (the pessimistic side of the two)."""
    logp_old = torch.zeros(1, 4)
    logp = tensor([[1.5, 1.5, 0.5, 0.5]]).log()
    advantages = tensor([[2.0, -2.0, 2.0, -2.0]])
    loss = ppo.policy_loss(logp, logp_old, advantages, torch.ones(1, 4), 0.2)
    assert close(loss, [[-2.4, 3.0, -1.0, 1.6]])


def test_the_ratio_starts_at_one_and_the_gradient_is_the_policy_gradient():
    """Catches a ratio with the sign or the shift wrong before the first step."""
    logp = tensor([[-1.0, -2.0, -0.1]], requires_grad=True)
    advantages = tensor([[0.3, -0.7, 1.1]])
    loss = ppo.policy_loss(logp, logp.detach(), advantages, torch.ones(1, 3), 0.2)
    loss.sum().backward()
    assert close(loss, -advantages)
    assert close(logp.grad, -advantages)


def test_value_loss_by_hand():
    """Catches a missing half, a clip around the return, and the smaller of the two losses."""
    value, value_old = tensor([[1.0, 0.2, 2.0]]), tensor([[0.0, 0.0, 0.0]])
    returns = tensor([[1.0, 1.0, -1.0]])
    loss = ppo.value_loss(value, value_old, returns, torch.ones(1, 3), 0.5)
    assert close(loss, [[0.125, 0.32, 4.5]])


def test_group_advantage_by_hand():
    """Catches a group of one that is not centred, rows of other groups, and a biased deviation."""
    score = tensor([1.0, 5.0, 0.0, 0.2, 2.0, 0.2])
    advantages = ppo.group_advantage(score, ["a", "b", "a", "c", "a", "c"])
    assert close(advantages, [0.0, 0.0, -1.0, 0.0, 1.0, 0.0])
    assert torch.equal(ppo.group_advantage(score, tensor([0, 1, 0, 2, 0, 2])), advantages)


def losses(logp, value, fixed):
    """A whole update in small: loss of policy and value with a k3 penalty, over one denominator."""
    mask, score, logp_old, ref_logp, value_old, entropy = fixed
    rewards = ppo.shaped_reward(score, ppo.kl(logp_old, ref_logp, "k1"), mask, 0.1)
    advantages, returns = ppo.gae(rewards, value_old, mask, 0.97, 0.9)
    policy = ppo.policy_loss(logp, logp_old, ppo.whiten(advantages, mask), mask, 0.2)
    policy = policy + 0.1 * torch.where(mask.bool(), ppo.kl(logp, ref_logp, "k3"), 0.0)
    critic = ppo.value_loss(value, value_old, returns, mask, 0.5)
    bonus = ppo.masked_mean(entropy, mask)
    return (policy.sum() + critic.sum()) / mask.sum().clamp(min=1) + bonus, (advantages, returns, rewards)


def update(filler: float):
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randn(3, 4, generator=generator) for _ in range(6)]
    logp, value, logp_old, ref_logp, value_old, entropy = (
        torch.where(MASK.bool(), x, torch.full_like(x, filler)) for x in tensors
    )
    logp.requires_grad_(), value.requires_grad_()
    fixed = (MASK, tensor([1.0, -1.0, 0.5]), logp_old, ref_logp, value_old, entropy)
    loss, targets = losses(logp, value, fixed)
    loss.backward()
    return [loss.detach(), logp.grad, value.grad, *targets]


@pytest.mark.parametrize("filler", BAD)
def test_nothing_at_a_masked_position_changes_anything_forward_or_backward(filler):
    """Catches masking after exp, masks by product (inf x 0 = NaN), and reply KL or pad values in a return."""
    for clean, dirty in zip(update(0.0), update(filler), strict=True):
        assert dirty.isfinite().all()
        assert torch.equal(clean, dirty)
    for x in update(filler)[1:]:
        assert (x[MASK == 0] == 0).all()


@pytest.mark.parametrize("filler", BAD)
@pytest.mark.parametrize("kind", ppo.KL_KINDS)
def test_the_gradient_of_every_kl_stops_at_the_mask(filler, kind):
    """Catches a KL loss that is masked outside a function whose derivative is NaN inside it."""
    for other in (0.0, filler):
        logp = torch.full((3, 4), filler, requires_grad=True)
        kept = torch.where(MASK.bool(), -1.0, logp)
        assert ppo.kl(kept, torch.full((3, 4), -1.0), kind)[MASK == 1].eq(0).all()
        ppo.masked_mean(ppo.kl(logp, torch.full((3, 4), other), kind), torch.zeros(3, 4)).backward()
        assert logp.grad.eq(0).all()


@pytest.mark.parametrize("width", [0, 1, 4])
@pytest.mark.parametrize("actions", ["none", "one", "equal"])
def test_degenerate_batches_are_finite_and_zero(width, actions):
    """Catches NaN, or an exception, from a batch with no action, with one, or with nothing to tell apart."""
    mask = torch.zeros(2, width, dtype=torch.bool)
    if width and actions != "none":
        mask[0, 0] = True
    if actions == "equal":
        mask[:] = True
    x, zeros = torch.full((2, width), 0.1), torch.zeros(2, width)
    assert torch.equal(ppo.whiten(x, mask), zeros)
    assert close(ppo.masked_var(x, mask), 0.0)
    assert close(ppo.masked_mean(x, mask), 0.1 if mask.any() else 0.0)
    advantages, returns = ppo.gae(
        ppo.shaped_reward(tensor([0.7, 0.7]), zeros, mask, 0.1), zeros, mask, 1.0, 1.0
    )
    assert close(returns, torch.where(mask, 0.7, 0.0))
    assert torch.equal(ppo.whiten(advantages, mask), zeros)
    assert (ppo.policy_loss(x, x, advantages, mask, 0.2)[~mask] == 0).all()
    assert close(ppo.group_advantage(tensor([0.1, 0.1, 0.1]), [0, 0, 0]), [0.0, 0.0, 0.0])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_loss_and_gradient_do_not_depend_on_the_size_of_micro_batches(size):
    """Catches a mean of means: rows of 50, 1, 7 and 3 actions, one denominator counted beforehand."""
    lengths, width = tensor([[50], [1], [7], [3]]), 50
    mask = torch.arange(width) < lengths
    generator = torch.Generator().manual_seed(4)
    old, advantages = torch.randn(4, width, generator=generator), torch.randn(4, width, generator=generator)

    def gradient(step: int):
        logp = (old + 0.1).requires_grad_()
        total = 0.0
        for i in range(0, 4, step):
            rows = slice(i, i + step)
            loss = (
                ppo.policy_loss(logp[rows], old[rows], advantages[rows], mask[rows], 0.2).sum() / mask.sum()
            )
            loss.backward()
            total += loss.item()
        return total, logp.grad

    (whole, whole_grad), (parts, parts_grad) = gradient(4), gradient(size)
    assert whole == pytest.approx(parts, abs=1e-6)
    assert torch.equal(whole_grad, parts_grad)


def test_annealing_by_hand():
    """Catches a bonus that starts below itself or falls at the wrong end, and a share of 0 that ends it."""
    assert [ppo.annealed(0.8, step, 4, 1.0) for step in (1, 2, 4)] == pytest.approx([0.8, 0.6, 0.2])
    assert [ppo.annealed(0.8, step, 8, 0.5) for step in (1, 5, 6, 8)] == pytest.approx([0.8, 0.8, 0.6, 0.2])
    assert ppo.annealed(0.8, 900, 900, 0.0) == 0.8
