"""Routers that learn from the collected table: KNN, MLP, BERT Router, RouterDC, GraphRouter, and a cascade.

Each `fit_*(table, encoder, seed)` returns a function that scores: (texts, lines) -> (n, L), how good each
line would be for each question, -inf for one that it cannot know. A *line* is (label, descriptor); who is
asked is the cheapest candidate of the best-scored label that the pool has. So in the miniature, where names
and prices are drawn anew for each episode, they choose among descriptors; in a real pool among names. Whoever
learns which candidate is best learns it from questions that somebody answers; among equals the cheaper one is
best.

The last four are our own small versions, faithful in method: BERT Router (RouteLLM, Ong et al. 2024),
RouterDC (Chen et al. 2024), GraphRouter (Feng et al. 2025), cascade (FrugalGPT, Chen et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import permutations
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from .encoder import Encoder
from .table import Table

Lines = Sequence[tuple[str, str]]  # (label, descriptor)
Scores = Callable[[Sequence[str], Lines], np.ndarray]  # -> (n, L)


def fit_knn(table: Table, encoder: Encoder, seed: int, k: int = 5) -> Scores:
    """The k nearest training questions vote (scikit-learn)."""
    from sklearn.neighbors import KNeighborsClassifier

    return _classifier(table, encoder, KNeighborsClassifier(n_neighbors=k))


def fit_mlp(table: Table, encoder: Encoder, seed: int) -> Scores:
    """A multilayer perceptron on frozen embeddings (scikit-learn)."""
    from sklearn.neural_network import MLPClassifier

    return _classifier(table, encoder, MLPClassifier((128, 64), max_iter=300, random_state=seed))


def _classifier(table: Table, encoder: Encoder, model: Any) -> Scores:
    best = table.best()
    model.fit(
        encoder.embed([t for t, b in zip(table.questions, best, strict=True) if b >= 0]), best[best >= 0]
    )
    names = [table.labels[i] for i in model.classes_]
    return lambda texts, lines: _spread(model.predict_proba(encoder.embed(texts)), names, lines)


def _spread(scores: np.ndarray, names: Sequence[str], lines: Lines) -> np.ndarray:
    """(n, known) -> (n, L): the scores under the labels that are asked for, -inf for a label not known."""
    padded = np.concatenate([scores, np.full((len(scores), 1), -np.inf)], axis=1)
    return padded[:, [names.index(name) if name in names else -1 for name, _ in lines]]


# ---- a fine-tuned encoder


def fit_bert(table: Table, encoder: Encoder, seed: int, steps: int = 300) -> Scores:
    """BERT Router: the encoder with a classification head, fine-tuned on the best label of each question."""
    best = torch.from_numpy(table.best())
    known = np.flatnonzero(best >= 0)
    torch.manual_seed(seed)
    head = nn.Linear(encoder.size, len(table.labels)).to(encoder.device)

    def loss(rows: np.ndarray) -> torch.Tensor:
        states = encoder.states([table.questions[i] for i in rows])
        return cross_entropy(head(states), best[rows].to(states.device))

    weights = _tune(encoder, head.parameters(), known, loss, seed, steps)

    @torch.no_grad()
    def scores(texts: Sequence[str], lines: Lines) -> np.ndarray:
        return _spread(head(encoder.tuned(texts, weights)).cpu().numpy(), table.labels, lines)

    return scores


def fit_routerdc(table: Table, encoder: Encoder, seed: int, steps: int = 300) -> Scores:
    """RouterDC: cosine of the question's state and a learned embedding of each candidate.

    Two contrastive losses. Sample-candidate: the best candidate against the worst three, wrong ones before
    dear ones (a single positive: EM leaves ties, which only the cost can break). Sample-sample: a question of
    the same cluster (k-means of frozen embeddings) against questions of other clusters.
    """
    from sklearn.cluster import KMeans

    torch.manual_seed(seed)
    count = max(2, min(8, len(table.questions) // 8))
    clusters = KMeans(count, n_init=4, random_state=seed).fit(encoder.embed(table.questions)).labels_
    vectors = nn.Parameter(torch.randn(len(table.labels), encoder.size, device=encoder.device))
    best, worst = _best_and_worst(table)
    rng = np.random.default_rng(seed)
    temperature = 0.1

    def pulled(states: torch.Tensor, wanted: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """Mean of -log p(wanted | it and the others) over the pairs. states (B, K), masks (B, K) bool."""
        e = states.exp()
        against = (e * others).sum(1, keepdim=True)
        terms = -(states - (e + against).log())[wanted]
        return terms.mean() if len(terms) else states.sum() * 0

    def loss(rows: np.ndarray) -> torch.Tensor:
        q = normalize(encoder.states([table.questions[i] for i in rows]), dim=1)
        similar = q @ normalize(vectors, dim=1).T / temperature  # (B, L)
        one = pulled(similar, best[rows].to(q.device), worst[rows].to(q.device))
        group = torch.from_numpy(clusters[rows])
        same = group[:, None] == group[None]
        partner = torch.zeros_like(same)
        for i in range(len(rows)):
            mates = [j for j in np.flatnonzero(same[i]) if j != i]
            if mates:
                partner[i, rng.choice(mates)] = True
        two = pulled(q @ q.T / temperature, partner.to(q.device), ~same.to(q.device))
        return one + two

    weights = _tune(encoder, [vectors], np.arange(len(table.questions)), loss, seed, steps)

    @torch.no_grad()
    def scores(texts: Sequence[str], lines: Lines) -> np.ndarray:
        q = normalize(encoder.tuned(texts, weights), dim=1)
        return _spread((q @ normalize(vectors, dim=1).T).cpu().numpy(), table.labels, lines)

    return scores


def _best_and_worst(table: Table, most: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """(Q, L) bool each: the best candidate, if any is right; the worst `most` others, wrong before dear."""
    best = table.best()[:, None] == np.arange(len(table.labels))
    worth = np.where(np.isnan(table.em) | best, np.inf, table.em * 1e9 - np.nan_to_num(table.cost))
    worst = (worth.argsort(axis=1).argsort(axis=1) < most) & np.isfinite(worth)
    return torch.from_numpy(best), torch.from_numpy(worst)


def _tune(encoder: Encoder, own: Iterable, rows: np.ndarray, loss: Callable, seed: int, steps: int) -> list:
    """Train the encoder's weights and one's own by `loss(row numbers)`; -> the encoder's weights, then put
    back.
    """
    rng, own = np.random.default_rng(seed), list(own)
    with encoder.training() as weights:
        groups = [{"params": weights, "lr": encoder.lr}, {"params": own, "lr": 1e-2}]
        optimiser = torch.optim.AdamW(groups, weight_decay=0.01)
        for _ in range(steps):
            optimiser.zero_grad(set_to_none=True)
            loss(rng.choice(rows, min(32, len(rows)), replace=False)).backward()
            nn.utils.clip_grad_norm_([*weights, *own], 1.0)
            optimiser.step()
        return [w.detach().clone() for w in weights]


# ---- a graph


class _Graph(nn.Module):
    """Questions and candidates as nodes. An observed edge carries (EM, cost); what flows along it: the sum of
    both ends' states and the edge's. A question has no edges of its own but those of its nearest neighbours.
    """

    def __init__(self, size: int, hidden: int = 64) -> None:
        super().__init__()
        self.question, self.candidate = nn.Linear(size, hidden), nn.Linear(size, hidden)
        self.edge = nn.Linear(2, hidden)
        self.to_candidate, self.to_question = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.predict = nn.Sequential(nn.Linear(3 * hidden, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, asked, near, known, lines, edges, seen):
        """asked (n, E) and their neighbours' numbers near (n, k) among known (Q, E); lines (L, E); edges
        (Q, L, 2) of which seen (Q, L) bool may be used. -> logits (n, L) that a line answers rightly.
        """
        q, c = self.question(known), self.candidate(lines)  # (Q, H), (L, H)
        told = torch.relu(q[:, None] + c[None] + self.edge(edges)) * seen[..., None]  # (Q, L, H)
        c = torch.relu(c + self.to_candidate(told.sum(0) / seen.sum(0).clamp(min=1)[:, None]))
        around, counts = told[near].sum(1), seen[near].sum(1).clamp(min=1)  # (n, L, H), (n, L)
        around = torch.relu(self.to_question(around / counts[..., None]))
        q = torch.relu(self.question(asked))[:, None].expand(-1, len(lines), -1)
        return self.predict(torch.cat([q, c[None].expand(len(q), -1, -1), around], dim=-1))[..., 0]


def fit_graph(table: Table, encoder: Encoder, seed: int, steps: int = 150, k: int = 10) -> Scores:
    """GraphRouter: predicts the edges of a graph of questions and candidates; .3 of them are hidden and asked
    for in each step. A candidate's node starts from its descriptor, so that one never seen can be scored.
    """
    torch.manual_seed(seed)
    known = torch.from_numpy(encoder.embed(table.questions))
    described = torch.from_numpy(encoder.embed([table.descriptors[name] for name in table.labels]))
    there = torch.from_numpy(~np.isnan(table.em))
    right = torch.from_numpy(np.nan_to_num(table.em)).float()
    cost = np.sqrt(np.nan_to_num(table.cost))
    edges = torch.stack([right, torch.from_numpy(cost / max(cost.max(), 1e-9)).float()], dim=-1)
    graph = _Graph(encoder.size)
    optimiser = torch.optim.AdamW(graph.parameters(), lr=3e-3)
    near = _nearest(known, known, k + 1)[:, 1:]  # not itself
    for _ in range(steps):
        rows = torch.randperm(len(known))[:256]
        hidden = (torch.rand(there.shape) < 0.3) & there
        logits = graph(known[rows], near[rows], known, described, edges, there & ~hidden)
        wanted = hidden[rows]
        loss = nn.functional.binary_cross_entropy_with_logits(logits[wanted], right[rows][wanted])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        optimiser.step()

    @torch.no_grad()
    def scores(texts: Sequence[str], lines: Lines) -> np.ndarray:
        asked = torch.from_numpy(encoder.embed(texts))
        new = torch.from_numpy(encoder.embed([descriptor for _, descriptor in lines]))
        places = [table.labels.index(name) if name in table.labels else -1 for name, _ in lines]
        columns = torch.tensor(places)
        seen = there[:, columns] & (columns >= 0)
        return graph(asked, _nearest(asked, known, k), known, new, edges[:, columns], seen).numpy()

    return scores


def _nearest(asked: torch.Tensor, known: torch.Tensor, k: int) -> torch.Tensor:
    """(n, k) numbers of the nearest known embeddings, the nearest first."""
    return (-torch.cdist(asked, known)).topk(min(k, len(known)), dim=1).indices


# ---- a cascade


def fit_cascade(table: Table, encoder: Encoder, seed: int) -> tuple[tuple[str, ...], Callable]:
    """FrugalGPT-style: a list of up to three labels and a scorer that says when to stop.

    The scorer is a logistic regression on the embedding of question and reply. List and threshold are those
    with the highest EM on the table at no more than the mean cost of always asking the dearest; equals: the
    cheaper. -> (labels in the order of asking, accept(question text, reply text) -> bool).
    """
    from sklearn.linear_model import LogisticRegression

    cells = [(i, j) for i, row in enumerate(table.replies) for j, text in enumerate(row) if text is not None]
    states = encoder.embed([f"{table.questions[i]} {table.replies[i][j]}" for i, j in cells])
    right = np.array([table.em[i, j] for i, j in cells])
    scorer = LogisticRegression(max_iter=500, C=10.0).fit(states, right)
    belief = np.full(table.em.shape, np.nan)
    belief[tuple(zip(*cells, strict=True))] = scorer.predict_proba(states)[:, 1]
    dear = max(range(len(table.labels)), key=lambda j: table.price[table.labels[j]])
    best = (-1.0, 0.0, (dear,), 0.5)
    for order in (p for size in (1, 2, 3) for p in permutations(range(len(table.labels)), size)):
        for threshold in (0.3, 0.5, 0.7, 0.9) if len(order) > 1 else (0.5,):
            em, cost = _run_cascade(table, belief, order, threshold)
            if cost <= np.nanmean(table.cost[:, dear]) and (em, -cost) > (best[0], -best[1]):
                best = (em, cost, order, threshold)
    _, _, order, threshold = best

    def accept(question: str, reply: str) -> bool:
        return scorer.predict_proba(encoder.embed([f"{question} {reply}"]))[0, 1] >= threshold

    return tuple(table.labels[j] for j in order), accept


def _run_cascade(
    table: Table, belief: np.ndarray, order: Sequence[int], threshold: float
) -> tuple[float, float]:
    """Mean EM and cost of a cascade on the table; candidates that a pool lacks are passed over."""
    em, cost = np.zeros(len(belief)), np.zeros(len(belief))
    open_ = np.ones(len(belief), dtype=bool)
    for j in order:
        asked = open_ & ~np.isnan(table.em[:, j])
        em[asked], cost[asked] = table.em[asked, j], cost[asked] + table.cost[asked, j]
        open_ &= ~(asked & (np.nan_to_num(belief[:, j]) >= threshold))
    return float(em.mean()), float(cost.mean())
