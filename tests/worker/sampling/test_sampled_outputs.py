"""Tokens and faults of a step, side by side."""

from __future__ import annotations

import pytest
import torch

from quire.runtime.worker.buffer_ring import BufferRing
from quire.runtime.worker.sampling.sampled_outputs import SampledOutputs
from quire.runtime.worker.staging_buffer import StagingBuffer


@pytest.mark.parametrize("most", [1, 3, 16, 255, 1_025])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_both_columns_come_to_the_host(most: int, device: str) -> None:
    ring = BufferRing(torch.device(device))
    staging, outputs = StagingBuffer(1, ring), SampledOutputs(most, ring)
    assert len(outputs.tokens) == len(outputs.faults) == most
    assert outputs.faults.data_ptr() % 16 == outputs.tokens.data_ptr() % 16
    seen = []
    for step in range(5):
        staging.begin().end().finish().copy_to_device()
        outputs.tokens.fill_(-1)
        outputs.send()  # replaced: the same step sends again
        outputs.tokens.copy_(torch.arange(most) * 2**40 + step)
        outputs.faults.copy_(-torch.arange(most) % 3 + step)
        outputs.send()
        seen.append((step, *outputs.on_host()))
    if device == "cuda":
        torch.cuda.synchronize()
    for step, tokens, faults in seen[-ring.size :]:  # the buffers of earlier steps are used again
        assert tokens.tolist() == [place * 2**40 + step for place in range(most)]
        assert faults.tolist() == [-place % 3 + step for place in range(most)]
