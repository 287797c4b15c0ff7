"""Matrix products on a device's own layout equal the plain one."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cpu import linear as packed
from quire.kernels.reference import linear as plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 3, 16, 70])
@torch.inference_mode()
def test_packed_equals_plain(dtype: torch.dtype, bias: bool, tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 36, generator=generator).to(dtype)
    x = torch.randn(tokens, 36, generator=generator).to(dtype)
    b = torch.randn(50, generator=generator).to(dtype) if bias else None
    expected = plain.linear(x, plain.pack_linear(weight), b)
    found = packed.linear(x, packed.pack_linear(weight.clone()), b)
    torch.testing.assert_close(found, expected, rtol=2e-2 if dtype != torch.float32 else 1e-4, atol=1e-4)
