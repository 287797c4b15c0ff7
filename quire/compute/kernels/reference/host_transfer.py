"""What a step takes from the host's memory, and what it leaves there."""

from __future__ import annotations

from torch import Tensor


def copy_inputs_from_host(buffers: Tensor, turn: Tensor, out: Tensor) -> None:
    """Bring what the host has laid for this step, and count the step.

    Args:
        buffers: [number, capacity] int64, the host's, one step's after another's.
        turn: [any] int64, all the same: how many steps have fetched before; changed.
        out: [entries] int64 out, the first of the buffer whose turn it is.
    """
    number = len(buffers)
    out.copy_(buffers[int(turn[0]) % number, : len(out)])
    turn.add_(1)


def copy_outputs_to_host(outputs: Tensor, buffers: Tensor, turn: Tensor) -> None:
    """Leave outputs with the host, in the buffer of the step that fetched last.

    Args:
        outputs: [entries] int64.
        buffers: [number, entries] int64, the host's; one is changed.
        turn: See `copy_inputs_from_host`.
    """
    buffers[(int(turn[0]) - 1) % len(buffers)] = outputs
