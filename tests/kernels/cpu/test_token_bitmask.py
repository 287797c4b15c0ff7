"""Forbidden tokens' logits as the reference sets them: every dtype, odd vocabularies, rows with a stride."""

from __future__ import annotations

import pytest
import torch

from quire.compute.kernels.cpu.sample import apply_token_bitmask
from quire.compute.kernels.reference import sample as reference

pytestmark = pytest.mark.usefixtures("instructions")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("reads", "masked", "vocab"), [(1, [0], 3), (5, [3, 0], 1003), (40, range(0, 40, 3), 4096)])
def test_forbidden_tokens_get_minus_infinity(dtype: torch.dtype, reads: int, masked: range, vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    whole = torch.randn(reads, vocab + 5, generator=generator).to(dtype)
    rows = torch.tensor(list(masked))
    bits = torch.randint(-(2**31), 2**31, (len(rows), -(-vocab // 32)), generator=generator, dtype=torch.int32)
    bits[0, 0], bits[-1, -1] = -1, 0  # all of a word's tokens, and none
    expected = whole.clone()
    reference.apply_token_bitmask(expected[:, :vocab], rows, bits)
    apply_token_bitmask(whole[:, :vocab], rows, bits)
    assert torch.equal(whole, expected)
    assert whole[:, :vocab].isneginf().any()


def test_no_row_is_fine() -> None:
    logits = torch.ones(2, 40)
    apply_token_bitmask(logits, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2, dtype=torch.int32))
    assert logits.eq(1).all()
