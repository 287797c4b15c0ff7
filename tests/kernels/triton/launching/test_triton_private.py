"""Where Triton lacks a private name that a feature stands on, it does without the feature, and one line says so."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from triton import knobs
from triton.runtime.jit import JITFunction

from quire.compute.kernels.triton.launching import triton_private
from quire.compute.kernels.triton.launching.launch import Kernel, fast_launch
from quire.compute.kernels.triton.launching.triton_private import (
    COMPILING_AHEAD,
    LAUNCHING,
    can_compile_ahead,
    can_launch,
)


def kernel_of_one(x, n):
    pass


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    can_launch.cache_clear()
    can_compile_ahead.cache_clear()
    yield
    can_launch.cache_clear()
    can_compile_ahead.cache_clear()


def test_this_triton_has_all_names() -> None:
    assert triton_private.missing(LAUNCHING) == []
    assert triton_private.missing(COMPILING_AHEAD) == []
    assert can_launch()
    assert can_compile_ahead()


def test_kernels_are_launched_by_triton_where_a_name_is_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    function, seen = JITFunction(kernel_of_one), []
    assert isinstance(fast_launch(function), Kernel)
    can_launch.cache_clear()
    monkeypatch.delattr("triton.runtime.jit.KernelParam.is_constexpr")
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **named: seen.append((args, named)))
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            kernel = fast_launch(function)
            assert kernel is function
            kernel[(3,)](1, 2, num_warps=4)
    assert seen == [((1, 2), {"grid": (3,), "warmup": False, "num_warps": 4})] * 2
    [line] = [record.getMessage() for record in caplog.records]
    assert "triton.runtime.jit:KernelParam.is_constexpr" in line


def test_nothing_is_compiled_ahead_where_a_name_is_gone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr("triton.runtime.jit.JITFunction.preload")
    monkeypatch.delattr("triton.backends.nvidia.driver.CudaUtils")
    with caplog.at_level(logging.INFO):
        assert [can_compile_ahead(), can_compile_ahead(), can_launch()] == [False, False, True]
    [line] = [record.getMessage() for record in caplog.records]
    assert "CudaUtils, triton.runtime.jit:JITFunction.preload" in line


def test_what_is_intercepted_is_put_back() -> None:
    usual: tuple[Any, Any] = (knobs.runtime.jit_cache_hook, JITFunction.__getitem__)
    with triton_private.intercept_launches(lambda miss: True, lambda getitem: lambda self, grid: None):
        assert JITFunction(kernel_of_one)[(1,)] is None
    assert usual == (knobs.runtime.jit_cache_hook, JITFunction.__getitem__)
