"""Feed-forward layers, with and without a gate, and the experts of a mixture."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.collectives.delta import Delta
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.quantized_rows import Rows
from quire.models.layers.linear import Projection
from quire.models.quantization.scheme import AdaptableExperts, ExpertsShape, SeparateExperts, WeightScheme
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.shards import Cut, Shards
from quire.models.weights.tensor_options import TensorOptions

GATED: dict[str, str] = {
    "silu": "silu_and_mul",
    "gelu": "gelu_exact_and_mul",
    "gelu_new": "gelu_and_mul",
    "gelu_pytorch_tanh": "gelu_and_mul",
}
"""config.json's `hidden_act` → the op of a gated MLP, which applies it to the gate and multiplies."""
PLAIN: dict[str, str] = {
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu": "gelu_exact",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu_squared",
}
"""config.json's `hidden_act` → the op of an MLP without a gate, which applies it."""


class MLP:
    """down(act(gate(x)) · up(x)), or down(act(up(x))) without a gate.

    `up` is the projection out of the stream, including the gate if there is one; `activation` is the op between,
    and `activate` computes one that has parameters of its own.

    Attributes:
        row_form: The form of quantized rows that the MLP takes in addition to dense ones; None: dense rows only.
    """

    def __init__(
        self,
        up: Projection,
        down: Callable[[Tensor], Delta],
        width: int,
        activation: str,
        options: TensorOptions,
        activate: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        self.row_form = up.row_form
        self._up = up
        self._down = down
        self._width = width
        self._activation = activation
        self._activate = kernel(activation, options.device.type) if activate is None else activate

    def __call__(self, x: Rows) -> Delta:
        """Compute the MLP: [tokens, hidden] → [tokens, hidden]."""
        if self._activation == "silu_and_mul":
            return self._down(self._up.silu_and_mul(x))  # the activation most in use may be part of the product
        hidden = x.new_empty((x.shape[0], self._width))
        self._activate(self._up(x), hidden)
        return self._down(hidden)


class LimitedSilu:
    """out = min(silu(gate), limit) · up; ups are between the limit and its negative (StepFun 2026, "Step 3.5")."""

    def __init__(self, limit: float) -> None:
        self._limit = limit

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Write the activation of x [tokens, 2 · width], which has gate, then up, to out [tokens, width]."""
        gate, up = x.chunk(2, dim=-1)
        torch.mul(F.silu(gate).clamp_(max=self._limit), up.clamp(-self._limit, self._limit), out=out)


class XIELU:
    """The activation xIELU, whose parameters each layer has for itself, under `name` in the checkpoint."""

    def __init__(self, name: str, options: TensorOptions) -> None:
        self._name = name
        self._options = options
        self._xielu = kernel("xielu", options.device.type)
        self._parameters: Tensor

    def weight_specs(self) -> Iterator[WeightSpec]:
        for name, shape in (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ())):
            yield WeightSpec(f"{self._name}.{name}", shape)

    def load_weights(self, checkpoint: Checkpoint) -> None:
        values = []
        for spec in self.weight_specs():
            value = torch.empty(spec.shape, dtype=torch.float32)
            checkpoint.read(spec.name, value)
            values.append(value.view(1))
        positive, negative, linear, eps = values
        parameters = (F.softplus(positive), linear + F.softplus(negative), linear, eps)
        self._parameters = torch.cat(parameters).to(self._options.device)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """Write xIELU(x) to out; both are [tokens, width]."""
        self._xielu(x, self._parameters, out)


class Experts:
    """The gated MLPs of one layer's experts, in whatever form the scheme keeps their weights.

    Args:
        shape: The shape of this rank's experts.
        scheme: Loads their weights and multiplies with them.
        options: The device and dtype of the weights.
        whole: The shape of all experts of the layer, undivided, which a checkpoint must have; None: `shape` is whole.
        cut: The part of each expert's width that this rank has; None: the whole width.
    """

    def __init__(
        self,
        shape: ExpertsShape,
        scheme: WeightScheme,
        options: TensorOptions,
        whole: ExpertsShape | None = None,
        cut: Cut | None = None,
    ) -> None:
        self._weights = scheme.experts(shape, options)
        specs = (self._weights if whole is None else scheme.experts(whole, options)).weight_specs()
        self._shards = Shards(specs, self._weights.weight_specs(), lambda module: cut) if cut else Shards(specs)

    @property
    def separate(self) -> SeparateExperts | None:
        """The products of single experts; None: the weights of the experts do not lie apart."""
        return self._weights if isinstance(self._weights, SeparateExperts) else None

    @property
    def adaptable(self) -> AdaptableExperts | None:
        """The products of all experts with adapters' updates; None: the form of the weights does not take updates."""
        return self._weights if isinstance(self._weights, AdaptableExperts) else None

    def weight_specs(self) -> Iterator[WeightSpec]:
        yield from self._shards.specs

    def load_weights(self, checkpoint: Checkpoint) -> None:
        self._weights.load(self._shards.of(checkpoint))

    def __call__(self, x: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
        """Compute the experts' weighted sum: x [tokens, hidden] → [tokens, hidden].

        Args:
            numbers, weights: [tokens, chosen], each token's experts and their weights.
        """
        return self._weights.multiply(x, numbers, weights)
