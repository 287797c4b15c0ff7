"""Weights that are converted to float16 as they are read: which of them it cannot hold.

Stored as bfloat16 or float32 they may be larger than float16's largest number, 65,504, and become infinite.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.weights.checkpoint import Checkpoint, StoredTensor

_SHOWN = 3


@contextlib.contextmanager
def refusing_overflow(checkpoint: Checkpoint, dtype: torch.dtype) -> Iterator[Checkpoint]:
    """The checkpoint to read from; at the end, what has overflowed is refused. Other dtypes than float16 hold all.

    Raises:
        CheckpointError: Some values are larger than float16's largest.
    """
    if dtype != torch.float16:
        yield checkpoint
        return
    watched = _WatchedCheckpoint(checkpoint)
    yield watched
    watched.check()


class _WatchedCheckpoint:
    """A Checkpoint that notes what overflows, on the device and without waiting for it.

    Args:
        checkpoint: What is read from.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._stored = checkpoint.contents()
        self._largest: list[tuple[str, Tensor]] = []

    def contents(self) -> dict[str, StoredTensor]:
        """See Checkpoint."""
        return self._checkpoint.contents()

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        """See Checkpoint."""
        self._checkpoint.read(name, out, start)
        if out.dtype == torch.float16 and self._stored[name].dtype != "F16" and out.numel():
            self._largest.append((name, torch.stack(torch.aminmax(out))))

    def close(self) -> None:
        """See Checkpoint."""
        self._checkpoint.close()

    def check(self) -> None:
        """Refuse what has overflowed.

        Raises:
            CheckpointError: Some values are larger than float16's largest.
        """
        if not self._largest:
            return
        infinite = torch.stack([each for _, each in self._largest]).isinf().any(1).tolist()
        names = sorted({name for (name, _), found in zip(self._largest, infinite, strict=True) if found})
        if names:
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise CheckpointError(
                f"{', '.join(names[:_SHOWN])}{more}: values beyond those of float16, whose largest is 65,504. Use "
                "--dtype bfloat16.",
                param="dtype",
            )
