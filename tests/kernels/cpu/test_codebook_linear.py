"""mxfp4 is multiplied in integers as the reference multiplies it: odd sizes, all codes, extreme scales."""

from __future__ import annotations

import pytest
import torch

from quire.compute.kernels.cpu.codebook_linear import codebook_linear, codebook_linear_silu_and_mul, pack_codebook
from quire.compute.kernels.reference import linear as reference
from quire.compute.kernels.reference.gguf_blocks import BlockWeight

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}

pytestmark = pytest.mark.usefixtures("instructions")


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("rows", "outputs", "columns"), [(1, 16, 32), (3, 50, 96), (40, 64, 320), (9, 96, 2880)])
@pytest.mark.parametrize("exponent", [110, 0, 200])
def test_products(rows: int, outputs: int, columns: int, exponent: int, dtype: torch.dtype, instructions: str) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (outputs, columns), dtype=torch.uint8, generator=generator)
    most = torch.randint(exponent, exponent + 12, (outputs, columns // 32), dtype=torch.uint8, generator=generator)
    scales = most.view(torch.float8_e8m0fnu)
    x = (torch.randn(rows, columns, generator=generator) / columns**0.5).to(dtype)
    bias = None if exponent != 110 else torch.randn(outputs, generator=generator).to(dtype)
    weight = pack_codebook(codes, scales, None, "e2m1", 32)
    assert isinstance(weight, BlockWeight) == (instructions != "none")
    exact = reference.pack_codebook(codes, scales, None, "e2m1", 32).dense().double()
    expected = x.double() @ exact.T + (0 if bias is None else bias.double())
    found = codebook_linear(x, weight, bias).double()
    assert (found - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max() + 1e-38
    if exponent == 110 and outputs % 2 == 0:
        gate, up = expected.chunk(2, 1)
        out = torch.empty((rows, outputs // 2), dtype=dtype)
        codebook_linear_silu_and_mul(x, weight, bias, out)
        gated = torch.nn.functional.silu(gate) * up
        assert (out.double() - gated).abs().max() <= 3 * TOLERANCE[dtype] * gated.abs().max()


def test_other_codes_keep_the_form_of_the_reference() -> None:
    codes, scales = torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 1)
    assert not isinstance(pack_codebook(codes, scales, None, "nf4", 64), BlockWeight)
