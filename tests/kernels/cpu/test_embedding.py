"""One weight for embeddings and head."""

from __future__ import annotations

import pytest
import torch

from quire.compute.kernels.cpu.embedding import embed, pack_tied
from quire.compute.kernels.cpu.linear import linear

pytestmark = pytest.mark.usefixtures("instructions")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 33])
@pytest.mark.parametrize("scale", [None, 3.0])
def test_rows_and_products_of_one_weight(dtype: torch.dtype, width: int, scale: float | None) -> None:
    weight = torch.randn(200, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    own, tokens = pack_tied(weight.clone()), torch.tensor([0, 199, 63, 64, 63])
    out = torch.empty(5, width, dtype=dtype)
    embed(tokens, own, scale, out)
    rows = weight[tokens]
    assert torch.equal(out, rows if scale is None else rows * scale)
    torch.testing.assert_close(linear(rows, own, None), rows @ weight.T, rtol=2e-2, atol=2e-2)
