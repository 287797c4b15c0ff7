"""A draft head's checkpoint under standard names, whichever of the published customs its files follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.weights.checkpoint import Checkpoint, StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

FUSION = "fc"
"""The product that makes one state of a model's streams. It is computed with the model, all else with the head."""
_NOT_READ = ("t2d",)
"""It says the same as d2t."""


class HeadNames:
    """A part of a head's checkpoint. `layers.0`, as in vLLM's, is `midlayer`, as in those of EAGLE's authors.

    Args:
        inner: The files.
        fusion: Whether the part is FUSION, or all else.
    """

    def __init__(self, inner: Checkpoint, fusion: bool) -> None:
        self._inner = inner
        names = {_standard(name): name for name in inner.contents()}
        self._names = {
            name: stored
            for name, stored in names.items()
            if name not in _NOT_READ and name.startswith(f"{FUSION}.") == fusion
        }

    def contents(self) -> dict[str, StoredTensor]:
        """Of this part."""
        stored = self._inner.contents()
        return {name: stored[inner] for name, inner in self._names.items()}

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        """Read from the inner checkpoint."""
        self._inner.read(self._names[name], out, start)

    def close(self) -> None:
        """Close the inner checkpoint."""
        self._inner.close()


def _standard(name: str) -> str:
    name = name.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name
