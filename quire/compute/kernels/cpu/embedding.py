"""What a step begins with: embeddings, of a weight that the head may multiply with as well, and angles."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compute.kernels.cpu.library import library
from quire.compute.kernels.cpu.linear import PackedWeight, pack_linear
from quire.compute.kernels.reference import embedding as reference


def pack_tied(weight: Tensor) -> Tensor | PackedWeight:
    """The weight [vocab_size, width] as both `embed` and `linear` take it; as it is where our kernels do not serve."""
    kernels = library()
    if kernels is None or not kernels.serves(weight):
        return weight
    return pack_linear(weight)


def embed(tokens: Tensor, weight: Tensor | PackedWeight, scale: float | None, out: Tensor) -> None:
    """Arguments as in reference/embedding.py; the weight may be packed."""
    if isinstance(weight, PackedWeight):
        assert tokens.is_contiguous() and out.is_contiguous() and out.dtype == weight.data.dtype
        data, columns, factor = weight.data.data_ptr(), weight.columns, 1.0 if scale is None else scale
        weight.library("embed", out.dtype, tokens.data_ptr(), len(tokens), data, columns, factor, out.data_ptr())
    elif scale is None:
        take_rows(weight, tokens, out)
    else:
        reference.embed(tokens, weight, scale, out)


def local_indices(indices: Tensor, first: int, count: int, out: Tensor) -> None:
    """Arguments as in reference/embedding.py."""
    kernels = library()
    if kernels is None or not (indices.is_contiguous() and out.is_contiguous()):
        reference.local_indices(indices, first, count, out)
        return
    kernels("local_indices", None, indices.data_ptr(), len(indices), first, count, out.data_ptr())


def take_rows(x: Tensor, rows: Tensor, out: Tensor) -> None:
    """Arguments as in reference/embedding.py."""
    kernels = library()
    if kernels is None or not (x.is_contiguous() and rows.is_contiguous() and out.is_contiguous()):
        reference.take_rows(x, rows, out)
        return
    assert x.dtype == out.dtype and rows.dtype == torch.int64
    row_bytes = x.shape[1] * x.element_size()
    kernels("take_rows", None, x.data_ptr(), rows.data_ptr(), len(rows), row_bytes, out.data_ptr())


def angles(positions: Tensor, frequencies: Tensor, scale: float, cos: Tensor, sin: Tensor) -> None:
    """Arguments as in reference/embedding.py."""
    kernels = library()
    whole = all(t.is_contiguous() for t in (positions, frequencies, cos, sin))
    if kernels is None or not whole or not kernels.serves(cos, sin) or frequencies.dtype != torch.float32:
        reference.angles(positions, frequencies, scale, cos, sin)
        return
    tokens, half = cos.shape
    kernels(
        "angles", cos.dtype, positions.data_ptr(), tokens, frequencies.data_ptr(),
        half if frequencies.dim() == 2 else 0, half, scale, cos.data_ptr(), sin.data_ptr(),
    )  # fmt: skip
