"""Products with 8-bit codes that have scales: int8 as int8.py has it, or grouped_linear.py where the processor does not
multiply bytes; fp8 as float8.py has it.

grouped_linear.py rounds activations to 16 bits and float8.py not at all, also where a checkpoint would have them in 8:
that is nearer to what the model was, and no slower there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compute.kernels.cpu import blocks, int8
from quire.compute.kernels.cpu.float8 import pack_float8
from quire.compute.kernels.cpu.grouped_linear import RUN, SIGN, pack_integers
from quire.compute.kernels.cpu.library import library
from quire.compute.kernels.reference import scaled_linear as reference
from quire.compute.kernels.reference.gguf_blocks import BlockWeight
from quire.compute.kernels.reference.quantized_rows import Rows
from quire.compute.kernels.reference.scaled_linear import ScaledWeight


def pack_scaled(weight: ScaledWeight) -> ScaledWeight | BlockWeight:
    """The weight as `scaled_linear` wants it; the reference's form where our kernels do not serve it."""
    columns = weight.codes.shape[1]
    kernels = library()
    if kernels is None:
        return weight
    if weight.codes.dtype == torch.float8_e4m3fn:
        return pack_float8(weight)
    if int8.serves(kernels, weight):
        return int8.pack_int8(weight)
    if weight.block != (1, columns) or columns % RUN:
        return weight
    return pack_integers(weight.codes.view(torch.uint8) ^ SIGN, weight.scales, None, 8, columns)


def scaled_linear(x: Rows, weight: ScaledWeight | BlockWeight, bias: Tensor | None) -> Tensor:
    """Arguments as in reference/scaled_linear.py."""
    if isinstance(weight, ScaledWeight):
        return reference.scaled_linear(x, weight, bias)
    y = x.new_empty((x.shape[0], weight.rows))
    blocks.block_linear(_dense(x), weight, bias, y)
    return y


def scaled_linear_silu_and_mul(x: Rows, weight: ScaledWeight | BlockWeight, bias: Tensor | None, out: Tensor) -> None:
    """Arguments as in reference/scaled_linear.py."""
    if isinstance(weight, ScaledWeight):
        reference.scaled_linear_silu_and_mul(x, weight, bias, out)
    else:
        blocks.block_linear_silu_and_mul(_dense(x), weight, bias, out)


def _dense(x: Rows) -> Tensor:
    return x if isinstance(x, Tensor) else x.codes.float() * x.scales
