"""A process that compiles kernels for another process, into Triton's cache on disk.

    python -c "…; main([descriptor, …])"

`compiler_processes` starts it at each start of an engine on a GPU. It is ready before the engine has imported torch: it
prepares what all compilations need, then forks a worker for each socket that it was given. A worker reads requests as
lines of JSON, compiles one at a time and answers each: `{"error": ""}`, or why it failed. It exits when the other end
of its socket is closed, by the parent or by its death.

Nothing here uses a device. Triton makes keys on disk from the same sources, settings and environment as in the parent.
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
    """Serve these sockets, each by one worker. Return once all workers are gone."""
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
    for worker in _fork(channels):
        os.waitpid(worker, 0)


def _prepare() -> None:
    """Load what all workers share: Triton, the hash of its 400 MB, and our kernels."""
    _stub_torch()
    import quire.compute.kernels.triton as kernels
    from quire.compute.kernels.triton.launching.triton_private import hash_triton

    hash_triton()
    for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}."):
        importlib.import_module(module.name)


def _stub_torch() -> None:
    """Put stubs in torch's place, whose import takes seconds: modules of kernels need it only to launch them."""
    if "torch" not in sys.modules:
        for name in ("torch", "torch.nn", "torch.nn.functional"):
            sys.modules[name] = _StubModule(name)


class _StubModule(ModuleType):
    def __getattr__(self, name: str) -> ModuleType:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__dict__[name] = found = _StubModule(f"{self.__name__}.{name}")
        return found


def _fork(channels: list[socket.socket]) -> list[int]:
    """Fork a worker for each channel, and return their process ids. SIGTERM kills them."""
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


def _serve(channel: socket.socket) -> None:
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
    """Put one compilation of a kernel, and its launcher, into Triton's cache, for a target with the fields of Triton's
    `GPUTarget`, with a specialization as in triton_private.CacheMiss. Nobody waits for a `deferred` compilation."""
    from quire.compute.kernels.triton.launching.triton_private import compile_for, compile_on_disk, make_cache_key

    if deferred:  # nearly all later compilations are deferred too, so the priority stays; the engine serves meanwhile
        os.setpriority(os.PRIO_PROCESS, 0, 10)
    compile_for(target)
    function = getattr(importlib.import_module(module), name)
    function = getattr(function, "function", function)  # of `launch.Kernel`
    make_cache_key(function)
    compile_on_disk(function, specialization)
