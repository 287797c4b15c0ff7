"""Tokens and faults of a step, side by side."""

from __future__ import annotations

import pytest
import torch

from quire.worker.draw_outputs import DrawOutputs


@pytest.mark.parametrize("reads", [1, 3, 16, 255])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_both_columns_come_to_the_host(reads: int, device: str) -> None:
    outputs = DrawOutputs(reads, torch.device(device))
    assert len(outputs.tokens) == len(outputs.faults) == reads
    assert outputs.faults.data_ptr() % 16 == outputs.tokens.data_ptr() % 16
    seen = []
    for step in range(3):
        outputs.tokens.copy_(torch.arange(reads) * 2**40 + step)
        outputs.faults.copy_(-torch.arange(reads) % 3 + step)
        seen.append(outputs.to_host())
    if device == "cuda":
        torch.cuda.synchronize()
        for step, (tokens, faults) in enumerate(seen):  # copies of earlier steps stand until their turn comes again
            assert tokens.tolist() == [read * 2**40 + step for read in range(reads)]
            assert faults.tolist() == [-read % 3 + step for read in range(reads)]
    tokens, faults = seen[-1]
    assert tokens.tolist() == outputs.tokens.tolist()
    assert faults.tolist() == outputs.faults.tolist()
