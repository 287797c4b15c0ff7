"""Root mean square norms and layer norms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.compute.collectives.collectives import Norms, norms_of
from quire.compute.collectives.delta import Delta, total_of
from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.quantized_rows import Rows
from quire.models.quantization.scheme import RowForm
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.tensor_options import TensorOptions


@dataclass(frozen=True)
class RMS:
    """A kind of root mean square norm.

    Attributes:
        eps: Added to the mean square.
        unit_offset: Whether weights are stored minus one, and applied in fp32.
    """

    eps: float
    unit_offset: bool = False


class RMSNorm:
    """Root mean square norm, with the residual addition before it.

    Args:
        names: The names of the checkpoint's modules, each with the number of heads that its weight is for. The norm of
            the stream has one name, with 0 heads.
        width: The number of elements that are normed together.
        kind: The norm's epsilon, and how its weights are stored.
        options: The device and dtype of the weights.
        form: The form of quantized rows that the next layer takes and `rows` makes; None: dense rows only.

    Attributes:
        weight: The loaded weight, [width] or [heads, width].
        eps: Added to the mean square.
    """

    def __init__(
        self,
        names: tuple[tuple[str, int], ...],
        width: int,
        kind: RMS,
        options: TensorOptions,
        form: RowForm | None = None,
    ) -> None:
        self._names = names
        self._width = width
        self._kind = kind
        self._options = options
        self.eps = kind.eps
        self._form = form
        self._norms = norms_of(options.device.type)
        self.weight: Tensor

    def weight_specs(self) -> Iterator[WeightSpec]:
        for name, _ in self._names:
            yield WeightSpec(f"{name}.weight", (self._width,))

    def load_weights(self, checkpoint: Checkpoint) -> None:
        dtype = torch.float32 if self._kind.unit_offset else self._options.dtype
        parts = []
        for name, heads in self._names:
            weight = torch.empty(self._width, dtype=self._options.dtype, device=self._options.device)
            checkpoint.read(f"{name}.weight", weight)
            weight = weight.to(dtype) + 1 if self._kind.unit_offset else weight
            parts.append(weight.expand(heads, -1) if heads else weight)
        self.weight = torch.cat(parts)  # [width], or [heads, width]

    def __call__(self, x: Delta, delta: Delta | None = None) -> Tensor:
        """Add `delta` to x in place and return the norm of x; all [tokens, width] or [tokens, heads, width]."""
        x = total_of(x)
        norms, added = self._norms_for(delta)
        out = x.new_empty(x.shape)
        norms.rms_norm(x, self.weight, self.eps, out, added)
        return out

    def rows(self, x: Tensor, delta: Delta | None) -> Rows:
        """Add `delta` to x [tokens, width] in place and return the norm of x in the form that the next layer takes."""
        if self._form is None or x.shape[0] <= self._form.dense_up_to:
            return self(x, delta)
        norms, added = self._norms_for(delta)
        return norms.rms_norm_quantized(x, self.weight, self.eps, self._form.dtype, added)

    def _norms_for(self, delta: Delta | None) -> tuple[Norms, Tensor | None]:
        """Return the kernels that add `delta` and norm, and the tensor to pass them as delta."""
        return (self._norms, delta) if delta is None or isinstance(delta, Tensor) else delta.for_norms(self._norms)


class LayerNorm:
    """Layer norm with a bias, with the residual addition before it."""

    def __init__(self, name: str, width: int, eps: float, options: TensorOptions) -> None:
        self._specs = (WeightSpec(f"{name}.weight", (width,)), WeightSpec(f"{name}.bias", (width,)))
        self._eps = eps
        self._options = options
        self._layer_norm = kernel("layer_norm", options.device.type)
        self._weight: Tensor
        self._bias: Tensor

    def weight_specs(self) -> Iterator[WeightSpec]:
        yield from self._specs

    def load_weights(self, checkpoint: Checkpoint) -> None:
        self._weight, self._bias = (
            torch.empty(spec.shape, dtype=self._options.dtype, device=self._options.device) for spec in self._specs
        )
        for spec, part in zip(self._specs, (self._weight, self._bias), strict=True):
            checkpoint.read(spec.name, part)

    def __call__(self, x: Tensor, delta: Delta | None = None) -> Tensor:
        """Add `delta` to x in place and return the norm of x; all [tokens, width]."""
        out, added = torch.empty_like(x), None if delta is None else total_of(delta)
        self._layer_norm(x, self._weight, self._bias, self._eps, out, added)
        return out
