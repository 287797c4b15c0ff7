"""Matrix product through oneDNN on weights in its blocked layout.

About twice as fast as a plain weight for 1 to 16 rows, and never slower: a plain one is rearranged at every call.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.reference.activation import silu_and_mul

_ROWS_HINT = 16
"""Number of rows that oneDNN chooses the layout for; any number may be multiplied then."""


def pack_linear(weight: Tensor) -> Tensor:
    """The weight [rows, columns] in oneDNN's layout, or as it is where oneDNN does not serve its dtype."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return weight
    if weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    ):
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        return packed
    return weight


def linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + bias: x [tokens, columns], bias [rows] → [tokens, rows], all of one dtype."""
    if not packed.is_mkldnn:
        return F.linear(x, packed, bias)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return y


def linear_silu_and_mul(x: Tensor, packed: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Arguments as in reference/linear.py."""
    silu_and_mul(linear(x, packed, bias), out)
