"""A retriever as one more kind of candidate: RAG is one call of it, Search-R1 a router trained with it alone.

BM25 (bm25s) over a JSONL corpus of `id, title, text`, or any server that speaks Search-R1's /retrieve:
{"queries": [...], "topk": k, "return_scores": true} -> {"result": [[{"document": {"contents"}, "score"}]]}.
The paper uses E5 over Wikipedia of 2018 behind such a server. What is retrieved costs nothing, as there.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from minirouter import facts, world
from minirouter.tags import fold
from minirouter.trajectory import Candidate, Reply

WORLD = Candidate(world.NAMES[0], 0.0, "large")  # the tiny base can only read descriptors that it knows
REAL = Candidate("search", 0.0, "a search engine: the query is looked up in Wikipedia, passages come back")
NOTHING = "Nothing was found."


class Retriever:
    """A pool of one candidate, whose reply to a query is the text of the best documents."""

    def __init__(self, candidate: Candidate, search: Callable[[str], str], instant: bool) -> None:
        """`search` maps a query to text, "" if nothing is found; OSError and ValueError are faults of it."""
        self.candidates = (candidate,)
        self.names = (candidate.name,)
        self.instant = instant
        self._search = search

    def subset(self, names: Sequence[str]) -> Retriever:
        """There is only one way to choose among one."""
        if list(names) != list(self.names):
            raise ValueError(f"a retriever is a pool of one, {self.names[0]}")
        return self

    def ask(self, name: str, query: str) -> Reply:
        """Passages for the query. Never raises for a fault: `Reply.status` says it."""
        mine = self.candidates[0]
        if fold(name) != fold(mine.name):
            return Reply("no such candidate", status="unknown")
        try:
            text = self._search(query)
        except TimeoutError:
            return Reply("No reply: timeout.", "timeout", mine.name)
        except OSError:
            return Reply("No reply: connection.", "connection", mine.name)
        except ValueError:
            return Reply("No reply: bad json.", "bad_json", mine.name)
        return Reply(text or NOTHING, candidate=mine.name, refused=not text)


def open_retriever(source: str, topk: int = 3, timeout_s: float = 60.0) -> Retriever:
    """ "world" (the facts of the miniature, one document a reply), a JSONL corpus, or the http address of a
    server. Raises ValueError, one line, for anything else.
    """
    if source == "world":
        return Retriever(WORLD, bm25(facts.corpus(), 1), instant=True)
    if source.startswith(("http://", "https://")):
        return Retriever(REAL, lambda query: _from_server(source, query, topk, timeout_s), instant=False)
    if Path(source).suffix != ".jsonl":
        raise ValueError(f"a retriever is world, a .jsonl corpus or an http address, not {source!r}")
    return Retriever(REAL, bm25(read_corpus(Path(source)), topk), instant=True)


def retriever_pool(pool: str, data: str, timeout_s: float = 60.0) -> Retriever | None:
    """The pool that "retriever" (the miniature's facts) or "retriever:SOURCE" names, else None."""
    kind, _, source = pool.partition(":")
    if kind != "retriever":
        return None
    return open_retriever(source or ("world" if data == "world" else ""), timeout_s=timeout_s)


def read_corpus(path: Path) -> list[dict[str, str]]:
    """Documents of a JSONL file. Raises ValueError with file and line for one without `text`."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    documents = []
    for number, line in enumerate(lines, start=1):
        try:
            document = json.loads(line)
            documents.append({"title": str(document.get("title", "")), "text": str(document["text"])})
        except (ValueError, KeyError, AttributeError):
            raise ValueError(f"{path}:{number}: not an object with id, title and text") from None
    if not documents:
        raise ValueError(f"{path}: no documents in it")
    return documents


def bm25(documents: Sequence[dict[str, str]], topk: int) -> Callable[[str], str]:
    """A search over documents held in memory; documents that share no word with the query are not found."""
    require("bm25s")
    import bm25s

    texts = [f"{document['title']} {document['text']}" for document in documents]
    index = bm25s.BM25()
    index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
    topk = min(topk, len(texts))

    def search(query: str) -> str:
        words = bm25s.tokenize([query], return_ids=False, show_progress=False)
        if not any(word in index.vocab_dict for word in words[0]):
            return ""
        found, scores = index.retrieve(words, k=topk, show_progress=False)
        kept = [documents[i]["text"] for i, score in zip(found[0], scores[0], strict=True) if score > 0]
        return "\n".join(kept)

    return search


def require(*packages: str) -> None:
    """Raises ValueError, one line, for a package of the extra `baselines` that is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise ValueError(f"this needs {package}: pip install -e '.[baselines]'")


def _from_server(url: str, query: str, topk: int, timeout_s: float) -> str:
    """The contents that a /retrieve server has for one query. ValueError for an answer of another shape."""
    address = url if url.rstrip("/").endswith("/retrieve") else url.rstrip("/") + "/retrieve"
    body = json.dumps({"queries": [query], "topk": topk, "return_scores": True}).encode()
    request = urllib.request.Request(address, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        result = json.loads(response.read())
    try:
        return "\n".join(str(hit["document"]["contents"]) for hit in result["result"][0])
    except (LookupError, TypeError):
        raise ValueError("not the answer of a /retrieve server") from None
