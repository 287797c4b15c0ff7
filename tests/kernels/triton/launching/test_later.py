"""What the start does without is compiled after it, or when somebody waits for it, or not once all is closed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from triton import knobs
from triton.runtime.jit import JITFunction

from quire.compute.kernels.triton.launching.precompiler import Precompiler

SECONDS = 60


@JITFunction
def _kernel(x: Any) -> Any:
    return x


class Compiler:
    """Compiles slowly, if asked to; remembers what it began and by whom."""

    def __init__(self) -> None:
        self.began: list[str] = []
        self.threads: list[str] = []
        self.may_end = threading.Event()
        self.may_end.set()

    def __call__(self, function: JITFunction[Any], specialization: str) -> str:
        self.began.append(specialization)
        self.threads.append(threading.current_thread().name)
        assert self.may_end.wait(SECONDS)
        if specialization == "bad":
            raise OSError("no room on the device")
        return specialization.upper()


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


@pytest.fixture
def precompiler(compiler: Compiler) -> Iterator[Precompiler]:
    _kernel.device_caches.clear()
    _kernel.device_caches[0] = ({},)  # of which Triton finds a launch's compilation by its key
    made = Precompiler(16, compiler, lambda: None)
    yield made
    compiler.may_end.set()
    made.close()
    _kernel.device_caches.clear()


def miss(*keys: str) -> None:
    """As Triton says that it lacks a compilation."""
    for key in keys:
        missed = {"device": 0, "key": key, "specialization_data": key}
        assert knobs.runtime.jit_cache_hook(fn=SimpleNamespace(jit_function=_kernel), compile=missed)


def kept(key: str) -> Any:
    return _kernel.device_caches[0][0].get(key)


def test_the_start_waits_for_what_it_needs_alone(precompiler: Precompiler, compiler: Compiler) -> None:
    with precompiler:
        with precompiler.warmup():
            miss("a")
            with precompiler.warmup(deferred=True):
                miss("b")
            miss("c")
        with precompiler.warmup(deferred=True):
            miss("d")
        for key in "ac":
            kept(key).result()
        assert sorted(compiler.began) == ["a", "c"]
        compiler.may_end.clear()  # nobody would go on if this waited for b and d
    assert precompiler.names == ["_kernel"] * 4
    compiler.may_end.set()
    assert [kept(key).result() for key in "abcd"] == ["A", "B", "C", "D"]
    assert [name.split("_")[0] for name in compiler.threads] == ["compile now"] * 2 + ["compile later"] * 2


def test_nothing_begins_before_the_end_of_the_outer_rehearsal(precompiler: Precompiler, compiler: Compiler) -> None:
    with precompiler.warmup():
        miss("a")
        with precompiler.warmup(deferred=True):
            miss("b")
        compiler.may_end.wait(0.05)
        assert compiler.began == []
    assert kept("a").result() == "A"


def test_who_needs_it_sooner_has_it_sooner(precompiler: Precompiler, compiler: Compiler) -> None:
    with precompiler.warmup(deferred=True):
        miss("a")
    assert not kept("a")._done.done()
    assert kept("a").result() == "A"


def test_one_that_fails_leaves_its_place_to_triton(precompiler: Precompiler) -> None:
    with precompiler.warmup(deferred=True):
        miss("bad")
    compilation = kept("bad")
    precompiler.finish()
    with pytest.raises(OSError, match="no room"):
        compilation.result()
    precompiler.close()
    assert kept("bad") is None


def test_a_closed_engine_compiles_nothing_more(precompiler: Precompiler, compiler: Compiler) -> None:
    compiler.may_end.clear()
    with precompiler.warmup(deferred=True):
        miss("a", "b", "c", "d")
    precompiler.finish()
    while len(compiler.began) < 2:  # as many as there are threads
        compiler.may_end.wait(0.001)
    closing = threading.Thread(target=precompiler.close)
    closing.start()
    while not precompiler._closed:
        compiler.may_end.wait(0.001)
    closing.join(0.05)
    assert closing.is_alive(), "what is under way is waited for"
    compiler.may_end.set()
    closing.join()
    assert sorted(compiler.began) == ["a", "b"]
    assert (kept("c"), kept("d")) == (None, None)


def test_a_start_that_fails_leaves_no_compilation_behind(precompiler: Precompiler, compiler: Compiler) -> None:
    with pytest.raises(ValueError, match="weights"), precompiler:  # noqa: PT012
        with precompiler.warmup(), precompiler.warmup(deferred=True):
            miss("b")
        raise ValueError("no such weights")
    assert compiler.began == []
    assert kept("b") is None


def test_what_has_time_leaves_the_interpreter_to_others_soon(precompiler: Precompiler, compiler: Compiler) -> None:
    usual = sys.getswitchinterval()
    compiler.may_end.clear()
    with precompiler.warmup(deferred=True):
        miss("a", "b", "c")
    assert sys.getswitchinterval() == usual
    precompiler.finish()
    while len(compiler.began) < 2:  # as many as there are threads
        compiler.may_end.wait(0.001)
    assert sys.getswitchinterval() < usual / 10
    compiler.may_end.set()
    assert [kept(key).result() for key in "abc"] == ["A", "B", "C"]
    precompiler.close()
    assert sys.getswitchinterval() == usual


def test_nothing_is_said_of_a_rehearsal_that_broke_off(compiler: Compiler) -> None:
    said = threading.Event()
    precompiler = Precompiler(16, compiler, lambda: None, done=said.set)
    with precompiler:
        with pytest.raises(MemoryError), precompiler.warmup():
            raise MemoryError
        precompiler.finish()
    precompiler.close()
    assert not said.is_set()


@pytest.mark.parametrize("last", ["b", "bad"])
def test_that_all_is_compiled_is_said_once_unless_something_is_not(compiler: Compiler, last: str) -> None:
    said = threading.Event()
    _kernel.device_caches[0] = ({},)
    precompiler = Precompiler(16, compiler, lambda: None, done=said.set)
    try:
        with precompiler, precompiler.warmup():
            miss("a")
            with precompiler.warmup(deferred=True):
                compiler.may_end.set()
                miss(last)
        assert said.wait(SECONDS if last == "b" else 0.2) == (last == "b")
    finally:
        precompiler.close()
        _kernel.device_caches.clear()
