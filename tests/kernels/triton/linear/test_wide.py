"""Products of many rows, cut in all ways, against products in fp64; and that the kernel compiles without a card."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import pytest
import torch

from quire.kernels.triton.linear.wide import Wide, serves_wide, streamed_tiles, wide_linear
from tests.kernels.triton.linear.test_linear import close, exact, poisoned, random

CUTS = (
    Wide(2, 256, 4, swapped=False, streamed=False),
    Wide(2, 256, 4, swapped=True, streamed=True),
    Wide(3, 256, 3, swapped=False, streamed=True),
    Wide(3, 256, 3, swapped=True, streamed=False),
    Wide(2, 128, 6, swapped=True, streamed=True),
    Wide(3, 128, 4, swapped=False, streamed=False),
)


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("gate", "biased"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("rows", [1, 129, 255, 256, 257, 1000])
def test_many_rows(rows: int, cut: Wide, gate: bool, biased: bool, overlap: bool) -> None:
    """Nothing is a multiple of a tile; in 4096 columns there are enough steps for all programs."""
    for made, columns in ((1000, 520), (264, 4096), (8, 8)):
        x, w, bias = random(rows, 2 * made if gate else made, columns, torch.bfloat16, "cuda")
        y = poisoned(rows, made, x)
        for _ in range(3):  # later calls find the counters of earlier ones as they were
            wide_linear(x, w, bias if biased else None, y.fill_(float("nan")), cut, gate, overlap)
            close(y, exact(x, w, bias if biased else None, gate))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("rows", [256, 2100])
def test_real_sizes_give_the_same_every_time(rows: int, cut: Wide, dtype: torch.dtype) -> None:
    for outputs, columns, gate in ((6144, 4096, False), (4096, 14336, False), (28672, 4096, True)):
        x = torch.randn(rows, columns, dtype=dtype, device="cuda")
        w = torch.randn(outputs, columns, dtype=dtype, device="cuda").div_(columns**0.5)
        ys = [poisoned(rows, outputs // 2 if gate else outputs, x) for _ in range(5)]
        for y in ys:
            wide_linear(x, w, None, y, cut, gate, True)
        close(ys[0], exact(x, w, None, gate))
        assert all(torch.equal(ys[0], y) for y in ys[1:])


@pytest.mark.gpu
def test_rows_of_x_may_lie_apart() -> None:
    x, w, _ = random(300, 136, 72, torch.bfloat16, "cuda")
    apart = torch.full((300, 200), float("nan"), dtype=x.dtype, device="cuda")
    apart[:, 80:152] = x
    assert serves_wide(apart[:, 80:152], w, gate=False)
    assert not serves_wide(apart[:, 81:153], w, gate=False)  # not where 16 bytes begin
    wide_linear(apart[:, 80:152], w, None, y := poisoned(300, 136, x), CUTS[0], False, False)
    close(y, exact(x, w, None, False))


@pytest.mark.parametrize("programs", [1, 7, 132])
@pytest.mark.parametrize("steps", [1, 8, 64, 224])
def test_streamed_tiles_leave_no_program_without_a_step(steps: int, programs: int) -> None:
    for tiles in range(1, 4 * programs):
        streamed = streamed_tiles(tiles, steps, programs)
        assert streamed <= tiles
        assert streamed < 2 * programs
        if streamed:
            assert streamed * steps >= programs
            assert (tiles - streamed) % programs == 0  # what is not streamed comes out even


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a card, other tests compile what they run")
def test_compiles() -> None:
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.triton.linear.compile_wide"]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 4, done.stdout
