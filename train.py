"""Train a router by PPO (Router-R1, arXiv 2506.09033), on one device.

    x ~ D                        questions                                             data.py, world.py
    y ~ pi(. | x; P)             think, call other LLMs, read their replies, answer    rollout.py, sampler.py
    r(x, y)                      format, outcome, cost                                 reward.py
    log pi, log pi_ref, V        one packed forward pass a role                        packing.py, model.py
    advantages                   KL in the reward, GAE, whitening (or groups: GRPO)    ppo.py
    critic, then policy          two clipped losses, one denominator a step            update.py

Departs from the paper where README, "Where minirouter differs", says so; above all, time is counted in the
router's own tokens, so that what other LLMs said is part of the state and never of a loss.
"""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path

import torch
from tqdm import tqdm

from evaluate import build, evaluate, limits_of, own_files
from minirouter.config import Config, fail, load_config, read_yaml
from minirouter.data import QuestionStream
from minirouter.estimates import (
    action_metrics,
    advantages_of,
    estimate,
    per_action,
    trainable,
    with_info_as_actions,
)
from minirouter.ppo import annealed
from minirouter.record import Recorder, mean, summarise, trajectory_row, transcript
from minirouter.report import compare
from minirouter.reward import CostScale, score
from minirouter.rollout import rollout
from minirouter.run import Interrupt, Run, refuse_changes, refuse_faults
from minirouter.sft import warm_start
from minirouter.update import Rules, update
from minirouter.watch import warnings


def train_step(run: Run) -> dict[str, float]:
    """One step of the algorithm; -> its metrics."""
    c, router, seed, start = run.config, run.router, f"{run.config.seed}/{run.step}", time.monotonic()

    # x ~ D, y ~ pi(. | x; P)
    taken = run.stream.take(c.batch // c.samples_per_question)
    questions, prompts = run.task.fitting(taken, c.total_tokens)
    questions = [q for q in questions for _ in range(c.samples_per_question)]
    prompts = [p for p in prompts for _ in range(c.samples_per_question)]
    pools = run.task.pools(questions)
    trajectories = rollout(router, prompts, pools, limits_of(c, training=True), seed, c.info_tag)
    rolled = time.monotonic()

    # r(x, y)
    rewards = [
        score(t, q, pool.names, run.scale, alpha=c.alpha, metric=c.metric, cost_when_wrong=c.cost_when_wrong,
              no_format_reward=c.no_format_reward)
        for t, q, pool in zip(trajectories, questions, pools, strict=True)
    ]  # fmt: skip
    metrics = {
        "step": run.step,
        "excluded": c.batch - len(trajectories),
        **summarise(trajectories, rewards, pools),
    }
    kept = trainable(trajectories, c.samples_per_question)
    details: dict[int, dict[str, list[float]]] = {}
    if kept:
        batch = [with_info_as_actions(trajectories[i]) if c.train_on_info else trajectories[i] for i in kept]

        # log pi, log pi_ref, V
        critic = "critic" in run.optimisers
        est = estimate(router, batch, run.pack_tokens, critic, c.old_logp)

        # advantages
        kl_reward, kl_loss = (c.kl_coef, 0.0) if c.kl_in == "reward" else (0.0, c.kl_coef)
        scores = torch.tensor([rewards[i].score for i in kept], device=router.device)
        group = [i // c.samples_per_question for i in kept]
        advantages, returns = advantages_of(est, scores, group, c.algo, kl_reward, c.gamma, c.lam)
        metrics |= action_metrics(est, batch, returns)

        # critic, then policy
        fixed = (c.minibatch, c.ppo_epochs, run.pack_tokens, c.clip, c.value_clip, c.max_grad_norm)
        rules = Rules(*fixed, annealed(c.entropy_coef, run.step, c.steps, c.entropy_decay), kl_loss)
        metrics |= update(router, run.optimisers, batch, est, advantages, returns, rules, seed)
        run.pack_tokens = metrics["pack_tokens"]
        details = dict(zip(kept, per_action(est, advantages), strict=True))

    rows = [
        trajectory_row(t, q, r, router.tokenizer, step=run.step, index=i, actions=details.get(i))
        for i, (t, q, r) in enumerate(zip(trajectories, questions, rewards, strict=True))
    ]
    run.recorder.append("trajectories.jsonl", rows)
    if c.print_every and run.step % c.print_every == 0:
        tqdm.write("\n\n".join(["", *map(transcript, rows[:2]), ""]))
    drawn = sum(len(t.actions) for t in trajectories)
    return metrics | {
        "time/step": time.monotonic() - start,
        "time/rollout": rolled - start,
        "time/tokens_per_s": drawn / (rolled - start),
    }


def train(run: Run) -> None:
    """All steps, with evaluations, checkpoints, and the reasons to stop early."""
    c, interrupt = run.config, Interrupt()
    if run.step >= c.steps:
        tqdm.write(f"nothing to train: step {run.step} is done; --steps says how far to go")
    bar = tqdm(range(run.step + 1, c.steps + 1), initial=run.step, total=c.steps, unit="step")
    for run.step in bar:
        metrics = run.set_rates() | train_step(run)
        if c.eval_every and run.step % c.eval_every == 0:
            results = evaluate(run.router, run.task, run.held_out["dev"], c)
            metrics |= {
                "dev/em": mean(r.reward.em for r in results),
                "dev/cost": mean(r.reward.cost for r in results),
            }
        run.count(metrics)
        metrics |= run.task.spending()
        metrics["warnings"] = warnings([*run.recorder.read("metrics.jsonl"), metrics])
        for line in metrics["warnings"]:
            tqdm.write(f"warning: {line}")
        run.recorder.append("metrics.jsonl", [metrics])
        shown = ("reward", "em", "format_rate", "calls", "cost")
        bar.set_postfix({key: f"{metrics[key]:.2f}" for key in shown})
        reason = run.reason_to_stop(interrupt.asked)
        if reason or run.step in (run.best_step, c.steps) or run.step % c.save_every == 0:
            run.save()
        if reason:
            bar.close()
            run.stop(reason)


def setup(config: Config) -> Run:
    """Load and check everything, then open the run folder. Raises ValueError, one line, before anything is
    written.
    """
    folder = Path(config.resume or config.run_dir or f"runs/{datetime.now():%Y%m%d-%H%M%S}-seed{config.seed}")
    if config.resume:
        refuse_changes(config, read_yaml(folder / "config.yaml"))
        config = own_files(config, folder)
    elif (folder / "config.yaml").exists():
        raise ValueError(f"{folder} holds a run already: --resume {folder} continues it")
    router, task = build(config)
    questions = task.questions("train", config.questions)
    if not task.fitting(questions[: config.batch], config.total_tokens)[0]:
        raise ValueError(f"total_tokens {config.total_tokens} leaves no room after the prompts")
    splits = ("dev", "test") if config.eval_every else ("test",)
    held_out = {split: task.questions(split, config.eval_questions) for split in splits}
    pool = None if isinstance(task.pool, str) else task.pool
    stream = QuestionStream(questions, config.seed, config.shuffle_candidates, config.drop_candidates, pool)
    rates = {"critic": config.critic_lr, "policy": config.lr}
    optimisers = {
        role: torch.optim.AdamW(router.parameters(role), lr=lr, betas=(0.9, 0.999), weight_decay=0.01)
        for role, lr in rates.items()
        if router.parameters(role)
    }
    run = Run(config, router, task, stream, CostScale(), optimisers, Recorder(folder), held_out)
    task.keep_account(config.ledger or folder / "ledger.sqlite", config.max_usd)
    if config.resume:
        for message in run.resume():
            tqdm.write(f"passed over: {message}")
        return run
    if config.sft_steps:
        losses = warm_start(router, task, questions, config.sft_steps, config.sft_lr, config.seed)
        tqdm.write(f"warm start: loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a token")
    run.begin()
    return run


def main() -> None:
    try:
        run = setup(load_config())
    except (ValueError, OSError) as error:
        fail(error)
    c, test, before = run.config, run.held_out["test"], []
    try:
        if run.step == 0:
            if run.task.remote:  # a few first, in case nobody answers; they will be in the cache
                refuse_faults(evaluate(run.router, run.task, test[: c.slots], c))
            before = evaluate(run.router, run.task, test, c)
        train(run)
        after = evaluate(run.router, run.task, test, c)
        run.recorder.plot()
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        run.stop(error)
    files = f"{run.recorder.folder}: metrics.jsonl, trajectories.jsonl, curves.png, checkpoints/"
    print(f"\n{compare(before, after)}\n\n{files}\n{run.task.bill()}")


if __name__ == "__main__":
    main()
