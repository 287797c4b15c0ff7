"""Sums over ranks by one another's memory, a rank at a time: what the others would have written lies there already.
`tests/gpu/test_rank_sums.py` has ranks that run at the same time."""

from __future__ import annotations

from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.compute.kernels.triton.ranks import flags, pulled, pushed
from quire.compute.kernels.triton.ranks.window import MAX_RANKS, PULLED_BYTES, PULLED_PROGRAMS, PUSHED_WORDS, layout_of

RANKS = 3
LAYOUT = layout_of(RANKS)


@triton.jit
def stored(address: Any, value: Any) -> None:
    tl.store(address.to(tl.pointer_type(tl.int32)), value)


@triton.jit
def loaded(address: Any) -> Any:
    return tl.load(address.to(tl.pointer_type(tl.int32)))


def without_ptx(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
    """What the interpreter knows in place of PTX, for a module's kernels."""
    monkeypatch.setattr(module, "release", stored)
    monkeypatch.setattr(flags, "acquire", loaded)


class Windows:
    """All ranks' windows, on one device."""

    def __init__(self, device: str) -> None:
        self.bytes = [torch.zeros(LAYOUT.size, dtype=torch.uint8, device=device) for _ in range(RANKS)]
        self.addresses = torch.tensor([each.data_ptr() for each in self.bytes], device=device)
        self.calls = torch.zeros(PUSHED_WORDS, dtype=torch.int32, device=device)

    def arrivals(self, rank: int, call: int) -> Tensor:
        """[ranks, PUSHED_WORDS] packets."""
        packets = self.bytes[rank][LAYOUT.arrivals : LAYOUT.buffers].view(torch.int64)
        return packets.view(2, RANKS, PUSHED_WORDS)[call & 1]

    def buffer(self, rank: int, call: int, dtype: torch.dtype) -> Tensor:
        return self.bytes[rank][LAYOUT.buffers : LAYOUT.rings].view(2, PULLED_BYTES)[call & 1].view(dtype)

    def flags(self, rank: int) -> Tensor:
        """[programs, ranks]"""
        return self.bytes[rank][: LAYOUT.row_flags].view(torch.int32).view(PULLED_PROGRAMS, MAX_RANKS)


@pytest.fixture
def windows(device: str) -> Windows:
    return Windows(device)


def summands(size: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(size)
    return [torch.randn(size, generator=generator).to(dtype).to(device) for _ in range(RANKS)]


def sum_of(given: list[Tensor]) -> Tensor:
    """In the order of ranks, in fp32."""
    total = torch.zeros_like(given[0], dtype=torch.float32)
    for each in given:
        total += each.float()
    return total.to(given[0].dtype)


@pytest.mark.parametrize(
    ("dtype", "own"), [*product((torch.float32, torch.bfloat16), range(RANKS)), (torch.float16, 1)]
)
def test_what_is_pushed_is_added_up(dtype: torch.dtype, own: int, windows: Windows, device: str) -> None:
    for call, size in enumerate((600, 2, 1_026), 1):  # 1,026 of bf16 are 513 words: a program more than before
        given = summands(size, dtype, device)
        words = [each.view(torch.int32).long() & 0xFFFFFFFF for each in given]
        programs = -(-len(words[0]) // 256)
        windows.calls[:programs] = call - 1
        for rank in range(RANKS):
            if rank != own:
                windows.arrivals(own, call)[rank, : len(words[0])] = call << 32 | words[rank]
        x = given[own].clone()
        pushed.all_reduce_pushed(x, windows.addresses, windows.calls, LAYOUT.arrivals, own, RANKS)
        assert torch.equal(x, sum_of(given))
        assert (windows.calls[:programs] == call).all()
        for rank in range(RANKS):
            if rank != own:
                sent = windows.arrivals(rank, call)[own]
                assert torch.equal(sent[: len(words[own])], call << 32 | words[own])
                assert not (sent[len(words[own]) :] >> 32 == call).any(), "nothing is written beyond"


@pytest.fixture
def interpreted(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        without_ptx(monkeypatch, pulled)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("dtype", "own"), [*product((torch.float32, torch.bfloat16), (0, 2)), (torch.float16, 0)])
def test_what_is_pulled_is_added_up(dtype: torch.dtype, own: int, windows: Windows, device: str) -> None:
    for call, size in enumerate((10_000, 2, 4_098), 1):
        given = summands(size, dtype, device)
        windows.calls[:] = call - 1
        windows.flags(own)[:] = call
        for rank in range(RANKS):
            if rank != own:
                windows.buffer(rank, call, dtype)[:size] = given[rank]
        x = given[own].clone()
        pulled.all_reduce_pulled(x, windows.addresses, windows.calls, LAYOUT.buffers, own, RANKS)
        assert torch.equal(x, sum_of(given))
        assert torch.equal(windows.buffer(own, call, dtype)[:size], given[own]), "what others read"
        programs = -(-size * dtype.itemsize // 8_192)
        for rank in range(RANKS):
            if rank != own:
                assert (windows.flags(rank)[:programs, own] == call).all()
                assert not windows.flags(rank)[5:, own].any(), "40,000 bytes are five tiles"


@triton.jit
def count_looks(word, awaited, looks, POLLS: tl.constexpr):  # Triton looks its annotations up
    tl.store(looks, flags.wait_for(word.to(tl.int64), tl.load(awaited), POLLS))


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("come_to", "waits"), [(6, True), (7, False), (8, False)])
@pytest.mark.parametrize("wrapped", [0, 2**31 - 7])
def test_a_word_is_awaited_when_it_has_wrapped_around_too(come_to: int, waits: bool, wrapped: int, device: str) -> None:
    """After months of steps."""

    def signed(number: int) -> int:
        return (number + 2**31) % 2**32 - 2**31

    word = torch.tensor([signed(wrapped + come_to)], dtype=torch.int32, device=device)
    awaited = torch.tensor([signed(wrapped + 7)], dtype=torch.int32, device=device)
    looks = torch.zeros(1, dtype=torch.int32, device=device)
    count_looks[(1,)](word, awaited, looks, POLLS=5)
    assert int(looks) == (5 if waits else 0)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("rows", "width"), [(2, 5_000), (3, 7), (1, 9_001)])
@pytest.mark.parametrize("own", range(RANKS))
def test_columns_are_side_by_side(rows: int, width: int, own: int, windows: Windows, device: str) -> None:
    dtype, columns = torch.bfloat16, -(-width // RANKS)
    tile, of_row = 4_096, -(-columns // 4_096)
    whole = summands(rows * width, dtype, device)[0].view(rows, width)
    parts = [whole[:, rank * columns : (rank + 1) * columns] for rank in range(RANKS)]
    windows.flags(own)[:] = 1
    for rank in range(RANKS):
        if rank != own:
            lies = windows.buffer(rank, 1, dtype)[: rows * of_row * tile].view(rows, of_row * tile)
            lies[:, : parts[rank].shape[1]] = parts[rank]
    x = torch.full((rows, columns + 2), float("nan"), dtype=dtype, device=device)
    x[:, : parts[own].shape[1]] = parts[own]
    out = torch.full_like(whole, float("nan"))
    pulled.gather_columns_pulled(x, out, columns, windows.addresses, windows.calls, LAYOUT.buffers, own, RANKS)
    assert torch.equal(out, whole)
