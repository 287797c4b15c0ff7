"""How scales of blocks are read."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from quire.compute.kernels.reference.linear import ScaledWeight
from quire.models.quantization.formats import Fp8Format
from quire.models.quantization.scaled import ScaledLinearWeight
from quire.models.quantization.scheme import LinearShape
from quire.models.weights.checkpoint import StoredTensor
from quire.models.weights.tensor_options import TensorOptions


class Made:
    """A checkpoint of one module."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def contents(self) -> dict[str, StoredTensor]:
        return {name: StoredTensor(tuple(tensor.shape), "F32") for name, tensor in self._tensors.items()}

    def read(self, name: str, out: Tensor, start: Sequence[int] | None = None) -> None:
        out.copy_(self._tensors[name])

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("columns", "block"), [(128, (1, 128)), (96, (1, 128)), (256, (128, 128))])
def test_a_single_column_of_blocks_is_scales_of_outputs(columns: int, block: tuple[int, int]) -> None:
    """As a rank's part of a narrow projection has it: kernels know no other meaning of one scale a row."""
    codes = torch.randn(256, columns).to(torch.float8_e4m3fn)
    scales = torch.rand(2, -(-columns // 128)) + 0.5
    form = Fp8Format("block", scale_name="weight_scale_inv")
    read = ScaledLinearWeight(
        form, LinearShape(("m",), (256,), columns), TensorOptions(torch.device("cpu"), torch.float32)
    )
    found = read.read(Made({"m.weight": codes, "m.weight_scale_inv": scales}))
    assert found.block == block
    assert len(found.scales) == 256 // block[0]
    assert torch.equal(found.dense(), ScaledWeight(codes, scales, (128, 128)).dense())
