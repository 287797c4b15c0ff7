"""Gates of attention's output equal their reference."""

from __future__ import annotations

import pytest
import torch

from quire.compute.kernels.cpu.output_gate import gate_heads
from quire.compute.kernels.reference import output_gate as reference

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}

pytestmark = pytest.mark.usefixtures("instructions")


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("activation", ["sigmoid", "softplus"])
@pytest.mark.parametrize("each", [1, 20])
def test_heads_are_gated(each: int, activation: str, dtype: torch.dtype) -> None:
    """By one number a head, or one an element; gates are parts of longer rows, and some are beyond what exp holds."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 20, generator=random).to(dtype)
    wide = 10 * torch.randn(5, 7 + 3 * each, generator=random)
    wide[0, 7], wide[1, 7] = 120.0, -120.0
    gate = wide.to(dtype)[:, 7:].view(5, 3, each)
    expected = x.clone()
    reference.gate_heads(expected, gate, activation)
    gate_heads(x, gate, activation)
    torch.testing.assert_close(x, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
