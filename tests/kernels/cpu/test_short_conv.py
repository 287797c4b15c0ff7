"""Short convolutions equal those of transformers, however their tokens are divided over steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.lfm2.modeling_lfm2 import causal_conv1d_fn

from quire.compute.kernels.cpu.short_conv import short_conv
from quire.compute.kernels.reference.state_inputs import StateRows

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
CHANNELS = 37
STEPS = [(5, 1, 1, 9), (1, 1, 2, 1), (1, 30, 1, 1), (4, 1, 1, 1)]
"""Tokens of each of four rows in each step."""

pytestmark = pytest.mark.usefixtures("instructions")


def rows_of(counts: tuple[int, ...]) -> StateRows:
    """Return rows with these numbers of tokens, whose states are not in the order of the rows."""
    return StateRows(torch.tensor([3, 1, 5, 2])[: len(counts)], torch.tensor([0, *counts]).cumsum(0))


def _of_transformers(u: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
    """Return the convolution of whole texts u [tokens, channels]."""
    y = causal_conv1d_fn(u.float().T[None], weight.float().T, None if bias is None else bias.float())[0].T
    return torch.nn.functional.silu(y) if silu else y


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("k", [2, 3, 4, 5])
@pytest.mark.parametrize("gated", [False, True])
def test_rows_continue_from_their_states(k: int, dtype: torch.dtype, *, gated: bool) -> None:
    random = torch.Generator().manual_seed(k)

    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    lengths = [sum(step[row] for step in STEPS) for row in range(4)]
    texts = [some(length, 3 * CHANNELS) for length in lengths]
    weight, bias = some(k, CHANNELS), None if gated else some(CHANNELS)
    state, done, outputs = some(6, k - 1, CHANNELS), [0] * 4, [torch.empty(0, CHANNELS)] * 4
    untouched = state[[0, 4]].clone()
    state[[3, 1, 5, 2]] = 0
    for counts in STEPS:
        rows = rows_of(counts)
        parts = [text[at : at + count] for text, at, count in zip(texts, done, counts, strict=True)]
        before, after, x = torch.cat(parts).split(CHANNELS, 1)
        gates = {"before": before, "after": after} if gated else {}
        out = torch.empty(len(x), CHANNELS, dtype=dtype)
        short_conv(x, weight, bias, state, rows, out, silu=not gated, **gates)
        outputs = [torch.cat(pair) for pair in zip(outputs, out.float().split(counts), strict=True)]
        done = [at + count for at, count in zip(done, counts, strict=True)]
    for own, text, out in zip((3, 1, 5, 2), texts, outputs, strict=True):
        before, after, x = text.split(CHANNELS, 1)
        u = before * x if gated else x
        expected = _of_transformers(u, weight, bias, silu=not gated) * (after.float() if gated else 1)
        torch.testing.assert_close(out, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert torch.equal(state[own], u[1 - k :])
    assert torch.equal(state[[0, 4]], untouched)
