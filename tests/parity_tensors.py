"""The comparison of the tensor files of the parity data; see parity_rules.py for the contract."""

import torch
from parity_rules import ACTIONS, ADAPTIVE, DEGENERATE, GROUP_OF_ONE, load

from minirouter import head, ppo

KL_NAMES = {"kl": "k1", "abs": "abs", "mse": "mse", "low_var_kl": "k3"}  # the reference's name: ours


def tensor(nested) -> torch.Tensor:
    """Nested lists of numbers, and of strings for what JSON cannot say, as float32."""
    return torch.tensor(_floats(nested), dtype=torch.float32)


def _floats(nested):
    return [_floats(x) for x in nested] if isinstance(nested, list) else float(nested)


def close(got, want, case: dict) -> bool:
    want = tensor(want)
    return torch.allclose(torch.as_tensor(got).float(), want, case["rtol"], case["atol"], equal_nan=True)


def inputs(case: dict, *names: str) -> list[torch.Tensor]:
    return [tensor(case["inputs"][name]) for name in names]


def holes(mask: torch.Tensor) -> bool:
    """Whether a masked column stands before an action: the place of a reply."""
    return bool((mask[:, 1:] > mask[:, :-1]).any())


def outside(x: torch.Tensor, mask: torch.Tensor) -> bool:
    """Whether `x` says anything where `mask` does not."""
    return bool((torch.where(mask.bool(), 0.0, x) != 0).any())


def compare_gae():
    """Advantages are compared at actions, whitened as the reference does inside its function."""
    for case in load("gae"):
        rewards, values, mask = inputs(case, "rewards", "values", "mask")
        gamma, lam = case["params"]["gamma"], case["params"]["lam"]
        advantages, returns = ppo.gae(rewards, values, mask, gamma, lam)
        advantages = ppo.whiten(advantages, mask)
        assert bool(advantages.isfinite().all()) and bool(returns.isfinite().all())
        if "error" in case["expected"]:
            yield "advantages", case, bool((advantages != 0).any()), {DEGENERATE}
            continue
        # Run over the masked columns, as the reference runs, ours gives its numbers: nothing else differs.
        straight, straight_returns = ppo.gae(rewards, values, torch.ones_like(mask), gamma, lam)
        assert _same(case, mask, ppo.whiten(straight, mask), straight_returns)
        leaks = not _same({**case, "expected": {"returns": straight_returns}}, mask, None, returns)
        assert not leaks or holes(mask) or outside(rewards, mask) or outside(values, mask)
        yield (
            "advantages, returns",
            case,
            _same(case, mask, advantages, returns),
            {ACTIONS} if leaks else set(),
        )


def _same(case: dict, mask: torch.Tensor, advantages: torch.Tensor | None, returns: torch.Tensor) -> bool:
    """Whether these are the case's advantages (if given) and returns, at actions."""
    pairs = [(returns, case["expected"]["returns"])]
    if advantages is not None:
        pairs.append((advantages, case["expected"]["advantages"]))
    return all(
        torch.allclose(
            x[mask.bool()],
            torch.as_tensor(tensor(want) if isinstance(want, list) else want)[mask.bool()],
            case["rtol"],
            case["atol"],
            equal_nan=True,
        )
        for x, want in pairs
    )


def compare_policy_loss():
    for case in load("policy_loss"):
        old, new, advantages, mask = inputs(case, "old_log_prob", "log_prob", "advantages", "mask")
        clip = case["params"]["cliprange"]
        loss = ppo.policy_loss(new, old, advantages, mask, clip)
        unclipped = ppo.policy_loss(new, old, advantages, mask, torch.inf)
        ours = {
            "loss": ppo.masked_mean(loss, mask),
            "clip_fraction": ppo.masked_mean((loss > unclipped).float(), mask),
            "kl": ppo.masked_mean(ppo.kl(old, new, "k1"), mask),
        }
        agrees = all(close(ours[k], case["expected"][k], case) for k in ours)
        yield "loss", case, agrees, set() if mask.any() else {DEGENERATE}


def compare_value_loss():
    for case in load("value_loss"):
        new, returns, old, mask = inputs(case, "vpreds", "returns", "values", "mask")
        loss = ppo.value_loss(new, old, returns, mask, case["params"]["cliprange_value"])
        unclipped = ppo.value_loss(new, old, returns, mask, torch.inf)
        clipped = ppo.masked_mean((loss > unclipped).float(), mask)
        agrees = close(ppo.masked_mean(loss, mask), case["expected"]["loss"], case)
        agrees &= close(clipped, case["expected"]["clip_fraction"], case)
        yield "loss", case, agrees, set() if mask.any() else {DEGENERATE}


def compare_kl_penalty():
    """Its "k3" is refused by the reference: that is our name for its "low_var_kl"."""
    for case in load("kl_penalty"):
        logp, ref_logp = inputs(case, "log_prob", "ref_log_prob")
        for theirs, want in case["expected"].items():
            if theirs in KL_NAMES:
                nan = bool(tensor(want).isnan().any())
                got = ppo.kl(logp, ref_logp, KL_NAMES[theirs])
                yield theirs, case, close(got, want, case), {DEGENERATE} if nan else set()
            elif theirs != "k3":
                yield theirs, case, want["error"] == "NotImplementedError" and _refused(theirs), set()


def _refused(kind: str) -> bool:
    try:
        ppo.kl(torch.zeros(1), torch.zeros(1), kind)
    except ValueError:
        return True
    return False


def compare_kl_reward():
    """Rewards of actions with the coefficient in force, the coefficient afterwards, the reported KL."""
    for case in load("kl_reward"):
        scores, logp, attention = inputs(case, "scores", "old_log_prob", "attention_mask")
        mask = attention if case["inputs"]["info_mask"] is None else tensor(case["inputs"]["info_mask"])
        ref_logp, kind = logp, KL_NAMES[case["params"]["kl_penalty"]]
        if case["inputs"]["ref_log_prob"] is not None:
            ref_logp = tensor(case["inputs"]["ref_log_prob"])
        penalty, want = ppo.kl(logp, ref_logp, kind), case["expected"]
        ours = ppo.shaped_reward(scores.sum(1), penalty, mask, want["coef_used"])
        # The reference pays the score where the response ends, even if that is the end of a reply.
        moved = bool(((scores != 0) & ~mask.bool()).any())
        yield "rewards", case, close(ours, want["token_level_rewards"], case), {ACTIONS} if moved else set()
        row_means = torch.stack([ppo.masked_mean(p, m) for p, m in zip(penalty, mask, strict=True)])
        empty = not mask.any(1).all()
        yield "kl", case, close(row_means.mean(), want["kl"], case), {DEGENERATE} if empty else set()
        coef = case["params"]["controller"]["coef"]
        adapted = want["coef_after"] != coef
        yield "coef", case, want["coef_after"] == coef, {ADAPTIVE} if adapted else set()


def compare_kl_controller():
    """Ours is the coefficient that it was given, for good."""
    for case in load("kl_controller"):
        adapted = any(abs(coef - case["init"]) > 1e-9 for coef in case["expected"])
        yield "coef", case, set(case["expected"]) == {case["init"]}, {ADAPTIVE} if adapted else set()


def compare_grpo():
    for case in load("grpo"):
        rewards, mask = inputs(case, "rewards", "mask")
        group = case["inputs"]["group"]
        ours = ppo.group_advantage(rewards.sum(1), group, case["params"]["epsilon"]).unsqueeze(1) * mask
        scores = rewards.sum(1).tolist()
        alone = any(group.count(g) == 1 and score for g, score in zip(group, scores, strict=True))
        agrees = close(ours, case["expected"]["advantages"], case) and close(
            ours, case["expected"]["returns"], case
        )
        yield "advantages", case, agrees, {GROUP_OF_ONE} if alone else set()


def compare_masked_mean():
    for case in load("masked_mean"):
        values, mask = inputs(case, "values", "mask")
        axis, want = case["params"]["axis"], case["expected"]["mean"]
        if axis is None:
            ours = ppo.masked_mean(values, mask)
        else:
            pairs = zip(values.movedim(axis, -1), mask.movedim(axis, -1), strict=True)
            ours = torch.stack([ppo.masked_mean(x, m) for x, m in pairs])
        undefined = bool(tensor(want).isnan().any())
        yield "mean", case, close(ours, want, case), {DEGENERATE} if undefined else set()


def compare_masked_var():
    """Ours is the unbiased one, which whitening needs; the other follows by n - 1 over n."""
    for case in load("masked_var"):
        values, mask = inputs(case, "values", "mask")
        ours, want = ppo.masked_var(values, mask), case["expected"]
        if "error" in want:
            yield "variance", case, ours != 0, {DEGENERATE}
            continue
        n = mask.sum()
        ours = ours if case["params"]["unbiased"] else ours * (n - 1) / n
        degenerate = {DEGENERATE} if n == 0 else set()
        yield "variance", case, close(ours, want["variance"], case), degenerate


def compare_masked_whiten():
    """At the positions of the mask; without shift_mean the mean is added back."""
    for case in load("masked_whiten"):
        values, mask = inputs(case, "values", "mask")
        ours, here = ppo.whiten(values, mask), mask.bool()
        if "error" in case["expected"]:
            yield "whitened", case, bool((ours != 0).any()), {DEGENERATE}
            continue
        if not case["params"]["shift_mean"]:
            ours = ours + ppo.masked_mean(values, mask)
        want = tensor(case["expected"]["whitened"])
        yield "whitened", case, torch.allclose(ours[here], want[here], case["rtol"], case["atol"]), set()


def logp_entropy(logits: torch.Tensor, ids: torch.Tensor) -> list[torch.Tensor]:
    """Of given logits (..., V), in slices of three tokens."""
    flat = logits.flatten(0, -2)
    n, vocab = flat.shape
    found = head.logp_entropy(lambda z, part: z[:, part], flat, ids.flatten(), vocab, 3 * n)
    return [x.view(ids.shape) for x in found]


def compare_entropy():
    for case in load("entropy"):
        (logits,) = inputs(case, "logits")
        _, ours = logp_entropy(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64))
        impossible = bool(logits.isinf().any())
        yield (
            "entropy",
            case,
            close(ours, case["expected"]["entropy"], case),
            {DEGENERATE} if impossible else set(),
        )


def compare_logprobs():
    for case in load("logprobs"):
        (logits,) = inputs(case, "logits")
        ours, _ = logp_entropy(logits, torch.tensor(case["inputs"]["labels"]))
        yield "logp", case, close(ours, case["expected"]["log_prob"], case), set()


def compare_entropy_loss():
    for case in load("entropy_loss"):
        logits, mask = inputs(case, "logits", "mask")
        _, entropy = logp_entropy(logits, torch.zeros(logits.shape[:-1], dtype=torch.int64))
        ours = ppo.masked_mean(entropy, mask)
        odd = not mask.any() or bool(logits.isinf().any())
        yield "loss", case, close(ours, case["expected"]["loss"], case), {DEGENERATE} if odd else set()


TENSOR_FILES = {
    "gae": compare_gae,
    "policy_loss": compare_policy_loss,
    "value_loss": compare_value_loss,
    "kl_penalty": compare_kl_penalty,
    "kl_reward": compare_kl_reward,
    "kl_controller": compare_kl_controller,
    "grpo": compare_grpo,
    "masked_mean": compare_masked_mean,
    "masked_var": compare_masked_var,
    "masked_whiten": compare_masked_whiten,
    "entropy": compare_entropy,
    "logprobs": compare_logprobs,
    "entropy_loss": compare_entropy_loss,
}
