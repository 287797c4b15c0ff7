"""What a draft head reads of a model: its residual streams, kept by token, and logits of a part of the vocabulary."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def copy_stream(x: Tensor, delta: Tensor | None, out: Tensor) -> None:
    """out = x + delta.

    Args:
        x: [tokens, width].
        delta: The same; None: nothing is added.
        out: The same, of the same dtype; may be some columns of a wider tensor.
    """
    if delta is None:
        out.copy_(x)
    else:
        torch.add(x, delta, out=out)


def put_rows(x: Tensor, rows: Tensor, out: Tensor) -> None:
    """out[rows] = x. Of equal rows, one stays.

    Args:
        x: [m, width].
        rows: [m] int64.
        out: [n, width], of the same dtype.
    """
    out.index_copy_(0, rows, x)


def state_rows(token_ids: Tensor, places: Tensor, slots: Tensor, first: int, out: Tensor) -> None:
    """out = the rows of the states that tokens are read with: `places`, or `first` + slot where the token is the one
    that its slot sampled last.

    Args:
        token_ids: [tokens] int64 as a plan names them; -1: the slot's last one.
        places: [tokens] int64.
        slots: [tokens] int64.
        first: The row of slot 0.
        out: [tokens] int64.
    """
    torch.where(token_ids == -1, slots + first, places, out=out)


def spread_columns(x: Tensor, columns: Tensor, out: Tensor) -> None:
    """out[:, columns] = x, and minus infinity elsewhere.

    Args:
        x: [n, width].
        columns: [width] int64, each once.
        out: [n, wide], of the same dtype.
    """
    out.fill_(-math.inf)
    out.index_copy_(1, columns, x)
