"""Refuses weights that float16 cannot hold, where weights are converted to float16 as they are read.

Weights stored as bfloat16 or float32 may be larger than float16's largest number, 65,504, and would become infinite.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.models.weights.checkpoint import Checkpoint, ObservedReads

_SHOWN = 3


@contextlib.contextmanager
def refusing_overflow(checkpoint: Checkpoint, dtype: torch.dtype) -> Iterator[Checkpoint]:
    """Yield the checkpoint to read from and, at the end, refuse weights that overflowed in this dtype. Raises
    CheckpointError if some values are larger than float16's largest."""
    if dtype != torch.float16:
        yield checkpoint
        return
    stored = checkpoint.contents()
    largest: list[tuple[str, Tensor]] = []

    def note(name: str, out: Tensor) -> None:
        """Note the least and largest value on the device, without waiting for it."""
        if out.dtype == torch.float16 and stored[name].dtype != "F16" and out.numel():
            largest.append((name, torch.stack(torch.aminmax(out))))

    yield ObservedReads(checkpoint, note)
    _check(largest)


def _check(largest: list[tuple[str, Tensor]]) -> None:
    if not largest:
        return
    infinite = torch.stack([each for _, each in largest]).isinf().any(1).tolist()
    names = sorted({name for (name, _), found in zip(largest, infinite, strict=True) if found})
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise CheckpointError(
            f"{', '.join(names[:_SHOWN])}{more}: values beyond those of float16, whose largest is 65,504. Use "
            "--dtype bfloat16.",
            param="dtype",
        )
