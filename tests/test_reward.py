"""Exact match, F1, the cost scale, and what they combine to."""

import json
import math
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minirouter.reward import CostScale, combine, exact_match, extract_answer, f1, normalize_answer, score
from minirouter.trajectory import Call, Question, Reply, Trajectory

NAMES = ("Ada", "Bo")
GOOD = "<think>who?</think><search>Ada: who?</search><think>so</think><answer>Goethe</answer>"
WORDS = [
    "the",
    "a",
    "Paris",
    "paris",
    "yes",
    "no",
    "noanswer",
    ".",
    "-",
    "–",
    "’",
    "'",
    "é",
    "e\u0301",
    "1,000",
    "",
]
answers = st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=4).map(" ".join)
costs = st.floats(0, 1e6, allow_nan=False)


@pytest.mark.parametrize(
    ("prediction", "gold"),
    [
        ("Beyonce\u0301", "Beyoncé"),
        ("O’Brien", "O'Brien"),
        ("“Hamlet”", "Hamlet"),
        ("1914–1918", "1914-1918"),
        ("twenty‐one", "twenty-one"),
        ("−5", "-5"),
        ("The  Beatles.", "beatles"),
    ],
)
def test_the_same_answer_in_another_form_matches(prediction, gold):
    """Catches composed against decomposed accents, and punctuation outside ASCII that stays."""
    assert exact_match(prediction, gold) == 1.0
    assert f1(prediction, gold) == 1.0


@pytest.mark.parametrize("empty", ["", " ", "the", "...", "’", "–", None])
def test_an_answer_of_nothing_matches_nothing(empty):
    """Catches the empty answer that equals a gold made of an article, and matching by substring."""
    for gold in ("", "a", "!", "Paris", ["", "the"]):
        assert exact_match(empty, gold) == 0.0
        assert f1(empty, gold) == 0.0
    assert exact_match("Paris", "") == 0.0


@pytest.mark.parametrize("make", [list, tuple, np.array, set, lambda golds: (g for g in golds)])
def test_golds_may_be_a_string_or_any_collection(make):
    """Catches a bare string taken for a list of letters, and an array from parquet."""
    assert exact_match("Goethe", make(["Schiller", "Goethe"])) == 1.0
    assert f1("J. W. Goethe", make(["Schiller", "Goethe"])) == 0.5
    assert exact_match("Goethe", "Goethe") == 1.0
    assert exact_match("G", "Goethe") == 0.0
    assert exact_match("Goethe", make([])) == f1("Goethe", make([])) == 0.0


def test_f1_by_hand():
    """Catches F1 over sets instead of bags, and a part of yes or no that earns something."""
    assert f1("x x y y", "x y y y") == pytest.approx(0.75)
    assert f1("Barack Obama", ["Obama", "Barack Hussein Obama"]) == pytest.approx(0.8)
    assert f1("yes it is", "yes") == f1("no", "no one") == f1("noanswer", "no answer") == 0.0
    assert f1("Yes.", "yes") == 1.0


@given(answers, st.lists(answers, max_size=3))
def test_exact_match_never_exceeds_f1(prediction, golds):
    """Catches two metrics that normalise differently, or judge empty answers differently."""
    em, overlap = exact_match(prediction, golds), f1(prediction, golds)
    assert em in (0.0, 1.0)
    assert em <= overlap <= 1.0
    if normalize_answer(prediction):
        assert exact_match(prediction, [*golds, prediction]) == 1.0


def test_the_last_answer_pair_counts():
    """Catches a first answer, an open one, or tags in capitals that win."""
    assert extract_answer("<answer>a</answer> <answer> b\n</answer>") == "b"
    assert extract_answer("<answer>a</answer><answer>b") == "a"
    assert extract_answer("<answer>a<answer>b</answer></answer>") == "a<answer>b"
    assert extract_answer("<answer></answer>") == ""
    for none in ("", "b</answer>", "<ANSWER>b</ANSWER>", "</answer>b<answer>"):
        assert extract_answer(none) is None


def test_eq_5_by_hand():
    """Catches a cheap wrong answer that pays (the code's rule), and the paper's rule when it is asked for."""
    assert combine(True, 1.0, 0.25, 0.6) == pytest.approx(0.4 * 1.0 + 0.6 * 0.25)
    assert combine(True, 0.5, 1.0, 0.6) == pytest.approx(0.4 * 0.5 + 0.6)
    assert combine(True, 0.0, 1.0, 0.6) == 0.0
    assert combine(True, 0.0, 1.0, 0.6, cost_when_wrong=True) == pytest.approx(0.6)
    assert combine(False, 1.0, 1.0, 0.6) == combine(False, 1.0, 1.0, 0.6, cost_when_wrong=True) == -1.0


def test_the_cost_scale_by_hand():
    """Catches costs that are not square roots, a scale the wrong way round, and a window that slides late."""
    scale = CostScale(window=3)
    assert scale.normalize(49.0, update=False) == 0.5
    assert scale.normalize(4.0) == 0.5, "alone: no spread"
    assert scale.normalize(16.0) == 0.0
    assert scale.normalize(0.0) == 1.0
    # roots 2, 4, 0: 5th percentile .2, 95th 3.8
    assert scale.normalize(9.0, update=False) == pytest.approx(1 - (3 - 0.2) / 3.6)
    scale.normalize(9.0)  # 2 leaves: 4, 0, 3: .3 and 3.9
    assert scale.normalize(4.0, update=False) == pytest.approx(1 - (2 - 0.3) / 3.6)


@given(st.lists(costs, max_size=30), costs, costs)
def test_the_cost_scale_is_monotone_within_a_window_and_in_bounds(fed, one, other):
    """Catches a reward that grows with the cost."""
    scale = CostScale(window=10)
    assert all(0.0 <= scale.normalize(cost) <= 1.0 for cost in fed)
    low, high = sorted((one, other))
    before = scale.state()
    cheap, dear = scale.normalize(low, update=False), scale.normalize(high, update=False)
    assert 1.0 >= cheap >= dear >= 0.0
    assert scale.state() == before
    assert len(before["roots"]) == min(len(fed), 10)


@pytest.mark.parametrize("cost", [math.nan, -1e-9, math.inf, -math.inf])
@pytest.mark.parametrize("update", [True, False])
def test_a_cost_that_is_none_is_refused_and_leaves_the_window(cost, update):
    """Catches one NaN that poisons the rewards of the next thousand episodes."""
    scale = CostScale()
    scale.normalize(4.0)
    before = scale.state()
    with pytest.raises(ValueError, match="a cost must be a finite number"):
        scale.normalize(cost, update=update)
    assert scale.state() == before


@given(st.lists(costs, min_size=1, max_size=12), st.integers(1, 6))
def test_a_saved_scale_goes_on_as_if_nothing_had_happened(fed, window):
    """Catches a scale that starts again empty when a run is resumed."""
    scale, resumed = CostScale(window), CostScale()
    for cost in fed:
        scale.normalize(cost)
    resumed.load_state(json.loads(json.dumps(scale.state())))
    assert [scale.normalize(c) for c in (3.0, 99.0, 0.0)] == [resumed.normalize(c) for c in (3.0, 99.0, 0.0)]


def trajectory(text: str = GOOD, cost: float = 4.0, status: str = "ok") -> Trajectory:
    calls = [
        Call("Ada", "who?", Reply("Goethe", status, cost=cost)),
        Call("Bo", "when?", Reply("1832", cost=5.0)),
    ]
    cut = text.find("</search>") + len("</search>")
    return Trajectory(turns=[text[:cut], text[cut:]], calls=calls, finish="answer")


QUESTION = Question("q", "Who wrote Faust?", ("Goethe", "J. W. Goethe"))


def test_a_trajectory_is_scored_by_its_parts():
    """Catches a cost of one call instead of all, and parts that do not say what they mean."""
    scale = CostScale()
    scale.normalize(0.0)
    reward = score(trajectory(), QUESTION, NAMES, scale, alpha=0.6)
    assert (reward.em, reward.f1, reward.cost, reward.cost_reward, reward.format_error) == (
        1.0,
        1.0,
        9.0,
        0.0,
        None,
    )
    assert reward.score == pytest.approx(0.4)
    part = score(
        trajectory(GOOD.replace("Goethe", "Goethe, of course")),
        QUESTION,
        NAMES,
        scale,
        alpha=0.6,
        metric="f1",
    )
    assert part.em == 0.0
    assert part.score == pytest.approx(0.4 * part.f1 + 0.6 * part.cost_reward)
    assert score(trajectory(GOOD.replace("Goethe", "Kant")), QUESTION, NAMES, scale, alpha=0.6).score == 0.0


def test_a_malformed_trajectory_loses_even_with_the_right_answer():
    """Catches a format judged on the prompt or on replies, and the ablation without it."""
    wrong_form = trajectory(GOOD + "</answer>")
    reward = score(wrong_form, QUESTION, NAMES, CostScale(), alpha=0.0)
    assert (reward.score, reward.em) == (-1.0, 1.0)
    assert reward.format_error == "<answer> and </answer> are not balanced"
    free = score(wrong_form, QUESTION, NAMES, CostScale(), alpha=0.0, no_format_reward=True)
    assert (free.score, free.format_error) == (1.0, reward.format_error)
    paid = score(
        trajectory(GOOD.replace("Goethe", "Kant")),
        QUESTION,
        NAMES,
        CostScale(),
        alpha=0.6,
        cost_when_wrong=True,
    )
    assert paid.score == pytest.approx(0.3)


@pytest.mark.parametrize("finish", ["eos", "call_limit", "turn_tokens", "total_tokens"])
def test_an_episode_cut_short_is_malformed(finish):
    """Catches a cut that is scored as wrong but well formed."""
    cut = trajectory(GOOD[: GOOD.index("<think>so")])
    cut.finish = finish
    assert score(cut, QUESTION, NAMES, CostScale(), alpha=0.6).score == -1.0


def test_only_unfaulted_training_trajectories_feed_the_scale():
    """Catches evaluation that moves training rewards, and a fault of the pool that counts as cheap."""
    scale = CostScale()
    score(trajectory(), QUESTION, NAMES, scale, alpha=0.6)
    score(trajectory("nonsense", cost=11.0), QUESTION, NAMES, scale, alpha=0.6)
    assert scale.state()["roots"] == [3.0, 4.0], "a malformed one too, in order"
    score(trajectory(), QUESTION, NAMES, scale, alpha=0.6, update=False)
    score(trajectory(status="timeout"), QUESTION, NAMES, scale, alpha=0.6)
    assert scale.state()["roots"] == [3.0, 4.0]
    score(trajectory(status="unknown"), QUESTION, NAMES, scale, alpha=0.6)
    assert scale.state()["roots"] == [3.0, 4.0, 3.0], "the router's own mistake is no fault of the pool"


@given(answers)
def test_composed_and_decomposed_text_score_alike(text):
    """Catches a normalisation that depends on how an accent is spelled."""
    forms = [unicodedata.normalize(form, text) for form in ("NFC", "NFD")]
    assert normalize_answer(forms[0]) == normalize_answer(forms[1])


def test_no_answer_comes_about_where_two_turns_meet():
    """Catches a reward for a tag that was half written before a reply and half after it."""
    turns = ["<think>a</think><search>Ada: q</search><", "answer>gold</answer>"]
    trajectory = Trajectory(turns=turns, finish="eos")
    assert extract_answer(trajectory.text) is None
