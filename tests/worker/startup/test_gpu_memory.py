"""How torch takes a GPU's memory: in expandable segments, but for what stays to the end, unless the user says else."""

from __future__ import annotations

import pytest
import torch

from quire.runtime.worker.startup import gpu_memory

GPU = torch.device("cuda:0")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch's allocator was told, without a GPU."""
    told: list[str] = []
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return told


def test_segments_are_expandable_but_for_what_is_taken_in_one(said: list[str]) -> None:
    gpu_memory.use_expandable_segments(GPU)
    with gpu_memory.in_one_segment(GPU):
        assert said[-1] == "expandable_segments:False"
    assert said[-1] == "expandable_segments:True"
    with pytest.raises(torch.OutOfMemoryError), gpu_memory.in_one_segment(GPU):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert said == [f"expandable_segments:{pieces}" for pieces in (True, False, True, False, True)]


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_settings_of_the_user_are_kept(said: list[str], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512")
    gpu_memory.use_expandable_segments(GPU)
    with gpu_memory.in_one_segment(GPU):
        pass
    assert said == []


def test_a_cpu_has_no_such_settings(said: list[str]) -> None:
    with gpu_memory.in_one_segment(torch.device("cpu")):
        pass
    assert said == []


@pytest.mark.gpu
def test_both_ways_allocate_and_release_memory() -> None:
    gpu_memory.release()  # what other tests left, which would be taken first
    gpu_memory.use_expandable_segments(GPU)
    pieces = torch.zeros(5 << 20, device=GPU)
    with gpu_memory.in_one_segment(GPU):
        whole = torch.zeros(64 << 20, device=GPU)
    assert _in_pieces(pieces)
    assert not _in_pieces(whole)
    before = torch.cuda.memory_reserved()
    size = whole.nbytes
    del pieces, whole
    gpu_memory.release()
    assert torch.cuda.memory_reserved() <= before - size


def _in_pieces(x: torch.Tensor) -> bool:
    """Whether the segment that x lies in can grow."""
    at = x.data_ptr()
    (segment,) = [s for s in torch.cuda.memory_snapshot() if s["address"] <= at < s["address"] + s["total_size"]]
    return bool(segment["is_expandable"])
