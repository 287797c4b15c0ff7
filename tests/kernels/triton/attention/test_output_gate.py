"""Gates of attention's output equal their reference."""

from __future__ import annotations

import pytest
import torch

from quire.compute.kernels.reference import output_gate as reference
from quire.compute.kernels.triton.attention.output_gate import gate_heads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["sigmoid", "softplus"])
@pytest.mark.parametrize("each", [1, 48])
def test_heads_are_gated(each: int, activation: str, dtype: torch.dtype, device: str) -> None:
    """By one number a head, or one an element; gates are parts of longer rows, and some are beyond what exp holds."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(5, 30, 48, generator=random).to(dtype).to(device)
    wide = 10 * torch.randn(5, 7 + 30 * each, generator=random)
    wide[0, 7], wide[1, 7] = 120.0, -120.0
    gate = wide.to(dtype).to(device)[:, 7:].view(5, 30, each)
    expected = x.clone()
    reference.gate_heads(expected, gate, activation)
    gate_heads(x, gate, activation)
    unit = 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(x, expected, rtol=unit, atol=unit)
