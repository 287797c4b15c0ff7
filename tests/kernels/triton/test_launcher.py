"""A kernel is compiled for every kind of arguments, once, and launched with what it is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from quire.kernels.triton import launcher as module
from quire.kernels.triton.launcher import Launcher, ceil_div, launchable


class Kernel:
    """Arguments x and n, a third that makes no kernel of its own, and constants BLOCK and FLAG."""

    params = tuple(
        SimpleNamespace(name=name, default=default, is_constexpr=name.isupper(), do_not_specialize=name == "rows")
        for name, default in (("x", None), ("n", None), ("rows", None), ("BLOCK", None), ("FLAG", False))
    )

    def __init__(self) -> None:
        self.compiled = 0
        self.launches: list[tuple[Any, ...]] = []

    def run(self, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> Any:
        self.compiled += 1
        self.launches.append((grid, args))
        return SimpleNamespace(run=self._run, function="function", packed_metadata=self.compiled)

    def _run(self, x: int, y: int, z: int, stream: int, function: str, metadata: int, *rest: Any) -> None:
        assert (stream, function, rest[:3]) == (7, "function", (None, None, None))
        self.launches.append(((x, y, z), metadata, *rest[3:]))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    card = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 7)
    monkeypatch.setattr(module, "driver", SimpleNamespace(active=card))
    return Kernel()


def test_the_second_launch_of_a_kind_is_direct(kernel: Kernel) -> None:
    launcher, x = Launcher(kernel), torch.zeros(64)
    launcher[(4,)](x, 32, 5, BLOCK=16, num_warps=4)
    launcher[(9, 2)](other := torch.ones(64), 48, 6, BLOCK=16, num_warps=4)
    assert kernel.compiled == 1
    assert kernel.launches[1] == ((9, 2, 1), 1, other, 48, 6, 16, False)


def test_what_makes_another_kernel(kernel: Kernel) -> None:
    launcher, x = Launcher(kernel), torch.zeros(64)
    kinds = [
        ((x, 32, 5), {"BLOCK": 16}),
        ((x[1:], 32, 5), {"BLOCK": 16}),
        ((x.half(), 32, 5), {"BLOCK": 16}),
        ((None, 32, 5), {"BLOCK": 16}),
        ((x, 1, 5), {"BLOCK": 16}),
        ((x, 33, 5), {"BLOCK": 16}),
        ((x, 2**40, 5), {"BLOCK": 16}),
        ((x, 32.0, 5), {"BLOCK": 16}),
        ((x, 32, 2**40), {"BLOCK": 16}),
        ((x, 32, 5), {"BLOCK": 32}),
        ((x, 32, 5), {"BLOCK": 16, "FLAG": True}),
        ((x, 32, 5), {"BLOCK": 16, "num_warps": 8}),
    ]
    for _ in range(2):
        for args, options in kinds:
            launcher[(1,)](*args, **options)
    assert kernel.compiled == len(kinds)
    launcher[(1,)](x, 64, 16, BLOCK=16)  # differs in nothing that counts
    assert kernel.compiled == len(kinds)


def test_arguments_by_name_go_the_long_way(kernel: Kernel) -> None:
    launcher = Launcher(kernel)
    for _ in range(2):
        launcher[(1,)](torch.zeros(4), 3, rows=4, BLOCK=16)
    assert kernel.compiled == 2


def test_ceil_div() -> None:
    assert [ceil_div(whole, 4) for whole in (0, 1, 4, 5)] == [0, 1, 1, 2]


@launchable
@triton.jit
def _scale(x, y, n, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, at < n, 0.0) * factor, at < n)


def test_launches_of_a_real_kernel(device: str) -> None:
    for n in (32, 32, 33, 48, 1, 7, 1, 33):
        for factor in (2.0, 3.0):
            x = torch.randn(n + 1, device=device)[n % 2 :][:n]
            _scale[(ceil_div(n, 16),)](x, y := torch.empty_like(x), n, factor, BLOCK=16)
            assert torch.equal(y, x * factor)
