"""A checkpoint under the names that models use, whichever of the published customs its files follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.weights.checkpoint import Checkpoint, StoredTensor
from quire.weights.stacked_experts import StackedBlocks, StackedExperts

if TYPE_CHECKING:
    from torch import Tensor

_BARE = {"embed_tokens.weight": "model.", "wte.weight": "transformer."}
"""By a name that a bare decoder's checkpoint has, the prefix that its names lack."""


def with_standard_names(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint under the names that models use, whichever of the published customs its files follow."""
    names = checkpoint.contents()
    for bare, prefix in _BARE.items():
        if bare in names and prefix + bare not in names:
            checkpoint = WithoutPrefix(checkpoint, prefix)
    for stacked in (StackedExperts, StackedBlocks):
        if stacked.has_any(names):
            checkpoint = stacked(checkpoint)
    return checkpoint


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
