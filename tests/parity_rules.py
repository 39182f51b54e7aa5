"""What minirouter decides otherwise than the reference implementation; the comparison of text and rewards.

Every `compare_...` yields (field, case, agrees, rows): whether we agree with the recorded output in that
field, and which rows of the table "Where minirouter differs" excuse it if not. The rows are found from the
*input* of the case and what the reference made of it, so that tests/test_parity.py can demand: it differs if
and only if a row is named.
"""

import functools
import gzip
import json
import re
from pathlib import Path

from minirouter.reward import CostScale, combine, exact_match, extract_answer, f1, normalize_answer, score
from minirouter.tags import PLACEHOLDERS, find_action, format_error, render_reply, resolve, split_call
from minirouter.trajectory import Call, Question, Reply, Trajectory

DATA = Path(__file__).parent / "data" / "parity"

TAG = "tag of a reply"
CALL = "call"
NAME = "name"
REPEATS = "query repeats the written name"
EMPTY = "empty answer"
REPLY = "tags inside a reply"
OWN_INFO = "router writes `<info>` itself"
BAD_CALL = "bad or unknown call"
FAULT = "pool fault"
FIFTH = "fifth call"
NO_ACTION = "a turn without an action"
FIRST_CLOSED = "answer, then a call in one turn"
COUNT = "the count of calls after a bad one"
DEGENERATE = "degenerate batches"
GROUP_OF_ONE = "GRPO group of one"
ADAPTIVE = "adaptive KL controller"
TEMPERATURE = "temperature of candidates"
FORMAT = "format otherwise"
WRONG = "wrong but well-formed answer"
COST = "cost of a call"
SCALE = "cost scale"
ACTIONS = "GAE, whitening, value loss"
KL = "KL"
HYPER = "hyper-parameters"
EM_F1 = "EM, F1"
EVALUATION = "evaluation"
TRUNCATION = "truncation"
BORN = "the mask is born when the token is drawn"
RETIRED = "a finished slot takes the next question"

# Rows that no case of the data can show, and rows that promise to be the same, with the test of each.
COVERED_ELSEWHERE = {
    TAG: "test_tags.py::test_a_reply_is_tagged_info_unless_the_other_spelling_is_asked_for",
    HYPER: "test_config.py::test_the_paper_preset_has_the_papers_hyper_parameters",
}
SAME = {
    REPEATS: "test_tags.py::test_a_query_that_repeats_the_written_name_is_malformed",
    FORMAT: "test_tags.py::test_format_rules_one_by_one",
    WRONG: "test_reward.py::test_eq_5_by_hand",
    COST: "test_pool.py::test_a_call_sends_one_message_and_is_priced_by_its_usage",
    KL: "test_ppo.py::test_kl_kinds_by_hand",
}
DIFFERS = [CALL, NAME, EMPTY, REPLY, OWN_INFO, BAD_CALL, FAULT, FIFTH, NO_ACTION, FIRST_CLOSED, COUNT]
DIFFERS += [DEGENERATE, GROUP_OF_ONE, ADAPTIVE, TEMPERATURE, SCALE, ACTIONS, EM_F1, EVALUATION]
DIFFERS += [TRUNCATION, BORN, RETIRED]  # decided in the design's text, not in a row of its table

# The pool of the reference's prompt: its six names, the model each stands for, its price, and aliases that a
# pool file would list for it.
CANDIDATES = {
    "Qwen2.5-7B-Instruct": ("qwen/qwen2.5-7b-instruct", 0.3, ("qwen",)),
    "LLaMA-3.1-8B-Instruct": ("meta/llama-3.1-8b-instruct", 0.18, ("llama 8b",)),
    "LLaMA-3.1-70B-Instruct": ("meta/llama-3.1-70b-instruct", 0.88, ("llama 70b",)),
    "Mistral-7B-Instruct": ("mistralai/mistral-7b-instruct-v0.3", 0.2, ("mistral",)),
    "Mixtral-8x22B-Instruct": ("mistralai/mixtral-8x22b-instruct-v0.1", 1.2, ("mixtral", "mixtral-8x22b")),
    "Gemma-2-27B-Instruct": ("google/gemma-2-27b-it", 0.8, ("gemma",)),
}
SPELLINGS = {s: name for name, (model, _, short) in CANDIDATES.items() for s in (name, model, *short)}
NAMES = tuple(SPELLINGS)

INFO_TAG = re.compile("</?info(rmation)?>")
PAIR = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
PLACED_REPLY = re.compile(r"(?<=</search>)(\s*)<information>(.*?)</information>", re.DOTALL)
EIGHT_TAGS = re.compile("</?(think|search|answer|information)>")


@functools.cache
def load(name: str) -> list[dict]:
    """The cases of one file of the parity data."""
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt", encoding="ascii") as lines:
        return [json.loads(line) for line in lines]


def written(completion: str) -> tuple[str, list[str]]:
    """A completion without the replies that stand where a reply belongs, and those replies."""
    return PLACED_REPLY.sub(r"\1", completion), [found[2] for found in PLACED_REPLY.finditer(completion)]


def pairs(text: str, kind: str) -> list[str]:
    return re.findall(f"<{kind}>(.*?)</{kind}>", text, re.DOTALL)


def format_rows(completion: str, well_formed: bool) -> set[str]:
    """Why we judge otherwise: stricter rules if the reference calls it well formed, else laxer ones."""
    mine, replies = written(completion)
    calls = [split_call(content) for content in pairs(mine, "search")]
    if well_formed:
        stricter = {
            OWN_INFO: INFO_TAG.search(mine),
            EMPTY: any(not answer.strip() for answer in pairs(mine, "answer")),
            NAME: any(name is not None and resolve(name, NAMES) is None for name, _ in calls),
        }
        return {row for row, holds in stricter.items() if holds}
    if format_error(mine, NAMES):
        return set()
    laxer = {
        CALL: any(":" in query for _, query in calls),
        REPLY: len(replies) != len(calls) or any(EIGHT_TAGS.search(reply) for reply in replies),
    }
    return {row for row, holds in laxer.items() if holds}


def routed(text: str) -> int:
    """Calls in a whole text that a candidate would have answered, the text cut at each action."""
    count = 0
    while action := find_action(text):
        placeholder = any(word in action.text.casefold() for word in PLACEHOLDERS)
        count += bool(action.query and resolve(action.name, NAMES) and not placeholder)
        text = text[text.index(f"</{action.kind}>", text.index(f"<{action.kind}>")) + 1 :]
    return count


def count_rows(completion: str) -> set[str]:
    replies = written(completion)[1]
    found = PAIR.findall(completion)
    calls = [split_call(content) for kind, content in found if kind == "search"]
    bad = [query is None or ":" in query or not resolve(name, NAMES) or not query for name, query in calls]
    reasons = {
        CALL: any(query and ":" in query for _, query in calls),
        NAME: any(name and resolve(name, NAMES) is None for name, _ in calls),
        COUNT: True in bad and False in bad[bad.index(True) :],
        REPLY: any("<search>" in reply for reply in replies),
        FIRST_CLOSED: any("<search>" in content or "<answer>" in content for _, content in found),
    }
    return {row for row, holds in reasons.items() if holds}


def compare_format():
    for case in load("format"):
        mine = written(case["completion"])[0]
        agrees = (format_error(mine, NAMES) is None) == (case["format_reward"] == 0)
        yield "format_reward", case, agrees, format_rows(case["completion"], case["format_reward"] == 0)
        agrees = extract_answer(mine) == case["answer"]
        yield "answer", case, agrees, _answer_rows(case["completion"], case["answer"])
        agrees = routed(mine) == case["route_count"]
        yield "route_count", case, agrees, set() if agrees else count_rows(case["completion"])


def _answer_rows(completion: str, answer: str | None) -> set[str]:
    """The reference also looks into replies for the last answer, and an answer may hold a whole reply."""
    in_reply = any("<answer>" in reply for reply in written(completion)[1])
    return {REPLY} if in_reply or INFO_TAG.search(answer or "") else set()


def misread(name: str, model: str) -> bool:
    """Whether the reference takes `name`, which is the exact id of a model, for another `model`."""
    return any(name.casefold() == known != model for known, _, _ in CANDIDATES.values())


def compare_llm_names():
    for case in load("llm_names"):
        spelling = resolve(case["raw"], NAMES)
        model = CANDIDATES[SPELLINGS[spelling]][0] if spelling else ""
        guessed = case["valid"] and (not spelling or misread(case["raw"], case["model"]))
        yield "model", case, model == case["model"], {NAME} if guessed else set()
        if spelling:
            yield "temperature", case, case["temperature"] == 0, {TEMPERATURE} if "gemma" in model else set()


def compare_answers():
    """NFC and ASCII quotes and dashes first; both sides empty: no match."""
    odd = re.compile("[‐‑‒–—―−‘’‚‛“”„‟«»]|[\u0300-\u036f]")
    for case in load("answers"):
        golds = [case["golds"]] if isinstance(case["golds"], str) else case["golds"]
        norms = [normalize_answer(s) for s in (case["prediction"], *golds)]
        agrees = norms == [case["norm_prediction"], *case["norm_golds"]]
        other_form = any(odd.search(s) for s in (case["prediction"], *golds))
        yield "normalised", case, agrees, {EM_F1} if other_form and not agrees else set()
        ours = exact_match(case["prediction"], case["golds"]), f1(case["prediction"], case["golds"])
        agrees = ours[0] == case["em"] and abs(ours[1] - case["f1"]) < 1e-9
        empty = case["norm_prediction"] == "" and "" in case["norm_golds"]
        yield "em, f1", case, agrees, {EM_F1} if empty or (other_form and not agrees) else set()


def compare_score():
    for case in load("score"):
        text, golds, metric = written(case["solution"])[0], case["golds"], case["reward_metric"]
        text = re.sub("<information>.*?</information>", "", text, flags=re.DOTALL)
        answer = extract_answer(text)
        ours = {"em": exact_match(answer, golds), "f1": f1(answer, golds), "cost": case["api_cost"]}
        well_formed = case["format_reward"] == 0
        ours["reward"] = combine(well_formed, ours[metric], case["api_cost"], case["cost_coe"])
        ours["metric"] = ours[metric]
        want = case["expected"]
        for field in want:
            rows = set()
            wrong = case["state"] == "train" and metric == "em" and want[field] == -1
            if field == "metric" and wrong:
                rows = {EVALUATION}
            elif answer is None and extract_answer(case["solution"]) is not None:
                right = want.get("em", want.get("metric")) == 1
                rows = {REPLY} if right and (field in ("em", "f1", "metric") or well_formed) else set()
            elif answer is not None and normalize_answer(answer) == "" and f1("x", golds) == 0:
                rows = {EM_F1} if _both_empty(golds) and want[field] > 0 else set()
            rows = set() if field == "cost" else rows
            yield field, case, abs(ours[field] - want[field]) < 1e-9, rows


def _both_empty(golds) -> bool:
    return "" in [normalize_answer(gold) for gold in ([golds] if isinstance(golds, str) else golds)]


def compare_cost_norm():
    for case in load("cost_norm"):
        scale = CostScale()
        ours = [scale.normalize(cost) for cost in case["costs"]]
        close = all(abs(a - b) < 1e-6 for a, b in zip(ours, case["expected"], strict=True))
        yield "costs", {**case, "kind": case["regime"]}, close, set()


def compare_reward_stream():
    """One scale a stream. Ours is not fed by evaluation; one that is shows that nothing else differs."""
    for case in load("reward_stream"):
        ours, theirs = CostScale(), CostScale()
        for b, batch in enumerate(case["batches"]):
            for e, episode in enumerate(batch["episodes"]):
                one = {"id": f"{case['id']}/{b}/{e}", "kind": batch["state"]}
                yield from _compare_episode(case, batch, episode, one, ours, theirs)


def _compare_episode(case, batch, episode, one, ours, theirs):
    mine, replies = written(episode["completion"])
    trajectory = Trajectory(turns=[mine], calls=[Call("", "", Reply("", cost=episode["cost"]))])
    question = Question("", "", tuple(episode["golds"]))
    settings = {"alpha": case["cost_coe"], "metric": case["reward_metric"]}
    want = episode["expected"]
    shared = score(trajectory, question, NAMES, theirs, **settings)
    assert abs(shared.cost_reward - want["cost"]) < 1e-6, (
        "fed by evaluation too, the scale is the reference's"
    )
    reward = score(trajectory, question, NAMES, ours, **settings, update=batch["state"] == "train")
    agrees = abs(reward.cost_reward - want["cost"]) < 1e-6
    yield "cost", one, agrees, {SCALE} if abs(reward.cost_reward - shared.cost_reward) > 1e-6 else set()
    rows = format_rows(episode["completion"], want["reward"] != -1)
    if reward.score != shared.score:
        rows.add(SCALE)
    yield "reward", one, abs(reward.score - want["reward"]) < 1e-6, rows
    answer = extract_answer(mine)
    empty = answer is not None and normalize_answer(answer) == "" and _both_empty(episode["golds"])
    rows = {EM_F1} if empty else set()
    if batch["state"] == "val":
        agrees = abs(reward.em - want["em"]) < 1e-6 and abs(reward.f1 - want["f1"]) < 1e-6
        yield "em, f1", one, agrees, rows | ({REPLY} if any("<answer>" in r for r in replies) else set())
        agrees = routed(mine) == want["routes"]
        yield "routes", one, agrees, set() if agrees else count_rows(episode["completion"])
    else:
        metric = reward.em if case["reward_metric"] == "em" else reward.f1
        rows = {EVALUATION} if want["metric"] == -1 else rows if case["reward_metric"] == "em" else set()
        yield "metric", one, abs(metric - want["metric"]) < 1e-6, rows


def compare_actions():
    for case in load("actions"):
        text = case["generated"]
        found = [re.search(f"<({k})>(.*?)</{k}>", text, re.DOTALL) for k in ("search", "answer")]
        first = min(filter(None, found), key=re.Match.end, default=None)
        closed = (first[1], first[2].strip()) if first else (None, "")
        rows = {FIRST_CLOSED} if text[: first.end() if first else None] != case["truncated"] else set()
        action = find_action(text)  # the oracle of `rows` above is a regular expression, not our parser
        end = text.index(f"</{action.kind}>", text.index(f"<{action.kind}>")) if action else len(text)
        ours = text[: end + len(f"</{action.kind}>")] if action else text
        yield "truncated", case, ours == case["truncated"], rows
        kind = case["action"] and case["action"].split()[0].replace("route", "search")
        agrees = (action.kind, action.text) == (kind, case["content"]) if action else kind is None
        yield "action", case, agrees, {FIRST_CLOSED} if closed != (kind, case["content"]) else set()


def compare_step():
    """One turn of a batch: each prediction is one case."""
    for case in load("step"):
        replies = dict(
            zip(
                case["routed_queries"],
                zip(case["pool_replies"], case["pool_costs"], strict=True),
                strict=False,
            )
        )
        want = case["expected"]
        for i, (text, active) in enumerate(zip(case["predictions"], case["active"], strict=True)):
            one = {"id": f"{case['id']}/{i}", "kind": case["kind"]}
            if "error" in want:
                yield "step", one, False, {RETIRED}
                continue
            theirs = [want[k][i] for k in ("next_obs", "dones", "valid_action", "is_route", "costs")]
            ours, row = _turn(text, active, case["do_route"], replies)
            yield "step", one, ours == theirs, {row} if row else set()


def _turn(text, active, do_route, replies):
    """[text put in, done, valid, asked, cost] of a turn as a rollout makes it; the row it may differ by."""
    action = find_action(text) if active else None
    if not active:
        return ["", 1, 0, 0, 0.0], None
    if action is None:
        return ["", 1, 0, 0, 0.0], NO_ACTION
    if action.kind == "answer":
        return ["", 1, 1, 0, 0.0], None
    if not do_route:
        return ["", 1, 0, 0, 0.0], FIFTH
    reply, cost = replies.get(action.text, (None, 0.0))
    if (
        not action.query
        or not resolve(action.name, NAMES)
        or any(w in action.text.casefold() for w in PLACEHOLDERS)
    ):
        missed = reply is not None and reply.casefold() != "llm name error"
        return [render_reply("reason", "information"), 0, 0, 0, 0.0], NAME if missed else BAD_CALL
    row = FAULT if reply.strip().casefold() in ("llm name error", "api request error") else None
    row = REPLY if EIGHT_TAGS.search(reply) else row
    return [render_reply(reply, "information"), 0, 1, 1, cost], row


def compare_route_call():
    """Blanks around the query are not sent: the reference keeps them, and nothing depends on it."""
    for case in load("route_call"):
        want = case["expected"]
        name, query = split_call(case["content"])
        spelling = resolve(name, NAMES) if query else None
        model, price, _ = CANDIDATES[SPELLINGS[spelling]] if spelling else ("", 0.0, ())
        cost = int(case["completion_tokens"]) * price
        ours = [model, query, cost] if spelling else ["", query, 0.0]
        theirs = [want["model"], want["query"] and want["query"].strip(), want.get("cost")]
        rows = set()
        if "error" in want or (spelling is None and want["called"]) or misread(name, want["model"]):
            rows = {NAME if name and query else BAD_CALL}
        elif case["api_fails"] and spelling:
            ours[2], rows = None, {FAULT}  # no cost is recorded: the call is marked and left out
        elif query and ":" in query:
            rows = {CALL}
        agrees = ours[:2] == theirs[:2] and theirs[2] is not None and abs((ours[2] or -1) - theirs[2]) < 1e-9
        if ours[2] == 0.0:
            agrees = ours == theirs
        yield "call", case, agrees, rows
        if spelling:
            yield "temperature", case, want["temperature"] == 0, {TEMPERATURE} if "gemma" in model else set()


def compare_rollout_masks():
    for case in load("rollout_masks"):
        want = case["expected"]
        for i in range(len(case["prompt"])):
            one = {"id": f"{case['id']}/{i}", "kind": case["kind"]}
            trajectory, odd = _joined(case, i)
            seen = [j for j, on in enumerate(want["attention_mask"][i]) if on]
            theirs = [[want[k][i][j] for j in seen] for k in ("input_ids", "info_mask", "position_ids")]
            own = [int(s or j < trajectory.prompt_len) for j, s in enumerate(trajectory.sampled)]
            rows = {BORN} if odd else set()
            if len(trajectory.ids) - trajectory.prompt_len > case["max_prompt_length"]:
                rows = {TRUNCATION}
            yield "masks", one, [trajectory.ids, own, list(range(len(own)))] == theirs, rows


def _joined(case: dict, i: int) -> tuple[Trajectory, bool]:
    """Row i as a trajectory, and whether an id that is the padding id stands among its tokens."""
    pad, odd = case["pad_id"], False
    prompt = case["prompt"][i]
    while prompt and prompt[0] == pad:
        prompt = prompt[1:]
    trajectory = Trajectory(prompt_len=len(prompt))
    trajectory.append(list(prompt))
    for turn in case["turns"]:
        for by, drawn in (("generated", True), ("inserted", False)):
            ids = list(turn[by][i]) if turn[by] else []
            while ids and ids[-1] == pad:
                ids.pop()
            odd |= pad in ids
            trajectory.append(ids, [0.0] * len(ids) if drawn else None)
    return trajectory, odd


TEXT_FILES = {
    "format": compare_format,
    "llm_names": compare_llm_names,
    "answers": compare_answers,
    "score": compare_score,
    "cost_norm": compare_cost_norm,
    "reward_stream": compare_reward_stream,
    "actions": compare_actions,
    "step": compare_step,
    "route_call": compare_route_call,
    "rollout_masks": compare_rollout_masks,
}
