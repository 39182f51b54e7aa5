"""The page of a run: it holds every trajectory, and no text of anybody can become HTML in it."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirouter import view
from minirouter.record import trajectory_row
from minirouter.trajectory import Call, Question, Reply, Reward, Trajectory

VOID = {"meta", "input", "br", "hr", "img", "link"}
HOSTILE = [
    "<b>bold</b><img src=x onerror=alert(1)>",
    "</script><script>document.title='broken'</script>",
    "<!-- <script> --!> ]]> <![CDATA[ &lt;&amp;&#60;",
    "nul \x00 and controls \x1b[31m \x7f \x85 \u2028 \u2029",
    "right to left \u202e\u2067 evil \u200f",
    "lone \ud800 and \udfff surrogates, \U0001f600",
    "{{data}} {{title}} \\u003c \\ \" ' `${1}`",
    "a" * 100_000,
]


def a_row(step: int = 1, index: int = 0, text: str = "plain words", **changed) -> dict:
    """A line of trajectories.jsonl in which `text` stands wherever somebody else can write."""
    row = {
        "question": text, "golds": [text, "gold"], "kind": "one-hop", "score": 0.7, "em": 1.0, "f1": 1.0,
        "format_error": None, "cost": 15.0, "cost_reward": 0.5, "finish": "answer", "faulted": False,
        "prompt_text": f"prompt {text}",
        "segments": [
            {"by": "router", "text": "ask now", "tokens": ["ask", "now"]},
            {"by": "pool", "text": text, "tokens": [text]},
            {"by": "router", "text": "done", "tokens": ["done"]},
        ],
        "calls": [{"name": text, "query": text, "candidate": "large", "status": "ok", "cost": 15.0,
                   "tokens": 5, "refused": False}],
        "step": step, "index": index,
        "actions": {name: [-0.5, 0.25, 1.0] for name in view.FIGURES},
    }  # fmt: skip
    return {**row, **changed}


def a_run(folder: Path, rows: list[dict], metrics: list[dict] | None = None) -> Path:
    steps = sorted({row["step"] for row in rows})
    metrics = metrics or [
        {"step": step, "reward": 0.1, "calls": 1.0, "calls/of/large": 1.0} for step in steps
    ]
    folder.mkdir(exist_ok=True)
    for name, lines in (("metrics.jsonl", metrics), ("trajectories.jsonl", rows)):
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines), "ascii")
    return folder


class Tags(HTMLParser):
    """Collects tags and attributes in order, and checks that they are balanced."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list = []
        self.open: list[tuple[str, str]] = []  # (tag, id)
        self.text: dict[str, str] = {}
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, attrs))
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("id", "")))

    def handle_endtag(self, tag):
        self.tags.append(("/" + tag, []))
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open:
            tag, name = self.open[-1]
            self.text[name or tag] = self.text.get(name or tag, "") + data


def unpack(page: str) -> tuple[dict, list[dict]]:
    """What the script of the page sees: all its data, and the trajectories with their texts put back."""
    data = json.loads(Tags(page).text["data"], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    word = lambda number: None if number is None else data["strings"][number]  # noqa: E731
    rows = [dict(zip(data["columns"], row, strict=True)) for row in data["rows"]]
    for row in rows:
        row |= {key: word(row[key]) for key in ("question", "kind", "format_error", "finish", "prompt_text")}
        row["golds"] = [word(gold) for gold in row["golds"]]
        row["calls"] = [[*map(word, call[:4]), *call[4:]] for call in row["calls"]]
        row["segments"] = [[by, [word(token) for token in tokens]] for by, tokens in row["segments"]]
    return data, rows


def test_hostile_text_adds_no_tag_and_comes_out_as_it_went_in(tmp_path):
    """Catches text that ends the script element, opens a comment or a tag, or is changed by escaping."""
    tame = Tags(view.build(a_run(tmp_path / "run", [a_row()])).html)
    hostile = a_run(tmp_path / "run", [a_row(1, i, text) for i, text in enumerate(HOSTILE)])
    (hostile / "config.yaml").write_text(HOSTILE[1] + "\n" + HOSTILE[2], "utf-8")
    page = view.build(hostile).html
    wild = Tags(page)
    assert wild.tags == tame.tags
    assert wild.open == []
    assert page.isascii() and "\x00" not in page
    data, rows = unpack(page)
    assert data["config"] == HOSTILE[1] + "\n" + HOSTILE[2]
    for row, text in zip(rows, HOSTILE, strict=True):
        assert (row["question"], row["golds"], row["prompt_text"]) == (text, [text, "gold"], f"prompt {text}")
        assert row["segments"] == [[1, ["ask", " now"]], [0, [text]], [1, ["done"]]]
        assert row["calls"] == [[text, text, "large", "ok", 15, 5, 0]]


@pytest.mark.parametrize("name", ["<script>alert(1)<", "a&b\"'", "{{data}}"])
def test_the_name_of_the_folder_is_escaped_too(tmp_path, name):
    """Catches the one text that goes into the page outside the data: its title."""
    tags = Tags(view.build(a_run(tmp_path / name, [a_row()])).html)
    assert tags.text["title"] == name and tags.text["name"] == name
    assert tags.tags == Tags(view.build(a_run(tmp_path / "run", [a_row()])).html).tags


def test_the_page_asks_nothing_of_the_network_and_builds_no_html_from_text():
    """Catches a font, script or style from elsewhere, and the ways in which a script parses text as HTML."""
    template = (Path(view.__file__).parent / "assets" / "view.html").read_text("ascii")
    fetches = ("http:", "https:", "src=", "href", "url(", "@import", "fetch(", "XMLHttp", "import(")
    parses = ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "DOMParser")
    assert [word for word in fetches + parses if word in template] == []
    assert "default-src 'none'" in template


def test_every_trajectory_of_a_long_run_is_there(tmp_path):
    """Catches a silent cap: 6,400 trajectories go in whole, each once, in order, and the page stays small."""
    rows = [a_row(step, index, f"question {step} {index}") for step in range(1, 101) for index in range(64)]
    page = view.build(a_run(tmp_path / "run", rows))
    data, shown = unpack(page.html)
    for key in ("step", "index", "question"):
        assert [row[key] for row in shown] == [row[key] for row in rows]
    assert (page.shown, page.total, page.notes, data["notes"]) == (6400, 6400, [], [])
    assert len(page.html) < (tmp_path / "run" / "trajectories.jsonl").stat().st_size / 2


def test_a_stride_keeps_whole_steps_and_says_exactly_what_is_shown(tmp_path, monkeypatch):
    """Catches a page that passes for the whole run. 10 steps of 3, one in four from the last: 10, 6, 2."""
    run = a_run(tmp_path / "run", [a_row(step, index) for step in range(1, 11) for index in range(3)])
    page = view.build(run, every=4)
    data, rows = unpack(page.html)
    assert [row["step"] for row in rows] == [2, 2, 2, 6, 6, 6, 10, 10, 10]
    assert len(data["notes"]) == 1 and "9 of 30 trajectories" in data["notes"][0]
    assert "one step in 4" in data["notes"][0] and "--every" in data["notes"][0]
    monkeypatch.setattr(view, "SIZE_LIMIT", (run / "trajectories.jsonl").stat().st_size // 2 + 1)
    assert view.build(run).shown == 15
    assert view.build(run, every=1).shown == 30


def test_figures_stay_with_their_actions_and_untrained_rows_have_none(tmp_path):
    """Catches figures shifted, lost in rounding, not finite (no JSON), or made up for a faulted row."""
    columns = ([-0.00449, -1.0, -math.inf], [0.0, -0.0, 2.5], [1.23456, -2.0, 0.0], [math.nan, 0.0006, 1e-9])
    actions = dict(zip(view.FIGURES, columns, strict=True))
    run = a_run(tmp_path / "run", [a_row(actions=actions), a_row(1, 1, actions=None, faulted=True)])
    trained, untrained = unpack(view.build(run).html)[1]
    assert trained["actions"] == [[-0.004, -1, None], [0, 0, 2.5], [1.235, -2, 0], [None, 0.001, 0]]
    assert untrained["actions"] is None and untrained["faulted"] == 1


def test_metrics_that_are_not_finite_do_not_break_the_page_and_warnings_are_on_it(tmp_path):
    """Catches NaN in the JSON, which Python writes and no browser reads, and a watch that is not wired in."""
    metrics = [{"step": step, "calls": 0.0, "kl": float("nan"), "warnings": []} for step in range(1, 7)]
    run = a_run(tmp_path / "run", [a_row(6)], metrics)
    data = unpack(view.build(run).html)[0]
    assert [row["kl"] for row in data["metrics"]] == [None] * 6
    assert len(data["warnings"]) == 2 and all(line.startswith("step 5: ") for line in data["warnings"])


def test_a_half_last_line_is_left_out_with_a_note_and_a_bad_line_is_named(tmp_path):
    """Catches a viewer that cannot look at a run that is being written, or that hides a damaged file."""
    run = a_run(tmp_path / "run", [a_row(1, i) for i in range(3)])
    path = run / "trajectories.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:50] + b"\xf0\x9f")
    page = view.build(run)
    assert page.shown == page.total == 3
    assert page.notes == ["trajectories.jsonl: line 4, the last, is not finished and was left out."]
    path.write_bytes(b"\xef\xbb\xbf" + whole.replace(b"\n", b"\r\n"))
    assert view.build(run).shown == 3
    for bad in (b"{broken\n", b"[]\n", b"[" * 100_000 + b"\n", b'{"step": 1}\n', b'{"step": "x"}\n'):
        path.write_bytes(whole + bad + whole)
        with pytest.raises(ValueError, match=r"trajectories\.jsonl, line 4: not a"):
            view.build(run)


@pytest.mark.parametrize("missing", ["run", "metrics.jsonl", "trajectories.jsonl"])
def test_what_is_missing_is_named_in_one_line_and_exit_code_2(tmp_path, capsys, missing):
    """Catches a traceback, or an empty page, for a wrong folder."""
    run = a_run(tmp_path / "run", [a_row()])
    shutil.rmtree(run) if missing == "run" else (run / missing).unlink()
    with pytest.raises(SystemExit) as stop:
        view.main([str(run)])
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert said.count("\n") == 1 and missing in said and "Traceback" not in said


def test_the_command_writes_where_it_is_told_and_says_how_many(tmp_path, capsys):
    """Catches a page in the wrong place, a wrong count, and a wrong option that passes."""
    run = a_run(tmp_path / "run", [a_row(step) for step in (1, 2)])
    view.main([str(run)])
    view.main([str(run), "-o", str(tmp_path / "other.html"), "--every", "2"])
    assert "1 of 2 trajectories" in capsys.readouterr().out
    assert len(unpack((run / "view.html").read_text("ascii"))[1]) == 2
    assert len(unpack((tmp_path / "other.html").read_text("ascii"))[1]) == 1
    for wrong in (["--every", "0"], ["-o", str(tmp_path / "none" / "x.html")]):
        with pytest.raises(SystemExit, match="2"):
            view.main([str(run), *wrong])


def test_the_rows_that_training_writes_are_the_rows_that_are_read(tmp_path):
    """Catches a field that one side renames. Ids 0 1 | 2 3 drawn | 4 put in | 5 drawn."""

    class Words:
        vocabulary = ("ask", "me", "<search>", "large", "<info>", "</answer>")

        def decode(self, ids: list[int]) -> str:
            return " ".join(self.vocabulary[i] for i in ids)

    t = Trajectory(2, [0, 1], [False] * 2, [None] * 2)
    t.append([2, 3], [-0.1, -0.2])
    t.append([4])
    t.append([5], [-0.3])
    t.calls.append(Call("large", "who", Reply("somebody", candidate="large", tokens=5, cost=15.0)))
    t.finish = "answer"
    reward = Reward(0.7, None, 1.0, 1.0, 15.0, 0.5)
    figures = {name: [0.0, 0.1, 0.2] for name in view.FIGURES}
    row = trajectory_row(t, Question("q", "who", ("x",)), reward, Words(), step=1, index=0, actions=figures)
    shown = unpack(view.build(a_run(tmp_path / "run", [row])).html)[1][0]
    assert shown["segments"] == [[1, ["<search>", " large"]], [0, ["<info>"]], [1, ["</answer>"]]]
    assert shown["prompt_text"] == "ask me" and shown["actions"] == [[0, 0.1, 0.2]] * 4
    assert shown["calls"] == [["large", "who", "large", "ok", 15, 5, 0]]


WORD = st.text(min_size=1, max_size=6).filter(lambda word: not set(word) & set(" \n"))


@given(st.lists(st.tuples(st.text(" \n", max_size=3), WORD), min_size=1))
def test_pieces_joined_are_the_text_whatever_white_space_decoding_lost(words):
    """Catches a transcript that is not what the model saw: words run together, text lost or doubled."""
    text = "".join(space + word for space, word in words)
    tokens = [word for _, word in words]
    pieces = view.aligned(text, tokens)
    assert len(pieces) == len(tokens)
    assert "".join(pieces) == text


def test_half_characters_keep_the_text_and_strangers_keep_the_tokens():
    """Catches replacement characters in place of a letter, and a text that its tokens do not fit."""
    assert view.aligned("a é b", ["a", " ", "\ufffd", "\ufffd", " b"]) == ["a", " ", "", "", "é b"]
    assert view.aligned("something else altogether", ["x", "y"]) == ["x", "y"]
    assert view.aligned("done .", ["done"]) == ["done ."] and view.aligned("", []) == []


def dom(path: Path, tmp_path: Path, fragment: str) -> str:
    """The document as Chromium has it after its script has run."""
    flags = "headless no-sandbox disable-gpu no-first-run disable-sync disable-background-networking dump-dom"
    more = [f"user-data-dir={tmp_path / 'profile'}", "virtual-time-budget=3000"]
    command = ["chromium", *(f"--{flag}" for flag in flags.split() + more), f"{path.as_uri()}#{fragment}"]
    done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    return done.stdout.decode("utf-8", "replace")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_filters_in_a_browser_count_what_they_should_and_hostile_text_stays_text(tmp_path):
    """Catches a script that does not run, a filter that does not filter, text that a browser executes."""
    rows = [a_row(1, i, text) for i, text in enumerate(HOSTILE)]
    rows += [a_row(2, i, em=0.0) for i in range(3)]
    rows += [a_row(2, 3, format_error="no answer", calls=[]), a_row(2, 4, faulted=True, actions=None)]
    run = a_run(tmp_path / "run", rows)
    view.main([str(run)])
    expected = {
        "": 13, "step=2": 5, "outcome=right": 8, "outcome=wrong": 3, "outcome=malformed": 1,
        "outcome=faulted": 1, "step=1&outcome=wrong": 0, "candidate=large": 12, "candidate=(no+call)": 1,
        "fault=no+answer": 1, "text=PLAIN": 5, "kind=one-hop": 13,
    }  # fmt: skip
    for fragment, count in expected.items():
        page = dom(run / "view.html", tmp_path, fragment)
        status = re.search(r'id="status"[^>]*>([^<]*)', page)
        assert status and status[1].startswith(f"{count} of 13 "), fragment
        assert page.count('<details class="row"') == count, fragment
    page = dom(run / "view.html", tmp_path, "step=1&open=1.1")
    assert "log-prob -0.500   value -0.500   advantage -0.500   KL -0.500" in page
    assert "<title>broken" not in page and "<img" not in page
    assert page.count("<script") == 2 and "[U+202E]" in page and "[U+D800]" in page
