"""What the untrained base model is told by the systems that do not train it, and what it answers.

The paper prints none of these prompts, so they are our own. They come in two shapes. An instruct model gets
a chat prompt. The tiny base of the miniature world knows no chat but its own protocol, so that it is shown
the beginning of an episode (a call, the reply, the thought that it knows) and writes the end of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from minirouter.data import PLAIN_LINE, describe, encode_prompt
from minirouter.reward import extract_answer
from minirouter.rollout import Speech, rollout
from minirouter.tags import find_action, fold, neutralise
from minirouter.task import Task
from minirouter.trajectory import Call, Candidate, Limits, Question, Reply, Trajectory

from .retriever import Retriever, open_retriever

ANSWER_FORM = (
    "Put the final answer between <answer> and </answer>: a name, a number or a few words, nothing else."
)
PROMPTS = {
    "Direct": "Answer the question at once. {form}\n\nQuestion: {question}",
    "CoT": "Think about the question step by step and write your reasoning down. Then answer. {form}\n\n"
    "Question: {question}",
    "final answer": "Answer the question. Others were asked for help, and what they said stands below. It "
    "can be wrong, and it need not be complete. {form}\n\n{notes}\n\nQuestion: {question}",
    "Prompt LLM": "Which one of these language models is the most likely to answer the question rightly? "
    "What it costs does not matter. Do not answer the question. Write the name of the model, spelled as in "
    "the list, between <answer> and </answer>.\n\n{candidates}\n\nQuestion: {question}",
    "split": "Break the question into the simpler questions that have to be answered on the way: at least "
    "one, at most four. Each must be understandable alone. Write them between <answer> and </answer>, one on "
    "a line, and do not answer them.\n\nQuestion: {question}",  # for the starred systems
}
CONTINUATIONS = {  # of the router's prompt, for the tiny base
    "a call": "<search> {name} : {query} </search>",
    "before an answer": "<think> know </think>",
}


@dataclass
class Bench:
    """What every system works with: the untrained base, the task, and what some of them need besides."""

    base: Any  # a Router whose adapters are fresh: it computes exactly what the base computes
    task: Task
    limits: Limits
    seed: int = 0
    source: str | None = None  # of the retriever (retriever.py), for RAG and Search-R1
    table: Any = None  # of training questions (table.py), for the learned routers
    encoder: str | None = None  # a Hugging Face encoder; None: mean-pooled states of the base
    sft_steps: int = 300
    fitted: dict[str, Any] = field(default_factory=dict)  # learned routers, by name

    @property
    def protocol(self) -> bool:
        """True for the base that knows nothing but its protocol."""
        return self.task.prompt == "tiny"

    @cached_property
    def retriever(self) -> Retriever:
        """The pool of one that RAG and Search-R1 ask, opened when it is needed."""
        if self.source is None:
            raise ValueError(
                "RAG and Search-R1 need a retriever: a .jsonl corpus, or the address of a server"
            )
        return open_retriever(self.source)

    @property
    def speech(self) -> Speech:
        return Speech(self.base.tokenizer, self.base.stop_ids, self.task.info_tag)

    def encode(self, text: str) -> list[int]:
        return self.base.tokenizer.encode(text, add_special_tokens=False)


@dataclass(frozen=True)
class Nobody:
    """A pool without candidates: the base is alone."""

    candidates: tuple[Candidate, ...] = ()
    names: tuple[str, ...] = ()
    instant = True

    def ask(self, name: str, query: str) -> Reply:
        return Reply("no such candidate", status="unknown")


def show_prompts() -> str:
    """Every prompt of the baselines, for `evaluate.py --show_prompts`."""
    parts = [f"## {name}\n\n{text.replace('{form}', ANSWER_FORM)}" for name, text in PROMPTS.items()]
    tiny = "\n".join(f"{name}: {text}" for name, text in CONTINUATIONS.items())
    return "\n\n".join([*parts, f"## The tiny base: continuations of the router's own prompt\n\n{tiny}"])


def write(bench: Bench, prompts: list[list[int]]) -> list[Trajectory]:
    """Let the base write on from each prompt (ids) until its answer, with nobody to call."""
    limits = replace(bench.limits, max_calls=0)
    return rollout(bench.base, prompts, Nobody(), limits, bench.seed, bench.task.info_tag)


def answer_of(trajectory: Trajectory) -> str | None:
    """The answer that was written; without any tag, the text counts as it stands."""
    text = trajectory.text
    return extract_answer(text) if "<" in text else text.strip() or None


def direct_prompts(bench: Bench, questions: Sequence[Question], job: str = "Direct") -> list[list[int]]:
    """Ids that the base is to write on from when it is alone."""
    if not bench.protocol:
        return [_chat(bench, PROMPTS[job], question=q.text) for q in questions]
    know = bench.encode(CONTINUATIONS["before an answer"]) if job == "Direct" else []
    return [prompt + know for prompt in bench.task.prompts([replace(q, pool=Nobody()) for q in questions])]


def direct(bench: Bench, questions: Sequence[Question], job: str = "Direct") -> list[Trajectory]:
    """The base alone: at once ("Direct"), or after a thought of its own ("CoT")."""
    written = write(bench, direct_prompts(bench, questions, job))
    if job == "Direct" or not bench.protocol:
        return written
    # The tiny base may want to call somebody: then only its thought is kept, and it is to answer.
    close, know = bench.encode("</think>")[-1], bench.encode(CONTINUATIONS["before an answer"])
    unanswered = [i for i, t in enumerate(written) if answer_of(t) is None]
    thoughts = [written[i].ids for i in unanswered]
    kept = [ids[: ids.index(close) + 1] if close in ids else ids for ids in thoughts]
    for i, t in zip(unanswered, write(bench, [ids + know for ids in kept]), strict=True):
        written[i] = t
    return written


def with_replies(
    bench: Bench, questions: Sequence[Question], pools: Sequence[Any], calls: Sequence[Sequence[Call]]
) -> list[Trajectory]:
    """The base writes the final answer, given what the calls brought: as for every baseline of the paper."""
    if not bench.protocol:
        notes = ["\n\n".join(f"{call.name} was asked: {call.query}\nReply: {call.reply.text}" for call in own)
                 for own in calls]  # fmt: skip
        prompt = PROMPTS["final answer"]
        return write(
            bench,
            [_chat(bench, prompt, question=q.text, notes=n) for q, n in zip(questions, notes, strict=True)],
        )
    speech, prompts = bench.speech, []
    shown = [replace(q, pool=pool) for q, pool in zip(questions, pools, strict=True)]
    for prompt, own in zip(bench.task.prompts(shown), calls, strict=True):
        for call in own:
            prompt += bench.encode(CONTINUATIONS["a call"].format(name=call.name, query=call.query))
            prompt += speech.encode_reply(call.reply.text, bench.limits.reply_tokens)
        prompts.append(prompt + bench.encode(CONTINUATIONS["before an answer"]))
    return write(bench, prompts)


def pick(bench: Bench, questions: Sequence[Question], pools: Sequence[Any]) -> list[Candidate | None]:
    """Whom the untrained base would ask; None where it names nobody. The tiny base shows it by its first
    call.
    """
    if bench.protocol:
        shown = [replace(q, pool=pool) for q, pool in zip(questions, pools, strict=True)]
        actions = [find_action(t.text) for t in write(bench, bench.task.prompts(shown))]
        named = [action.name if action else None for action in actions]
    else:
        lists = [
            "\n".join(describe(c, PLAIN_LINE, bench.task.show_prices) for c in pool.candidates)
            for pool in pools
        ]
        prompts = [
            _chat(bench, PROMPTS["Prompt LLM"], question=q.text, candidates=shown)
            for q, shown in zip(questions, lists, strict=True)
        ]
        named = [answer_of(t) for t in write(bench, prompts)]
    return [_find(pool, name or "") for pool, name in zip(pools, named, strict=True)]


def split(bench: Bench, questions: Sequence[Question]) -> list[list[str]]:
    """One to four sub-questions of each question, by the base; the question itself where it writes none."""
    job = PROMPTS["split"]
    written = [
        answer_of(t) or "" for t in write(bench, [_chat(bench, job, question=q.text) for q in questions])
    ]
    lines = [[line.strip("-*0123456789.) \t") for line in text.splitlines()] for text in written]
    return [[line for line in own if line][:4] or [q.text] for own, q in zip(lines, questions, strict=True)]


def ask(bench: Bench, wanted: Sequence[tuple[Any, Candidate, str]]) -> list[Call]:
    """Make the calls (pool, candidate, query), side by side where the pool takes its time; in their order."""

    def one(request: tuple[Any, Candidate, str]) -> Call:
        pool, candidate, query = request
        return Call(candidate.name, query, pool.ask(candidate.name, query))

    if all(pool.instant for pool, _, _ in wanted):
        return [one(request) for request in wanted]
    with ThreadPoolExecutor(max_workers=bench.limits.slots) as threads:
        return list(threads.map(one, wanted))


def _find(pool: Any, name: str) -> Candidate | None:
    """The candidate of that name or alias, or None."""
    spelled = {fold(s): c for c in pool.candidates for s in (c.name, *c.aliases)}
    return spelled.get(fold(name))


def _chat(bench: Bench, prompt: str, **texts: str) -> list[int]:
    """Ids of a chat prompt; what others wrote is neutralised, and braces in it mean nothing."""
    safe = {key: neutralise(text, bench.task.specials) for key, text in texts.items()}
    return encode_prompt(bench.base.tokenizer, prompt.format(form=ANSWER_FORM, **safe))
