"""Refuses weights that float16 cannot hold, where weights are converted to float16 as they are read.

Weights stored as bfloat16 or float32 may be larger than float16's largest number, 65,504, and would become infinite.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from quire.errors import CheckpointError
from quire.models.weights.checkpoint import Checkpoint, StoredTensor

_SHOWN = 3


@contextlib.contextmanager
def refusing_overflow(checkpoint: Checkpoint, dtype: torch.dtype) -> Iterator[Checkpoint]:
    """Yield the checkpoint to read from and, at the end, refuse weights that have overflowed.

    Args:
        checkpoint: What is read from.
        dtype: What weights are converted to; only float16 can overflow.

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
        """List the tensors by name, from the files' headers alone."""
        return self._checkpoint.contents()

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        """Copy the window of `out`'s shape that begins at `start` into `out`, and note whether values overflowed."""
        self._checkpoint.read(name, out, start)
        if out.dtype == torch.float16 and self._stored[name].dtype != "F16" and out.numel():
            self._largest.append((name, torch.stack(torch.aminmax(out))))

    def close(self) -> None:
        """Close the files."""
        self._checkpoint.close()

    def check(self) -> None:
        """Refuse the checkpoint if weights have overflowed.

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
