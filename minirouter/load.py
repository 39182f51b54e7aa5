"""A causal LM from disk or hub: its precision, its tokenizer, what is refused, and how much memory a run
takes.

The paper trains full copies of a 3B model on several 48 GB GPUs (its Table 8). Here one frozen base serves
all roles, in NF4 with double quantisation (QLoRA) where asked, so that one consumer GPU is enough.

What the rest of the program cannot compute rightly is refused in one line: attention that takes no tree
mask, and contexts longer than a sliding window or than the RoPE that the model was made for.

`python -m minirouter.load GGUF OUT_DIR` makes an ordinary checkpoint of a GGUF file, or of the folder that
holds one.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedConfig
from transformers.utils.logging import disable_progress_bar

from .head import SLICE_LOGITS

disable_progress_bar()  # of loading weights: an entry point prints what it has to say itself


def model_config(path: str, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a model in a folder or on the hub. ValueError, one line, if there is none."""
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load the model {path}: {_one_line(error)}") from None


def load_model(
    path: str,
    load_in_4bit: bool = False,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    total_tokens: int = 0,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """(model, tokenizer): the base frozen and in eval mode, on the GPU if there is one.

    `dtype` is that of everything not in 4 bits and of all computing: by default bfloat16 on a GPU that has
    it, else float32. `total_tokens` is the longest sequence that will be seen. ValueError, one line, if the
    model cannot be loaded or is none that a router can be made of. Weights are read from safetensors alone,
    never from pickles.
    """
    device = torch.device(device or default_device())
    dtype = dtype or default_dtype(device)
    config = model_config(path, trust_remote_code)
    check_config(config, total_tokens)
    quantise = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        # Computing in another type, layers would cast their biases in place: the base would change.
        bnb_4bit_compute_dtype=dtype,
    )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            device_map={"": device},
            quantization_config=quantise if load_in_4bit else None,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot load the model {path}: {_one_line(error)}") from None
    if not tokenizer.chat_template:
        raise ValueError(f"{path} has no chat template: an instruct model is needed, not a base model")
    keep_4bit_layout(model)
    model.requires_grad_(False).eval()
    check_tree_mask(model)
    return model, tokenizer


def default_device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the GPU computes it itself; float16 overflows in some models, so otherwise float32."""
    fast = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if fast else torch.float32


def keep_4bit_layout(model: torch.nn.Module) -> None:
    """Forbid bitsandbytes to repack weights for AVX512-BF16, as it does in the first eval forward on such a
    CPU.

    The backward pass, dequantising and merging read the repacked bytes as if they were not (bitsandbytes
    0.50.2): the loss looks right and the gradients are wrong. The switch is set as a layer is made, so this
    follows any load.
    """
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False


def stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that ends an episode: those of the generation config (several for Qwen, Llama) and eos."""
    ends: set[int] = set()
    for ids in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        ends.update([] if ids is None else [ids] if isinstance(ids, int) else ids)
    return frozenset(ends)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


# ---- what is refused


def check_config(config: PreTrainedConfig, total_tokens: int) -> None:
    """ValueError, one line, for what the configuration alone rules out with sequences of `total_tokens`."""
    text, name = config.get_text_config(decoder=True), config.model_type
    if config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model: a causal one is needed")
    layers = set(getattr(text, "layer_types", None) or ())
    if odd := layers - {"full_attention", "sliding_attention"}:
        raise ValueError(f"{name} has layers of {', '.join(sorted(odd))}, which cannot take a tree mask")
    if any(getattr(text, scale, None) not in (None, 1, 1.0) for scale in ("logits_scaling", "logit_scale")):
        raise ValueError(f"{name} scales its logits, which is not supported")
    for what, limit in context_limits(text).items():
        if total_tokens > limit:
            raise ValueError(f"total_tokens {total_tokens} is more than the {what} of {name}, {limit}")


def context_limits(text: PreTrainedConfig) -> dict[str, int]:
    """How many tokens a sequence may have before a tree mask or our positions would be computed wrongly.

    A 4-D mask replaces that of a sliding window, which is therefore never applied; dynamic and longrope
    RoPE change all positions with the longest in the batch.
    """
    limits = {}
    longest = getattr(text, "max_position_embeddings", None)
    if longest:
        limits["longest position"] = longest
    layers = getattr(text, "layer_types", None)
    slides = "sliding_attention" in layers if layers else getattr(text, "use_sliding_window", True)
    if slides and getattr(text, "sliding_window", None):
        limits["sliding window"] = text.sliding_window
    rope = getattr(text, "rope_parameters", None) or {}
    for part in [
        rope,
        *(value for value in rope.values() if isinstance(value, dict)),
    ]:  # flat, or by layer type
        if part.get("rope_type") in ("dynamic", "longrope"):
            original = part.get("original_max_position_embeddings") or longest
            limits[f"original context ({part['rope_type']} RoPE)"] = original
    return limits


@torch.no_grad()
def check_tree_mask(model: Any) -> None:
    """Two branches behind one prefix must come out as if each were alone, else ValueError."""
    ids = torch.arange(3, 9, device=model.device)[None] % model.config.get_text_config().vocab_size
    positions = torch.tensor([[0, 1, 2, 3, 2, 3]], device=model.device)
    branch = torch.tensor([0, 0, 1, 1, 2, 2], device=model.device)
    tree = ((branch[:, None] == branch) | (branch == 0)).tril()
    alone = torch.tensor([0, 1, 4, 5], device=model.device)  # the prefix and the second branch

    def last(ids: torch.Tensor, positions: torch.Tensor, sees: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(sees.shape, dtype=model.dtype, device=model.device)  # added by every attention
        mask = mask.masked_fill(~sees, torch.finfo(model.dtype).min)[None, None]
        body = model.get_decoder()
        return body(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False)[0][
            0, -1
        ].float()

    try:
        right = last(ids[:, alone], positions[:, alone], tree[alone][:, alone])
        packed = last(ids, positions, tree)
        leaking = last(ids, positions, torch.ones_like(tree).tril())
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{model.config.model_type} cannot take a tree mask: {_one_line(error)}") from None
    if not (packed - right).norm() <= 0.5 * (leaking - right).norm():
        raise ValueError(f"the attention of {model.config.model_type} does not respect a tree mask")


# ---- memory

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
    CUDA context, libraries and fragmentation, about 1 GB; on a CPU, the copies that `PackedLinear` keeps.
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


# ---- GGUF


def convert(gguf: Path, out: Path) -> None:
    """Write the model of a GGUF file, dequantised to float32, and its tokenizer as an ordinary checkpoint."""
    files = [gguf] if gguf.is_file() else sorted(gguf.glob("**/*.gguf"))
    if len(files) != 1:
        raise ValueError(f"{gguf} holds {len(files)} GGUF files, one is needed")
    where = {"pretrained_model_name_or_path": str(files[0].parent), "gguf_file": files[0].name}
    try:
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(f"cannot read {files[0]}: {_one_line(error)}") from None
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):  # it describes the file, and would not be written
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict(), strict=True)
    plain.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m minirouter.load GGUF OUT_DIR")
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except ValueError as mistake:
        print(mistake, file=sys.stderr)
        sys.exit(2)
