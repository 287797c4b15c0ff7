"""Blocks of GGUF's types stand for the weights that the `gguf` package reads in them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.compute.gguf.tensor_types import NONLINEAR, QUANTIZED
from quire.compute.kernels.reference.gguf_blocks import dequantize, unpack
from tests.gguf import made


@pytest.mark.parametrize("name", QUANTIZED)
def test_dequantized_blocks_are_the_packages(name: str) -> None:
    blocks = made.random_blocks(name, 5, 512)
    ours = dequantize(torch.from_numpy(blocks), name).numpy()
    np.testing.assert_array_equal(ours, made.values(blocks, name))


@pytest.mark.parametrize("name", QUANTIZED)
def test_codes_fit_into_the_bits_that_they_are_kept_in(name: str) -> None:
    codes = unpack(torch.from_numpy(made.random_blocks(name, 8, 1024)), name).codes
    form = QUANTIZED[name]
    assert codes.dtype == (torch.int8 if form.bits == 8 else torch.uint8)
    assert form.bits == 8 or int(codes.max()) < 1 << form.bits


def test_every_type_that_the_package_calls_by_these_names_has_its_size() -> None:
    import gguf

    for form in QUANTIZED.values():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[form.name]] == (form.block, form.block_bytes)
    assert len(NONLINEAR) == 16
