"""Compiles kernels side by side before they are needed; Triton alone compiles one after another, at each first launch.

In a rehearsal, all that will be launched later is launched on tensors of the same shapes, but nothing runs: Triton only
looks up what serves each launch, and cuBLAS is not asked. What Triton has not compiled yet is compiled by other
threads, which spend most of their time in LLVM, in ptxas and in a C compiler, without the interpreter's lock; what
stands in its cache on disk is read by them. Outputs are left as they are found, so nothing in a rehearsal may depend on
them.

Triton makes all keys itself, so a rehearsal can do no harm: a kernel that it misses is compiled when it is launched.
Imports no torch, so that work can begin while torch is imported.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from triton import knobs
from triton.backends.nvidia.driver import CudaUtils
from triton.runtime import cache
from triton.runtime.jit import JITFunction

from quire.kernels.triton.launching.keys import settle_key

if TYPE_CHECKING:
    from torch import Tensor

Compile = Callable[[JITFunction[Any], str], Any]
"""A function and one of its specialisations, as Triton writes it down → the compiled kernel."""
_log = logging.getLogger(__name__)


class Precompiler:
    """Threads that compile what rehearsals miss. At the end of `with` all is compiled, or given up if that is an error.

    Args:
        threads: How many compile at the same time.
        compile: Compiles one of a function's specialisations, in a thread.
        prepare: What every compilation needs, in a thread before the first.

    Attributes:
        names: The kernels of all compilations, in the order in which rehearsals missed them.
    """

    def __init__(self, threads: int, compile: Compile | None = None, prepare: Callable[[], None] | None = None) -> None:
        self.names: list[str] = []
        self._compile = compile or _compile_and_load
        self._pool = ThreadPoolExecutor(threads, "compile")
        self._prepared = self._pool.submit(prepare or _prepare)
        self._undisturbed = threading.Event()  # set while nobody rehearses
        self._begun: list[_Compilation] = []

    def __enter__(self) -> Precompiler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=error is not None)
        self.finish()

    def finish(self) -> None:
        """Wait until all is compiled that was begun."""
        for compilation in self._begun:
            compilation.end()
        self._begun.clear()

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """What this thread launches inside does not run; what is not compiled yet, is from the end on. Sooner it would
        only take the interpreter's lock from the rehearsal, which is over before the first compilation would be.
        """
        import torch.nn.functional as F  # torch is there now

        from quire.kernels.triton.launching.launch import Kernel

        rehearsing, hook = threading.get_ident(), knobs.runtime.jit_cache_hook

        def miss(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
            """Whether Triton shall not compile by itself."""
            if threading.get_ident() != rehearsing:
                return False
            self._begin(fn.jit_function, compile)
            return True

        def look_up(launches: Any, function_of: Callable[[Any], JITFunction[Any]]) -> Callable[[Any, Any], Any]:
            def at(kernel: Any, grid: Any) -> Any:
                if threading.get_ident() != rehearsing:
                    return launches(kernel, grid)
                return functools.partial(function_of(kernel).run, grid=grid, warmup=True)

            return at

        def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            if threading.get_ident() != rehearsing:
                return linear(x, weight, bias)
            return x.new_empty((*x.shape[:-1], len(weight)))

        usual, linear = (JITFunction.__getitem__, Kernel.__getitem__), F.linear
        self._undisturbed.clear()
        knobs.runtime.jit_cache_hook = miss
        JITFunction.__getitem__ = look_up(usual[0], lambda kernel: kernel)
        Kernel.__getitem__ = look_up(usual[1], lambda kernel: kernel.function)  # type: ignore[method-assign]
        F.linear = multiply  # type: ignore[assignment]
        try:
            yield
        finally:
            F.linear = linear
            knobs.runtime.jit_cache_hook = hook
            JITFunction.__getitem__, Kernel.__getitem__ = usual  # type: ignore[method-assign]
            self._undisturbed.set()

    def _begin(self, function: JITFunction[Any], missed: dict[str, Any]) -> None:
        """Compile what a launch missed, and say so where Triton looks for it."""
        kernels, key = function.device_caches[missed["device"]][0], missed["key"]
        self.names.append(function.fn.__name__)
        done = self._pool.submit(self._compile_prepared, function, missed["specialization_data"])
        kernels[key] = _Compilation(kernels, key, done)
        self._begun.append(kernels[key])

    def _compile_prepared(self, function: JITFunction[Any], specialization: str) -> Any:
        self._prepared.result()
        self._undisturbed.wait()
        settle_key(function)
        return self._compile(function, specialization)


class _Compilation:
    """Stands where Triton keeps a compiled kernel, until there is one: who launches it before waits.

    Args:
        kernels: Triton's, by key.
        key: Of the kernel.
        done: The compiled kernel, some time.
    """

    def __init__(self, kernels: dict[str, Any], key: str, done: Future[Any]) -> None:
        self._kernels = kernels
        self._key = key
        self._done = done

    def result(self) -> Any:
        """Triton asks for it at a launch."""
        return self._done.result()

    def end(self) -> None:
        """Wait, and leave the place to the kernel. If there is none, the launch that needs it compiles and says why."""
        try:
            self._done.result()
        except Exception as error:
            _log.info("kernels     one was not compiled ahead: %r", error)
            if self._kernels.get(self._key) is self:
                del self._kernels[self._key]


def _compile_and_load(function: JITFunction[Any], specialization: str) -> Any:
    """The compiled kernel on the device, with what launches it, which Triton makes by a C compiler."""
    kernel = function.preload(specialization)
    kernel.run  # noqa: B018
    return kernel


@functools.cache
def _prepare() -> None:
    """What Triton wants for its first kernel: a module that it compiles from C, and the hash of its own 400 MB."""
    CudaUtils()
    cache.triton_key()
