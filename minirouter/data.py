"""Questions in, prompt text out, and a stream of questions that can be resumed (x ~ D in Eq. 1 of the paper).

Questions come from the paper's seven benchmarks, sampled as there (section 4), or from a local file, read
strictly. A prompt is a template file filled in; its instruction is that of the paper (Fig. 2) in our own
words, and unlike the reference implementation's it can show prices. The question comes last, so that all
prompts of a pool share one prefix.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minirouter.tags import INFO, neutralise
from minirouter.trajectory import Candidate, Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HUB = "RUC-NLPIR/FlashRAG_datasets"
# The split that a test is drawn from: the first of test, dev and train, as in the reference implementation.
TEST_SPLIT = dict.fromkeys(("nq", "triviaqa", "popqa", "bamboogle"), "test")
TEST_SPLIT |= dict.fromkeys(("hotpotqa", "2wikimultihopqa", "musique"), "dev")
TEST_ONLY = ("popqa", "bamboogle")
DEFAULT_SIZE = {"train": 7000, "dev": 100, "test": 500}  # questions of each set, as in the paper
KEPT_FOR_DEV = 500  # questions of a training split that training never sees
PROMPTS = Path(__file__).parent / "assets" / "prompts"
CANDIDATE_LINE = "{candidate} ="
PLAIN_LINE = "{name}: {descriptor}[ Price: ${price} per 1M output tokens.]"
TODAY = date(2024, 7, 26)  # for chat templates that print today's date: prompts must not change overnight


def load_questions(source: str, split: str, n: int | None = None, seed: int = 0) -> list[Question]:
    """The questions of one split: "train", "dev" or "test".

    `source` is a .jsonl or .parquet file (the same questions for every split), a folder that holds such a
    file named after each split, or a comma list of benchmarks (the keys of TEST_SPLIT). `n` questions are
    drawn of a file (by default all) or of each benchmark (DEFAULT_SIZE) and kept in their order there. Dev
    questions of a benchmark, at most 500, are never training questions if both are drawn with the same
    `seed`. ValueError, one line with file and line, if anything about a row is wrong.
    """
    if split not in DEFAULT_SIZE:
        raise ValueError(f"split must be train, dev or test, not {split!r}")
    path = Path(source)
    if path.is_dir():
        path = path / (f"{split}.parquet" if (path / f"{split}.parquet").exists() else f"{split}.jsonl")
    if path.suffix not in (".jsonl", ".parquet"):
        return [q for name in source.split(",") for q in _benchmark(name.strip(), split, n, seed)]
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    questions, places = [], {}
    for place, number, row in _jsonl(path) if path.suffix == ".jsonl" else _parquet(path):
        question = _question(row, place, path.stem, number)
        if question.id in places:
            raise ValueError(f"{place}: the id {question.id!r} was used before, at {places[question.id]}")
        places[question.id] = place
        questions.append(question)
    if not questions:
        raise ValueError(f"{path}: no questions in it")
    size = len(questions) if n is None else min(n, len(questions))
    return [questions[i] for i in sorted(random.Random(seed).sample(range(len(questions)), size))]


def _jsonl(path: Path) -> Iterable[tuple[str, int, Any]]:
    """(place for messages, line number, value) of each line that is not blank. BOM and CRLF are accepted."""
    for number, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        try:
            text = line.decode("utf-8").strip()
            value = json.loads(text, parse_constant=int) if text else None  # int() refuses NaN and Infinity
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: not a line of JSON ({error})") from None
        if text:
            yield f"{path}:{number}", number, value


def _parquet(path: Path) -> Iterable[tuple[str, int, Any]]:
    from pyarrow import ArrowException, parquet

    try:
        rows = parquet.read_table(path).to_pylist()  # plain lists and strings, never arrays
    except (ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a parquet file ({' '.join(str(error).split())})") from None
    return [(f"{path}: row {number}", number, row) for number, row in enumerate(rows, start=1)]


def _benchmark(name: str, split: str, n: int | None, seed: int) -> list[Question]:
    """Questions of one set of the hub: "?" is appended when missing, as in the reference implementation."""
    if name not in TEST_SPLIT:
        near = difflib.get_close_matches(name, TEST_SPLIT, 1) or ["a .jsonl file", *TEST_SPLIT]
        raise ValueError(f"no questions named {name!r}; did you mean {' or '.join(near)}?")
    if split != "test" and name in TEST_ONLY:
        raise ValueError(f"{name} has test questions only, none for {split}")
    from datasets import load_dataset  # seconds to import, and needed only here

    held = TEST_SPLIT[name] if split == "test" else "train"
    try:
        rows = load_dataset(HUB, name, split=held)
    except OSError as error:  # no network, offline mode, no such set
        raise ValueError(f"cannot load {name} from {HUB}: {' '.join(str(error).split())}") from None
    rows = rows.select_columns(["id", "question", "golden_answers"])  # other columns differ from set to set
    order = random.Random(f"{seed}/{name}/{held}").sample(range(len(rows)), len(rows))
    part = {"train": order[KEPT_FOR_DEV:], "dev": order[:KEPT_FOR_DEV], "test": order}[split]
    questions = []
    for i in sorted(part[: n or DEFAULT_SIZE[split]]):
        row = dict(rows[i])
        row |= {"id": f"{name}/{row['id']}", "question": row["question"].strip().removesuffix("?") + "?"}
        questions.append(_question(row, f"{name} {held} row {i}", name, i))
    return questions


def _question(row: Any, place: str, stem: str, number: int) -> Question:
    """A checked question; its kind is the row's `kind` or `dataset`, else the file's name."""
    if not isinstance(row, dict) or "question" not in row:
        raise ValueError(f"{place}: not an object with a question")
    golds = row["golden_answers"] if row.get("golden_answers") is not None else row.get("answer")
    golds = [golds] if isinstance(golds, str) else golds
    if not isinstance(golds, list) or not golds:
        raise ValueError(f"{place}: needs golden_answers (or answer): a string, or a list of at least one")
    name = row["id"] if row.get("id") is not None else f"{stem}-{number}"
    if isinstance(name, bool) or not isinstance(name, str | int | float):
        raise ValueError(f"{place}: the id is neither a string nor a number")
    kind = row.get("kind") or row.get("dataset") or stem
    texts = [("question", row["question"]), ("id", str(name)), ("kind", kind)]
    for field, text in texts + [("answer", gold) for gold in golds]:
        _check_text(text, f"{place}: the {field}")
    return Question(str(name), row["question"].strip(), tuple(gold.strip() for gold in golds), kind)


def _check_text(text: Any, what: str) -> None:
    """NUL and lone surrogates are refused: tokenizers and log files cannot take them."""
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{what} is not a string, or is empty")
    if re.search("[\0\ud800-\udfff]", text):
        raise ValueError(f"{what} holds a NUL or half a surrogate pair")


def load_template(prompt: str) -> str:
    """The template called "tiny" or "paper", or the one in the file `prompt`.

    It holds `{candidates}` once and ends with `{question}`; `{info}` (the tag of a reply) and `{max_calls}`
    may stand before. The first line may be `{candidate} = FORMAT`: how to write a candidate with its
    {name}, {descriptor}, {price} (USD per 1M output tokens), {latency_s} and {example}. A [piece in
    brackets] is left out where the pool has no such value or prices are hidden. ValueError if it cannot be
    read or is not so.
    """
    path = PROMPTS / f"{prompt}.txt" if prompt in ("tiny", "paper") else Path(prompt)
    try:
        template = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read the prompt template {path}: {error}") from None
    body = _split_template(template)[1]
    for field in ("{candidates}", "{question}"):
        if body.count(field) != 1:
            raise ValueError(
                f"{path}: a template needs {field} once, this one has it {body.count(field)} times"
            )
    if not body.endswith("{question}"):
        raise ValueError(f"{path}: nothing may follow {{question}}, so that all prompts share one prefix")
    return template


def _split_template(template: str) -> tuple[str, str]:
    """(how to write a candidate, the rest without the white space around it)"""
    first, _, rest = template.strip().partition("\n")
    if first.startswith(CANDIDATE_LINE):
        return first.removeprefix(CANDIDATE_LINE).strip(), rest.strip()
    return PLAIN_LINE, template.strip()


def render_prompt(
    template: str,
    question: str,
    candidates: Iterable[Candidate],
    show_prices: bool = True,
    info_tag: str = INFO,
    max_calls: int = 4,
    specials: Sequence[str] = (),
) -> str:
    """The template filled in. Question and descriptors are neutralised; `specials`: see special_strings."""
    line, body = _split_template(template)
    shown = "\n".join(describe(candidate, line, show_prices, specials) for candidate in candidates)
    values = {"candidates": shown, "question": neutralise(question, specials)}
    return _fill(body, values | {"info": info_tag, "max_calls": str(max_calls)})


def describe(candidate: Candidate, line: str, show_prices: bool = True, specials: Sequence[str] = ()) -> str:
    """What the router is told of a candidate. Price, latency and example are shown or hidden together."""
    values = {"name": candidate.name, "descriptor": neutralise(candidate.descriptor, specials)}
    if show_prices:
        values["price"] = f"{candidate.price:g}"
        values["latency_s"] = "" if candidate.latency_s is None else f"{candidate.latency_s:g}"
        values["example"] = neutralise(candidate.example or "", specials)

    def piece(match: re.Match[str]) -> str:
        return match[1] if all(values.get(field) for field in re.findall(r"\{(\w+)\}", match[1])) else ""

    return _fill(re.sub(r"\[([^\[\]]*)\]", piece, line), values).strip()


def _fill(text: str, values: dict[str, str]) -> str:
    """Each {field} that has a value, replaced in one pass: braces inside a value mean nothing, and stay."""
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), text)


def special_strings(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """Every string that the tokenizer parses as one special or added token, longest first."""
    return tuple(
        sorted({*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}, key=lambda s: (-len(s), s))
    )


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Ids of one user turn and the opening of the router's, through the chat template.

    The begin token stands there once where template or tokenizer put it, and not at all where neither does.
    No special token comes out of `text`. A template that prints today's date prints a fixed one.
    """
    template = tokenizer.get_chat_template()
    if "strftime_now" in template:  # a macro of that name hides the function that reads the clock
        codes = "".join(f"|replace('%{code}', '{TODAY:%{code}}')" for code in "aAbBdjmyY")
        template = "{%- macro strftime_now(format) -%}{{ format" + codes + " }}{%- endmacro -%}" + template
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        chat_template=template,
        add_generation_prompt=True,
        sanitize_control_tokens=True,  # neutralising spares special strings without "<", such as [INST]
        return_dict=False,
    )
    bos = tokenizer.bos_token_id
    rest = list(itertools.dropwhile(lambda token: token == bos, ids))
    begins = len(rest) < len(ids) or list(tokenizer("")["input_ids"][:1]) == [bos]
    return [bos, *rest] if begins else rest


class QuestionStream:
    """Questions without end, in a new order each epoch that depends on `seed` and epoch alone.

    With `shuffle_candidates` or `drop_candidates` (the chance that one is left out; at least one stays)
    each question gets a pool of its own, drawn from the pool that it brings or else from `pool`. The paper
    does neither.
    """

    def __init__(
        self,
        questions: Sequence[Question],
        seed: int,
        shuffle_candidates: bool = False,
        drop_candidates: float = 0.0,
        pool: Any = None,
    ) -> None:
        if not questions or not 0 <= drop_candidates < 1:
            raise ValueError("a stream needs questions, and drop_candidates at least 0 and below 1")
        self.questions, self.seed, self.pool = tuple(questions), seed, pool
        self.shuffle, self.drop = shuffle_candidates, drop_candidates
        self.digest = hashlib.sha256(json.dumps([q.id for q in self.questions]).encode()).hexdigest()[:16]
        self._start(epoch=0, position=0)

    def _start(self, epoch: int, position: int) -> None:
        self.epoch, self.position = epoch, position
        self.order = random.Random(f"{self.seed}/{epoch}").sample(self.questions, len(self.questions))

    def take(self, n: int) -> list[Question]:
        """The next n questions; an epoch may end among them."""
        taken = []
        while len(taken) < n:
            if self.position == len(self.order):
                self._start(self.epoch + 1, position=0)
            taken.append(self._with_pool(self.order[self.position]))
            self.position += 1
        return taken

    def _with_pool(self, question: Question) -> Question:
        pool = self.pool if question.pool is None else question.pool
        if pool is None or not (self.shuffle or self.drop):
            return question
        rng = random.Random(f"{self.seed}/{self.epoch}/{self.position}")
        names = [candidate.name for candidate in pool.candidates]
        kept = [name for name in names if rng.random() >= self.drop] or [rng.choice(names)]
        return replace(question, pool=pool.subset(rng.sample(kept, len(kept)) if self.shuffle else kept))

    def state(self) -> dict[str, Any]:
        """Where the stream stands, as JSON."""
        return {"seed": self.seed, "questions": self.digest, "epoch": self.epoch, "position": self.position}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a `state()`. ValueError if that was a stream of other questions or another seed."""
        if (state["seed"], state["questions"]) != (self.seed, self.digest):
            raise ValueError("the saved position belongs to other questions or another seed")
        self._start(state["epoch"], state["position"])
