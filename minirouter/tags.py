"""The text protocol, written once: tags, the one routing action of a turn, and whether a text is well formed.

A turn is `<think>...</think>` and then either `<search>NAME: QUERY</search>`, a call of a candidate, or
`<answer>...</answer>` (the paper, section 3). The reply to a call is put in between `<info>` tags by the
rollout. Well formed or not is Eq. 2 (0 or -1), judged on what the router wrote, replies left out.

Departures from the reference implementation: the first *closed* pair is the action, whatever surrounds it; a
call is split at its first colon and its query may hold more of them; a name is a listed spelling instead of a
substring guess; an empty answer and an info tag that the router wrote itself are malformed; what others say
is neutralised when it enters the text instead of being held against the router. Every scan is linear.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

INFO = "info"  # the paper's tag of a reply; published checkpoints know "information"
INFO_TAGS = ("info", "information")
TAGS = ("think", "search", "answer", *INFO_TAGS)
PLACEHOLDERS = ("llm-name", "your-query")  # the prompt's example of a call, copied instead of filled in
ANY_TAG = re.compile(f"<(/?)({'|'.join(TAGS)})>")


@dataclass(frozen=True)
class Action:
    """The action of a turn. `name` and `query` are None for an answer and for a call without a colon."""

    kind: str  # "search" or "answer"
    text: str  # between the tags, stripped
    name: str | None = None
    query: str | None = None


def render(tag: str, text: str) -> str:
    """`text`, stripped, between the tags of that name. Neutralise text that is not your own first."""
    return f"<{tag}>{text.strip()}</{tag}>"


def render_reply(text: str, info_tag: str = INFO, special_strings: Iterable[str] = ()) -> str:
    """What is put into the context for a reply: neutralised, tagged, between blank lines."""
    return f"\n\n{render(info_tag, neutralise(text, special_strings))}\n\n"


def find_action(text: str) -> Action | None:
    """The first closed pair of search or answer, the one whose closing tag comes first; None without any."""
    pairs = [(*span, kind) for kind in ("search", "answer") if (span := _first_pair(text, kind))]
    if not pairs:
        return None
    end, start, kind = min(pairs)
    content = text[start:end].strip()
    name, query = split_call(content) if kind == "search" else (None, None)
    return Action(kind, content, name, query)


def split_call(content: str) -> tuple[str, str] | tuple[None, None]:
    """NAME and QUERY, stripped: what stands before and after the first colon. (None, None) without one."""
    name, colon, query = content.partition(":")
    return (name.strip(), query.strip()) if colon else (None, None)


def call_error(content: str) -> str | None:
    """Why what stands in a call cannot be sent to anybody, in a few words, or None."""
    name, query = split_call(content)
    if name is None:
        return "a call without a colon"
    if any(word in content.casefold() for word in PLACEHOLDERS):
        return "a call with a placeholder of the prompt"
    return None if query else "a call without a query"


def fold(name: str) -> str:
    """The form in which two spellings of a name are compared: trimmed, case-folded."""
    return name.strip().casefold()


def resolve(name: str, names: Iterable[str]) -> str | None:
    """The spelling among `names` that equals the written `name` after case-folding and trimming, or None."""
    wanted = fold(name)
    return next((known for known in names if fold(known) == wanted), None)


def format_error(text: str, names: Iterable[str]) -> str | None:
    """Why `text` is malformed, in a few words, or None if it is well formed (Eq. 2).

    `text` is what the router wrote in all turns, inserted replies left out; `names` the accepted spellings.
    """
    text = text.strip()
    tags = list(ANY_TAG.finditer(text))
    counts = {(kind, slash): 0 for kind in TAGS for slash in ("", "/")}
    for tag in tags:
        counts[tag[2], tag[1]] += 1
    if any(counts[kind, slash] for kind in INFO_TAGS for slash in ("", "/")):
        return "the router wrote an info tag itself"
    if not text.startswith("<think>"):
        return "does not start with <think>"
    if not text.endswith("</answer>"):
        return "does not end with </answer>"
    for kind in TAGS:
        if counts[kind, ""] != counts[kind, "/"]:
            return f"<{kind}> and </{kind}> are not balanced"
    if counts["answer", ""] != 1:
        return "more than one answer"
    return _pairs_error(text, tags, list(names))


def neutralise(text: str, special_strings: Iterable[str] = ()) -> str:
    """`text` with `<` as `‹` inside every tag of ours and inside the given special and added token strings.

    What a candidate or a data set says can then neither close its own tag, nor act, nor become a special
    token. Putting in `‹` cannot make a new tag, so none is left. Strings without `<` stay as they are.
    """
    text = ANY_TAG.sub(lambda tag: "‹" + tag[0][1:], text)
    for special in special_strings:
        while "<" in special and special in text:  # again for a string that overlaps with itself
            text = text.replace(special, special.replace("<", "‹"))
    return text


def _first_pair(text: str, kind: str) -> tuple[int, int] | None:
    """(end, start) of what the first closed pair of that kind holds; the end first, to compare by it."""
    start = text.find(f"<{kind}>")
    end = text.find(f"</{kind}>", start) if start >= 0 else -1
    return (end, start + len(f"<{kind}>")) if end >= 0 else None


def _pairs_error(text: str, tags: list[re.Match], names: list[str]) -> str | None:
    """What is wrong inside the pairs of a text whose tags are balanced in number."""
    last_close = {tag[2]: i for i, tag in enumerate(tags) if tag[1]}
    i = 0
    while i < len(tags):
        kind, closing = tags[i][2], tags[i][1]
        if closing or last_close[kind] < i:  # a pair the wrong way round is free text, as in the reference
            i += 1
            continue
        after = tags[i + 1]
        if (after[2], after[1]) != (kind, "/"):
            return f"a tag inside <{kind}>"
        if error := _content_error(kind, text[tags[i].end() : after.start()].strip(), names):
            return error
        i += 2
    return None


def _content_error(kind: str, content: str, names: list[str]) -> str | None:
    if kind == "think":
        return "empty thought" if content in ("", "...") else None
    if kind == "answer":
        return None if content else "empty answer"
    if error := call_error(content):
        return error
    name, query = split_call(content)
    if resolve(name, names) is None:
        return "a call of an unknown name"
    return "a query that repeats the name" if fold(name) in fold(query) else None
