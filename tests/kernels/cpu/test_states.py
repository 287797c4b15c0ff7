"""What a draft head reads of a model: our kernels do what torch does."""

from __future__ import annotations

import pytest
import torch

from quire.compute.kernels.cpu import states
from quire.compute.kernels.reference import states as reference

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3), (7, 40), (130, 513)])
@pytest.mark.parametrize("added", [False, True])
def test_copy_stream(dtype: torch.dtype, shape: tuple[int, int], *, added: bool) -> None:
    torch.manual_seed(0)
    x, other = torch.randn(2, *shape).to(dtype)
    delta = other if added else None
    wide, expected = torch.zeros(2, shape[0], shape[1] + 9, dtype=dtype)
    states.copy_stream(x, delta, wide[:, 4 : 4 + shape[1]])
    reference.copy_stream(x, delta, expected[:, 4 : 4 + shape[1]])
    assert torch.equal(wide, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_put_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, rows = torch.randn(5, 13).to(dtype), torch.tensor([8, 0, 3, 11, 2])
    out, expected = torch.zeros(2, 12, 13, dtype=dtype)
    states.put_rows(x, rows, out)
    reference.put_rows(x, rows, expected)
    assert torch.equal(out, expected)


def test_state_rows() -> None:
    ids, places, slots = torch.tensor([4, -1, 0, -1]), torch.tensor([70, 71, 72, 73]), torch.tensor([0, 1, 2, 5])
    out, expected = torch.zeros(2, 4, dtype=torch.int64)
    states.state_rows(ids, places, slots, 100, out)
    reference.state_rows(ids, places, slots, 100, expected)
    assert out.tolist() == expected.tolist() == [70, 101, 72, 105]


@pytest.mark.parametrize("dtype", DTYPES)
def test_spread_columns(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, columns = torch.randn(3, 6).to(dtype), torch.randperm(41)[:6]
    out, expected = torch.zeros(2, 3, 41, dtype=dtype)
    states.spread_columns(x, columns, out)
    reference.spread_columns(x, columns, expected)
    assert torch.equal(out, expected)
    assert torch.equal(out[:, columns], x)
    assert int(out.isinf().sum()) == 3 * 35
