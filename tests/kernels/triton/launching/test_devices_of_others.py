"""GPUs of AMD count their architectures as NVIDIA's do, but have none of what is asked for by them."""

from __future__ import annotations

import pytest
import torch

from quire.compute.kernels.triton.launching.dependent_launch import can_overlap
from quire.compute.kernels.triton.launching.device_properties import is_sm_90


@pytest.mark.parametrize(("hip", "hopper"), [(None, True), ("6.3", False)])
def test_an_amd_gpu_is_no_hopper(monkeypatch: pytest.MonkeyPatch, hip: str | None, hopper: bool) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    device = torch.device("cuda")
    assert can_overlap.__wrapped__(device) is hopper
    assert is_sm_90.__wrapped__(device) is hopper
