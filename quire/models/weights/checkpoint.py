"""The seam between a model and the files its weights come from: named tensors of declared shapes, read by windows.

`check` compares everything a model needs with what the files declare, before a byte of weights is allocated. Knows
nothing about file formats or architectures.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from quire.compute.gguf.tensor_types import QUANTIZED
from quire.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

SPREAD = 1e-3
"""The largest magnitude of random weights, where there is no checkpoint."""
READABLE_DTYPES = ("F64", "F32", "F16", "BF16", *QUANTIZED)
"""Stored dtypes that are converted on load; GGUF's are dequantized. All others are read as they are, or not at all."""
_SHOWN = 8
_HARMLESS = re.compile(
    r"\.rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|^lm_head\.weight$|\.[kv]_scale$|\bembeddings\.(position|token_type)_ids$"
)
"""Tensors that checkpoints carry and no model reads: frequencies and causal masks of old ones, which are compared as
they are left out (runtime/worker/weight_loading.py), a second head that equals the embedding (`has_own_head`), scales
of a quantized KV cache, which --kv-cache-dtype auto does without, and the numbers of positions of old encoders."""


@dataclass(frozen=True)
class DummyValues:
    """What a tensor is filled with where there is no checkpoint: products of codes and scales are about ±1e-3.

    Kinds are `values`, uniform in ±1e-3, or random bits for what is not converted on load; `scales` of codes up to
    `size`; `exponents`, the same scales as powers of two, stored as e8m0; and `groups`, numbers of groups of `size`.
    """

    kind: Literal["values", "scales", "exponents", "groups"] = "values"
    size: float = 1


@dataclass(frozen=True)
class WeightSpec:
    """One tensor that a model reads.

    Attributes:
        dtypes: The dtypes it may be stored as, by safetensors' or GGUF's names.
        optional: Whether the tensor may be missing.
        any_rank: Whether dimensions of size one may be left out or added.
        any_shape: Whether the file decides its shape.
        dummy: What the tensor is filled with where there is no checkpoint.
        divisible: Whether each rank may have a part of it. False where values count from the tensor's beginning.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = READABLE_DTYPES
    optional: bool = False
    any_rank: bool = False
    any_shape: bool = False
    dummy: DummyValues = DummyValues()
    divisible: bool = True


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as the files declare it; `dtype` in safetensors' words (F32, BF16, …), or in GGUF's (Q4_K)."""

    shape: tuple[int, ...]
    dtype: str


class Checkpoint(Protocol):
    """Named tensors."""

    def contents(self) -> dict[str, StoredTensor]:
        """List the tensors by name, from the files' headers alone."""
        ...

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        """Copy the window of `out`'s shape that begins at `start` (default: the origin) into `out`.

        READABLE_DTYPES are converted to `out`'s dtype; with any other stored dtype, `out` has the same.
        Safe to call from several threads. A tensor-parallel worker reads its part this way.
        """
        ...

    def close(self) -> None: ...


class WrappedCheckpoint:
    """A checkpoint that passes everything on to another one. Subclasses change some of it."""

    def __init__(self, inner: Checkpoint) -> None:
        self._inner = inner

    def contents(self) -> dict[str, StoredTensor]:
        return self._inner.contents()

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        self._inner.read(name, out, start)

    def close(self) -> None:
        self._inner.close()


class ObservedReads(WrappedCheckpoint):
    """A checkpoint that calls `on_read` with the name of each tensor that was read, and the tensor it was read into."""

    def __init__(self, inner: Checkpoint, on_read: Callable[[str, Tensor], None]) -> None:
        super().__init__(inner)
        self._on_read = on_read

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        super().read(name, out, start)
        self._on_read(name, out)


def check_weights(checkpoint: Checkpoint, specs: Iterable[WeightSpec], architecture: str) -> None:
    """Compare what a model needs with what the files declare.

    Raises:
        CheckpointError: A tensor is missing, of another shape or of an unreadable dtype, or the files hold weights
            that this architecture has no place for. The message lists names, expected and found.
    """
    contents = checkpoint.contents()
    wrong, needed = [], set()
    for spec in specs:
        needed.add(spec.name)
        stored = contents.get(spec.name)
        if stored is None:
            if not spec.optional:
                wrong.append(f"{spec.name}: missing, expected {list(spec.shape)}")
        elif not _fits(stored.shape, spec):
            wrong.append(f"{spec.name}: expected {list(spec.shape)}, found {list(stored.shape)}")
        elif stored.dtype not in spec.dtypes:
            wrong.append(f"{spec.name}: dtype {stored.dtype} is not one of {', '.join(spec.dtypes)}")
    for name in sorted(contents.keys() - needed):
        if not _HARMLESS.search(name):
            wrong.append(f"{name}: found {list(contents[name].shape)}, but {architecture} has no such weight")
    if wrong:
        listed = "\n  ".join(wrong[:_SHOWN] + [f"… and {len(wrong) - _SHOWN} more"] * (len(wrong) > _SHOWN))
        raise CheckpointError(
            f"The weights do not match config.json ({len(wrong)} differences):\n  {listed}\n"
            "Download the checkpoint again, or check that config.json belongs to it."
        )


def _fits(shape: tuple[int, ...], spec: WeightSpec) -> bool:
    return spec.any_shape or shape == spec.shape or (spec.any_rank and _core(shape) == _core(spec.shape))


def _core(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
