"""How a GPU's memory is taken: by pieces, but for what stays to the end; and as the user says, who may know better."""

from __future__ import annotations

import pytest
import torch

from quire.worker.startup import device_memory

CARD = torch.device("cuda:0")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch's allocator was told, without a card."""
    told: list[str] = []
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return told


def test_by_pieces_but_for_what_is_whole(said: list[str]) -> None:
    device_memory.begin(CARD)
    with device_memory.whole(CARD):
        assert said[-1] == "expandable_segments:False"
    assert said[-1] == "expandable_segments:True"
    with pytest.raises(torch.OutOfMemoryError), device_memory.whole(CARD):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert said == [f"expandable_segments:{pieces}" for pieces in (True, False, True, False, True)]


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_user_knows_better(said: list[str], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:512")
    device_memory.begin(CARD)
    with device_memory.whole(CARD):
        pass
    assert said == []


def test_a_processor_has_no_such_settings(said: list[str]) -> None:
    with device_memory.whole(torch.device("cpu")):
        pass
    assert said == []


@pytest.mark.gpu
def test_both_ways_give_memory_and_take_it_back() -> None:
    device_memory.give_back()  # what other tests left, which would be taken first
    device_memory.begin(CARD)
    pieces = torch.zeros(5 << 20, device=CARD)
    with device_memory.whole(CARD):
        whole = torch.zeros(64 << 20, device=CARD)
    assert _in_pieces(pieces)
    assert not _in_pieces(whole)
    before = torch.cuda.memory_reserved()
    size = whole.nbytes
    del pieces, whole
    device_memory.give_back()
    assert torch.cuda.memory_reserved() <= before - size


def _in_pieces(x: torch.Tensor) -> bool:
    """Whether the segment that x lies in can grow."""
    at = x.data_ptr()
    (segment,) = [s for s in torch.cuda.memory_snapshot() if s["address"] <= at < s["address"] + s["total_size"]]
    return bool(segment["is_expandable"])
