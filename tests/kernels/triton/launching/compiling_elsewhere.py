"""Has kernels compiled for sm_90 by other processes, on a machine with or without a card, and says who compiled what.

    TRITON_CACHE_DIR=… python -m tests.kernels.triton.launching.compiling_elsewhere

Prints one line of JSON; see test_compiler.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime.jit import JITFunction

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.triton.launching.compiler_processes import CompilerProcesses
from quire.compute.kernels.triton.launching.precompiler import Precompiler
from quire.compute.kernels.triton.step_inputs import embed
from quire.tools.bench.kernels import all_cases
from tests.kernels.triton.compile_cases import NoCard

SECONDS = 120

compiled: list[tuple[str, bool, str]] = []
"""A kernel, whether Triton's cache on disk had it, and the thread that asked for it."""
functions: list[JITFunction[Any]] = []


def main() -> None:
    triton.runtime.driver.set_active(NoCard())
    knobs.compilation.listener = lambda *, src, cache_hit, **_: compiled.append(
        (src.fn.__name__, cache_hit, threading.current_thread().name.split("_")[0])
    )
    found: dict[str, Any] = {}
    processes = CompilerProcesses(2)
    with Precompiler(2, preload, lambda: None, processes) as precompiler, precompiler.warmup():
        embed_by(None)
        launch("prefill_attention_dense")  # in Gluon
        launch("token_logprobs")  # calls functions that read constants: part of its key, see `make_cache_key`
        with precompiler.warmup(deferred=True):
            embed_by(2.5)
    found["start"] = [each for each in compiled if each[2] != "compile later"]
    until(lambda: len(compiled) == len(precompiler.names) and processes._process.poll() is not None)
    found["later"] = [each for each in compiled if each[2] == "compile later"]
    forget()

    os.environ["TRITON_CACHE_DIR"] += "/other"
    processes = CompilerProcesses(2)
    with Precompiler(2, preload, lambda: None, processes) as precompiler, precompiler.warmup():
        os.killpg(processes.pid, signal.SIGKILL)
        embed_by(None)
    found["killed"] = list(compiled)
    forget()
    precompiler.close()
    print(json.dumps(found))


def preload(function: JITFunction[Any], specialization: str) -> Any:
    """All that can be done without a card to load it on."""
    functions.append(function)
    return function.preload(specialization)


def embed_by(scale: float | None) -> None:
    embed(torch.zeros(8, dtype=torch.int64), torch.zeros(9, 32), scale, torch.empty(8, 32))


def launch(op: str) -> None:
    """A small case of the benchmark."""
    case = next(case for case in all_cases(torch.device("cpu")) if case.op == op)
    arguments, named = case.make(torch.device("cpu"))
    kernel(op, "cuda")(*arguments, **named)


def forget() -> None:
    """As in a new process."""
    compiled.clear()
    for function in functions:
        function.device_caches.clear()


def until(come_true: Any) -> None:
    deadline = time.monotonic() + SECONDS
    while not come_true() and time.monotonic() < deadline:
        time.sleep(0.01)


if __name__ == "__main__":
    main()
