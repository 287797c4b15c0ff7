"""A step's way from the host and back in Triton against the reference."""

from __future__ import annotations

import pytest
import torch

from quire.compute.kernels.reference import host_transfer as reference
from quire.compute.kernels.triton.host_transfer import copy_inputs_from_host, copy_outputs_to_host

POISON = -(2**40)


@pytest.mark.parametrize("programs", [1, 8])
@pytest.mark.parametrize("entries", [0, 1, 300, 1_024, 8_193, 20_000])
def test_columns_come_in_turns(entries: int, programs: int, device: str) -> None:
    """What stands behind them stays."""
    buffers = torch.randint(-(2**62), 2**62, (3, max(1, entries)), device=device)
    turn = torch.full((programs,), 2**33, device=device)
    for op in (copy_inputs_from_host, reference.copy_inputs_from_host):
        own = turn.clone()
        for step in range(4):
            out = torch.full((entries + 5,), POISON, device=device)
            op(buffers, own, out[:entries])
            assert torch.equal(out[:entries], buffers[(2**33 + step) % 3, :entries])
            assert (out[entries:] == POISON).all()
            assert (own == turn + step + 1).all()


@pytest.mark.parametrize("entries", [1, 300, 1_024, 2_500])
def test_outputs_go_in_turns(entries: int, device: str) -> None:
    """To the buffer of the step that fetched; the others stay."""
    outputs = torch.randint(-(2**62), 2**62, (entries,), device=device)
    for op in (copy_outputs_to_host, reference.copy_outputs_to_host):
        for steps in (1, 2, 3, 2**33):
            buffers = torch.full((3, entries), POISON, device=device)
            op(outputs, buffers, torch.full((8,), steps, device=device))
            own = (steps - 1) % 3
            assert torch.equal(buffers[own], outputs)
            assert all((buffers[other] == POISON).all() for other in range(3) if other != own)
