"""What stages hand on, a rank at a time: `tests/gpu/test_stage_links.py` has ranks that run at the same time."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.compute.kernels.triton.ranks import handed_on
from quire.compute.kernels.triton.ranks.stage_window import STREAM_PROGRAMS, TILE_WORDS, layout_of
from tests.kernels.triton.not_interpreted import printed_by
from tests.kernels.triton.test_ranks import without_ptx

HIDDEN, MAX_TOKENS, SLOTS, STEPS = 64, 200, 1_100, 3
LATE = 2**31 - 2
"""A step whose number has come to the end of a word's positive numbers."""


@pytest.fixture(autouse=True)
def interpreted(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program at a time takes long."""
    if device == "cpu":
        without_ptx(monkeypatch, handed_on)
        monkeypatch.setattr(handed_on, "STREAM_PROGRAMS", 3)
    monkeypatch.setattr(handed_on, "MAX_POLLS", 50)


class Window:
    """A window that its own rank reads and another one writes."""

    def __init__(self, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.layout = layout_of(SLOTS, STEPS, MAX_TOKENS * HIDDEN * dtype.itemsize)
        self.bytes = torch.zeros(self.layout.size, dtype=torch.uint8, device=device)
        self.elsewhere = torch.zeros_like(self.bytes)
        own, other = self.bytes.data_ptr(), self.elsewhere.data_ptr()
        self.reading = torch.tensor([own, other], device=device)
        self.writing = torch.tensor([other, own], device=device)

    @property
    def flags(self) -> Tensor:
        begin = self.layout.flags
        return self.bytes[begin : begin + 4 * STREAM_PROGRAMS].view(torch.int32)[: handed_on.STREAM_PROGRAMS]


def stream(tokens: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x, delta = torch.randn(2, tokens, HIDDEN, generator=generator).to(dtype).to(device)
    return x.clone(), delta.clone()


def number(step: int, device: str) -> Tensor:
    return torch.tensor([step], device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [1, LATE])
def test_as_many_steps_as_may_be_on_their_way_arrive(first: int, dtype: torch.dtype, device: str) -> None:
    """Of several sizes: less than a tile, whole tiles, more than there are programs, and as many as there is room."""
    window = Window(device, dtype)
    whole = TILE_WORDS * 4 // dtype.itemsize // HIDDEN
    for begin in (first, first + STEPS):
        sent = {
            begin + i: stream(tokens, dtype, device)
            for i, tokens in enumerate((1, whole, min(4 * whole + 1, MAX_TOKENS)))
        }
        for step, (x, delta) in sent.items():
            handed_on.send_stream(x, delta, window.writing, number(step, device), window.layout)
        for step, (x, delta) in sent.items():
            found = torch.empty_like(x), torch.empty_like(delta)
            handed_on.receive_stream(*found, window.reading, number(step, device), window.layout)
            assert torch.equal(found[0], x)
            assert torch.equal(found[1], delta)
    assert not window.elsewhere.any()


def test_a_receiver_that_pads_more_or_less_gets_the_same_rows(device: str) -> None:
    window = Window(device)
    x, delta = stream(40, torch.bfloat16, device)
    for step, tokens in ((1, 5), (2, 150)):
        handed_on.send_stream(x, delta, window.writing, number(step, device), window.layout)
        assert (window.flags == step).all()
        found = torch.empty((2, tokens, HIDDEN), dtype=x.dtype, device=device)
        handed_on.receive_stream(*found, window.reading, number(step, device), window.layout)
        assert torch.equal(found[0, :40], x[:tokens])
        assert torch.equal(found[1, :40], delta[:tokens])


def test_step_0_writes_nothing_and_waits_for_nothing(device: str) -> None:
    window = Window(device)
    x, delta = stream(7, torch.bfloat16, device)
    handed_on.send_stream(x, delta, window.writing, number(0, device), window.layout)
    handed_on.send_tokens(torch.ones(SLOTS, dtype=torch.int64, device=device), window.writing, 0, window.layout)
    assert not window.bytes.any()
    handed_on.receive_stream(x, delta, window.reading, number(0, device), window.layout)
    last = torch.full((SLOTS,), 5, device=device)
    handed_on.take_tokens(last, window.reading, 0, window.layout)
    assert (last == 5).all()


@pytest.mark.parametrize("step", [2, LATE + 5, 2**32])
def test_tokens_of_all_slots_arrive(step: int, device: str) -> None:
    window = Window(device)
    sampled = torch.arange(SLOTS, device=device) * 2**33
    handed_on.send_tokens(sampled, window.writing, step, window.layout)
    for awaited in (step, step - 1):
        last = torch.zeros_like(sampled)
        handed_on.take_tokens(last, window.reading, awaited, window.layout)
        assert torch.equal(last, sampled)
    assert not window.flags.any()


def test_what_has_not_come_is_awaited(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the looks are used up."""
    if device != "cpu":
        pytest.skip("looks are counted in the interpreter")
    window, looks = Window(device), 0

    def counting(address: object, value: object, POLLS: int) -> None:
        nonlocal looks
        looks += 1

    monkeypatch.setattr(handed_on, "wait_for", counting)
    x, delta = stream(7, torch.bfloat16, device)
    handed_on.receive_stream(x, delta, window.reading, number(3, device), window.layout)
    assert looks == handed_on.STREAM_PROGRAMS
    handed_on.take_tokens(torch.zeros(SLOTS, dtype=torch.int64), window.reading, 3, window.layout)
    assert looks == handed_on.STREAM_PROGRAMS + 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a card, every test compiles what it runs")
def test_they_compile_for_a_card() -> None:
    said = printed_by("tests.kernels.triton.compile_ranks").split()
    assert said[:4] == ["send_stream", "receive_stream", "send_tokens", "take_tokens"]
    assert said[4:] == ["all_reduce_pulled", "all_reduce_pushed", "rms_norm_pushed", "rms_norm_pulled"]
