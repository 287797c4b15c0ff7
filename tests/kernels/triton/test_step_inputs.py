"""A step's beginning in Triton against the reference: equal to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.compute.kernels.reference import step_inputs as reference
from quire.compute.kernels.triton.step_inputs import init_slots, prepare_inputs

POISON = -(2**40)


def begin(device: str, counts: list[int], padding: int, seed: int) -> None:
    """Rows of so many tokens in slots of any order, and rows of padding behind them; both ops on the same table."""
    generator = torch.Generator().manual_seed(seed)
    slots, dummy = len(counts) + 4, len(counts) + 3
    own = torch.randperm(slots - 1, generator=generator)[: len(counts)]
    of_rows = torch.cat((own, torch.full((padding,), dummy)))
    count = torch.tensor([*counts, *[1] * padding])
    row_of_token = torch.arange(len(count)).repeat_interleave(count)
    offsets = torch.cat([torch.arange(n) for n in count.tolist()])
    ids = torch.randint(-2, 5, (len(offsets),), generator=generator)  # some are what the slot drew last
    length = torch.randint(0, 2**33, (slots,), generator=generator)
    length[dummy] = 0
    last = torch.randint(100, 2**33, (slots,), generator=generator)
    given = [x.to(device) for x in (of_rows, count, row_of_token, offsets, ids)]

    def run(op: object) -> list[Tensor]:
        moved = length.to(device, copy=True)
        sizes = (len(count), len(ids), len(ids), len(ids))
        out = [torch.full((n,), POISON, device=device) for n in sizes]
        op(*given, moved, last.to(device), dummy, *out)  # type: ignore[operator]
        return [moved, *out]

    found, expected = run(prepare_inputs), run(reference.prepare_inputs)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert found[0][dummy] == 0
    assert found[0].sum() == length.sum() + sum(counts)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("rows", [1, 3, 17, 255, 257])
def test_rows_of_one_token(rows: int, padding: int, device: str) -> None:
    begin(device, [1] * rows, padding, rows)


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("counts", [[2], [1, 5, 1, 127], [256, 1], [1, 1, 600, 3, 1], [2] * 300])
def test_rows_of_several_tokens(counts: list[int], padding: int, device: str) -> None:
    begin(device, counts, padding, len(counts))


def test_columns_may_begin_anywhere(device: str) -> None:
    """As parts of one buffer; what stands beside the outputs stays."""
    buffer, outputs = torch.arange(30, device=device) % 7, torch.full((30,), POISON, device=device)
    slots, ids, rest = buffer[1:6], torch.full((5,), -1, device=device), buffer[9:14]
    length, last = torch.arange(10, 18, device=device), torch.arange(20, 28, device=device)
    found = [outputs[i : i + 5] for i in (1, 7, 13, 19)]
    prepare_inputs(slots, rest, rest, rest, ids, length, last, 7, *found)
    for column, first in zip(found, (10, 10, 0, 20), strict=True):
        assert torch.equal(column, slots + first)
    assert (outputs == POISON).sum() == 10
    assert torch.equal(length, torch.tensor([10, 12, 13, 14, 15, 16, 16, 17], device=device))


@pytest.mark.gpu
def test_long_prompts() -> None:
    begin("cuda", [8_192], 0, 1)
    begin("cuda", [1] * 255 + [7_000] + [1] * 500, 13, 2)


@pytest.mark.parametrize(("owners", "groups", "blocks"), [(1, 1, 1), (3, 2, 17), (1, 1, 1_025), (17, 3, 5)])
def test_new_owners(owners: int, groups: int, blocks: int, device: str) -> None:
    """Their columns begin anywhere in a buffer; what is others' stays."""
    generator = torch.Generator().manual_seed(blocks)
    every, ints, floats = owners + 3, 6, 3
    given = [
        torch.randperm(every, generator=generator)[:owners],
        torch.randint(-(2**62), 2**62, (owners * ints,), generator=generator),
        torch.rand(owners * floats, generator=generator, dtype=torch.float64),
    ]
    kept = (
        torch.randint(1, 99, (ints, every)),
        torch.rand(floats, every),
        torch.randint(1, 99, (groups, every, blocks)),
    )

    def run(op: object) -> list[Tensor]:
        moved = [x.to(device, copy=True) for x in kept]
        op(*(torch.cat((x[:1], x)).to(device)[1:] for x in given), *moved)  # type: ignore[operator]
        return moved

    for ours, theirs in zip(run(init_slots), run(reference.init_slots), strict=True):
        assert torch.equal(ours, theirs)
