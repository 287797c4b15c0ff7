"""Compiles kernels side by side before they are needed; Triton compiles one after another, each at its first launch.

A compile warm-up launches all that will be launched later, on tensors of the same shapes, but nothing runs: Triton only
looks up what serves each launch, and cuBLAS is not called. Other processes compile what Triton has not compiled yet
into its cache on disk, and threads of this process load it from there. Without such processes, or where they fail, the
threads compile; they spend much of their time in LLVM, in ptxas and in a C compiler, without the interpreter's lock.
Nothing in a warm-up may depend on outputs, which are not written.

Triton makes all keys itself, so a kernel that a warm-up misses is compiled when it is launched. Imports no torch, so
that work can begin while torch is imported.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, thread
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any

from triton.runtime import JITFunction

from quire.compute.kernels.triton.launching import triton_private
from quire.compute.kernels.triton.launching.compiler_processes import CompilerProcesses
from quire.compute.kernels.triton.launching.triton_private import CacheMiss

if TYPE_CHECKING:
    from torch import Tensor

Compile = Callable[[JITFunction[Any], str], Any]
"""A function that returns the compiled kernel for a function and one of its specialisations (see CacheMiss)."""
_LATER_PART = 8
"""One of this many threads loads or compiles deferred kernels, because it shares the interpreter's lock with
requests."""
_SWITCH_INTERVAL_S = 2e-4
"""How long a thread with deferred kernels holds the interpreter's lock while others wait for it.

Python's usual 5 ms are longer than a step.
"""
_log = logging.getLogger(__name__)


class Precompiler:
    """Threads that compile what warm-ups miss.

    At the end of `with` all kernels that the start needs are compiled, or given up if there was an error; deferred
    kernels are compiled some time before `close`.

    Args:
        threads: How many load or compile at the same time.
        compile: Compiles one of a function's specialisations, or finds it on disk, in a thread.
        prepare: Makes what every compilation needs, in a thread, before the first.
        processes: Compile to the disk before `compile` is called; this object lets them end.
        done: Called in a thread when all is compiled, deferred kernels too, unless something could not be.

    Attributes:
        names: The kernels of all compilations, in the order in which warm-ups missed them.
    """

    def __init__(
        self,
        threads: int,
        compile: Compile | None = None,
        prepare: Callable[[], None] | None = None,
        processes: CompilerProcesses | None = None,
        done: Callable[[], None] | None = None,
    ) -> None:
        triton_private.load_launchers_apart()
        self.names: list[str] = []
        self._processes = processes
        self._done = done
        self._all: list[Future[Any]] = []
        self._compile = compile or triton_private.compile_and_load
        self._now = ThreadPoolExecutor(threads, "compile now")
        self._later = ThreadPoolExecutor(max(1, threads // _LATER_PART), "compile later")
        self._prepared = self._now.submit(prepare or triton_private.prepare_to_load)
        self._undisturbed = threading.Event()  # set while there is no warm-up
        self._needed = threading.Event()  # a deferred kernel is waited for, or all others are done
        self._warming_up = self._deferred = self._closed = False
        self._short_switch_interval = _ShortSwitchInterval()
        self._begun: list[_Compilation] = []

    def __enter__(self) -> Precompiler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None:
            self.close()
        self.finish()
        self._now.shutdown()

    def finish(self) -> None:
        """Wait until everything that the start needs is compiled, and begin with the rest."""
        for compilation in self._begun:
            compilation.end()
        self._begun.clear()
        self._needed.set()
        if self._processes is not None:
            self._processes.finish()
        if self._done is not None and not self._closed:
            self._later.submit(self._call_when_done, self._done)  # behind what is deferred
            self._done = None

    def _call_when_done(self, done: Callable[[], None]) -> None:
        if all(each.exception() is None for each in self._all):
            done()

    def close(self) -> None:
        """Compile nothing more, and wait for running compilations, which need the device's context."""
        self._closed = True
        self._needed.set()
        if self._processes is not None:
            self._processes.close()
        for pool in (self._now, self._later):
            pool.shutdown(cancel_futures=True)

    @contextmanager
    def warmup(self, *, deferred: bool = False) -> Iterator[None]:
        """Compile what this thread launches inside the context, without running it. Contexts may be nested.

        Other processes compile at once; this process compiles when the context ends, because before that it would only
        take the interpreter's lock from the warm-up, which takes less time than one compilation. `finish` does not wait
        for kernels that are `deferred`, because the start does not need them.
        """
        before, self._deferred = self._deferred, deferred
        try:
            with nullcontext() if self._warming_up else self._look_up_only():
                yield
        finally:
            self._deferred = before

    @contextmanager
    def _look_up_only(self) -> Iterator[None]:
        import torch.nn.functional as F  # torch is there now

        from quire.compute.kernels.triton.launching.launch import Kernel

        warming_up = threading.get_ident()

        def on_miss(miss: CacheMiss) -> bool:
            """Return whether Triton must not compile the kernel itself."""
            if threading.get_ident() != warming_up:
                return False
            self._start_compilation(miss)
            return True

        def look_up(launches: Any, look_up_of: Callable[[Any], Callable[..., object]]) -> Callable[[Any, Any], Any]:
            def at(kernel: Any, grid: Any) -> Any:
                return launches(kernel, grid) if threading.get_ident() != warming_up else look_up_of(kernel)

            return at

        def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            if threading.get_ident() != warming_up:
                return linear(x, weight, bias)
            return x.new_empty((*x.shape[:-1], len(weight)))

        def look_up_in_triton(launches: Callable[..., Any]) -> Callable[..., Any]:
            return look_up(launches, lambda function: functools.partial(function.run, grid=None, warmup=True))

        launches, linear = Kernel.__getitem__, F.linear
        self._undisturbed.clear()
        self._warming_up = True
        Kernel.__getitem__ = look_up(launches, lambda kernel: kernel.look_up)  # type: ignore[method-assign]
        F.linear = multiply  # type: ignore[assignment]
        try:
            with triton_private.intercept_launches(on_miss, look_up_in_triton):
                yield
        except BaseException:
            self._done = None  # the rest of the warm-up might have missed more
            raise
        finally:
            F.linear, Kernel.__getitem__ = linear, launches  # type: ignore[method-assign]
            self._warming_up = False
            self._undisturbed.set()
            if self._processes is not None:
                self._processes.release()

    def _start_compilation(self, miss: CacheMiss) -> None:
        """Compile what a launch missed, and put a placeholder where Triton looks for it."""
        function, specialization, kernels, key = miss
        self.names.append(function.fn.__name__)
        pool, begins = (self._later, self._needed) if self._deferred else (self._now, self._undisturbed)
        elsewhere = self._ask_processes(function, specialization)
        done = pool.submit(self._compile_prepared, elsewhere, begins, function, specialization)
        self._all.append(done)
        again = functools.partial(self._compile, function, specialization)
        kernels[key] = compilation = _Compilation(kernels, key, done, again, self._needed if self._deferred else None)
        if self._deferred:
            done.add_done_callback(lambda _: compilation.end())
        else:
            self._begun.append(compilation)

    def _ask_processes(self, function: JITFunction[Any], specialization: str) -> Future[bool] | None:
        """Return a future that ends when the processes have compiled the kernel or failed; None: there are no
        processes."""
        if self._processes is None:
            return None
        return self._processes.submit(
            function, specialization, triton_private.current_target(), deferred=self._deferred
        )

    def _compile_prepared(
        self, elsewhere: Future[bool] | None, begins: threading.Event, function: JITFunction[Any], specialization: str
    ) -> Any:
        if elsewhere is not None:
            elsewhere.result()
        begins.wait()
        if self._closed or thread._shutdown:  # the interpreter ends, and would wait for all that is left
            raise CancelledError
        self._prepared.result()
        with self._short_switch_interval if begins is self._needed else nullcontext():
            triton_private.make_cache_key(function)
            return self._compile(function, specialization)


class _ShortSwitchInterval:
    """While any thread is inside, threads hold the interpreter's lock for _SWITCH_INTERVAL_S at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._usual_s = 0.0

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(_SWITCH_INTERVAL_S)
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                sys.setswitchinterval(self._usual_s)


class _Compilation:
    """Stands in Triton's place for a compiled kernel until it exists, so that a launch waits for it. `kernels` are
    Triton's, by key; `again` compiles the kernel, and `needed` is set when a launch waits for it."""

    def __init__(
        self,
        kernels: dict[str, Any],
        key: str,
        done: Future[Any],
        again: Callable[[], Any],
        needed: threading.Event | None = None,
    ) -> None:
        self._kernels = kernels
        self._key = key
        self._done = done
        self._again = again
        self._needed = needed

    def result(self) -> Any:
        """Return the kernel to Triton at a launch.

        If a thread could not compile it, because a disk was full for example, it is tried once more: an error here ends
        the engine.
        """
        if self._needed is not None:
            self._needed.set()
        try:
            return self._done.result()
        except Exception as error:
            _log.info("kernels     one was not compiled ahead: %r", error)
            self._kernels[self._key] = kernel = self._again()
            return kernel

    def end(self) -> None:
        """Wait, then put the kernel in this object's place; after a failure leave the place empty.

        The launch that needs the kernel then compiles it and raises the error.
        """
        try:
            self._done.result()
        except Exception as error:
            if not isinstance(error, CancelledError):
                _log.info("kernels     one was not compiled ahead: %r", error)
            if self._kernels.get(self._key) is self:
                del self._kernels[self._key]
