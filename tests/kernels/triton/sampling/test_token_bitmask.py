"""Bitmasks on the device: bit by bit, and against the reference."""

from __future__ import annotations

import pytest
import torch

from quire.compute.kernels.reference import sample as reference
from quire.compute.kernels.triton.sampling.logits_transforms import apply_token_bitmask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (2, 31), (3, 32), (4, 33), (3, 320), (2, 4_096), (3, 9_001)])
def test_forbidden_tokens_are_at_minus_infinity_and_no_other_logit_changes(
    rows: int, vocab: int, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(vocab)
    words = -(-vocab // 32)
    bits = torch.randint(-(2**31), 2**31, (rows, words), dtype=torch.int32)
    bits[0, -1] = -(2**31)  # the sign is a token's bit as any other
    masked = torch.randperm(rows + 2)[:rows]
    whole = torch.randn(rows + 2, vocab + 3).to(dtype)
    expected = whole.clone()
    for row, mask in zip(masked.tolist(), bits.tolist(), strict=True):
        for token in range(vocab):
            if not mask[token // 32] >> token % 32 & 1:
                expected[row, token] = -torch.inf
    found = whole.clone().to(device)
    apply_token_bitmask(found[:, :vocab], masked.to(device), bits.to(device))
    assert torch.equal(found.cpu(), expected)
    reference.apply_token_bitmask(whole[:, :vocab], masked, bits)
    assert torch.equal(whole, expected)


def test_many_rows_are_changed_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, bits = torch.randn(5, 70), torch.randint(-(2**31), 2**31, (5, 3), dtype=torch.int32)
    rows, whole = torch.arange(5), logits.clone()
    reference.apply_token_bitmask(whole, rows, bits)
    monkeypatch.setattr(reference, "_MAX_LOGITS", 150)
    reference.apply_token_bitmask(logits, rows, bits)
    assert torch.equal(logits, whole)


def test_no_rows(device: str) -> None:
    logits, none = torch.randn(2, 40, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    before = logits.clone()
    apply_token_bitmask(logits, none, torch.zeros(0, 2, dtype=torch.int32, device=device))
    assert torch.equal(logits, before)
