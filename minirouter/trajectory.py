"""The records that flow from stage to stage: typed, and never overwritten by a later stage.

A question (x ~ D in Eq. 1 of the paper) becomes a prompt, a prompt becomes a trajectory (y ~ pi), a
trajectory earns a reward (Eq. 5), and trajectories are packed into a batch. Unlike the reference
implementation, which pads responses and rebuilds masks from token ids, a trajectory records at the draw
which tokens are the router's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

FINISHES = ("answer", "eos", "call_limit", "turn_tokens", "total_tokens")


@dataclass(frozen=True)
class Question:
    """One question. `pool` is set when the question brings its own pool (the miniature world does)."""

    id: str
    text: str
    golds: tuple[str, ...]
    kind: str = ""
    pool: Any = None


@dataclass(frozen=True)
class Candidate:
    """One LLM of the pool: what the router is told of it, what it costs, and where it answers."""

    name: str
    price: float  # USD per 1M output tokens
    descriptor: str = ""
    price_in: float = 0.0  # USD per 1M prompt tokens
    latency_s: float | None = None
    example: str | None = None
    aliases: tuple[str, ...] = ()
    model: str = ""  # the name that the endpoint knows it by
    base_url: str = ""
    api_key_env: str | None = None
    temperature: float = 0.0
    max_tokens: int = 512
    extra: Mapping[str, Any] = field(default_factory=dict)  # further fields of the request body


@dataclass(frozen=True)
class Reply:
    """What came back from a call. Faults are values: `status` says what happened and every status has a rule.

    "ok": a reply, paid. "malformed" or "unknown": the router's own mistake (no colon, no such candidate);
    costs nothing and is trained on. Anything else is a fault of the pool; the trajectory is left out of the
    update.
    """

    text: str
    status: str = "ok"
    candidate: str = ""  # canonical name of who answered, "" if nobody
    price: float = 0.0  # of that candidate, USD per 1M output tokens
    tokens: int = 0  # output tokens paid for
    cost: float = 0.0  # tokens x price (+ prompt tokens x price_in): USD per 1M questions like this one
    estimated: bool = False  # usage was missing, tokens were counted with the router's tokenizer
    cached: bool = False  # nothing was billed; the cost in the reward is the same
    refused: bool = False  # the candidate said that it does not know

    @property
    def faulted(self) -> bool:
        return self.status not in ("ok", "malformed", "unknown")


@dataclass(frozen=True)
class Call:
    """One routing action: the name and query as the router wrote them (None where it wrote none)."""

    name: str | None
    query: str | None
    reply: Reply


@dataclass(frozen=True)
class Limits:
    """Budgets of a rollout. Tokens are the router's. `slots` trajectories are made at once; twice as many
    with a pool that takes time, since then about half of them wait for replies.
    """

    max_calls: int
    turn_tokens: int
    reply_tokens: int
    total_tokens: int  # prompt, own tokens and replies together
    slots: int
    temperature: float
    top_p: float = 1.0  # below 1 for evaluation only: the scored distribution is the full one


@dataclass
class Trajectory:
    """The exact ids the model was fed. The three lists grow only through `append`, in step."""

    prompt_len: int = 0
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)  # True where the router drew the token
    logps: list[float | None] = field(default_factory=list)  # at draw time, nats; None where not drawn
    calls: list[Call] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)  # what the router wrote, decoded, one string a turn
    finish: str = ""  # one of FINISHES once it has ended

    def append(self, ids: list[int], logps: list[float] | None = None) -> None:
        """Add tokens: drawn by the router if `logps` is given (one each), else put in by somebody else."""
        if logps is not None and len(logps) != len(ids):
            raise ValueError(f"{len(ids)} ids but {len(logps)} log-probs")
        self.ids += ids
        self.sampled += [logps is not None] * len(ids)
        self.logps += [None] * len(ids) if logps is None else logps

    @property
    def text(self) -> str:
        """What the router wrote, replies left out: the text whose form is judged. A line break stands for a
        reply, so that no tag comes about that was never written.
        """
        return "\n".join(self.turns)

    @property
    def actions(self) -> list[int]:
        """Positions in `ids` of the tokens that the router drew."""
        return [i for i, drawn in enumerate(self.sampled) if drawn]

    @property
    def cost(self) -> float:
        """Sum over calls of output tokens times price (Eq. 4 before normalising), in USD per 1M such
        questions.
        """
        return sum(call.reply.cost for call in self.calls)

    @property
    def faulted(self) -> bool:
        """True if a call met a fault of the pool: such a trajectory is not trained on."""
        return any(call.reply.faulted for call in self.calls)


@dataclass(frozen=True)
class Reward:
    """The parts of Eq. 5 and what they combine to."""

    score: float  # r(x, y), one number a trajectory
    format_error: str | None  # None = well formed (Eq. 2 gives 0), else the reason (Eq. 2 gives -1)
    em: float  # Eq. 3
    f1: float
    cost: float  # before normalising, USD per 1M such questions
    cost_reward: float  # Eq. 4, in [0, 1], larger is cheaper


@dataclass(frozen=True)
class Batch:
    """Trajectories laid out for one forward pass: a common prefix and then every branch, in one row.
    N tokens; B trajectories of at most A actions.
    """

    input_ids: torch.Tensor  # (1, N) int64
    position_ids: torch.Tensor  # (1, N) int64
    branches: tuple[int, ...]  # lengths: of the prefix (may be 0), then of each branch
    action_index: torch.Tensor  # (B, A) int64, into N: the state of the action, before its token
    action_ids: torch.Tensor  # (B, A) int64
    mask: torch.Tensor  # (B, A) bool, right padding
