"""One base model, three roles: policy adapter, critic adapter with a value head, no adapter = the reference.

The base is loaded once and stays frozen. LoRA adapter `policy` is the router pi, LoRA adapter `critic` and
a linear head on the last hidden state is the value function, and the base alone is pi_ref of Eq. 1 (after a
supervised warm start: a frozen copy of the warm policy adapter). The reference implementation holds three
full copies of the model.

The vocabulary projection runs at action positions only, a slice of the vocabulary at a time (head.py).

Shape letters: B trajectories, A actions, R rows, T tokens a row, N tokens of a pack, C cached columns, E
hidden size, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, load_peft_weights, set_peft_model_state_dict
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from .attention import ATTENTION, tree_mask
from .head import SLICE_LOGITS, logp_entropy
from .load import load_model, stop_ids
from .trajectory import Batch

PACKED_SIZE = 2**16  # weights: smaller layers stay in the processor's cache, where BLAS is as fast


class Router:
    """A causal LM with its adapters. Everything that runs the network goes through here."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        lora_r: int,
        critic: bool = True,
        temperature: float = 1.0,
        gradient_checkpointing: bool = False,
        slice_logits: int = SLICE_LOGITS,
    ) -> None:
        """`model` is a frozen causal LM; log-probs are those at `temperature` (1 if it is 0)."""
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids(model, tokenizer)
        self.temperature = temperature or 1.0
        self.device = model.device
        self.config = model.config.get_text_config()
        self.slice_logits = slice_logits
        if gradient_checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        if model.config._attn_implementation == "sdpa" and model._supports_attention_backend:
            model.set_attn_implementation(ATTENTION)
        lora = LoraConfig(r=lora_r, lora_alpha=2 * lora_r, lora_dropout=0.0, target_modules="all-linear")
        with warnings.catch_warnings():
            # peft asks transformers by a name that is going away
            warnings.simplefilter("ignore", FutureWarning)
            self.model = get_peft_model(model, lora, adapter_name="policy")
        if critic:
            self.model.add_adapter("critic", lora)
        self.model.eval()  # from now on its flag is that of every module
        self.adapted = [layer for layer in self.model.modules() if isinstance(layer, BaseTunerLayer)]
        self.value_head = nn.Linear(self.config.hidden_size, 1, device=self.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self.reads_prefix = model.config._attn_implementation == ATTENTION
        self.role = ""
        self.warm = False  # True: the reference is the frozen adapter `reference`, not the bare base
        self._switch("policy")

    @classmethod
    def load(cls, path: str, base: Mapping[str, Any], *, seed: int = 0, **options: Any) -> Router:
        """Load a base from disk or hub and put fresh adapters on it; raises ValueError as `load_model` does.

        `base` goes to `load.load_model` (load_in_4bit, total_tokens, ...), `options` to this class.
        """
        model, tokenizer = load_model(path, **base)
        # for the adapters' first values, all that is drawn from torch's own generator
        torch.manual_seed(seed)
        return cls(model, tokenizer, **options)

    def parameters(self, role: str) -> list[nn.Parameter]:
        """Trainable tensors of "policy" or "critic" (with the value head), by name: flags change with the
        role. Empty for a critic that is not there."""
        if role not in self.model.peft_config:
            return []
        own = [p for name, p in self.model.named_parameters() if f".{role}." in name]
        return own + list(self.value_head.parameters()) if role == "critic" else own

    def _switch(self, role: str) -> None:
        """Make a role active: "policy", "critic" or "reference". It stays so until another is asked for,
        since gradient checkpointing computes forward passes again, in the backward pass, with whatever is
        active then."""
        if role == self.role:
            return
        self.role = role
        bare = role == "reference" and not self.warm
        for layer in self.adapted:  # peft's own way of switching asks every module of the network, often
            layer.enable_adapters(not bare)
            if not bare:
                layer.set_adapter(role, inference_mode=role == "reference")

    def _set_training(self, training: bool) -> None:
        if self.model.training != training:  # train() visits every module: 3 ms on the base of the benchmarks
            self.model.train(training)

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Inside, `logp` is that of pi_ref: the base with no adapter, or the frozen warm policy."""
        self._switch("reference")
        try:
            yield
        finally:
            self._switch("policy")

    def freeze_reference(self) -> None:
        """Make the policy as it is now the reference (after a supervised warm start)."""
        self.model.add_adapter("reference", self.model.peft_config["policy"])
        for name, p in self.model.named_parameters():
            if ".policy." in name:
                self.model.get_parameter(name.replace(".policy.", ".reference.")).data.copy_(p.data)
        self.warm = True
        self.role = ""  # add_adapter has set flags of its own
        self._switch("policy")

    def save(self, folder: Path) -> None:
        """Write every adapter as PEFT keeps them: FOLDER/policy, FOLDER/critic, after a warm start
        FOLDER/reference.
        """
        self.model.save_pretrained(folder, save_embedding_layers=False)

    def load_adapters(self, folder: Path) -> None:
        """Read what `save` wrote into the adapters that are there; a saved reference is taken up too."""
        if (folder / "reference").is_dir() and not self.warm:
            self.freeze_reference()
        for role in self.model.peft_config:
            if (folder / role).is_dir():
                weights = load_peft_weights(folder / role, device=str(self.device))
                set_peft_model_state_dict(self.model, weights, adapter_name=role)

    def hidden(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        mask: torch.Tensor | None,
        cache: Any = None,
        **more: Any,
    ):
        """Last hidden states (R, T, E) of whatever role is active. `mask` (R, 1, T, C) bool; None = plain
        causal. `more` goes to the attention.
        """
        if mask is not None:
            # Eager attention adds its mask: a boolean one would add 0 or 1 and hide nothing. Others would
            # convert it again in every layer.
            floor = torch.finfo(self.model.dtype).min
            mask = torch.zeros_like(mask, dtype=self.model.dtype).masked_fill_(~mask, floor)
        body = self.model.get_base_model().get_decoder()
        output = body(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=mask,
            cache=cache,
            use_cache=cache is not None,
            **more,
        )
        return output.last_hidden_state

    def logits(self, hidden: torch.Tensor, part: slice = slice(None)) -> torch.Tensor:
        """(..., E) -> (..., V), or `part` of V, as the model itself would: soft-capping must not be lost."""
        head = self.model.get_output_embeddings()
        if part == slice(None):
            logits = head(hidden)
        else:
            bias = None if head.bias is None else head.bias[part]
            logits = nn.functional.linear(hidden, head.weight[part], bias)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return cap * torch.tanh(logits / cap) if cap else logits

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Inside, on a CPU in float32, `forward_cached` reads copies of the large weights, laid out by oneDNN
        and with the policy as it is now merged in: products of few rows take a fifth to a half of the time
        of BLAS on some processors, and the adapter takes none. The base stays as it is.
        """
        layers = [x for x in (*self.adapted, self.model.get_output_embeddings()) if _is_worth_packing(x)]
        products = [partial(_product, _pack(layer), layer.bias) for layer in layers]
        for layer, product in zip(layers, products, strict=True):
            layer.forward = product
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward  # that of its class again

    def forward_cached(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor, cache: Any
    ) -> torch.Tensor:
        """One step of the sampler, by the policy: new ids (R, T) on top of a cache -> hidden states (R, T,
        E).
        """
        self._switch("policy")
        self._set_training(False)
        cache.apart = self.reads_prefix and input_ids.shape[1] == 1
        more = {"shared": cache.prefix} if cache.apart else {}
        return self.hidden(input_ids, position_ids, mask, cache, **more)

    def logp(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob of every action and entropy of its distribution, nats, (B, A) each, 0 where there is no
        action.
        """
        if self.role == "critic":
            self._switch("policy")
        states, where = self._states(batch)
        ids = batch.action_ids.to(self.device)[where]
        vocab = self.model.get_output_embeddings().out_features
        logp, entropy = logp_entropy(self._scaled_logits, states, ids, vocab, self.slice_logits)
        empty = torch.zeros(where.shape, device=self.device)
        return empty.masked_scatter(where, logp), empty.masked_scatter(where, entropy)

    def value(self, batch: Batch) -> torch.Tensor:
        """The critic's estimate of the return at every action's state, (B, A), 0 where there is no action."""
        self._switch("critic")
        states, where = self._states(batch)
        values = self.value_head(states.float())[:, 0]
        return torch.zeros(where.shape, device=self.device).masked_scatter(where, values)

    def _scaled_logits(self, hidden: torch.Tensor, part: slice) -> torch.Tensor:
        return self.logits(hidden, part).float() / self.temperature

    def _states(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of the valid actions, flat (n, E), and the mask (B, A) that scatters them back."""
        # Gradient checkpointing works in train() only; dropout is 0, so that train() and eval() agree.
        self._set_training(torch.is_grad_enabled())
        ids, positions = batch.input_ids.to(self.device), batch.position_ids.to(self.device)
        if self.reads_prefix:
            # a mask of one entry: without one the library would make its own from the positions
            nothing_hidden = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
            hidden = self.hidden(ids, positions, nothing_hidden, branches=batch.branches)
        else:
            hidden = self.hidden(ids, positions, tree_mask(batch.branches).to(self.device))
        where = batch.mask.to(self.device)
        return hidden[0][batch.action_index.to(self.device)[where]], where


def _is_worth_packing(layer: nn.Module) -> bool:
    base = layer.get_base_layer() if isinstance(layer, LoraLinear) else layer
    fits = type(base) is nn.Linear and base.weight.device.type == "cpu" and base.weight.dtype == torch.float32
    return fits and base.weight.numel() >= PACKED_SIZE and torch.backends.mkldnn.is_available()


@torch.no_grad()
def _pack(layer: nn.Module) -> torch.Tensor:
    weight = layer.weight
    if isinstance(layer, LoraLinear):
        weight = weight + layer.get_delta_weight("policy")
    # This operator and the next are those that torch.compile calls; torch has no public name for them.
    return torch.ops.mkldnn._reorder_linear_weight(weight)


def _product(packed: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
