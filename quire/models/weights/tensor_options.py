"""Where a layer's weights live, in what dtype, and where they are kept packed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch

P = TypeVar("P")


class PackedWeights(AbstractContextManager[object, None], Protocol):
    """Weights as kernels take them, kept from start to start. Entered while weights are loaded."""

    def get(self, name: str, pack: Callable[[], P]) -> P:
        """Return what `pack` returns, or has returned at an earlier start. `name` says what is packed and how; no two
        calls share a name. Safe to call from several threads."""
        ...


class PackedAtStart(nullcontext[None]):
    """PackedWeights that keeps nothing: each start packs."""

    def get(self, name: str, pack: Callable[[], P]) -> P:
        return pack()


@dataclass(frozen=True)
class TensorOptions:
    """The device and dtype of a layer's weights, and where they are kept packed.

    Attributes:
        many_rows: Whether most steps have many rows, as those of whole texts have: the processor's speed bounds them,
            not that of memory. For a CPU only.
    """

    device: torch.device
    dtype: torch.dtype
    packed_weights: PackedWeights = field(default_factory=PackedAtStart)
    many_rows: bool = False
