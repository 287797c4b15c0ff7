"""The seam between a model and the files its weights come from: named tensors of declared shapes, read by windows.

`check` compares everything a model needs with what the files declare, before a byte of weights is allocated. Knows
nothing about file formats or architectures.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quire.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

READABLE_DTYPES = ("F64", "F32", "F16", "BF16")
"""Stored dtypes that are converted on load."""
_SHOWN = 8
_HARMLESS = re.compile(r"\.rotary_emb\.inv_freq$|^lm_head\.weight$")
"""Tensors that old or tied checkpoints carry and no model reads."""


@dataclass(frozen=True)
class Need:
    """One tensor that a model reads."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """One tensor as the files declare it; `dtype` in safetensors' words (F32, BF16, …)."""

    shape: tuple[int, ...]
    dtype: str


class Checkpoint(Protocol):
    """Named tensors."""

    def contents(self) -> dict[str, Stored]:
        """What there is, from the files' headers alone."""
        ...

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        """Copy the window of `out`'s shape that begins at `start` (default: the origin) into `out`, in its dtype.

        Safe to call from several threads. A tensor-parallel worker reads its part this way.
        """
        ...

    def close(self) -> None:
        """Let go of the files."""
        ...


class WithoutPrefix:
    """A checkpoint of the bare decoder, saved without the `model.` in front of its names."""

    PREFIX = "model."

    def __init__(self, inner: Checkpoint) -> None:
        self._inner = inner

    def contents(self) -> dict[str, Stored]:
        """The inner contents, with the prefix."""
        return {self._outer_name(name): stored for name, stored in self._inner.contents().items()}

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        """Read from the inner checkpoint."""
        self._inner.read(name.removeprefix(self.PREFIX), out, start)

    def close(self) -> None:
        """Close the inner checkpoint."""
        self._inner.close()

    def _outer_name(self, name: str) -> str:
        return name if name.startswith("lm_head.") else self.PREFIX + name


def with_known_names(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint under the names that models use, whichever of the published customs its files follow."""
    names = checkpoint.contents()
    if "embed_tokens.weight" in names and "model.embed_tokens.weight" not in names:
        return WithoutPrefix(checkpoint)
    return checkpoint


def check(checkpoint: Checkpoint, needs: Iterable[Need], architecture: str) -> None:
    """Compare what a model needs with what the files declare.

    Raises:
        CheckpointError: A tensor is missing, of another shape or of an unreadable dtype, or the files hold weights
            that this architecture has no place for. The message lists names, expected and found.
    """
    contents = checkpoint.contents()
    wrong, needed = [], set()
    for need in needs:
        needed.add(need.name)
        stored = contents.get(need.name)
        if stored is None:
            wrong.append(f"{need.name}: missing, expected {list(need.shape)}")
        elif stored.shape != need.shape:
            wrong.append(f"{need.name}: expected {list(need.shape)}, found {list(stored.shape)}")
        elif stored.dtype not in READABLE_DTYPES:
            wrong.append(f"{need.name}: dtype {stored.dtype} is not one of {', '.join(READABLE_DTYPES)}")
    for name in sorted(contents.keys() - needed):
        if not _HARMLESS.search(name):
            wrong.append(f"{name}: found {list(contents[name].shape)}, but {architecture} has no such weight")
    if wrong:
        listed = "\n  ".join(wrong[:_SHOWN] + [f"… and {len(wrong) - _SHOWN} more"] * (len(wrong) > _SHOWN))
        raise CheckpointError(
            f"The weights do not match config.json ({len(wrong)} differences):\n  {listed}\n"
            "Download the checkpoint again, or check that config.json belongs to it."
        )
