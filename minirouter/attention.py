"""Attention that reads a common prefix once, under the name that transformers knows it by.

Two kinds of forward pass have rows that share a prefix: a decoding step, where the prefix is apart in the
cache (sampler.py), and a pack, where it stands before the branches (packing.py). Everything else is left to
the library's `sdpa`.

Shape letters: R rows, H key heads, G query heads a key head, P tokens of the prefix, C cached columns, N
tokens of a pack, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "shared_prefix"


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    shared: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
    branches: tuple[int, ...] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer: `shared` is given in a decoding step, `branches` for a pack."""
    if shared is not None:
        return decode(module, query, key, value, attention_mask, shared, kwargs.get("scaling")), None
    if branches is not None:
        return attend_to_branches(module, query, key, value, branches, **kwargs), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)  # without it, padding and causality are lost


def decode(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    shared: list[tuple[torch.Tensor, torch.Tensor]],
    scaling: float | None,
) -> torch.Tensor:
    """One new id a row looks at a prefix that all rows share, `shared` (one row a layer; none if empty), and
    at own columns.

    Reading the prefix once, for the queries of all rows together, is a product of matrices; reading a copy
    of it for each row would be bound by memory. query (R, H * G, 1, D), key and value (R, H, C, D),
    attention_mask (R, 1, 1, P + C), added -> (R, 1, H * G, D).
    """
    rows = len(query)
    query = (query * (scaling or query.shape[-1] ** -0.5)).view(rows, key.shape[1], -1, query.shape[-1])

    def fold(x: torch.Tensor) -> torch.Tensor:  # (R, H, G, ...) -> (H, R * G, ...)
        return x.transpose(0, 1).flatten(1, 2)

    def unfold(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(1, (rows, -1)).transpose(0, 1)

    # keys first: with few queries BLAS takes half the time, on some processors
    scores, size = (key @ query.transpose(2, 3)).transpose(2, 3), 0
    if shared:
        common_key, common_value = (t[0] for t in shared[module.layer_idx])  # (H, P, D)
        scores = torch.cat([unfold(fold(query) @ common_key.transpose(1, 2)), scores], dim=-1)
        size = common_key.shape[1]
    # (R, H, G, P + C)
    p = torch.softmax(scores + attention_mask, dim=-1, dtype=torch.float32).to(value.dtype)
    out = p[..., size:] @ value  # (R, H, G, D)
    if shared:
        out = unfold(fold(p[..., :size]) @ common_value) + out
    return out.flatten(1, 2)[:, None]


def attend_to_branches(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    branches: tuple[int, ...],
    **kwargs: Any,
) -> torch.Tensor:
    """The prefix of a pack looks at itself, each branch at the prefix and at itself: only pairs that may look
    are computed, and no (N, N) mask exists. query (1, H * G, N, D), key and value (1, H, N, D) ->
    (1, N, H * G, D).
    """
    (common_query, *queries), (common_key, *keys), (common_value, *values) = (
        x.split(branches, dim=2) for x in (query, key, value)
    )
    out = []
    if branches[0]:
        out.append(sdpa_attention_forward(module, common_query, common_key, common_value, None, **kwargs)[0])
    for q, k, v in zip(queries, keys, values, strict=True):
        k, v = torch.cat([common_key, k], dim=2), torch.cat([common_value, v], dim=2)
        mask = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(branches[0])
        out.append(sdpa_attention_forward(module, q, k, v, mask, **kwargs)[0])
    return torch.cat(out, dim=1)


def tree_mask(branches: tuple[int, ...]) -> torch.Tensor:
    """The same as a mask (1, 1, N, N), True where a token may look, for models that bring their attention."""
    branch = torch.repeat_interleave(torch.arange(len(branches)), torch.tensor(branches))
    return ((branch[:, None] == branch) | (branch == 0)).tril()[None, None]
