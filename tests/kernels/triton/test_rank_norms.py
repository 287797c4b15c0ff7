"""Norms that add up over ranks, a rank at a time and by ranks that run at the same time, against a sum and a norm."""

from __future__ import annotations

import multiprocessing
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from quire.compute.kernels.triton.norm import rms_norm, rms_norm_quantized
from quire.compute.kernels.triton.ranks import norm_rows, pulled_norm, pushed_norm
from quire.compute.kernels.triton.ranks.window import (
    PULLED_PROGRAMS,
    PUSHED_TILE,
    PUSHED_WORDS,
    STEP_BYTES,
    STEPS,
    layout_of,
)
from tests.kernels.triton.test_ranks import LAYOUT, RANKS, Windows, sum_of, without_ptx

EPS = 1e-5
CODES = [None, torch.int8, torch.float8_e4m3fn]
DTYPES = (torch.float32, torch.bfloat16)
IN_FP16 = ((None, torch.float16, 0), (torch.int8, torch.float16, 1))
"""Codes, dtype and rank."""
FEW_PROGRAMS = 2


class Case(NamedTuple):
    """A norm's inputs; `given` are the ranks' summands."""

    x: Tensor
    weight: Tensor
    given: list[Tensor]


class Found(NamedTuple):
    """What a norm left; `scales` where out has codes."""

    x: Tensor
    out: Tensor
    scales: Tensor | None


def case_of(rows: int, width: int, dtype: torch.dtype, device: str, ranks: int = RANKS, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(1_000 * seed + rows + width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    return Case(normal(rows, width), normal(width), [normal(rows, width) for _ in range(ranks)])


def expected_of(case: Case, code: torch.dtype | None) -> Found:
    """By a sum and a norm."""
    x, delta = case.x.clone(), sum_of(case.given)
    if code is not None:
        made = rms_norm_quantized(x, case.weight, EPS, code, delta)
        return Found(x, made.codes, made.scales)
    rms_norm(x, case.weight, EPS, out := torch.empty_like(x), delta)
    return Found(x, out, None)


def poisoned(case: Case, code: torch.dtype | None) -> Found:
    """Places for what is found."""
    x = case.x.clone()
    if code is None:
        return Found(x, torch.full_like(x, float("nan")), None)
    scales = torch.full((len(x), 1), float("nan"), device=x.device)
    return Found(x, torch.full(x.shape, 99, dtype=torch.uint8, device=x.device).view(code), scales)


def assert_same(found: Found, expected: Found) -> None:
    """The stream has the same bits; the norm too, but for where the order of squares shows."""
    assert torch.equal(found.x, expected.x)
    if found.scales is not None:
        torch.testing.assert_close(found.scales, expected.scales, rtol=2**-7, atol=0)
        far = (found.out.float() - expected.out.float()).abs() > 1 + 0.13 * expected.out.float().abs()
        assert not far.any()
        assert (found.out.float() != expected.out.float()).sum() <= 1 + 0.05 * found.out.numel()
    elif found.out.dtype == torch.float32:
        torch.testing.assert_close(found.out, expected.out, rtol=2e-6, atol=2e-6)
    else:
        torch.testing.assert_close(found.out, expected.out, rtol=2**-6, atol=1e-6)
        assert (found.out != expected.out).sum() <= 1 + 0.02 * found.out.numel()


@pytest.fixture
def windows(device: str, monkeypatch: pytest.MonkeyPatch) -> Windows:
    """A rank finds all that it waits for: in these it looks a few times."""
    for module in (pulled_norm, pushed_norm):
        monkeypatch.setattr(module, "MAX_POLLS", 3)
    return Windows(device)


def words(x: Tensor) -> Tensor:
    """[rows, words]."""
    return x.contiguous().view(torch.int32)


@pytest.mark.parametrize(("code", "dtype", "own"), [*product(CODES, DTYPES, (0, 1)), *IN_FP16])
def test_pushed_rows_are_added_up_and_normed(
    code: torch.dtype | None, dtype: torch.dtype, own: int, windows: Windows, device: str
) -> None:
    """Tiles have had different numbers of calls before, as after sums of few words."""
    windows.calls[:] = torch.arange(len(windows.calls)) % 3
    for rows, width in ((2, 1_200), (1, 2), (5, 512)):
        case, before = case_of(rows, width, dtype, device), windows.calls.clone()
        each = words(case.x).shape[1]
        tiles = -(-each // PUSHED_TILE)
        tile = torch.arange(rows)[:, None] * tiles + torch.arange(each) // PUSHED_TILE
        place = torch.arange(rows)[:, None] * tiles * PUSHED_TILE + torch.arange(each)
        call = before.cpu()[tile].long() + 1
        packets = [call << 32 | (words(one).cpu().long() & 0xFFFFFFFF) for one in case.given]

        def arrived(at: int, come_from: int, call: Tensor = call, place: Tensor = place) -> Tensor:
            both = torch.stack([windows.arrivals(at, parity)[come_from].cpu() for parity in (0, 1)])
            return both[call & 1, place]

        for rank in range(RANKS):
            for parity in (0, 1) if rank != own else ():
                mine = (call & 1) == parity
                windows.arrivals(own, parity)[rank, place[mine].to(device)] = packets[rank][mine].to(device)
        found = poisoned(case, code)
        pushed_norm.rms_norm_pushed(
            found.x, case.weight, EPS, found.out, found.scales, case.given[own],
            windows.addresses, windows.calls, LAYOUT.arrivals, own, RANKS,
        )  # fmt: skip
        assert_same(found, expected_of(case, code))
        for rank in range(RANKS):
            if rank != own:
                assert torch.equal(arrived(rank, own), packets[own])
        counted = torch.zeros_like(before)
        counted[: rows * tiles] = 1
        assert torch.equal(windows.calls - before, counted)


def test_rows_that_windows_have_no_room_for_are_not_pushed() -> None:
    most = PUSHED_WORDS // 2_048
    assert pushed_norm.can_push_rows(torch.empty(most, 4_096, dtype=torch.bfloat16, device="meta"))
    assert not pushed_norm.can_push_rows(torch.empty(most + 1, 4_096, dtype=torch.bfloat16, device="meta"))
    assert not pushed_norm.can_push_rows(torch.empty(most, 4_098, dtype=torch.bfloat16, device="meta"))


def test_only_plain_rows_are_served() -> None:
    x, weight = torch.empty(3, 8_192, dtype=torch.bfloat16), torch.empty(8_192, dtype=torch.bfloat16)
    assert norm_rows.serves_rows(x, weight)
    assert not norm_rows.serves_rows(x, weight.float()), "a weight that is applied before the result is rounded"
    assert not norm_rows.serves_rows(x.view(3, 2, -1), weight), "heads"
    assert not norm_rows.serves_rows(x[:, :4_096], weight[:4_096]), "a part of wider rows"
    assert not norm_rows.serves_rows(x[:, :3].contiguous(), weight[:3]), "no whole words"
    wide = torch.empty(1, STEP_BYTES // 2 + 2, dtype=torch.bfloat16)
    assert not norm_rows.serves_rows(wide, wide[0])


@pytest.fixture
def interpreted(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        without_ptx(monkeypatch, pulled_norm)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("code", "dtype", "own"), [*product(CODES, DTYPES, (0, 2)), IN_FP16[0]])
def test_pulled_rows_are_added_up_and_normed(
    code: torch.dtype | None,
    dtype: torch.dtype,
    own: int,
    windows: Windows,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pulled_norm, "PULLED_PROGRAMS", FEW_PROGRAMS)
    counts = torch.full((PULLED_PROGRAMS,), 2**31 - 2, dtype=torch.int32, device=device)  # they wrap around
    for rows, width in ((7, 3_000), (1, 2), (16, 1_024)):
        case, before = case_of(rows, width, dtype, device), counts.clone()
        steps = steps_of(rows, words(case.x).shape[1])
        last = before[: len(steps)] + torch.tensor([len(each) for each in steps], dtype=torch.int32, device=device)
        for rank in range(RANKS):
            if rank != own:
                row_flags(windows, own)[: len(steps), rank] = last
                for program, own_steps in enumerate(steps):
                    for step, (start, stop) in enumerate(own_steps):
                        part = words(case.given[rank])[start:stop].reshape(-1)
                        ring(windows, rank)[program, (int(before[program]) + step) % STEPS, : len(part)] = part
        found = poisoned(case, code)
        pulled_norm.rms_norm_pulled(
            found.x, case.weight, EPS, found.out, found.scales, case.given[own],
            windows.addresses, counts, LAYOUT.row_flags, LAYOUT.rings, own, RANKS,
        )  # fmt: skip
        assert_same(found, expected_of(case, code))
        assert torch.equal(counts[: len(steps)], last)
        assert torch.equal(counts[len(steps) :], before[len(steps) :])
        for rank in range(RANKS):
            if rank != own:
                assert torch.equal(row_flags(windows, rank)[: len(steps), own], last)


def steps_of(rows: int, words: int) -> list[list[tuple[int, int]]]:
    """The rows of each program's steps, as bounds."""
    block, share = max(32, 1 << (words - 1).bit_length()), -(-rows // FEW_PROGRAMS)
    at_once = min(STEP_BYTES // (4 * block), 1 << (share - 1).bit_length())
    bounds = [(start, min(rows, start + at_once)) for start in range(0, rows, at_once)]
    return [bounds[program::FEW_PROGRAMS] for program in range(min(len(bounds), FEW_PROGRAMS))]


def row_flags(windows: Windows, rank: int) -> Tensor:
    """[programs, ranks]"""
    return windows.bytes[rank][LAYOUT.row_flags : LAYOUT.arrivals].view(torch.int32).view(PULLED_PROGRAMS, -1)


def ring(windows: Windows, rank: int) -> Tensor:
    """[programs, places, words]"""
    return windows.bytes[rank][LAYOUT.rings : LAYOUT.size].view(torch.int32).view(PULLED_PROGRAMS, STEPS, -1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_rank_sums.py has cards that run at the same time")
@pytest.mark.usefixtures("interpreted")
def test_ranks_that_run_at_the_same_time_overwrite_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes with shared windows, in many more steps than a ring has places."""
    monkeypatch.setattr(pulled_norm, "PULLED_PROGRAMS", FEW_PROGRAMS)
    layout = layout_of(2)
    shared = [torch.zeros(layout.size, dtype=torch.uint8).share_memory_() for _ in range(2)]
    found = [torch.zeros(len(CALLS), dtype=torch.bool).share_memory_() for _ in range(2)]
    processes = [
        multiprocessing.get_context("fork").Process(target=norm_in_calls, args=(rank, shared, found[rank]))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        process.kill()
    assert [each.tolist() for each in found] == [[True] * len(CALLS)] * 2


CALLS = [(19, 4_096), (3, 8_192), (40, 2_048), (1, 64), (23, 4_096), (9, 8_192)]
"""Rows and width of each call."""


def norm_in_calls(rank: int, windows: list[Tensor], found: Tensor) -> None:
    """A rank: in turn pulled and pushed."""
    torch.set_num_threads(1)  # those of the process that it is a fork of are not there
    layout, addresses = layout_of(2), torch.tensor([window.data_ptr() for window in windows])
    counts, calls = torch.zeros(PULLED_PROGRAMS, dtype=torch.int32), torch.zeros(PUSHED_WORDS, dtype=torch.int32)
    for number, (rows, width) in enumerate(CALLS):
        case = case_of(rows, width, torch.bfloat16, "cpu", ranks=2, seed=number)
        arguments = (case.weight, EPS)
        expected = expected_of(case, None)
        pulled, pushed = poisoned(case, None), poisoned(case, None)
        pulled_norm.rms_norm_pulled(
            pulled.x, *arguments, pulled.out, None, case.given[rank],
            addresses, counts, layout.row_flags, layout.rings, rank, 2,
        )  # fmt: skip
        pushed_norm.rms_norm_pushed(
            pushed.x, *arguments, pushed.out, None, case.given[rank], addresses, calls, layout.arrivals, rank, 2
        )
        for each in (pulled, pushed):
            assert_same(each, expected)
        found[number] = True
