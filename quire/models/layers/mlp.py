"""Feed-forward layers, with and without a gate."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quire.compute.collectives.delta import Delta
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.quantized_rows import Rows
from quire.models.layers.linear import Projection
from quire.models.weights.tensor_options import TensorOptions

GATED: dict[str, str] = {
    "silu": "silu_and_mul",
    "gelu_pytorch_tanh": "gelu_and_mul",
}
"""config.json's `hidden_act` → the op of a gated MLP, which applies it to the gate and multiplies."""
PLAIN: dict[str, str] = {
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
}
"""config.json's `hidden_act` → the op of an MLP without a gate, which applies it."""


class MLP:
    """down(act(gate(x)) · up(x)), or down(act(up(x))): `up` is the projection out of the stream, with the gate or not,
    and `activation` the op between.

    Attributes:
        row_form: The form of quantized rows that the MLP takes besides dense ones; None: it takes dense rows only.
    """

    def __init__(
        self, up: Projection, down: Callable[[Tensor], Delta], width: int, activation: str, options: TensorOptions
    ) -> None:
        self.row_form = up.row_form
        self._up = up
        self._down = down
        self._width = width
        self._activation = activation
        self._activate = kernel(activation, options.device.type)

    def __call__(self, x: Rows) -> Delta:
        """[tokens, hidden] → [tokens, hidden]."""
        if self._activation == "silu_and_mul":
            return self._down(self._up.silu_and_mul(x))  # the activation most in use may be part of the product
        hidden = x.new_empty((x.shape[0], self._width))
        self._activate(self._up(x), hidden)
        return self._down(hidden)
