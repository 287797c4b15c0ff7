"""Loads the weights of all layers: each layer loads its own by name, so models have no loading code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import torch

from quire.models.weights.checkpoint import Checkpoint, ObservedReads, WeightSpec
from quire.models.weights.progress import ReadingProgress


class Layer(Protocol):
    """A layer with weights."""

    def weight_specs(self) -> Iterator[WeightSpec]:
        """Yield the tensors that the layer reads. Called before anything is allocated."""
        ...

    def load_weights(self, checkpoint: Checkpoint) -> None:
        """Allocate and read the weights. Called once, in any thread."""
        ...


def weight_specs_of(layers: Sequence[Layer]) -> list[WeightSpec]:
    """Return the specs of all tensors that these layers read, in order."""
    return [spec for layer in layers for spec in layer.weight_specs()]


def load_all_weights(layers: Sequence[Layer], checkpoint: Checkpoint, threads: int, progress: ReadingProgress) -> None:
    """Let every layer load its weights, `threads` layers at a time; on return, all weights are on their device.

    The checkpoint must have been checked before. `progress` counts the bytes that weights take on the device.
    """
    counted = ObservedReads(checkpoint, progress.count)

    def load(layer: Layer) -> None:
        with torch.inference_mode():
            layer.load_weights(counted)

    with ThreadPoolExecutor(threads, "weights") as pool, progress:
        for _ in pool.map(load, layers):
            pass
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
