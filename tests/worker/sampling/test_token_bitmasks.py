"""Bitmasks of a step on their way to the device, while those of the step before are still to be read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.compute.kernels.reference import sample as reference
from quire.runtime.worker.sampling import token_bitmasks
from quire.runtime.worker.sampling.token_bitmasks import BitmaskBuffer

VOCAB = 64


def test_a_step_leaves_the_masks_of_the_step_before_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of a pipeline have rows of two steps that are masked independently."""
    launched: list[tuple[Tensor, Tensor, Tensor]] = []
    monkeypatch.setattr(token_bitmasks, "kernel", lambda op, device: lambda *of: launched.append(of))
    buffer = BitmaskBuffer(2, VOCAB, torch.device("cpu"))
    rows = torch.arange(1)
    for step in range(4):
        logits = torch.zeros((1, VOCAB))
        buffer.apply(logits, rows, [(1 << step).to_bytes(VOCAB // 8, "little")])
        if step % 2:
            for at, given in enumerate(launched[-2:]):
                reference.apply_token_bitmask(*given)
                assert given[0].isfinite().nonzero()[:, 1].tolist() == [step - 1 + at]
