"""Tiny random models of the supported families, and a tokenizer of bytes: made in memory, without a network.

Weights are drawn ten times wider than usual, so that attention is far from uniform and a wrong mask, position
or soft cap moves the logits by much more than rounding. Every family has grouped query heads, and more logit
columns than its tokenizer has tokens, as the real ones do.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral")
SPECIALS = ("<|pad|>", "<|bos|>", "<|end|>", "<|start|>")
# With these a tag has several spellings, and can close inside a longer token.
MERGES = ((">", "<"), ("<", "/"), ("s", "e"))
CHATML = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + CHATML

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOW = 512  # wider than any test is long: the models are accepted, and their masks must not matter


def byte_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token a byte, three merged pairs, four special tokens; no protocol tag is a single token.

    It never adds a begin token itself: `WITH_BOS` is a template that does.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = list(SPECIALS) + alphabet + [a + b for a, b in MERGES]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, list(MERGES)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    pad, bos, end, start = SPECIALS
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=pad,
        bos_token=bos,
        eos_token=end,
        additional_special_tokens=[start],
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def config(family: str, **changes: object) -> PreTrainedConfig:
    """The configuration of the tiny model of a family, with `changes` to its fields."""
    fields: dict = SHAPE | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if family == "qwen2":  # derives the head size
        fields = {key: value for key, value in fields.items() if key != "head_dim"}
    own: dict[str, tuple[type, dict]] = {
        "llama": (LlamaConfig, {}),
        "qwen2": (
            Qwen2Config,
            {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        ),
        "qwen3": (Qwen3Config, {}),
        "gemma2": (
            Gemma2Config,
            {
                "sliding_window": WINDOW,
                "layer_types": MIXED,
                "query_pre_attn_scalar": 12,
                "attn_logit_softcapping": 4.0,
                "final_logit_softcapping": 5.0,
            },
        ),
        "gemma3": (
            Gemma3TextConfig,
            {"sliding_window": WINDOW, "layer_types": MIXED, "query_pre_attn_scalar": 12},
        ),
        "mistral": (MistralConfig, {"sliding_window": WINDOW}),
    }
    kind, more = own[family]
    return kind(**(fields | more | changes))


def tiny(family: str, seed: int = 0, **changes: object) -> tuple[torch.nn.Module, PreTrainedTokenizerFast]:
    """(model, tokenizer) of a family: random but seeded, fp32, eval mode, frozen like a loaded base."""
    shape = config(family, **changes)
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    attention = "eager" if family == "gemma2" else "sdpa"
    model = AutoModelForCausalLM.from_config(shape, attn_implementation=attention, dtype=torch.float32)
    torch.random.set_rng_state(state)
    return model.eval().requires_grad_(False), byte_tokenizer()
