"""Low-rank updates equal their reference: any adapters in a step, odd widths, ranks that are not in use."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.compute.kernels.cpu import lora as ours
from quire.compute.kernels.cpu.linear import pack_linear
from quire.compute.kernels.reference import lora as reference
from quire.compute.kernels.reference.lora import LowRankWeights, Scaling, Tiles
from quire.models.lora.step_tiles import order_tokens

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
SLOTS = 40
ALONE = 2
"""This slot's adapter leaves the product alone."""

pytestmark = pytest.mark.usefixtures("instructions")


def random_weights(rank: int, columns: int, rows: tuple[int, ...], dtype: torch.dtype) -> LowRankWeights:
    """Adapters side by side in one memory; beside what they have of the product lies what would break it. Every third
    one scales the product's outputs.
    """
    generator = torch.Generator().manual_seed(rank + columns)
    a_size, b_size = len(rows) * rank * columns, sum(rows) * rank
    outputs = sum(rows)
    memory = torch.randn((SLOTS, 3 + a_size + b_size + 2 * outputs + 1), generator=generator).to(dtype) / 4
    memory[:, :3], memory[:, -1] = torch.nan, torch.nan
    a = memory[:, 3 : 3 + a_size].view(SLOTS, len(rows) * rank, columns)
    b = memory[:, 3 + a_size : 3 + a_size + b_size].view(SLOTS, rank, outputs).transpose(1, 2)
    factors, summands = memory[:, -1 - 2 * outputs : -1].split(outputs, dim=1)
    ranks = torch.full((SLOTS, 3), 99, dtype=torch.int64)
    ranks[:, 2] = torch.tensor([slot % 3 == 0 for slot in range(1, SLOTS + 1)])
    for slot in range(1, SLOTS + 1):
        used = ranks[slot - 1, 1] = 0 if slot == ALONE else 1 + slot * 7 % rank
        a[slot - 1].view(len(rows), rank, columns)[:, used:] = torch.nan
        b[slot - 1, :, used:] = torch.nan
    for slot in range(SLOTS):
        if not ranks[slot, 2]:
            factors[slot], summands[slot] = torch.nan, torch.nan
    return LowRankWeights(a, b, ranks[:, 1], rows, Scaling(factors, summands, ranks[:, 2]))


def tiles_of(slots: list[int]) -> Tiles:
    own, tokens = order_tokens(np.array(slots, dtype=np.int64))
    return Tiles(torch.from_numpy(own), torch.from_numpy(tokens))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("slots", "rank", "columns", "rows"),
    [
        ([1], 16, 64, (40,)),
        ([3] * 5, 16, 100, (7, 33, 8)),
        ([0, 1, 2, 3, 1, 0, 3, 3], 16, 1_101, (40, 8, 8)),
        ([1] * 20 + [0] * 3 + [3] * 18 + [1] * 70, 48, 65, (300, 291)),
        ([4, 0, 4, 1], 128, 603, (96,)),
        (list(range(1, SLOTS + 1)) * 2, 32, 31, (1, 2)),
        ([9, 17] * 60, 64, 640, (512, 128, 128)),
        ([0, 0], 16, 64, (16,)),
        ([], 16, 64, (16,)),
    ],
)
def test_rows_are_changed_by_their_own_adapter(
    slots: list[int], rank: int, columns: int, rows: tuple[int, ...], dtype: torch.dtype
) -> None:
    weights, tiles = random_weights(rank, columns, rows, dtype), tiles_of(slots)
    wide = torch.randn((len(slots), columns + 5), generator=torch.Generator().manual_seed(0)).to(dtype)
    x = wide[:, :columns]
    y = torch.randn((len(slots), sum(rows)), generator=torch.Generator().manual_seed(1)).to(dtype)
    found = torch.full((len(slots), sum(rows) + 3), torch.nan, dtype=dtype)
    found[:, : sum(rows)] = y
    low = ours.lora_shrink(x, weights, tiles)
    ours.lora_expand(low, weights, tiles, found[:, : sum(rows)])
    assert found[:, sum(rows) :].isnan().all()
    expected = y.float().clone()
    assert weights.scaling is not None
    scaling = Scaling(weights.scaling.factors.float(), weights.scaling.summands.float(), weights.scaling.used)
    exact = LowRankWeights(weights.a.float(), weights.b.float(), weights.ranks, rows, scaling)
    reference.lora_expand(reference.lora_shrink(x.float(), exact, tiles), exact, tiles, expected)
    torch.testing.assert_close(
        found[:, : sum(rows)].float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * rank**0.5
    )
    changed = [i for i, slot in enumerate(slots) if slot not in (0, ALONE)]
    alone = [i for i, slot in enumerate(slots) if slot in (0, ALONE)]
    assert torch.equal(found[alone, : sum(rows)], y[alone])
    assert not changed or (found[changed, : sum(rows)] != y[changed]).any(dim=1).all()


def test_a_row_is_the_same_whoever_shares_its_step() -> None:
    weights = random_weights(32, 200, (64, 24), torch.float32)
    x = torch.randn((60, 200), generator=torch.Generator().manual_seed(0))
    slots = [3, 5, 0, 7, 3] * 12

    def changed(tokens: list[int]) -> torch.Tensor:
        y, tiles = torch.zeros(len(tokens), 88), tiles_of([slots[token] for token in tokens])
        ours.lora_expand(ours.lora_shrink(x[tokens].contiguous(), weights, tiles), weights, tiles, y)
        return y

    together = changed(list(range(60)))
    for token in (0, 1, 2, 3, 59):
        torch.testing.assert_close(changed([token])[0], together[token], rtol=1e-5, atol=1e-4)


def test_a_product_and_a_x_are_those_of_both_ops() -> None:
    weights, tiles = random_weights(16, 70, (40, 8), torch.float32), tiles_of([1, 0, 3])
    x, w, bias = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((3, 70), (48, 70), 48))
    for module, packed in ((ours, pack_linear(w)), (reference, w)):
        y, low = module.linear_and_shrink(x, packed, bias, weights, tiles)
        expected = torch.nn.functional.linear(x, w, bias)
        torch.testing.assert_close(y, expected)
        module.lora_expand(module.lora_shrink(x, weights, tiles), weights, tiles, expected)
        module.lora_expand(low, weights, tiles, y)
        torch.testing.assert_close(y, expected)


def test_broken_rows_break_nobody_else() -> None:
    weights, tiles = random_weights(16, 70, (40,), torch.float32), tiles_of([1, 1, 1, 3, 3])
    x = torch.randn((5, 70), generator=torch.Generator().manual_seed(0))
    y, broken = torch.zeros(5, 40), torch.zeros(5, 40)
    ours.lora_expand(ours.lora_shrink(x, weights, tiles), weights, tiles, y)
    x[1] = torch.nan
    ours.lora_expand(ours.lora_shrink(x, weights, tiles), weights, tiles, broken)
    assert broken[1].isnan().all()
    assert torch.equal(broken[[0, 2, 3, 4]], y[[0, 2, 3, 4]])
