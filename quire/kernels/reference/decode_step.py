"""Attention of steps in which every row has one token: from what was projected to what comes out."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.reference.paged import rotate_and_store
from quire.kernels.reference.paged_rows import Partials, attend_pieces


def rotate_and_attend(
    qkv: Tensor,
    norm: Tensor | None,
    eps: float,
    cos: Tensor | None,
    sin: Tensor | None,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    pieces: Tensor,
    partials: Partials,
    out: Tensor,
    scale: float,
    cap: float | None = None,
) -> None:
    """`rotate_and_store`, then `attend_pieces`.

    No row sees what another one's token of this step left in the cache.

    Args:
        qkv, norm, eps, cos, sin, keys, values: See rotate_and_store. Each token that no piece names is left alone.
        table, pieces, partials, out, scale, cap: See attend_pieces. A row's token is the last that its pieces have, and
            its key and value are stored there.
    """
    block_size = keys.shape[1]
    last = [piece for number, piece in enumerate(pieces.tolist()) if piece[6] and number == piece[5] + piece[6] - 1]
    tokens, slots, ends = (torch.tensor([piece[i] for piece in last], device=qkv.device) for i in (0, 1, 3))
    positions = ends - 1
    places = table[slots, positions // block_size] * block_size + positions % block_size
    q = torch.empty_like(out)
    turned = q[tokens]
    own_cos, own_sin = (None if angle is None else angle[tokens] for angle in (cos, sin))
    rotate_and_store(qkv[tokens], norm, eps, own_cos, own_sin, keys, values, places, turned)
    q[tokens] = turned
    attend_pieces(q, keys, values, table, pieces, partials, out, scale, cap)
