"""Random weights for measuring: uniform in ±1e-3 once dequantized, each tensor with its own seed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from quire.models.weights.checkpoint import SPREAD, DummyValues, StoredTensor, WeightSpec

_E8M0_ONE = 127


class DummyCheckpoint:
    """Has exactly the tensors of these specs. The same seed and name always give the same values."""

    def __init__(self, specs: Iterable[WeightSpec], seed: int) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._contents = {
            name: StoredTensor(spec.shape, "F32" if "F32" in spec.dtypes else spec.dtypes[0])
            for name, spec in self._specs.items()
        }
        self._seed = seed

    def contents(self) -> dict[str, StoredTensor]:
        return dict(self._contents)

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        """Draw the tensor; a window has the values that the whole tensor has there."""
        shape = self._contents[name].shape
        digest = hashlib.blake2b(f"{self._seed}:{name}".encode(), digest_size=8).digest()
        generator = torch.Generator(out.device).manual_seed(int.from_bytes(digest) >> 1)
        if tuple(out.shape) == shape:
            _fill(out, self._specs[name].dummy, generator)
            return
        whole = torch.empty(shape, dtype=out.dtype, device=out.device)
        _fill(whole, self._specs[name].dummy, generator)
        window = tuple(slice(s, s + n) for s, n in zip(start or [0] * out.dim(), out.shape, strict=True))
        out.copy_(whole[window])

    def close(self) -> None:
        """Nothing is open."""


def _fill(out: Tensor, dummy: DummyValues, generator: torch.Generator) -> None:
    if dummy.kind == "groups":
        out.copy_(torch.arange(out.numel(), device=out.device) // int(dummy.size))
    elif dummy.kind == "scales":
        wide = torch.empty(out.shape, device=out.device)
        out.copy_(wide.uniform_(0.5 * SPREAD / dummy.size, SPREAD / dummy.size, generator=generator))
    elif dummy.kind == "exponents":
        most = _E8M0_ONE + math.floor(math.log2(SPREAD / dummy.size))
        out.view(torch.uint8).random_(most - 1, most + 1, generator=generator)
    elif out.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        largest = torch.finfo(out.dtype).max
        wide = torch.empty(out.shape, device=out.device)
        out.copy_(wide.uniform_(-largest, largest, generator=generator))
    elif out.dtype.is_floating_point:
        out.uniform_(-SPREAD, SPREAD, generator=generator)
    else:
        span = torch.iinfo(out.dtype)
        out.random_(span.min + (out.dtype == torch.int8), span.max, generator=generator)
