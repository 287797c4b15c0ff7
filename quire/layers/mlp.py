"""The gated feed-forward layer."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.table import kernel
from quire.layers.layer import Place
from quire.layers.linear import Linear

ACTIVATIONS: dict[str, str] = {
    "silu": "silu_and_mul",
}
"""config.json's `hidden_act` → the op that applies it to the gate and multiplies."""


class MLP:
    """down(act(gate(x)) · up(x))."""

    def __init__(self, gate_up: Linear, down: Linear, width: int, activation: str, place: Place) -> None:
        self._gate_up = gate_up
        self._down = down
        self._width = width
        self._activate = kernel(ACTIVATIONS[activation], place.device.type)

    def __call__(self, x: Tensor) -> Tensor:
        """[tokens, hidden] → [tokens, hidden]."""
        hidden = torch.empty((len(x), self._width), dtype=x.dtype, device=x.device)
        self._activate(self._gate_up(x), hidden)
        return self._down(hidden)
