"""What a step takes from the host's memory, and what it leaves there; and blocks of the KV cache, which come and go."""

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


def move_blocks(source: Tensor, origins: Tensor | None, target: Tensor, goals: Tensor | None) -> None:
    """target[goals] = source[origins]: whole blocks, of all layers at once.

    Args:
        source, target: [blocks, storages, …] of one dtype; they may be the same tensor.
        origins, goals: [n] int64 block numbers; None: 0 to n - 1, for one of them. No goal stands twice, and none is an
            origin where source and target are the same.
    """
    if origins is None:
        assert goals is not None
        moved = source[: len(goals)]
    else:
        moved = source.index_select(0, origins)
    if goals is None:
        target[: len(moved)] = moved
    else:
        target.index_copy_(0, goals, moved)
