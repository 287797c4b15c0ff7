"""Low-rank updates of rows, by our own kernels: entries are single tokens, in the order of their adapters."""

from __future__ import annotations

from torch import Tensor

from quire.compute.kernels.cpu.activation import silu_and_mul
from quire.compute.kernels.cpu.library import Library, library
from quire.compute.kernels.cpu.linear import PackedWeight, linear
from quire.compute.kernels.cpu.norm import rms_norm
from quire.compute.kernels.reference import lora as reference
from quire.compute.kernels.reference.lora import LowRankWeights, Tiles, lies_beside


def lora_shrink(x: Tensor, weights: LowRankWeights, tiles: Tiles) -> Tensor:
    a, ranks, modules, most = weights.a, weights.ranks, len(weights.rows), weights.b.shape[2]
    if (kernels := _serving(x, weights, tiles)) is None or x.stride(1) != 1:
        return reference.lora_shrink(x, weights, tiles)
    assert a.stride(2) == 1 and a.stride(1) == x.shape[1] == a.shape[2]
    low = x.new_empty((1, len(tiles.slots), modules * most))
    kernels(
        "lora_shrink", x.dtype, x, x.stride(0), x.shape[1], a, a.stride(0), ranks, ranks.stride(0), modules, most,
        tiles.slots, tiles.rows, len(tiles.slots), low,
    )  # fmt: skip
    return low


def linear_and_shrink(
    x: Tensor, packed: Tensor | PackedWeight, bias: Tensor | None, weights: LowRankWeights, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    return linear(x, packed, bias), lora_shrink(x, weights, tiles)


def lora_expand(low: Tensor, weights: LowRankWeights, tiles: Tiles, y: Tensor) -> None:
    b, ranks, scaling = weights.b, weights.ranks, weights.scaling
    if (kernels := _serving(y, weights, tiles)) is None or y.stride(1) != 1:
        reference.lora_expand(low, weights, tiles, y)
        return
    begin, element = 0, y.element_size()
    assert scaling is None or lies_beside(scaling, weights)
    for module, outputs in enumerate(weights.rows):
        kernels(
            "lora_expand", y.dtype, low.data_ptr() + module * b.shape[2] * element, low.shape[2],
            b.data_ptr() + begin * element, b.stride(0), b.stride(2), outputs, ranks, ranks.stride(0), b.shape[2],
            tiles.slots, tiles.rows, len(tiles.slots),
            scaling.factors.data_ptr() + begin * element if scaling else 0,
            scaling.summands.data_ptr() + begin * element if scaling else 0, scaling.used if scaling else 0,
            y.data_ptr() + begin * element, y.stride(0),
        )  # fmt: skip
        begin += outputs


def lora_expand_silu_and_mul(low: Tensor, weights: LowRankWeights, tiles: Tiles, y: Tensor, out: Tensor) -> None:
    lora_expand(low, weights, tiles, y)
    silu_and_mul(y, out)


def lora_rms_norm(
    low: Tensor, weights: LowRankWeights, tiles: Tiles, x: Tensor, weight: Tensor, eps: float, out: Tensor,
    delta: Tensor,
) -> None:  # fmt: skip
    lora_expand(low, weights, tiles, delta)
    rms_norm(x, weight, eps, out, delta)


def _serving(x: Tensor, weights: LowRankWeights, tiles: Tiles) -> Library | None:
    """Return the kernels if outputs of B lie side by side and a tile is a token; otherwise None."""
    kernels = library()
    ours = tiles.rows.shape[1] == 1 and weights.b.stride(1) == 1
    return kernels if kernels is not None and ours and kernels.serves(x, weights.a, weights.b) else None
