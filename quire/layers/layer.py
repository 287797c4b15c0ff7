"""What every layer with weights can do, and loading them all: first check every need, then allocate and read.

Layers pull their weights by name; no model has loading code of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from quire.weights.checkpoint import Checkpoint, Need
from quire.weights.progress import CountedReads, ReadingProgress


@dataclass(frozen=True)
class Place:
    """Where a layer's weights live, and as what."""

    device: torch.device
    dtype: torch.dtype


class Layer(Protocol):
    """Something with weights."""

    def needs(self) -> Iterator[Need]:
        """The tensors it reads; asked before anything is allocated."""
        ...

    def pull(self, checkpoint: Checkpoint) -> None:
        """Allocate and read them. Called once, in any thread."""
        ...


def needs_of(layers: Sequence[Layer]) -> list[Need]:
    """Everything that these layers read, in order."""
    return [need for layer in layers for need in layer.needs()]


def pull_all(layers: Sequence[Layer], checkpoint: Checkpoint, threads: int, progress: ReadingProgress) -> None:
    """Let every layer pull its weights, `threads` at a time; when this returns, all have arrived on their device.

    Args:
        layers: Those of a model.
        checkpoint: Has what they need; that must have been checked before.
        threads: How many layers are pulled at a time.
        progress: Advances by the bytes that weights take where they live.
    """
    counted = CountedReads(checkpoint, progress)

    def pull(layer: Layer) -> None:
        with torch.inference_mode():
            layer.pull(counted)

    with ThreadPoolExecutor(threads, "weights") as pool, progress:
        for _ in pool.map(pull, layers):
            pass
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
