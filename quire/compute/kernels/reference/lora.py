"""Low-rank updates of some rows of a product, each by the adapter of its token: y += B A x; DoRA scales y first.

A tile has rows of one adapter, which share a read of its weights ("segmented gather matrix-vector product" of Punica,
Chen et al. 2023). Rows without an adapter are in tiles of their own, or in none, and are not changed. A x is computed
before the product that is updated, or together with it, and B A x is added after it.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from quire.compute.kernels.reference.activation import silu_and_mul
from quire.compute.kernels.reference.linear import linear
from quire.compute.kernels.reference.norm import rms_norm


class Scaling(NamedTuple):
    """What adapters with magnitudes (DoRA) do to a product's outputs before B A x is added: y += factor · y + summand.

    Attributes:
        factors: [slots, outputs], of the model's dtype: the scale less 1, which keeps small changes exact.
        summands: [slots, outputs], of the model's dtype, which keep the product's bias unscaled.
        used: [slots] int64, 1 where the adapter has magnitudes.
    """

    factors: Tensor
    summands: Tensor
    used: Tensor


class LowRankWeights(NamedTuple):
    """The weights A and B of all adapters on the device, for one product that stacks several modules.

    Attributes:
        a: [slots, modules · rank, columns], of the model's dtype; only the first dimension has gaps. Ranks that are not
            in use are 0.
        b: [slots, outputs, rank], times the adapter's scale; only the first dimension has gaps. On a CPU outputs lie
            side by side.
        ranks: [slots] int64, how many of a module's ranks are in use; 0: the adapter does not change this product.
        rows: The outputs of each module.
        scaling: How adapters scale the product's own outputs; None: they do not.
    """

    a: Tensor
    b: Tensor
    ranks: Tensor
    rows: tuple[int, ...]
    scaling: Scaling | None = None


class Tiles(NamedTuple):
    """Which rows have which adapter.

    Attributes:
        slots: [tiles] int64, each tile's adapter, from 1; 0 in the last tiles, which are empty or whose rows have none.
        rows: [tiles, size] int64, the tile's rows, and -1 behind them.
        slot_of_row: [n] int64, each row's adapter, from 1, or 0; None: no kernel needs it.
    """

    slots: Tensor
    rows: Tensor
    slot_of_row: Tensor | None = None


class RowUpdate(NamedTuple):
    """An update B A x that is still to be added to a product's outputs: the arguments of `lora_expand`."""

    low: Tensor
    weights: LowRankWeights
    tiles: Tiles


def lora_shrink(x: Tensor, weights: LowRankWeights, tiles: Tiles) -> Tensor:
    """Compute A x for the rows in tiles, from x [n, columns] of the model's dtype.

    Returns:
        A x in a layout that only `lora_expand` of the same implementation reads. Here it is [tiles · size, modules ·
        rank], with zeros where a tile has no row.
    """
    most = weights.b.shape[2]
    low = x.new_zeros((tiles.rows.numel(), len(weights.rows), most))
    for slot, rank, places, rows in _in_use(weights, tiles):
        a = weights.a[slot - 1].view(-1, most, x.shape[1])[:, :rank]  # [modules, rank, columns]
        low[places, :, :rank] = (x[rows] @ a.flatten(0, 1).T).view(len(rows), -1, rank)
    return low.flatten(1)


def linear_and_shrink(
    x: Tensor, packed: Tensor, bias: Tensor | None, weights: LowRankWeights, tiles: Tiles
) -> tuple[Tensor, Tensor]:
    """Compute `linear` and, for its low-rank update, `lora_shrink`."""
    return linear(x, packed, bias), lora_shrink(x, weights, tiles)


def lora_expand(low: Tensor, weights: LowRankWeights, tiles: Tiles, y: Tensor) -> None:
    """Add B A x to rows of y, in place, after scaling them where their adapter has magnitudes (DoRA).

    `low` is A x from `lora_shrink`, which is rounded to the dtype of y [n, outputs] first, as PEFT does.
    """
    own = low.to(y.dtype).view(tiles.rows.numel(), len(weights.rows), weights.b.shape[2])
    for slot, rank, places, rows in _in_use(weights, tiles):
        if weights.scaling is not None and weights.scaling.used[slot - 1]:
            factor, summand = weights.scaling.factors[slot - 1], weights.scaling.summands[slot - 1]
            y[rows] += y[rows] * factor + summand
        begin = 0
        for module, outputs in enumerate(weights.rows):
            b = weights.b[slot - 1, begin : begin + outputs, :rank]
            y[:, begin : begin + outputs].index_add_(0, rows, own[places, module, :rank] @ b.T)
            begin += outputs


def lora_expand_silu_and_mul(low: Tensor, weights: LowRankWeights, tiles: Tiles, y: Tensor, out: Tensor) -> None:
    """Add B A x to y as `lora_expand` does, then write out = silu(first half of y) · second half of y.

    Args:
        low, weights: As in `lora_expand`.
        tiles: Every row is in a tile, unless tiles are single rows.
        y: [n, 2 · width]; its contents are undefined afterwards.
        out: [n, width], of y's dtype.
    """
    lora_expand(low, weights, tiles, y)
    silu_and_mul(y, out)


def lora_rms_norm(
    low: Tensor,
    weights: LowRankWeights,
    tiles: Tiles,
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    delta: Tensor,
) -> None:
    """Add B A x to delta as `lora_expand` does, then add delta to x and write the RMS norm of the sum to out.

    Args:
        low, weights, tiles: As in `lora_expand`; the product has one module.
        x, weight, eps, out: As in `rms_norm`.
        delta: [n, width], contiguous; its contents are undefined afterwards.
    """
    lora_expand(low, weights, tiles, delta)
    rms_norm(x, weight, eps, out, delta)


def lies_beside(scaling: Scaling, weights: LowRankWeights) -> bool:
    """Whether the scaling of neighbouring adapters is as far apart in memory as their other weights are."""
    factors, summands, used = scaling
    one = len(used) == 1  # then distances say nothing
    apart = factors.stride(0) == summands.stride(0) == weights.b.stride(0) and used.stride() == weights.ranks.stride()
    return factors.stride(1) == summands.stride(1) == 1 and (one or apart)


def _in_use(weights: LowRankWeights, tiles: Tiles) -> list[tuple[int, int, Tensor, Tensor]]:
    """Return the slot, the rank, the places in tiles and the rows at these places of each adapter in use."""
    rows, slots = tiles.rows.view(-1), tiles.slots.repeat_interleave(tiles.rows.shape[1])
    found = []
    for slot in sorted(set(tiles.slots.tolist())):
        if slot and (rank := int(weights.ranks[slot - 1])):
            places = ((slots == slot) & (rows >= 0)).nonzero()[:, 0]
            found.append((slot, rank, places, rows[places]))
    return found
