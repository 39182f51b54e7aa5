"""KV-cached decoding of many ragged rows of token ids: y ~ pi(.|x; P) of Eq. 1, one token at a time.

Knows ids only, no text. Every row has a length of its own: new keys and values are written at the row's own
next column, and rotary positions are counted per row, so there is no left padding and there are no holes.
The common prefix of all prompts is computed and kept once. A row is fed each id once: a reply is one chunk
on top of what is cached. The reference implementation encodes and prefills the whole context again at every
turn.

Shape letters: S slots, R rows of one forward pass, T new ids a row, C cached columns, H heads, D head size,
V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

Draw = tuple[int, float]  # token id, its log-prob in nats


class RaggedCache:
    """Keys and values of S rows, preallocated and written in place, behind those of a prefix that all rows
    share, which are kept once. The cache interface that transformers expects.
    """

    def __init__(self, slots: int, capacity: int, prefix: RaggedCache | None = None) -> None:
        """`prefix` is a cache of one row, full but for its last column."""
        self.slots = slots
        self.capacity = capacity
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []  # (S, H, C, D) each; by the first update
        self.prefix = [(k[:, :, :-1], v[:, :, :-1]) for k, v in prefix.layers] if prefix else []
        self.apart = False  # True: the attention of the next forward pass reads the prefix by itself

    def aim(self, start: int, places: torch.Tensor, columns: int) -> None:
        """Say where the next forward pass writes: rows from `start`, at columns `places` (R, T); it reads C =
        `columns`.
        """
        self.rows = slice(start, start + places.shape[0])
        self.index = torch.arange(start, start + places.shape[0], device=places.device)[:, None]
        self.places = places
        self.columns = columns
        self.apart = False

    def update(self, k: torch.Tensor, v: torch.Tensor, layer_idx: int, *_: Any, **__: Any):
        """Write (R, H, T, D) new keys and values, return all live ones, (R, H, prefix + C, D) each; views of
        (R, H, C, D) if the prefix is read apart.
        """
        if layer_idx == len(self.layers):
            shape = (self.slots, k.shape[1], self.capacity, k.shape[3])
            # zeros, not empty: a masked column still takes part in 0 * value
            self.layers.append((k.new_zeros(shape), v.new_zeros(shape)))
        live = []
        for part, (tensor, new) in enumerate(zip(self.layers[layer_idx], (k, v), strict=True)):
            tensor[self.index, :, self.places] = new.transpose(1, 2)
            own = tensor[self.rows, :, : self.columns]
            if self.prefix and not self.apart:
                common = self.prefix[layer_idx][part]
                own = torch.cat([common.expand(len(own), -1, -1, -1), own], dim=2)
            live.append(own)
        return live

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Asked by some models for default positions; ours are always explicit."""
        return 0

    def swap(self, i: int, j: int, columns: int) -> None:
        """Exchange the first `columns` of rows i and j."""
        for tensor in (t for layer in self.layers for t in layer):
            kept = tensor[i, :, :columns].clone()
            tensor[i, :, :columns] = tensor[j, :, :columns]
            tensor[j, :, :columns] = kept


def draw(logits: torch.Tensor, uniforms: torch.Tensor, temperature: float, top_p: float = 1.0):
    """Inverse-CDF sampling in fp32. logits (R, V), uniforms (R,) in [0, 1] -> ids (R,), log-probs (R,) in
    nats.

    Temperature 0 is greedy, its log-probs are those of temperature 1. `top_p` < 1 keeps the smallest set of
    tokens with at least that probability; log-probs are always those of the full distribution, the scored
    one.
    """
    logp = torch.log_softmax(logits.float() / (temperature or 1.0), dim=-1)
    if temperature == 0:
        ids = logp.argmax(dim=-1, keepdim=True)
    else:
        p = logp.exp() if top_p >= 1 else nucleus(logp.exp(), top_p)
        cdf = p.cumsum(dim=-1)  # (R, V)
        total = cdf[:, -1:].contiguous()
        ids = torch.searchsorted(cdf, uniforms[:, None] * total, right=True)
        # u * total can round up to total: the last token of positive probability, never one behind it
        ids = torch.minimum(ids, torch.searchsorted(cdf, total))
        ids = ids.clamp(max=p.shape[1] - 1)  # with NaN, both searches end behind the last token
    return ids[:, 0], logp.gather(1, ids)[:, 0]


def nucleus(p: torch.Tensor, top_p: float) -> torch.Tensor:
    """Zero all but the most probable tokens that together reach `top_p` (the evaluation of the reference has
    .95).
    """
    ranked, order = p.sort(dim=-1, descending=True)
    before = ranked.cumsum(dim=-1) - ranked
    return torch.zeros_like(p).scatter(1, order, torch.where(before < top_p, ranked, 0.0))


class Sampler:
    """Up to `slots` rows, each known by a key of the caller's. Rows that are advanced together lie side by
    side in the cache, so that attention reads plain views of it: idle rows (waiting for a reply) are kept
    behind them, and a dropped row's place is taken by the last one."""

    def __init__(
        self,
        router: Any,
        slots: int,
        capacity: int,
        prefix: list[int],
        temperature: float,
        top_p: float = 1.0,
    ) -> None:
        self.router = router
        self.temperature = temperature
        self.top_p = top_p
        self.keys: list[Any] = []  # row -> key
        self.lengths: list[int] = []  # row -> cached ids behind the prefix
        # One column more than needed: padding of ragged chunks is written there and never read
        self.prefix, self.cache = 0, RaggedCache(1, len(prefix) + 1)
        if prefix:
            self._forward(0, [prefix], [0])
        self.prefix = len(prefix)
        self.cache = RaggedCache(slots, capacity - self.prefix + 1, self.cache if prefix else None)

    @property
    def free(self) -> int:
        return self.cache.slots - len(self.keys)

    def drop(self, key: Any) -> None:
        """Forget a row; its slot is free at once."""
        self._swap(self.keys.index(key), len(self.keys) - 1)
        self.keys.pop()
        self.lengths.pop()

    @torch.no_grad()
    def advance(self, pending: dict[Any, list[int]], uniforms: dict[Any, float]) -> dict[Any, Draw]:
        """Feed each key its pending ids (a new key takes a free slot, after the prefix) and draw one token
        for it.

        Rows with one id and rows with many are two forward passes, so that decoding is not padded to a
        reply's length. Raises ValueError if the model's logits are not finite.
        """
        for key in pending:
            if key not in self.keys:
                self.keys.append(key)
                self.lengths.append(0)
        single = {key for key, ids in pending.items() if len(ids) == 1}
        chunks = pending.keys() - single
        self._bring(single, 0)
        self._bring(chunks, len(single))
        hidden = []
        for start, end in ((0, len(single)), (len(single), len(pending))):
            if start < end:
                ids = [pending[key] for key in self.keys[start:end]]
                hidden.append(self._forward(start, ids, self.lengths[start:end]))
                self.lengths[start:end] = [
                    n + len(new) for n, new in zip(self.lengths[start:end], ids, strict=True)
                ]
        keys = self.keys[: len(pending)]
        logits = self.router.logits(torch.cat(hidden))
        u = torch.tensor([uniforms[key] for key in keys], dtype=torch.float32, device=logits.device)
        ids, logps = draw(logits, u, self.temperature, self.top_p)
        # ids below 2^53 are exact in float64: one transfer, one host synchronisation
        ids, logps = torch.stack([ids.double(), logps.double()]).tolist()
        if not all(-float("inf") < logp <= 0 for logp in logps):
            raise ValueError("the model's logits are not finite: nothing can be sampled from them")
        return {key: (int(i), logp) for key, i, logp in zip(keys, ids, logps, strict=True)}

    @torch.no_grad()
    def _forward(self, start: int, ids: list[list[int]], lengths: list[int]) -> torch.Tensor:
        """Feed rows from `start` their ids; -> (R, E) hidden states of each row's last id."""
        width = max(map(len, ids))
        trash = self.cache.capacity - 1
        device = self.router.device
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in ids], device=device)  # (R, T)
        places = torch.tensor(
            [
                list(range(n, n + len(row))) + [trash] * (width - len(row))
                for row, n in zip(ids, lengths, strict=True)
            ],
            device=device,
        )
        columns = max(n + len(row) for row, n in zip(ids, lengths, strict=True))
        self.cache.aim(start, places, columns)
        mask = torch.arange(-self.prefix, columns, device=device) <= places[:, :, None]  # (R, T, prefix + C)
        # padding gets position 0: some rotary embeddings look at the largest position of the batch
        positions = torch.where(places < trash, places + self.prefix, 0)
        hidden = self.router.forward_cached(tokens, positions, mask[:, None], self.cache)  # (R, T, E)
        last = torch.tensor([len(row) - 1 for row in ids], device=device)
        return hidden[torch.arange(len(ids), device=device), last]

    def _bring(self, wanted: set[Any], start: int) -> None:
        """Put the wanted keys into the rows from `start`, in any order, by as few exchanges as there are
        strangers.
        """
        end = start + len(wanted)
        strangers = [row for row in range(start, end) if self.keys[row] not in wanted]
        outside = [row for row in range(end, len(self.keys)) if self.keys[row] in wanted]
        for i, j in zip(strangers, outside, strict=True):
            self._swap(i, j)

    def _swap(self, i: int, j: int) -> None:
        if i == j:
            return
        self.cache.swap(i, j, max(self.lengths[i], self.lengths[j]))
        self.keys[i], self.keys[j] = self.keys[j], self.keys[i]
        self.lengths[i], self.lengths[j] = self.lengths[j], self.lengths[i]
