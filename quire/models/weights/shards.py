"""A rank's part of a checkpoint: the tensors of a layer, cut to what the rank computes with.

A layer is divided along its outputs or along its inputs. It is built in the rank's size, and reads through a
`ShardedCheckpoint`, which finds where in the whole tensors its own values lie; so the forms of weights know nothing of
ranks. Every tensor counts outputs and inputs in units of its own (eight to a word, 128 to a scale, or not at all):
comparing what the whole layer and the rank's part of it need tells which dimension is cut, and in what unit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from quire.compute.mesh import Span
from quire.errors import CheckpointError
from quire.models.weights.checkpoint import Checkpoint, StoredTensor, WeightSpec, WrappedCheckpoint

if TYPE_CHECKING:
    from torch import Tensor


class Cut(NamedTuple):
    """A rank's outputs, or inputs, of one of the checkpoint's modules: `spans` of `whole`, side by side."""

    whole: int
    spans: tuple[Span, ...]


class TensorShard(NamedTuple):
    """A rank's part of one tensor, cut along `dimension`: the entries of `spans`, side by side. `place` counts the
    dimensions with more than one entry before it: tensors may be stored without the others."""

    dimension: int
    spans: tuple[Span, ...]
    place: int

    def of(self, dimensions: int, expected: int) -> int:
        """The dimension that is cut in a tensor that is stored with `dimensions`, where `expected` were expected."""
        return self.dimension if dimensions == expected else self.place


class Shards:
    """What a layer needs of a checkpoint, and which part of it is this rank's.

    Args:
        whole: What the undivided layer needs.
        own: What a layer of the rank's size needs: the same tensors, but smaller; None: the layer is undivided.
        cut_of: Returns how the module of this name is divided.
        by_tensor: Whether `cut_of` takes the names of tensors instead.

    Attributes:
        specs: `whole`.

    Raises:
        CheckpointError: A border between ranks lies where the weights' form cannot be divided.
    """

    def __init__(
        self,
        whole: Iterable[WeightSpec],
        own: Iterable[WeightSpec] | None = None,
        cut_of: Callable[[str], Cut] | None = None,
        *,
        by_tensor: bool = False,
    ) -> None:
        self.specs = tuple(whole)
        self._shards: dict[str, tuple[WeightSpec, TensorShard]] = {}
        if own is None or cut_of is None:
            return
        for spec, part in zip(self.specs, own, strict=True):
            assert spec.name == part.name
            name = spec.name if by_tensor else spec.name.rpartition(".")[0]
            if (shard := _shard(spec, part, cut_of(name))) is not None:
                self._shards[spec.name] = spec, shard

    def of(self, checkpoint: Checkpoint) -> Checkpoint:
        """The rank's part of the checkpoint."""
        return ShardedCheckpoint(checkpoint, self._shards) if self._shards else checkpoint


class ShardedCheckpoint(WrappedCheckpoint):
    """A checkpoint some of whose tensors are cut to a rank's part; `shards` has the whole tensors and parts by name."""

    def __init__(self, inner: Checkpoint, shards: dict[str, tuple[WeightSpec, TensorShard]]) -> None:
        super().__init__(inner)
        self._shards = shards

    def contents(self) -> dict[str, StoredTensor]:
        contents = super().contents()
        for name, (spec, shard) in self._shards.items():
            if (stored := contents.get(name)) is not None:
                dimension = shard.of(len(stored.shape), len(spec.shape))
                shape = list(stored.shape)
                shape[dimension] = sum(span.count for span in shard.spans)
                contents[name] = StoredTensor(tuple(shape), stored.dtype)
        return contents

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        if name not in self._shards:
            self._inner.read(name, out, start)
            return
        assert start is None, "a part of a part"
        spec, shard = self._shards[name]
        dimension, at = shard.of(out.dim(), len(spec.shape)), 0
        for span in shard.spans:
            window = [0] * out.dim()
            window[dimension] = span.start
            self._inner.read(name, out.narrow(dimension, at, span.count), window)
            at += span.count
        assert at == out.shape[dimension]


_SCALES_OF_BLOCKS = (".weight_scale_inv", ".weight_scale")
"""Ends of the names of scales, each of which may be for several neighbouring outputs, in the order of the outputs."""


def _reordered(spec: WeightSpec, cut: Cut) -> TensorShard | None:
    """All outputs of a tensor in another order; None: they are in order, or the tensor has none.

    Raises:
        CheckpointError: The weights' form does not say where the outputs are.
    """
    if sum(span.count for span in cut.spans) != cut.whole or len(cut.spans) < 2 or math.prod(spec.shape) == 1:
        return None
    first = spec.shape[0] if spec.shape else 0
    unit = int(first == cut.whole)
    if first and spec.name.endswith(_SCALES_OF_BLOCKS) and cut.whole % first == 0:
        unit = cut.whole // first
    if not unit or any(span.start % unit or span.count % unit for span in cut.spans):
        raise CheckpointError(
            f"{spec.name} {list(spec.shape)}: queries, keys and values are stored head by head, which is not supported "
            "for this form of quantized weights. Use the model's bf16 checkpoint.",
            param="quantization",
        )
    return TensorShard(0, tuple(Span(span.start // unit, span.count // unit) for span in cut.spans), 0)


def _shard(spec: WeightSpec, own: WeightSpec, cut: Cut) -> TensorShard | None:
    """The rank's part of a tensor; None: all of it."""
    different = [number for number, sizes in enumerate(zip(spec.shape, own.shape, strict=True)) if len(set(sizes)) > 1]
    if not different:
        return _reordered(spec, cut)
    assert len(different) == 1, f"{spec.name} is cut in several dimensions: {spec.shape} to {own.shape}"
    (dimension,) = different
    unit, rest = divmod(cut.whole, spec.shape[dimension])
    aligned = not rest and all(span.start % unit == 0 and span.count % unit == 0 for span in cut.spans)
    if not aligned or not spec.divisible or sum(span.count for span in cut.spans) // unit != own.shape[dimension]:
        raise CheckpointError(
            f"{spec.name} {list(spec.shape)} cannot be divided where --tensor-parallel-size divides its layer: groups "
            "and blocks of a quantized weight must end there, and columns must not be reordered (desc_act). Lower it, "
            "or use the model's bf16 checkpoint.",
            param="tensor_parallel_size",
        )
    spans = tuple(Span(span.start // unit, span.count // unit) for span in cut.spans)
    return TensorShard(dimension, spans, sum(size != 1 for size in spec.shape[:dimension]))
