"""The seam between a model and the files its weights come from: named tensors of declared shapes, read by windows.

`check` compares everything a model needs with what the files declare, before a byte of weights is allocated. Knows
nothing about file formats or architectures.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from quire.errors import CheckpointError
from quire.gguf.tensor_types import QUANTIZED

if TYPE_CHECKING:
    from torch import Tensor

READABLE_DTYPES = ("F64", "F32", "F16", "BF16", *QUANTIZED)
"""Stored dtypes that are converted on load; GGUF's are dequantized. All others are read as they are, or not at all."""
_SHOWN = 8
_BARE = {"embed_tokens.weight": "model.", "wte.weight": "transformer."}
"""By a name that a bare decoder's checkpoint has, the prefix that its names lack."""
_HARMLESS = re.compile(r"\.rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$|^lm_head\.weight$|\.[kv]_scale$")
"""Tensors that checkpoints carry and no model reads: old ones' frequencies and causal masks, a tied one's second head,
scales of a quantized KV cache, which --kv-cache-dtype auto does without."""


@dataclass(frozen=True)
class DummyValues:
    """What a tensor is filled with where there is no checkpoint: products of codes and scales are about ±1e-3.

    Attributes:
        kind: `values`: uniform in ±1e-3, or random bits for what is not converted on load. `scales`: of codes up to
            `size`. `groups`: numbers of groups of `size`.
        size: See there.
    """

    kind: Literal["values", "scales", "groups"] = "values"
    size: float = 1


@dataclass(frozen=True)
class WeightSpec:
    """One tensor that a model reads.

    Attributes:
        dtypes: What it may be stored as, in safetensors' or GGUF's words.
        optional: It may be missing.
        any_rank: Dimensions of one may be left out or added.
        dummy: What stands for it without a checkpoint.
        divisible: Whether each rank may have a part of it. Not so where values count from the tensor's beginning.
    """

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = READABLE_DTYPES
    optional: bool = False
    any_rank: bool = False
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
        """What there is, from the files' headers alone."""
        ...

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        """Copy the window of `out`'s shape that begins at `start` (default: the origin) into `out`.

        READABLE_DTYPES are converted to `out`'s dtype; with any other stored dtype, `out` has the same.
        Safe to call from several threads. A tensor-parallel worker reads its part this way.
        """
        ...

    def close(self) -> None:
        """Let go of the files."""
        ...


class WithoutPrefix:
    """A checkpoint of the bare decoder, saved without the prefix (`model.`) in front of its names."""

    def __init__(self, inner: Checkpoint, prefix: str) -> None:
        self._inner = inner
        self._prefix = prefix

    def contents(self) -> dict[str, StoredTensor]:
        """The inner contents, with the prefix."""
        return {self._outer_name(name): stored for name, stored in self._inner.contents().items()}

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        """Read from the inner checkpoint."""
        self._inner.read(name.removeprefix(self._prefix), out, start)

    def close(self) -> None:
        """Close the inner checkpoint."""
        self._inner.close()

    def _outer_name(self, name: str) -> str:
        return name if name.startswith("lm_head.") else self._prefix + name


class StackedExperts:
    """A checkpoint whose experts are stacked as transformers 5 holds them, under the names of single experts.

    `….experts.gate_up_proj` [experts, 2 · width, hidden] and `….experts.down_proj` [experts, hidden, width] are seen
    as `….experts.{number}.gate_proj.weight` and so on.
    """

    _STACKED = re.compile(r"^(.+\.experts\.)(gate_up|down)_proj$")
    _SINGLE = re.compile(r"^(.+\.experts\.)(\d+)\.(gate|up|down)_proj\.weight$")

    def __init__(self, inner: Checkpoint) -> None:
        self._inner = inner

    @classmethod
    def has_stacked_experts(cls, names: Iterable[str]) -> bool:
        """Whether a checkpoint with these names has any."""
        return any(cls._STACKED.match(name) for name in names)

    def contents(self) -> dict[str, StoredTensor]:
        """The inner contents, with every expert on its own."""
        contents: dict[str, StoredTensor] = {}
        for name, stored in self._inner.contents().items():
            stacked = self._STACKED.match(name)
            if stacked is None or len(stored.shape) != 3:
                contents[name] = stored
                continue
            count, rows, columns = stored.shape
            parts = ("gate", "up") if stacked[2] == "gate_up" else ("down",)
            for number in range(count):
                for part in parts:
                    single = f"{stacked[1]}{number}.{part}_proj.weight"
                    contents[single] = StoredTensor((rows // len(parts), columns), stored.dtype)
        return contents

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        """Read a single expert's part of the stack."""
        single = self._SINGLE.match(name)
        if single is None:
            self._inner.read(name, out, start)
            return
        stack = f"{single[1]}{'down' if single[3] == 'down' else 'gate_up'}_proj"
        row, column = start or (0, 0)
        if single[3] == "up":
            row += self._inner.contents()[stack].shape[1] // 2
        self._inner.read(stack, out.unsqueeze(0), (int(single[2]), row, column))

    def close(self) -> None:
        """Close the inner checkpoint."""
        self._inner.close()


def with_standard_names(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint under the names that models use, whichever of the published customs its files follow."""
    names = checkpoint.contents()
    for bare, prefix in _BARE.items():
        if bare in names and prefix + bare not in names:
            checkpoint = WithoutPrefix(checkpoint, prefix)
    return StackedExperts(checkpoint) if StackedExperts.has_stacked_experts(names) else checkpoint


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
        elif stored.shape != spec.shape and not (spec.any_rank and _core(stored.shape) == _core(spec.shape)):
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


def _core(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)
