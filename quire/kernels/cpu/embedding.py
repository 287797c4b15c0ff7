"""Embeddings from a weight that the head multiplies with as well, so that it exists once."""

from __future__ import annotations

from torch import Tensor

from quire.kernels.cpu.library import library
from quire.kernels.cpu.linear import PackedWeight, pack_linear
from quire.kernels.reference import embedding as reference


def pack_tied(weight: Tensor) -> Tensor | PackedWeight:
    """The weight [vocab_size, width] as both `embed` and `linear` take it; as it is where our kernels do not serve."""
    kernels = library()
    if kernels is None or not kernels.serves(weight):
        return weight
    return pack_linear(weight)


def embed(tokens: Tensor, weight: Tensor | PackedWeight, scale: float | None, out: Tensor) -> None:
    """Arguments as in reference/embedding.py; the weight may be packed."""
    if not isinstance(weight, PackedWeight):
        reference.embed(tokens, weight, scale, out)
        return
    assert tokens.is_contiguous() and out.is_contiguous() and out.dtype == weight.data.dtype
    weight.library(
        "embed",
        out.dtype,
        tokens.data_ptr(),
        len(tokens),
        weight.data.data_ptr(),
        weight.columns,
        out.data_ptr(),
    )
    if scale is not None:
        out.mul_(scale)
