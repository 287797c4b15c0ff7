"""Causal convolution of each channel over a few tokens, whose state is the tokens before."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.compute.kernels.reference.state_inputs import StateRows, check_states


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    rows: StateRows,
    out: Tensor,
    *,
    silu: bool,
    before: Tensor | None = None,
    after: Tensor | None = None,
) -> None:
    """Write silu(Σ weight[i] · x[token - k + 1 + i] + bias) to out, computed in fp32 and rounded once.

    Of each row, the last k - 1 inputs replace those in its state, which come before the row's first token.

    Args:
        x: [tokens, channels]; rows may lie in a wider tensor.
        weight: [k, channels], of the oldest token first.
        bias: [channels]; None: nothing is added.
        state: [states, k - 1, channels], of the oldest token first.
        rows: The rows, and the state of each.
        out: [tokens, channels], apart from x.
        silu: Whether the sum goes through silu.
        before: [tokens, channels], which multiplies the input; the product is rounded. None: nothing does.
        after: [tokens, channels], which multiplies the output. None: nothing does.
    """
    check_states(rows, state)
    u = x.clone() if before is None else before * x
    starts, wide = rows.starts.tolist(), weight.float()
    for own, first, end in zip(rows.states.tolist(), starts[:-1], starts[1:], strict=True):
        if first == end:
            continue
        whole = torch.cat((state[own], u[first:end]))  # [k - 1 + tokens of the row, channels]
        y = (whole.unfold(0, len(weight), 1).float() * wide.T).sum(-1)
        y = y if bias is None else y + bias.float()
        y = F.silu(y) if silu else y
        out[first:end] = y if after is None else y * after[first:end].float()
        state[own] = whole[end - first :]
