"""Where a layer's weights live, in what dtype, and the seam to weights that are kept packed: as a kernel takes them, by
the name of what was packed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, TypeVar

import torch

P = TypeVar("P")


class PackedWeights(Protocol):
    """Entered while weights are loaded."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def get(self, name: str, pack: Callable[[], P]) -> P:
        """What `pack` returns, or the same from an earlier start. Safe to call from several threads.

        Args:
            name: Says what is packed and how; no two calls have the same.
        """
        ...


class PackedAtStart:
    """Nothing is kept: each start packs."""

    def __enter__(self) -> PackedAtStart:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...

    def get(self, name: str, pack: Callable[[], P]) -> P:
        """Pack."""
        return pack()


@dataclass(frozen=True)
class TensorOptions:
    """The device and dtype of a layer's weights, and where they are kept packed."""

    device: torch.device
    dtype: torch.dtype
    packed_weights: PackedWeights = field(default_factory=PackedAtStart)
