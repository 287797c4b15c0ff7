"""Tokens and faults of a step, side by side."""

from __future__ import annotations

import pytest
import torch

from quire.worker.buffer_ring import BufferRing
from quire.worker.sampling.sampled_outputs import SampledOutputs
from quire.worker.staging_buffer import StagingBuffer


@pytest.mark.parametrize("reads", [1, 3, 16, 255, 1_025])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_both_columns_come_to_the_host(reads: int, device: str) -> None:
    turns = BufferRing(torch.device(device))
    columns, outputs = StagingBuffer(1, turns), SampledOutputs(reads, turns)
    assert len(outputs.tokens) == len(outputs.faults) == reads
    assert outputs.faults.data_ptr() % 16 == outputs.tokens.data_ptr() % 16
    seen = []
    for step in range(5):
        columns.lay([])
        columns.fetch()
        outputs.tokens.fill_(-1)
        outputs.send()  # in vain: the same step sends again
        outputs.tokens.copy_(torch.arange(reads) * 2**40 + step)
        outputs.faults.copy_(-torch.arange(reads) % 3 + step)
        outputs.send()
        seen.append((step, *outputs.on_host()))
    if device == "cuda":
        torch.cuda.synchronize()
    for step, tokens, faults in seen[-turns.number :]:  # those of earlier steps stand until their turn comes again
        assert tokens.tolist() == [read * 2**40 + step for read in range(reads)]
        assert faults.tolist() == [-read % 3 + step for read in range(reads)]
