"""Copies between a step and the host's memory, and moves of blocks of the KV cache."""

from __future__ import annotations

from torch import Tensor


def copy_inputs_from_host(buffers: Tensor, turn: Tensor, out: Tensor) -> None:
    """Copy what the host has prepared for this step, and count the step.

    Args:
        buffers: [number, capacity] int64, the host's buffers, which steps take in turn.
        turn: [any] int64, equal entries: how many steps have copied before; changed.
        out: [entries] int64 out, the first entries of the buffer whose turn it is.
    """
    number = len(buffers)
    out.copy_(buffers[int(turn[0]) % number, : len(out)])
    turn.add_(1)


def copy_outputs_to_host(outputs: Tensor, buffers: Tensor, turn: Tensor) -> None:
    """Copy outputs [entries] int64 to the host's buffer [number, entries] of the step that copied inputs last.

    `turn` is as in `copy_inputs_from_host`, but not changed.
    """
    buffers[(int(turn[0]) - 1) % len(buffers)] = outputs


def move_blocks(source: Tensor, origins: Tensor | None, target: Tensor, goals: Tensor | None) -> None:
    """target[goals] = source[origins]: whole blocks, of all layers at once.

    Args:
        source, target: [blocks, storages, …] of one dtype; they may be one tensor.
        origins, goals: [n] int64 block numbers; one of them may be None, for 0 to n - 1. Goals are different, and no
            goal is an origin where source and target are one tensor.
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
