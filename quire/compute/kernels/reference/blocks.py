"""Whole blocks of the KV cache, of all layers at once."""

from __future__ import annotations

from torch import Tensor


def move_blocks(source: Tensor, origins: Tensor | None, target: Tensor, goals: Tensor | None) -> None:
    """target[goals] = source[origins].

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
