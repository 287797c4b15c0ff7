"""Reading weights to a card where the system does not give what reading would like to have."""

from __future__ import annotations

import torch

from quire.weights.cuda_fetches import CudaFetches


def test_a_buffer_that_cannot_be_pinned_is_nobody_elses_error() -> None:
    device = torch.device("cuda:0")
    fetches, buffer = CudaFetches(device), torch.arange(2**22, dtype=torch.uint8)
    fetches.pin(buffer)
    other = CudaFetches(device)
    other.pin(buffer)  # the driver refuses: it is pinned already
    assert torch.ones(3, device=device).sum().item() == 3
    out = torch.empty_like(buffer, device=device)
    other.copy(out, buffer)
    other.before_the_caller()
    assert torch.equal(out.cpu(), buffer)
    other.unpin(buffer)  # it is not this one's
    fetches.unpin(buffer)
    fetches.pin(buffer)
    fetches.unpin(buffer)
    assert torch.ones(3, device=device).sum().item() == 3
