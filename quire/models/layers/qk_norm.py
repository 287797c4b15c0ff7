"""Norms of queries and keys, whose arithmetic is part of the op that rotates and stores them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.compute.collectives.collectives import Collectives
from quire.compute.kernels.dispatch import kernel
from quire.compute.mesh import Mesh, Span
from quire.models.layer_spec import QKNormSpec
from quire.models.layers.norm import RMS
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.tensor_options import TensorOptions


class QKNorm:
    """The norms of a layer's queries and keys.

    Args:
        names: The names of the checkpoint's modules, of queries and of keys.
        heads: The numbers of query heads and KV heads of the undivided layer; without the latter, keys are another
            layer's.
        width: The width of a head.
        spec: The kind of the norms.
        kind: The epsilon, and how weights are stored.
        options: The device and dtype of the weights.
        mesh: This rank's place among the ranks that divide the layer.
        collectives: Operations over these ranks.

    Attributes:
        weight, bias: [heads + kv_heads, width] of this rank; the bias is None if there is none.
        eps: Added to the mean square or the variance.
        whole: Whether all heads are normed together.
    """

    def __init__(
        self,
        names: tuple[str, str],
        heads: tuple[int, ...],
        width: int,
        spec: QKNormSpec,
        kind: RMS,
        options: TensorOptions,
        mesh: Mesh,
        collectives: Collectives,
    ) -> None:
        self._names = names[: len(heads)]
        self._heads = heads
        self._width = width
        self._spec = spec
        self._kind = kind
        self._options = options
        self._mesh = mesh
        self._collectives = collectives
        self._qk_mean_squares = kernel("qk_mean_squares", options.device.type)
        self.eps = kind.eps
        self.whole = spec.whole
        self.weight: Tensor
        self.bias: Tensor | None = None

    def weight_specs(self) -> Iterator[WeightSpec]:
        for suffix in self._suffixes():
            for name, heads in zip(self._names, self._heads, strict=True):
                match self._spec.weights:
                    case "shared":
                        yield WeightSpec(f"{name}.{suffix}", (self._width,))
                    case "by head":
                        yield WeightSpec(f"{name}.{suffix}", self._shape(heads))
                    case "by module":
                        for head in range(heads):
                            yield WeightSpec(f"{name}.norms.{head}.{suffix}", (self._width,))

    def load_weights(self, checkpoint: Checkpoint) -> None:
        """Read this rank's weights; if none are stored, they are ones."""
        self.weight = torch.cat([self._read(checkpoint, number, "weight") for number in range(len(self._heads))])
        if self._kind.unit_offset:
            self.weight = self.weight.float() + 1
        if self._spec.bias:
            self.bias = torch.cat([self._read(checkpoint, number, "bias") for number in range(len(self._heads))])

    def mean_squares(self, qkv: Tensor) -> Tensor:
        """Return the mean squares [tokens, 2] of all ranks' queries and keys; qkv is [tokens, heads, width]."""
        query, kv = (self._mesh.part(heads).count for heads in self._heads)
        out = qkv.new_empty((len(qkv), 2), dtype=torch.float32)
        self._qk_mean_squares(qkv, query, kv, self._mesh.tp, out)
        if self._mesh.tp > 1:
            self._collectives.all_reduce(out)
        return out

    def _suffixes(self) -> tuple[str, ...]:
        return () if self._spec.weights == "none" else ("weight", "bias") if self._spec.bias else ("weight",)

    def _shape(self, heads: int) -> tuple[int, ...]:
        return (heads * self._width,) if self._spec.whole else (heads, self._width)

    def _read(self, checkpoint: Checkpoint, number: int, suffix: str) -> Tensor:
        """Read what this rank has of the queries' norms (0) or of the keys' (1): [heads, width]."""
        own, name = self._mesh.part(self._heads[number]), f"{self._names[number]}.{suffix}"
        out = torch.ones((own.count, self._width), dtype=self._options.dtype, device=self._options.device)
        match self._spec.weights:
            case "shared":
                checkpoint.read(name, out[0])
                out = out[:1].expand(own.count, -1)
            case "by head":
                self._read_heads(checkpoint, name, own, out)
            case "by module":
                for row in range(own.count):
                    checkpoint.read(f"{self._names[number]}.norms.{own.start + row}.{suffix}", out[row])
        return out

    def _read_heads(self, checkpoint: Checkpoint, name: str, own: Span, out: Tensor) -> None:
        if self._spec.whole:
            checkpoint.read(name, out.view(-1), [own.start * self._width])
        else:
            checkpoint.read(name, out, [own.start, 0])
