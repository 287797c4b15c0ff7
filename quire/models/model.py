"""What a runner asks of a model, and how one is built from its spec."""

from __future__ import annotations

import importlib
from typing import Protocol

from torch import Tensor

from quire.attention.backend import AttentionBackend
from quire.layers.factory import LayerFactory
from quire.layers.positions import Positions
from quire.models.registry import ARCHITECTURES
from quire.models.spec import ModelSpec


class Model(Protocol):
    """A decoder: tokens to hidden states, and hidden states to logits for the positions that are read."""

    def hidden(self, tokens: Tensor, positions: Positions, attention: AttentionBackend) -> Tensor:
        """Tokens [tokens] int64 → [tokens, hidden], normed. The backend must have been prepared for these rows."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] → [n, vocab_size] in the model's dtype."""
        ...


def build_model(spec: ModelSpec, factory: LayerFactory) -> Model:
    """A model of this spec, without its weights: `factory.layers` load them."""
    module, name = ARCHITECTURES[spec.architecture].split(":")
    model: Model = getattr(importlib.import_module(module), name)(spec, factory)
    return model
