"""Rollouts: y ~ pi(.|x; P) of Eq. 1, where P is the pool and the router's calls are answered on the way.

Token in, token out: sampled ids are never decoded and encoded again. Text is looked at only to see whether
the turn holds a closed tag, and a reply is encoded alone and appended. The reference implementation samples
a whole turn, cuts it as text, encodes it again and goes on until the last of all rows is done; here a row
stops at the token that closes its tag, calls go to threads while other rows go on, and a finished row's
slot takes the next question at once.

Order does not matter: each trajectory owns its random numbers, drawn from the seed and its place in
`prompts`.
"""

from __future__ import annotations

import random
from collections import deque
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from .data import special_strings
from .packing import common_prefix
from .sampler import Sampler
from .tags import Action, call_error, find_action, render_reply
from .trajectory import Call, Limits, Reply, Trajectory


@dataclass
class Speech:
    """What a rollout must know of the tokenizer: where an episode ends, which tokens can close a tag."""

    tokenizer: Any
    stop_ids: frozenset[int]
    info_tag: str
    closers: frozenset[int] = field(init=False)
    specials: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.closers = frozenset(i for token, i in self.tokenizer.get_vocab().items() if ">" in token)
        self.specials = special_strings(self.tokenizer)

    def decode(self, ids: list[int]) -> str:
        """Text of the router's own ids, special tokens visible, the end of the episode left out."""
        ids = ids[:-1] if ids[-1] in self.stop_ids else ids
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def encode_reply(self, text: str, limit: int) -> list[int]:
        """Ids of a reply in its tags: untrusted, so neutralised; at most `limit`, the closing tag kept."""
        text = render_reply(text, self.info_tag, self.specials)
        ids = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        if len(ids) <= limit:
            return ids
        closing = self.tokenizer.encode(text[text.rindex("</") :], add_special_tokens=False)
        return ids[: max(0, limit - len(closing))] + closing


@dataclass
class Episode:
    """One trajectory being made, and the state that its next token depends on."""

    trajectory: Trajectory
    pool: Any
    rng: random.Random
    unseen: list[int]  # ids that the model has not been fed yet
    turn: list[int] = field(default_factory=list)  # ids drawn since the last reply

    def take(self, token: int, logp: float, speech: Speech, limits: Limits) -> Action | None:
        """Append a drawn token, set `finish` if the episode ends with it; -> the call to make, if it closed
        one.
        """
        t = self.trajectory
        t.append([token], [logp])
        self.turn.append(token)
        self.unseen = [token]
        action = find_action(speech.decode(self.turn)) if token in speech.closers else None
        if action:
            if action.kind == "answer":
                t.finish = "answer"
            elif len(t.calls) >= limits.max_calls:
                t.finish = "call_limit"
        elif token in speech.stop_ids:
            t.finish = "eos"
        elif len(self.turn) >= limits.turn_tokens:
            t.finish = "turn_tokens"
        elif len(t.ids) >= limits.total_tokens:
            t.finish = "total_tokens"
        if action or t.finish:
            t.turns.append(speech.decode(self.turn))
            self.turn = []
        return None if t.finish else action

    def hear(self, call: Call, speech: Speech, limits: Limits) -> None:
        """Append the reply to a call. One that leaves no room for a token ends the episode, paid for."""
        t = self.trajectory
        t.calls.append(call)
        ids = speech.encode_reply(call.reply.text, limits.reply_tokens)
        if len(t.ids) + len(ids) >= limits.total_tokens:
            t.finish = "total_tokens"
        else:
            t.append(ids)
            self.unseen = self.unseen + ids


def ask(pool: Any, action: Action) -> Call:
    """Make a call. One that cannot be sent is the router's own mistake: it is told so, at no cost."""
    if call_error(action.text):
        return Call(action.name, action.query, Reply("A call must read NAME: QUERY.", status="malformed"))
    return Call(action.name, action.query, pool.ask(action.name, action.query))


def rollout(
    router: Any, prompts: list[list[int]], pool: Any, limits: Limits, seed: int, info_tag: str = "info"
) -> list[Trajectory]:
    """Let the router answer every prompt. `pool` is one pool, or a list of one for each prompt.

    -> trajectories in the order of the prompts. A prompt that leaves no room for a token ends at once, with
    `finish` "total_tokens" and no action. Raises ValueError if the model's logits are not finite.
    """
    pools = pool if isinstance(pool, list) else [pool] * len(prompts)
    speech = Speech(router.tokenizer, router.stop_ids, info_tag)
    episodes = []
    for i, (prompt, own_pool) in enumerate(zip(prompts, pools, strict=True)):
        trajectory = Trajectory(prompt_len=len(prompt))
        trajectory.append(prompt)
        episodes.append(Episode(trajectory, own_pool, random.Random(f"{seed}/{i}"), unseen=prompt))
        if len(prompt) >= limits.total_tokens:
            trajectory.finish = "total_tokens"
    running = [episode for episode in episodes if not episode.trajectory.finish]
    if running:
        with ThreadPoolExecutor(max_workers=2 * limits.slots) as threads, router.decoding():
            _run(router, running, limits, speech, threads)
    return [episode.trajectory for episode in episodes]


def _run(
    router: Any, episodes: list[Episode], limits: Limits, speech: Speech, threads: ThreadPoolExecutor
) -> None:
    """Advance all episodes to their ends, `slots` at once; twice as many where replies take time, since then
    about half of them wait, each with its row of the cache.
    """
    prompts = [episode.unseen for episode in episodes]
    prefix = common_prefix(prompts, longest=min(map(len, prompts)) - 1)
    waits = not all(episode.pool.instant for episode in episodes)
    rows = min(limits.slots * (2 if waits else 1), len(episodes))
    sampler = Sampler(
        router, rows, limits.total_tokens, prompts[0][:prefix], limits.temperature, limits.top_p
    )
    for episode in episodes:
        episode.unseen = episode.unseen[prefix:]
    queue = deque(range(len(episodes)))
    live: set[int] = set()  # episodes that can go on
    calls: dict[int, Future[Call]] = {}  # episodes that wait for a reply
    while queue or live or calls:
        while queue and len(live) + len(calls) < rows:
            live.add(queue.popleft())
        if not live:
            wait(calls.values(), return_when=FIRST_COMPLETED)
        pending = {i: episodes[i].unseen for i in sorted(live)}
        draws = sampler.advance(pending, {i: episodes[i].rng.random() for i in pending}) if pending else {}
        for i, (token, logp) in draws.items():
            if action := episodes[i].take(token, logp, speech, limits):
                calls[i] = _submit(threads, episodes[i].pool, action)
        live -= calls.keys()
        for i in [i for i, call in calls.items() if call.done()]:
            episodes[i].hear(calls.pop(i).result(), speech, limits)
            live.add(i)
        for i in [i for i in live if episodes[i].trajectory.finish]:
            sampler.drop(i)
            live.remove(i)


def _submit(threads: ThreadPoolExecutor, pool: Any, action: Action) -> Future[Call]:
    """A call in a thread of its own; a simulated pool answers at once, so that runs with it repeat bit for
    bit.
    """
    if not pool.instant:
        return threads.submit(ask, pool, action)
    done: Future[Call] = Future()
    done.set_result(ask(pool, action))
    return done
