"""Everything that only a GPU can say, in one run of under 8 minutes. `python -m benchmarks.gpu`

Random weights of the shapes of Qwen2.5-3B (NF4 and bfloat16) and Qwen2.5-0.5B:

    limits    memory bandwidth and bfloat16 products of this card
    decode    tokens a second at 16, 32 and 64 rows, share of the bound (weights and live cache read once)
    update    tokens a second of packed forward and backward, and the share of the card's products
    memory    peak of a whole PPO step (rollout, estimates, update) at the 8, 12 and 24 GB presets

Without a GPU it ends in one line. `--tiny` runs the same code with tiny shapes, on a CPU if need be.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from minirouter.config import PRESETS, read_yaml
from minirouter.estimates import advantages_of, estimate
from minirouter.load import default_dtype, keep_4bit_layout
from minirouter.model import Router
from minirouter.trajectory import Limits
from minirouter.update import Rules, update

from .common import Plan, planned_rollout, prompts_of, word_tokenizer
from .decode import our_steps
from .measure import report
from .update import packed, trajectories_of

SHAPES = {
    "3b": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
           "num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
             "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300},
}  # fmt: skip
CARDS = {"qwen2.5-0.5b": 8, "qwen2.5-3b-12gb": 12, "qwen2.5-3b": 24}  # preset -> GB of the card it is for
PREFIX = 1100  # tokens that all prompts share


def router_of(shape: str, four_bit: bool, device: torch.device, **more: Any) -> Router:
    """A router with random weights, quantised as `load.load_model` would."""
    torch.manual_seed(0)
    config = Qwen2Config(**SHAPES[shape], max_position_embeddings=8192, tie_word_embeddings=True)
    dtype = default_dtype(device)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).requires_grad_(False).eval()
    if four_bit:
        quantise(model, device, dtype)
    return Router(model, word_tokenizer(1000), lora_r=16, gradient_checkpointing=True, **more)


def quantise(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Turn every linear layer but the head into NF4 with double quantisation, in place."""
    head = model.get_output_embeddings()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and child is not head:
                layer = Linear4bit(
                    child.in_features,
                    child.out_features,
                    child.bias is not None,
                    compute_dtype=dtype,
                    quant_type="nf4",
                    device="meta",
                )
                layer.weight = type(layer.weight)(
                    child.weight.data.cpu(), requires_grad=False, quant_type="nf4", compress_statistics=True
                )
                layer.bias = child.bias
                setattr(parent, name, layer.to(device))
    model.is_loaded_in_4bit = True
    keep_4bit_layout(model)


# ---- measurement


def clock(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds that `work` takes, the device's own included."""
    sync(device)
    start = time.perf_counter()
    work()
    sync(device)
    return time.perf_counter() - start


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def clear(device: torch.device) -> None:
    """Forget what earlier measurements left, so that a peak is that of one alone."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gb(device: torch.device) -> float:
    """The most that was reserved since `clear`, in GB (1e9 bytes); nan on a CPU."""
    return torch.cuda.max_memory_reserved() / 1e9 if device.type == "cuda" else float("nan")


def limits_of_card(device: torch.device, tiny: bool) -> tuple[float, float]:
    """(bytes a second that are read, products a second in the router's dtype), the best of five."""
    x = torch.ones(2**12 if tiny else 2**30, dtype=torch.uint8, device=device)
    y = torch.empty_like(x)
    copy = min(clock(lambda: y.copy_(x), device) for _ in range(5))
    size = 64 if tiny else 8192
    a = torch.ones(size, size, dtype=default_dtype(device), device=device)
    product = min(clock(lambda: a @ a, device) for _ in range(5))
    return 2 * x.numel() / copy, 2 * size**3 / product


def weight_bytes(router: Router) -> int:
    return sum(p.numel() * p.element_size() for p in router.model.get_base_model().parameters())


def decode_row(router: Router, what: str, n: int, read: float, device: torch.device, tiny: bool):
    """Decode n rows at contexts of 1,300, 1,100 of them common; one row of the table."""
    common, own, steps = (20, 8, 3) if tiny else (PREFIX, 200, 20)
    contexts = [
        [3 + i % 200 for i in range(common)] + [3 + (i * k) % 200 for i in range(own)] for k in range(n)
    ]
    run = our_steps(router, contexts, common, common + own + 2 * steps + 8)
    run(3)
    seconds = clock(lambda: run(steps), device) / steps
    c = router.config
    token = 2 * c.num_hidden_layers * c.num_key_value_heads * c.hidden_size // c.num_attention_heads
    live = token * router.model.dtype.itemsize * (common + n * own)
    bound = (weight_bytes(router) + live) / read
    return {"what": f"{what}, decode {n} rows", "tokens/s": f"{n / seconds:.0f}",
            "ms": f"{seconds * 1e3:.1f}", "bound, ms": f"{bound * 1e3:.2f}",
            "share of limit": f"{bound / seconds:.0%}"}  # fmt: skip


def update_row(router: Router, what: str, products: float, device: torch.device, tiny: bool):
    """Packed forward and backward of 16 trajectories with checkpointed layers; one row of the table."""
    n, common, own, size = (4, 30, (6, 20), 90) if tiny else (16, PREFIX, (200, 800), 8192)
    trajectories = trajectories_of(n, common, own, 290)
    packed(router, trajectories[:4], size)
    seconds = clock(lambda: packed(router, trajectories, size), device)
    tokens = common + sum(len(t.ids) - common for t in trajectories)
    head = router.model.get_output_embeddings()
    inner = sum(m.in_features * m.out_features for m in router.model.modules()
                if isinstance(m, nn.Linear) and m is not head)  # fmt: skip
    # forward, forward again, and the gradient of the inputs; the frozen weights have none
    bound = 6 * inner * tokens / products
    return {"what": f"{what}, update of {tokens} tokens", "tokens/s": f"{tokens / seconds:.0f}",
            "ms": f"{seconds * 1e3:.0f}", "bound, ms": f"{bound * 1e3:.0f}",
            "share of limit": f"{bound / seconds:.0%}"}  # fmt: skip


def memory_row(preset: str, device: torch.device, tiny: bool) -> dict[str, Any]:
    """Peak of a whole PPO step at a preset: its slots, lengths, packs and minibatch."""
    c = read_yaml(PRESETS / f"{preset}.yaml")
    shape = "tiny" if tiny else "3b" if "3B" in c["model"] else "0.5b"
    common, turn, total, size = (
        (30, 4, 120, 200) if tiny else (PREFIX, 64, c["total_tokens"], c["max_tokens_per_pack"])
    )
    slots, batch = (2, 4) if tiny else (c["slots"], c["minibatch"])
    clear(device)
    start = time.perf_counter()
    router = router_of(shape, c["load_in_4bit"], device)
    optimisers = {role: torch.optim.AdamW(router.parameters(role), lr=1e-5) for role in ("critic", "policy")}
    reply = 10 if tiny else c["reply_tokens"]
    # replies are delayed: waiting rows are there too
    plans = [Plan((turn,) * 3, (reply,) * 2, (0.001,) * 2)] * (2 * slots)
    prompts, _, words = prompts_of(router, len(plans), common, own=20)
    limits = Limits(2, 10**9, reply, total, slots, 1.0)
    drawn = planned_rollout(router, prompts, plans, limits, words)[:batch]
    rollout_peak = peak_gb(device)
    est = estimate(router, drawn, size, critic=True)
    advantages, returns = advantages_of(
        est, torch.zeros(len(drawn), device=device), range(len(drawn)), "ppo", 0.001, 1.0, 1.0
    )
    rules = Rules(batch, 1, size, 0.2, 0.5, 1.0, 0.001, 0.0)
    update(router, optimisers, drawn, est, advantages, returns, rules, "seed")
    return {"what": f"{preset}, whole PPO step, card of {CARDS[preset]} GB",
            "peak, GB": f"{peak_gb(device):.1f} (rollout {rollout_peak:.1f})",
            "ms": f"{(time.perf_counter() - start) * 1e3:.0f}"}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on a CPU if there is no GPU")
    given = parser.parse_args(argv)
    if not (given.tiny or torch.cuda.is_available()):
        sys.exit("benchmarks.gpu: no GPU here; --tiny runs the same code with tiny shapes on the CPU")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    read, products = limits_of_card(device, given.tiny)
    rows: list[dict[str, Any]] = [
        {"what": f"this card: {read / 1e9:.0f} GB/s, {products / 1e12:.1f} TFLOP/s in products"}
    ]
    for four_bit in (True, False):
        clear(device)
        what = "NF4" if four_bit else str(default_dtype(device)).removeprefix("torch.")
        router = router_of("tiny" if given.tiny else "3b", four_bit, device)
        for n in (2,) if given.tiny else (16, 32, 64):
            rows.append(decode_row(router, what, n, read, device, given.tiny))
        rows.append(update_row(router, what, products, device, given.tiny))
        del router
    rows += [memory_row(preset, device, given.tiny) for preset in CARDS]
    given.model = "random Qwen2.5 shapes"
    return report("gpu", given, rows)


if __name__ == "__main__":
    main()
