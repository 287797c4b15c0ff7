"""Reading weights to a card where the system does not give what reading would like to have."""

from __future__ import annotations

import torch

from quire.models.weights.gpu_loader import CudaCopyStream


def test_a_buffer_that_cannot_be_pinned_is_nobody_elses_error() -> None:
    device = torch.device("cuda:0")
    copies, buffer = CudaCopyStream(device), torch.arange(2**22, dtype=torch.uint8)
    copies.pin(buffer)
    other = CudaCopyStream(device)
    other.pin(buffer)  # the driver refuses: it is pinned already
    assert torch.ones(3, device=device).sum().item() == 3
    out = torch.empty_like(buffer, device=device)
    other.copy(out, buffer)
    other.make_caller_wait()
    assert torch.equal(out.cpu(), buffer)
    other.unpin(buffer)  # it is not this one's
    copies.unpin(buffer)
    copies.pin(buffer)
    copies.unpin(buffer)
    assert torch.ones(3, device=device).sum().item() == 3
