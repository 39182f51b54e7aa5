"""A causal LM from disk or hub: its precision, its tokenizer, and what is refused.

The paper trains full copies of a 3B model on several 48 GB GPUs (its Table 8). Here one frozen base serves
all roles, in NF4 with double quantisation (QLoRA) where asked, so that one consumer GPU is enough.

What the rest of the program cannot compute rightly is refused in one line: attention that takes no tree
mask, contexts longer than a sliding window or than the RoPE that the model was made for, and weights outside
the model's own folder.

`python -m minirouter.load GGUF OUT_DIR` makes an ordinary checkpoint of a GGUF file, or of the folder that
holds one.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, cached_file
from transformers.utils.logging import disable_progress_bar

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
        check_files(path, config)
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


def check_files(path: str, config: PreTrainedConfig) -> None:
    """ValueError, one line, if a model's weights are not safetensors that lie beside its config.json.

    transformers 5.24 opens whatever path an index of shards names (CVE-2026-75104), takes a pickle if the
    configuration names one, and puts an adapter on top that lies there.
    """

    def found(name: str) -> str | None:
        quiet = ("_raise_exceptions_for_missing_entries", "_raise_exceptions_for_connection_errors")
        return cached_file(path, name, **dict.fromkeys(quiet, False))

    if found("adapter_config.json"):
        raise ValueError("there is an adapter beside it: merge it into its base first")
    name = str(getattr(config, "transformers_weights", None) or SAFE_WEIGHTS_INDEX_NAME)
    if Path(name).name != name or not name.endswith((".safetensors", ".safetensors.index.json")):
        raise ValueError(f"its config.json names weights that are no safetensors beside it: {name}")
    index = found(name)
    if index is None or not name.endswith(".json"):
        return
    try:
        shards = json.loads(Path(index).read_text("utf-8"))["weight_map"].values()
        outside = [shard for shard in shards if Path(shard).name != shard]
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{name} is no index of weights") from None
    if outside:
        raise ValueError(f"{name} names a file that does not lie beside it: {outside[0]}")


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
