"""A process that compiles kernels for another one, into Triton's cache on disk, where that one finds them.

    python -c "…; main([descriptor, …])"

Started by `compiler_processes`, at each start of an engine on a GPU, and ready before that engine has imported torch:
it prepares what all compilations need, then forks a worker for each socket that it was given. A worker reads requests
as lines of JSON, compiles one at a time and answers each: `{"error": ""}`, or why it failed. It leaves when the other
end of its socket is closed: when it is told so, or when the parent is gone and whoever the parent forked.

Nothing here touches a device, so all of it may run on a machine without one. Keys on disk are made by Triton itself
from the same sources, settings and environment as the parent's.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType, ModuleType
from typing import Any


def main(descriptors: Sequence[int]) -> None:
    """Serve these sockets; each is one worker's. Returns once all workers are gone."""
    channels = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    for channel in channels:
        channel.set_inheritable(False)  # or ptxas would hold it open after the worker's death
    try:
        _prepare()
    except Exception as error:
        for channel in channels:
            with suppress(OSError):  # the parent is gone
                channel.sendall(_answer(error))
        return
    _wait_for(_fork(channels))


def _prepare() -> None:
    """What all workers share: Triton, the hash of its 400 MB, and our kernels."""
    _stub_torch()
    import quire.compute.kernels.triton as kernels
    from quire.compute.kernels.triton.launching.triton_private import hash_triton

    hash_triton()
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        importlib.import_module(module.name)


def _stub_torch() -> None:
    """Put stubs in torch's place: importing it takes seconds, and modules of kernels use it only to launch them."""
    if "torch" not in sys.modules:
        for name in ("torch", "torch.nn", "torch.nn.functional"):
            sys.modules[name] = _StubModule(name)


class _StubModule(ModuleType):
    """A module of which every attribute is such a module again."""

    def __getattr__(self, name: str) -> ModuleType:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__dict__[name] = found = _StubModule(f"{self.__name__}.{name}")
        return found


def _fork(channels: list[socket.socket]) -> list[int]:
    """A worker for each; their process ids. A request to leave ends them, whatever they are at."""
    workers: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        for worker in workers:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)

    signal.signal(signal.SIGTERM, leave)
    for channel in channels:
        worker = os.fork()
        if worker == 0:
            try:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                for other in channels:
                    if other is not channel:
                        other.close()
                _serve(channel)
            finally:
                os._exit(0)
        workers.append(worker)
    for channel in channels:
        channel.close()
    return workers


def _wait_for(workers: list[int]) -> None:
    for worker in workers:
        os.waitpid(worker, 0)


def _serve(channel: socket.socket) -> None:
    """Answer requests until there will be no more."""
    with suppress(OSError):  # the parent is gone
        for line in channel.makefile("rb"):
            try:
                _compile(**json.loads(line))
            except Exception as error:
                channel.sendall(_answer(error))
            else:
                channel.sendall(_answer(None))


def _answer(error: Exception | None) -> bytes:
    return json.dumps({"error": repr(error) if error else ""}).encode() + b"\n"


def _compile(module: str, name: str, target: dict[str, Any], specialization: str, deferred: bool) -> None:
    """Put one specialisation of a kernel into Triton's cache, with what launches it.

    Args:
        module: Where the kernel is.
        name: Its own, there.
        target: The fields of Triton's `GPUTarget`.
        specialization: See triton_private.CacheMiss.
        deferred: Nobody waits for it.
    """
    from quire.compute.kernels.triton.launching.triton_private import compile_for, compile_on_disk, make_cache_key

    if deferred:  # from now on, for nearly all that comes afterwards is deferred too
        os.setpriority(os.PRIO_PROCESS, 0, _LOW_PRIORITY)
    compile_for(target)
    function = getattr(importlib.import_module(module), name)
    function = getattr(function, "function", function)  # of `launch.Kernel`
    make_cache_key(function)
    compile_on_disk(function, specialization)


_LOW_PRIORITY = 10
"""A nice value: the engine serves meanwhile."""
