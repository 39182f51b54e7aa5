"""Every system by name, and the rows they all leave: for `evaluate.py --methods` and the paper's tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from minirouter.record import label
from minirouter.reward import exact_match, extract_answer, f1
from minirouter.trajectory import Candidate, Limits, Question

from . import prompts, routers, systems
from .encoder import Encoder
from .prompts import Bench
from .retriever import require
from .stats import beside, main_table
from .systems import Outcome, System
from .table import Table, collect, read_table

FITS = {
    "KNN Router": routers.fit_knn,
    "MLP Router": routers.fit_mlp,
    "BERT Router": routers.fit_bert,
    "RouterDC": routers.fit_routerdc,
    "GraphRouter": routers.fit_graph,
}


def learned(bench: Bench, name: str, questions: Sequence[Question] = ()) -> systems.Choose:
    """A learned router, trained once a bench, as a choice among the candidates of any pool."""
    if name not in bench.fitted:
        bench.fitted[name] = FITS[name](_table(bench), _encoder(bench), bench.seed)
    scores = bench.fitted[name]
    shown = [_lines(pool) for pool in bench.task.pools(questions)]
    everything = tuple(dict.fromkeys(line for lines in shown for line in lines))
    texts = list(dict.fromkeys(question.text for question in questions))
    grid = scores(texts, everything) if texts else ()
    known = {
        (t, line): s
        for t, row in zip(texts, grid, strict=True)
        for line, s in zip(everything, row, strict=True)
    }

    def choose(question: Question, pool: Any) -> Candidate:
        lines = _lines(pool)
        if any((question.text, line) not in known for line in lines):
            known.update(
                {
                    (question.text, line): s
                    for line, s in zip(lines, scores([question.text], lines)[0], strict=True)
                }
            )
        worth, best = max((known[question.text, line], line[0]) for line in lines)
        return systems.cheapest_of(pool, best) if worth > -float("inf") else systems.dearest(question, pool)

    return choose


def _lines(pool: Any) -> tuple[tuple[str, str], ...]:
    return tuple(dict.fromkeys((label(c), c.descriptor) for c in pool.candidates))


def _table(bench: Bench) -> Table:
    if bench.table is None:
        raise ValueError("learned routers need a collected table: make it with evaluate.py --collect")
    return bench.table


def _encoder(bench: Bench) -> Encoder:
    if "encoder" not in bench.fitted:
        bench.fitted["encoder"] = Encoder(bench.base, bench.encoder)
    return bench.fitted["encoder"]


def _routed(name: str, bench: Bench, questions: Sequence[Question]) -> list[Outcome]:
    return systems.single_round(bench, questions, learned(bench, name, questions))


def _knn_starred(bench: Bench, questions: Sequence[Question]) -> list[Outcome]:
    return systems.starred(bench, questions, learned(bench, "KNN Router"))


def cascade(bench: Bench, questions: Sequence[Question]) -> list[Outcome]:
    """Asks one label after the other until the scorer accepts; the base answers from the last reply."""
    if "cascade" not in bench.fitted:
        bench.fitted["cascade"] = routers.fit_cascade(_table(bench), _encoder(bench), bench.seed)
    order, accept = bench.fitted["cascade"]
    pools = bench.task.pools(questions)
    calls: list[list] = [[] for _ in questions]
    waiting = list(range(len(questions)))
    for wanted in order:
        there = [(i, c) for i in waiting if (c := systems.cheapest_of(pools[i], wanted))]
        made = prompts.ask(bench, [(pools[i], c, questions[i].text) for i, c in there])
        for (i, _), call in zip(there, made, strict=True):
            calls[i].append(call)
            if accept(questions[i].text, call.reply.text):
                waiting.remove(i)
    last = [own[-1:] for own in calls]
    written = prompts.with_replies(bench, questions, pools, last)
    return [Outcome(prompts.answer_of(t), tuple(c), t) for t, c in zip(written, calls, strict=True)]


METHODS: dict[str, System] = {
    "Direct": systems.direct,
    "CoT": systems.cot,
    "SFT": systems.sft_baseline,
    "RAG": systems.rag,
    "Prompt LLM": systems.prompt_llm,
    "Largest LLM": partial(systems.single_round, choose=systems.dearest),
    "Random": partial(systems.single_round, choose=systems.anybody),
    **{name: partial(_routed, name) for name in FITS},
    "FrugalGPT": cascade,
    "Prompt LLM*": systems.starred,
    "KNN Router*": _knn_starred,
    "Oracle": systems.oracle,
}
BASELINES = tuple(name for name in METHODS if name != "Oracle")
NEED_TABLE = (*FITS, "FrugalGPT", "KNN Router*")
NEED_SKLEARN = ("KNN Router", "KNN Router*", "MLP Router", "RouterDC", "FrugalGPT")


def singles(bench: Bench, questions: Sequence[Question]) -> dict[str, System]:
    """One system for each label of the pools: always that candidate."""
    found = dict.fromkeys(label(c) for pool in bench.task.pools(questions) for c in pool.candidates)
    return {f"only {name}": partial(systems.single_round, choose=systems.only(name)) for name in found}


def rows_of(questions: Sequence[Question], pools: Sequence[Any], outcomes: Sequence[Outcome]) -> list[dict]:
    """One JSON row a question: what every table and figure is made from."""
    rows = []
    for question, pool, outcome in zip(questions, pools, outcomes, strict=True):
        labels = {candidate.name: label(candidate) for candidate in pool.candidates}
        calls = [
            {
                "name": call.reply.candidate,
                "label": labels.get(call.reply.candidate, "nobody"),
                "query": call.query,
                "price": call.reply.price,
                "cost": call.reply.cost,
                "tokens": call.reply.tokens,
                "refused": call.reply.refused,
                "status": call.reply.status,
            }
            for call in outcome.calls
        ]
        rows.append(
            {
                "id": question.id,
                "kind": question.kind,
                "question": question.text,
                "golds": list(question.golds),
                "answer": outcome.answer,
                "em": exact_match(outcome.answer, question.golds),
                "f1": f1(outcome.answer, question.golds),
                "cost": outcome.cost,
                "format_ok": outcome.format_ok,
                "calls": calls,
            }
        )
    return rows


def find_method(bench: Bench, name: str, questions: Sequence[Question]) -> tuple[str, System]:
    """A system, with its name as it is written here. Raises ValueError, one line, for an unknown one, or if
    what it needs is not there: a table, an encoder, a retriever, a package.
    """
    known = METHODS | singles(bench, questions)
    known |= {"by hand": systems.by_hand} if bench.task.data == "world" else {}
    folded = {key.casefold(): key for key in known}
    name = name if name in known else folded.get(name.casefold(), name)
    if name not in known:
        others = f"all, minirouter, {', '.join(known)}; and, with --search_run, Search-R1"
        raise ValueError(f"no system {name!r}; there are {others}")
    if name == "RAG":
        _ = bench.retriever
    if name in NEED_TABLE:
        _table(bench)
        _encoder(bench)
    if name in NEED_SKLEARN:
        require("sklearn")
    return name, known[name]


def run_method(bench: Bench, name: str, questions: Sequence[Question]) -> list[dict]:
    """The rows of one system. Raises ValueError as `find_method` does."""
    name, system = find_method(bench, name, questions)
    pools = [bench.retriever] * len(questions) if name == "RAG" else bench.task.pools(questions)
    return rows_of(questions, pools, system(bench, questions))


# ---- what evaluate.py calls


def open_bench(
    base: Any,
    task: Any,
    limits: Limits,
    seed: int,
    table: str | None,
    retriever: str | None,
    encoder: str | None,
) -> Bench:
    """A bench from plain values; the retriever of the miniature is its own facts."""
    source = retriever or ("world" if task.data == "world" else None)
    known = read_table(Path(table)) if table and Path(table).exists() else None
    return Bench(base, task, limits, seed, source, known, encoder)


def compare_methods(bench: Bench, wanted: str, questions: Sequence[Question]) -> dict[str, list[dict]]:
    """The rows of the systems of `--methods`: a comma list, or "all" (but for what needs a table or retriever
    that is not there). "minirouter" is left to the caller. Raises ValueError as `find_method` does, before
    the first question is asked.
    """
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    if names == ["all"]:
        lacking = (() if bench.table else NEED_TABLE) + (() if bench.source else ("RAG",))
        names = [name for name in (*METHODS, *singles(bench, questions)) if name not in lacking]
    found = dict(find_method(bench, name, questions) for name in names if name.casefold() != "minirouter")
    return {name: run_method(bench, name, questions) for name in found}


def search_r1(bench: Bench, questions: Sequence[Question]) -> list[dict]:
    """The rows of Search-R1: the loop with the retriever alone. The adapters of a run with `--pool retriever`
    must be on the bench's base by now.
    """
    shown = [replace(question, pool=bench.retriever) for question in questions]
    return rows_of(shown, bench.task.pools(shown), systems.loop(bench, shown))


def rows_of_results(results: Sequence[Any]) -> list[dict]:
    """The rows of what evaluate.py found (question, pool, trajectory, reward)."""
    outcomes = [
        Outcome(extract_answer(t.text), tuple(t.calls), t, r.reward.format_error is None)
        for r in results
        for t in [r.trajectory]
    ]
    return rows_of([r.question for r in results], [r.pool for r in results], outcomes)


def report(systems_rows: dict[str, list[dict]], model: str, alpha: float = 0.0) -> str:
    """Markdown: the systems on the same questions, tested against the best baseline if there is one, and the
    paper's figures for the same systems and sets, with the interval that its sample gives them.
    """
    ours = [name for name in systems_rows if name.startswith("minirouter")]
    rivals = [name for name in systems_rows if name not in (*ours, "Oracle", "by hand")]
    several = len(systems_rows) > 1
    table = main_table({name: [rows] for name, rows in systems_rows.items()}, ours, rivals) if several else ""
    return "\n\n".join(filter(None, (table, beside(systems_rows, model, alpha))))


def collect_table(bench: Bench, questions: Sequence[Question], path: str) -> Iterator[int]:
    """Collect with the untrained base; yields progress (questions in the table)."""
    yield from collect(bench, questions, Path(path))
