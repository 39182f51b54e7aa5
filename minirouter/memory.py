"""How much memory a run takes on its device, computed before anything is loaded.

Weights, adapters, optimiser and KV cache follow from shapes; what a layer keeps for its backward pass was
found with the memory profiler.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from .head import SLICE_LOGITS

# Bytes for each token and unit of width (hidden, all heads, intermediate), by the size of a number: what a
# layer saves for its backward pass, and what that needs beside it. LoRA computes in float32: a bfloat16 layer
# keeps float32 copies of its inputs; each branch of a pack copies its prefix's keys and values (here as long
# as the branch). Found with the memory profiler on Llama blocks; a test measures others.
SAVED_BYTES = {2: (28, 14, 10), 4: (16, 20, 16)}
WORK_BYTES = {2: (12, 0, 8), 4: (0, 0, 8)}
LOGIT_BYTES = 20  # for each logit of a slice of the head: logits, probabilities, gradients


def memory_estimate(
    config: PreTrainedConfig,
    *,
    load_in_4bit: bool,
    lora_r: int,
    slots: int,
    total_tokens: int,
    max_tokens_per_pack: int,
    slice_logits: int = SLICE_LOGITS,
    gradient_checkpointing: bool = True,
    critic: bool = True,
    warm: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, int]:
    """Bytes on the device, by purpose. `critic`: PPO, not GRPO; `warm`: a warm-started reference adapter.

    Rollout and update follow each other, so that "total" counts the larger of the two. Not counted: the
    CUDA context, libraries and fragmentation, about 1 GB; on a CPU, the copies that `Router.decoding` makes.
    """
    size, text = dtype.itemsize, config.get_text_config(decoder=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    linears.remove(model.get_output_embeddings())
    weights = sum(p.numel() for p in model.parameters()) * size
    if load_in_4bit:
        weights += sum(nf4_bytes(m.weight.numel()) - m.weight.numel() * size for m in linears)
    lora = sum(lora_r * (m.in_features + m.out_features) for m in linears) * 4
    trained = lora + critic * (lora + (text.hidden_size + 1) * 4)
    heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    row = 2 * slots * total_tokens * head_dim * size  # keys and values of one head, all slots
    layers = text.num_hidden_layers
    widths = (text.hidden_size, heads * head_dim, getattr(text, "intermediate_size", 4 * text.hidden_size))
    saved, work = (
        sum(a * b for a, b in zip(table[size], widths, strict=True)) for table in (SAVED_BYTES, WORK_BYTES)
    )
    kept = layers * text.hidden_size * size + saved if gradient_checkpointing else layers * saved
    # Gemma-2's soft cap needs attention that computes all pairs of a pack, under a mask
    pairs = max_tokens_per_pack**2 if getattr(text, "attn_logit_softcapping", None) else 0
    scores = pairs * (1 + size + heads * (4 + 2 * size))  # at least
    dequantised = max(m.weight.numel() for m in linears) * size if load_in_4bit else 0
    parts = {
        "weights": weights,
        "adapters": trained + warm * lora,
        "gradients": trained,
        "optimiser": 2 * trained,
        "kv_cache": row * (getattr(text, "num_key_value_heads", None) or heads) * layers,
        "decoding": row * heads,  # one layer at a time, keys and values are repeated for every query head
        "activations": max_tokens_per_pack * (kept + work) + scores + dequantised,
        "logits": min(slice_logits, max_tokens_per_pack * text.vocab_size) * LOGIT_BYTES,
    }
    rollout, update = parts["kv_cache"] + parts["decoding"], parts["activations"] + parts["logits"]
    return parts | {"total": weights + parts["adapters"] + 3 * trained + max(rollout, update)}


def nf4_bytes(n: int) -> int:
    """Bytes of n weights in NF4 with double quantisation: half a byte each, one for each 64, four for each
    16,384, and the two code books and the offset."""
    blocks = -(-n // 64)
    return -(-n // 2) + blocks + 4 * -(-blocks // 256) + 4 * (16 + 256 + 1)


def memory_table(parts: dict[str, int]) -> str:
    """The estimate as lines of text, in GB (1e9 bytes)."""
    return "\n".join(f"{name:<12} {number / 1e9:8.2f} GB" for name, number in parts.items())
