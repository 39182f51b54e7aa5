"""The reward of a trajectory: format (Eq. 2), outcome (Eq. 3), cost (Eq. 4), and their combination (Eq. 5).

EM and F1 follow SQuAD: lower case, no ASCII punctuation, no articles, single blanks; the best of the golds.

Departures from the reference implementation: text is first brought to NFC with ASCII quotes and dashes;
answers that normalise to nothing never match; the cost scale is fed by training trajectories alone, refuses
NaN and negative costs, and can be saved. Departure from the paper's Eq. 5, as in the reference: a wrong
answer earns no cost reward unless `cost_when_wrong`.
"""

from __future__ import annotations

import math
import re
import string
import unicodedata
from collections import Counter, deque
from collections.abc import Iterable

import numpy as np

from .tags import format_error
from .trajectory import Question, Reward, Trajectory

ASCII_FORMS = str.maketrans(
    dict.fromkeys("‘’‚‛", "'") | dict.fromkeys("“”„‟«»", '"') | dict.fromkeys("‐‑‒–—―−", "-")
)
NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
ARTICLES = re.compile(r"\b(a|an|the)\b")
ALL_OR_NOTHING = ("yes", "no", "noanswer")  # a part of such an answer is worth nothing
SAME_PERCENTILES = 1e-8  # below this spread all costs count as equal


def normalize_answer(s: str) -> str:
    """`s` as it is compared: NFC, ASCII quotes and dashes, lower case, no punctuation, no articles."""
    s = unicodedata.normalize("NFC", s).translate(ASCII_FORMS).lower().translate(NO_PUNCTUATION)
    return " ".join(ARTICLES.sub(" ", s).split())


def exact_match(prediction: str | None, golds: str | Iterable[str]) -> float:
    """Eq. 3: 1.0 if the prediction equals a gold after normalising and is not empty, else 0.0."""
    wanted = normalize_answer(prediction or "")
    return float(wanted != "" and any(normalize_answer(gold) == wanted for gold in _as_list(golds)))


def f1(prediction: str | None, golds: str | Iterable[str]) -> float:
    """F1 of the bags of normalised words, the largest over the golds (SQuAD); 0.0 without golds."""
    return max((_f1(normalize_answer(prediction or ""), gold) for gold in _as_list(golds)), default=0.0)


def extract_answer(text: str) -> str | None:
    """Text of the last answer pair, stripped, or None; `text` is what the router wrote."""
    found, end = None, 0
    while (start := text.find("<answer>", end)) >= 0 and (close := text.find("</answer>", start)) >= 0:
        found, end = text[start + len("<answer>") : close].strip(), close + len("</answer>")
    return found


class CostScale:
    """Eq. 4: the cost of an episode to [0, 1], larger is cheaper, against the last `window` costs fed to it.

    x = sqrt(cost), scaled between the 5th and the 95th percentile of the window, clipped, taken from 1.
    """

    def __init__(self, window: int = 1000) -> None:
        self.roots: deque[float] = deque(maxlen=window)

    def normalize(self, cost: float, update: bool = True) -> float:
        """The scaled `cost`, which with `update` enters the window first; .5 for an empty or flat window.

        Raises ValueError for NaN, an infinite or a negative cost, and leaves the window as it was.
        """
        if not (0 <= cost < math.inf):
            raise ValueError(f"a cost must be a finite number of at least 0, not {cost}")
        root = math.sqrt(cost)
        if update:
            self.roots.append(root)
        if not self.roots:
            return 0.5
        low, high = np.percentile(self.roots, (5, 95))
        if high - low < SAME_PERCENTILES:
            return 0.5
        return 1.0 - min(max(float((root - low) / (high - low)), 0.0), 1.0)

    def state(self) -> dict:
        """What a checkpoint keeps, as JSON knows it."""
        return {"window": self.roots.maxlen, "roots": list(self.roots)}

    def load_state(self, state: dict) -> None:
        self.roots = deque(state["roots"], maxlen=state["window"])


def combine(
    format_ok: bool, outcome: float, cost_reward: float, alpha: float, cost_when_wrong: bool = False
) -> float:
    """Eq. 5: -1 if malformed, else (1 - alpha) * outcome + alpha * cost_reward.

    `outcome` is EM or F1. A wrong answer (outcome 0) earns 0, or alpha * cost_reward with `cost_when_wrong`,
    which is the paper's rule.
    """
    if not format_ok:
        return -1.0
    if outcome == 0 and not cost_when_wrong:
        return 0.0
    return (1 - alpha) * outcome + alpha * cost_reward


def score(
    trajectory: Trajectory,
    question: Question,
    names: Iterable[str],
    scale: CostScale,
    *,
    alpha: float,
    metric: str = "em",
    cost_when_wrong: bool = False,
    no_format_reward: bool = False,
    update: bool = True,
) -> Reward:
    """The reward of one trajectory and its parts. `names` are the accepted spellings of the pool's names.

    With `update` the trajectory's cost enters the scale first, unless the pool was at fault: call in the
    order of the prompts. Evaluation passes False. `no_format_reward` pays malformed text for its last answer.
    """
    error = format_error(trajectory.text, names)
    answer = extract_answer(trajectory.text)
    em, overlap = exact_match(answer, question.golds), f1(answer, question.golds)
    cost_reward = scale.normalize(trajectory.cost, update=update and not trajectory.faulted)
    outcome = {"em": em, "f1": overlap}[metric]
    total = combine(error is None or no_format_reward, outcome, cost_reward, alpha, cost_when_wrong)
    return Reward(total, error, em, overlap, trajectory.cost, cost_reward)


def _f1(prediction: str, gold: str) -> float:
    """F1 of a normalised prediction and a gold."""
    gold = normalize_answer(gold)
    if prediction != gold and (prediction in ALL_OR_NOTHING or gold in ALL_OR_NOTHING):
        return 0.0
    mine, theirs = prediction.split(), gold.split()
    common = (Counter(mine) & Counter(theirs)).total()
    return 2 * common / (len(mine) + len(theirs)) if common else 0.0


def _as_list(golds: str | Iterable[str]) -> list[str]:
    """Golds as a list: a bare string is one gold, not its letters; data sets give lists and arrays."""
    return [golds] if isinstance(golds, str) else [str(gold) for gold in golds]
