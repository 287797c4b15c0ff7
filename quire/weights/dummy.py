"""Weights without a file, for measuring: uniform in ±1e-3, each tensor with its own seed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from quire.weights.checkpoint import StoredTensor, WeightSpec

SPREAD = 1e-3


class DummyCheckpoint:
    """Has exactly what is needed. The same seed and name give the same values, whatever else is read and when."""

    def __init__(self, specs: Iterable[WeightSpec], seed: int) -> None:
        self._contents = {spec.name: StoredTensor(spec.shape, "F32") for spec in specs}
        self._seed = seed

    def contents(self) -> dict[str, StoredTensor]:
        """Every need, as declared."""
        return dict(self._contents)

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        """Draw the tensor; a window shows the same values that the whole tensor would have there."""
        shape = self._contents[name].shape
        digest = hashlib.blake2b(f"{self._seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(out.device).manual_seed(int.from_bytes(digest) >> 1)
        if tuple(out.shape) == shape:
            out.uniform_(-SPREAD, SPREAD, generator=generator)
            return
        whole = torch.empty(shape, dtype=out.dtype, device=out.device)
        whole.uniform_(-SPREAD, SPREAD, generator=generator)
        window = tuple(slice(s, s + n) for s, n in zip(start or [0] * out.dim(), out.shape, strict=True))
        out.copy_(whole[window])

    def close(self) -> None:
        """Nothing is open."""
