"""Texts to vectors for the learned routers: mean-pooled last states of the router's base, or of any encoder.

The base is there already, so that nothing has to be downloaded; fine-tuning it means its policy adapter,
which comes back as it was. A Hugging Face encoder (a sentence encoder such as MiniLM does well) is tuned as a
whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from minirouter.load import check_files

from .systems import borrowed

BATCH = 64  # texts of one forward pass


class Encoder:
    """E = `size` numbers a text. `path` names a Hugging Face encoder; without one, `router` is its base."""

    def __init__(self, router: Any, path: str | None = None) -> None:
        """Raises ValueError, one line, if there is no encoder at `path`."""
        self.router = None if path else router
        if path:
            from transformers import AutoConfig, AutoModel, AutoTokenizer

            try:
                config = AutoConfig.from_pretrained(path)
                check_files(path, config)
                self.model = AutoModel.from_pretrained(path, config=config, use_safetensors=True).eval()
                self.tokenizer = AutoTokenizer.from_pretrained(path)
            except (OSError, ValueError) as error:
                raise ValueError(f"no encoder {path}: {' '.join(str(error).split())[:160]}") from None
            self.weights, self.size = list(self.model.parameters()), self.model.config.hidden_size
            self.lr = 5e-5  # of all weights
            self.device = self.model.device
        else:
            self.tokenizer, self.device = router.tokenizer, router.device
            self.weights, self.size = router.parameters("policy"), router.config.hidden_size
            self.lr = 1e-3  # of an adapter

    def states(self, texts: Sequence[str]) -> torch.Tensor:
        """(n, E) fp32, with gradient where it is on. Padding is right of a text and not pooled."""
        ids = [self.tokenizer.encode(text)[:512] or [0] for text in texts]
        width = max(map(len, ids))
        rows = torch.tensor([row + [0] * (width - len(row)) for row in ids], device=self.device)
        lengths = torch.tensor([len(row) for row in ids], device=self.device)
        mask = torch.arange(width, device=self.device) < lengths[:, None]  # (n, T)
        if self.router:
            positions = torch.arange(width, device=self.device).expand_as(rows)
            hidden = self.router.hidden(rows, positions, None)  # causal: nobody looks at the padding
        else:
            hidden = self.model(input_ids=rows, attention_mask=mask.long()).last_hidden_state
        return (hidden.float() * mask[..., None]).sum(1) / lengths[:, None]

    @torch.no_grad()
    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """(n, E) of the untrained encoder, length 1."""
        with self.router.reference() if self.router else nullcontext():
            return torch.nn.functional.normalize(self._all(texts), dim=1).cpu().numpy()

    @torch.no_grad()
    def tuned(self, texts: Sequence[str], weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """(n, E) of the encoder with these weights in place of its own."""
        with borrowed(self.weights, weights):
            return self._all(texts)

    @contextmanager
    def training(self) -> Iterator[list[torch.nn.Parameter]]:
        """Inside, the weights may be trained; afterwards they are what they were."""
        with borrowed(self.weights):
            yield self.weights

    def _all(self, texts: Sequence[str]) -> torch.Tensor:
        return torch.cat([self.states(texts[i : i + BATCH]) for i in range(0, len(texts), BATCH)])
