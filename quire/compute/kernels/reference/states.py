"""Ops that draft heads need: a model's residual streams, kept by token, and logits of a part of the vocabulary."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def copy_stream(x: Tensor, delta: Tensor | None, out: Tensor) -> None:
    """Write x + delta to out.

    Args:
        x, delta: [tokens, width]; delta None: nothing is added.
        out: [tokens, width], of the same dtype; may be some columns of a wider tensor.
    """
    if delta is None:
        out.copy_(x)
    else:
        torch.add(x, delta, out=out)


def multiply(x: Tensor, factor: float) -> None:
    """Multiply x [rows, width] by a factor, in place."""
    x.mul_(factor)


def put_rows(x: Tensor, rows: Tensor, out: Tensor) -> None:
    """Write x [m, width] to out[rows], with rows [m] int64 and out [n, width]. Of equal rows, one stays."""
    out.index_copy_(0, rows, x)


def state_rows(token_ids: Tensor, places: Tensor, slots: Tensor, first: int, out: Tensor) -> None:
    """Write the row of the states that each token is read with.

    The row is `places`, or `first` + slot where the token is the one that its slot sampled last.

    Args:
        token_ids: [tokens] int64 as a plan names them; -1: the slot's last one.
        places, slots: [tokens] int64.
        first: The row of slot 0.
        out: [tokens] int64.
    """
    torch.where(token_ids == -1, slots + first, places, out=out)


def spread_columns(x: Tensor, columns: Tensor, out: Tensor) -> None:
    """Write x [n, width] to out[:, columns], and minus infinity elsewhere.

    Each of the columns [width] int64 is different; out is [n, wide], of the same dtype.
    """
    out.fill_(-math.inf)
    out.index_copy_(1, columns, x)
