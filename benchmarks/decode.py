"""One decode step against the library's growing cache, and against the bound. `python -m benchmarks.decode`

8 and 32 rows, contexts of 1,300, of which 1,100 are a common prefix (as in rollouts) or none. Both feed one
token a row, project to the vocabulary and draw. Must be 1.6x faster, aim 2x. The bound is the time to read
the weights and what is cached once, at the memory bandwidth measured here.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch

from minirouter.model import Router
from minirouter.sampler import Sampler

from .common import library_router, router_of
from .measure import alternate, compare, options, report


def bandwidth(megabytes: int = 512) -> float:
    """Bytes a second that can be read from memory, the best of several passes over a large tensor."""
    x = torch.ones(megabytes * 2**18)
    return max(x.numel() * 4 / seconds(lambda: x.sum()) for _ in range(5))


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def our_steps(router: Router, contexts: list[list[int]], common: int, capacity: int) -> Callable[[int], None]:
    """-> a function that decodes n tokens of every row with minirouter's sampler.

    Own parts are not computed: their columns hold zeros, which take as long to read.
    """
    sampler = Sampler(router, len(contexts), capacity, contexts[0][:common], 1.0)
    uniforms = dict.fromkeys(range(len(contexts)), 0.5)
    draws = sampler.advance({i: ids[-1:] for i, ids in enumerate(contexts)}, uniforms)
    sampler.lengths = [len(ids) - common for ids in contexts]

    def steps(n: int) -> None:
        nonlocal draws
        for _ in range(n):
            draws = sampler.advance({i: [token] for i, (token, _) in draws.items()}, uniforms)

    return steps


def library_steps(router: Router, contexts: list[list[int]]) -> Callable[[int], None]:
    """The same with the library's forward pass, growing cache and attention, and multinomial draws."""
    model = router.model.get_base_model().eval()
    ids = torch.tensor(contexts, device=router.device)
    mask = torch.ones_like(ids)  # generate passes one, since rows are padded
    with torch.no_grad():
        output = model(input_ids=ids[:1], attention_mask=mask[:1], use_cache=True, logits_to_keep=1)
    output.cache.batch_repeat_interleave(len(ids))  # all rows as the first: their values take no time
    output.logits = output.logits.expand(len(ids), -1, -1)

    @torch.no_grad()
    def steps(n: int) -> None:
        nonlocal output, mask
        for _ in range(n):
            drawn = torch.multinomial(output.logits[:, -1].softmax(-1), 1)
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            output = model(
                input_ids=drawn, attention_mask=mask, cache=output.cache, use_cache=True, logits_to_keep=1
            )

    return steps


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    given = options(__doc__, argv)
    sizes, context, prefix, steps = ((2,), 30, 20, 2) if given.tiny else ((8, 32), 1300, 1100, 4)
    rounds = 5 * given.rounds  # of a few steps: a busy moment of the machine decides nothing
    ours, theirs = router_of(given), library_router(given)
    rng = random.Random(0)
    read = bandwidth(8 if given.tiny else 512)
    weights = sum(p.numel() * p.element_size() for p in ours.model.get_base_model().parameters())
    head = (
        getattr(ours.config, "head_dim", None) or ours.config.hidden_size // ours.config.num_attention_heads
    )
    token = 2 * 4 * ours.config.num_hidden_layers * ours.config.num_key_value_heads * head  # bytes
    rows = []
    with ours.decoding():
        for n, common in product(sizes, (prefix, 0)):
            start = [rng.randrange(ours.config.vocab_size) for _ in range(common)]
            own = context - common
            contexts = [start + [rng.randrange(ours.config.vocab_size) for _ in range(own)] for _ in range(n)]
            a = library_steps(theirs, contexts)
            b = our_steps(ours, contexts, common, context + steps * (rounds + 1))
            for warm in (a, b):
                warm(2)
            timings = alternate({"library": lambda a=a: a(steps), "minirouter": lambda b=b: b(steps)}, rounds)
            bound = (weights + token * (common + n * own)) / read
            step = statistics.median(timings["minirouter"].wall) / steps
            work = {"work": f"{n} rows, {context} tokens, {common} of them common"}
            bounds = {
                "bound, s": f"{bound:.3g}",
                "share of bound": f"{bound / step:.0%}",
                "must, aim": "1.6x, 2x",
            }
            rows.append(work | compare(timings, "library", "minirouter", steps) | bounds)
    print(
        f"memory bandwidth {read / 1e9:.1f} GB/s, weights {weights / 1e6:.0f} MB, cache {token} bytes a token"
    )
    return report("decode", given, rows)


if __name__ == "__main__":
    main()
