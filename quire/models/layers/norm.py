"""Root mean square norms and layer norms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.compute.collectives.collectives import Norms, norms_of
from quire.compute.collectives.delta import Delta, added, total_of
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.quantized_rows import Rows, UnnormedRow
from quire.models.layer_spec import NormSpec
from quire.models.quantization.scheme import RowForm
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.tensor_options import TensorOptions


@dataclass(frozen=True)
class RMS:
    """A kind of root mean square norm.

    Attributes:
        eps: Added to the mean square.
        unit_offset: Whether weights are stored minus one, and applied in fp32.
        weight: Whether a weight is stored; otherwise, it is ones.
        tensor: The name of the weight in its module.
        factor: Factor of the weight.
    """

    eps: float
    unit_offset: bool = False
    weight: bool = True
    tensor: str = "weight"
    factor: float = 1.0


class RMSNorm:
    """Root mean square norm, with the residual addition before it.

    Args:
        name: The name of the checkpoint's module.
        width: The number of elements that are normed together.
        kind: The norm's epsilon, and how its weights are stored.
        options: The device and dtype of the weights.
        form: The form of quantized rows that the next layer takes and `rows` makes; None: dense rows only.

    Attributes:
        weight: The loaded weight, [width].
        eps: Added to the mean square.
    """

    def __init__(
        self,
        name: str,
        width: int,
        kind: RMS,
        options: TensorOptions,
        form: RowForm | None = None,
    ) -> None:
        self._name = name
        self._width = width
        self._kind = kind
        self._options = options
        self.eps = kind.eps
        self._form = form
        self._norms = norms_of(options.device.type)
        self.weight: Tensor

    def weight_specs(self) -> Iterator[WeightSpec]:
        if self._kind.weight:
            yield WeightSpec(f"{self._name}.{self._kind.tensor}", (self._width,))

    def load_weights(self, checkpoint: Checkpoint) -> None:
        weight = torch.ones(self._width, dtype=self._options.dtype, device=self._options.device)
        if self._kind.weight:
            checkpoint.read(f"{self._name}.{self._kind.tensor}", weight)
        if self._kind.factor != 1.0:
            weight = weight * self._kind.factor
        self.weight = weight.float() + 1 if self._kind.unit_offset else weight

    def __call__(self, x: Delta, delta: Delta | None = None) -> Tensor:
        """Add `delta` to x in place and return the norm of x; all [tokens, width] or [tokens, heads, width]."""
        x = total_of(x)
        norms, added = self._norms_for(delta)
        out = x.new_empty(x.shape)
        norms.rms_norm(x, self.weight, self.eps, out, added)
        return out

    def rows(self, x: Tensor, delta: Delta | None) -> Rows:
        """Add `delta` to x [tokens, width] in place and return the norm of x in the form that the next layer takes."""
        if self._form is None or self._form.dtype is None or x.shape[0] <= self._form.dense_up_to:
            return self(x, delta)
        norms, added = self._norms_for(delta)
        return norms.rms_norm_quantized(x, self.weight, self.eps, self._form.dtype, added)

    def before(self, x: Tensor, delta: Delta | None) -> Rows:
        """Return what `rows` does, or an UnnormedRow where the next layer norms a single row itself.

        The sum of x and `delta` is then in x, or where `stream_behind` finds it once the layer has run.
        """
        if x.shape[0] == 1 and self._form is not None and self._form.norms_one and isinstance(delta, Tensor | None):
            return UnnormedRow(x, delta, self.weight, self.eps)
        return self.rows(x, delta)

    def _norms_for(self, delta: Delta | None) -> tuple[Norms, Tensor | None]:
        """Return the kernels that add `delta` and norm, and the tensor to pass them as delta."""
        return (self._norms, delta) if delta is None or isinstance(delta, Tensor) else delta.for_norms(self._norms)


def stream_behind(x: Tensor, rows: Rows) -> Tensor:
    """Return the stream whose rows a layer has read: x, to which `RMSNorm.before` has added, or the sum it left out."""
    return rows.stream if isinstance(rows, UnnormedRow) else x


class NoNorm:
    """The residual addition that norms have before them, alone."""

    def rows(self, x: Tensor, delta: Delta | None) -> Rows:
        """Add `delta` to x [tokens, width] in place and return x."""
        return x if delta is None else added(x, total_of(delta))

    before = rows


class LayerNorm:
    """Layer norm, with the residual addition before it.

    Args:
        name: The name of the checkpoint's module.
        width: The number of elements that are normed together.
        kind: The norm's epsilon, and which of weight and bias are stored, and how.
        options: The device and dtype of the weights.
    """

    def __init__(self, name: str, width: int, kind: NormSpec, options: TensorOptions) -> None:
        self._name = name
        self._width = width
        self._kind = kind
        self._eps = kind.eps
        self._options = options
        self._layer_norm = kernel("layer_norm", options.device.type)
        self._weight: Tensor
        self._bias: Tensor

    def weight_specs(self) -> Iterator[WeightSpec]:
        for stored, part in ((self._kind.weight, "weight"), (self._kind.bias, "bias")):
            if stored:
                yield WeightSpec(f"{self._name}.{part}", (self._width,))

    def load_weights(self, checkpoint: Checkpoint) -> None:
        """Read the weight and the bias; one that is not stored becomes ones or zeros."""
        self._weight = torch.ones(self._width, dtype=self._options.dtype, device=self._options.device)
        self._bias = torch.zeros_like(self._weight)
        if self._kind.weight:
            checkpoint.read(f"{self._name}.weight", self._weight)
        if self._kind.unit_offset:
            self._weight = (self._weight.float() + 1).to(self._options.dtype)
        if self._kind.bias:
            checkpoint.read(f"{self._name}.bias", self._bias)

    def __call__(self, x: Delta, delta: Delta | None = None) -> Tensor:
        """Add `delta` to x in place and return the norm of x; all [tokens, width]."""
        x, added = total_of(x), None if delta is None else total_of(delta)
        out = torch.empty_like(x)
        self._layer_norm(x, self._weight, self._bias, self._eps, out, added)
        return out

    def rows(self, x: Tensor, delta: Delta | None) -> Rows:
        return self(x, delta)

    before = rows
