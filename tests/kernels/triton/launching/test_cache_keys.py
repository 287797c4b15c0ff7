"""Triton's keys on disk: the same whichever kernel was asked first, and by whichever thread."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import triton.language as tl
from triton.runtime.jit import JITFunction

from quire.compute.kernels.triton.launching.launch import Kernel
from quire.compute.kernels.triton.launching.triton_private import make_cache_key

# mypy: disable-error-code="no-untyped-def, operator"
_ONE = tl.constexpr(1)
_TWO = tl.constexpr(2)


@JITFunction
def _inner(x):
    return x + _ONE


@JITFunction
def _middle(x):
    return _inner(x) * _TWO


@JITFunction
def _first(x):
    return _middle(x)


@JITFunction
def _second(x):
    return _inner(x)


@JITFunction
def _endless(x):
    return _endless(_inner(x))


ALL = (_inner, _middle, _first, _second, _endless)


@pytest.fixture(autouse=True)
def _unknown() -> None:
    _forget()


def _forget() -> None:
    for function in ALL:
        function.hash, function.used_global_vals = None, {}


def _keys() -> list[str]:
    return [function.hash for function in ALL]


def test_keys_do_not_depend_on_the_order() -> None:
    found = []
    for order in itertools.permutations(ALL):
        _forget()
        for function in order:
            make_cache_key(function)
        found.append(_keys())
    assert all(keys == found[0] for keys in found)
    assert len(set(found[0])) == len(ALL)


def test_keys_do_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits in the middle of making a key until another had time to come by."""
    for function in ALL:
        make_cache_key(function)
    alone, parse = _keys(), JITFunction.parse
    monkeypatch.setattr(JITFunction, "parse", lambda function: threading.Event().wait(0.02) or parse(function))
    with ThreadPoolExecutor(2 * len(ALL)) as pool:
        for _ in range(3):
            _forget()
            list(pool.map(make_cache_key, [*ALL, *reversed(ALL)]))
            assert _keys() == alone


def test_a_key_knows_the_constants_of_what_is_called() -> None:
    make_cache_key(_first)
    assert {name for name, _ in _first.used_global_vals} == {"_ONE", "_TWO"}


def test_a_launch_that_compiles_makes_the_same_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it puts on disk is found by other processes, and what they put there by later compilations of this one."""
    keys: list[str | None] = []
    monkeypatch.setattr(JITFunction, "__getitem__", lambda *_: lambda *_: keys.extend([_inner.hash, _first.hash]))
    Kernel(_first)[(1,)](1)
    make_cache_key(_first)
    assert keys == [_inner.hash, _first.hash]
