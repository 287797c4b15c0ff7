"""Compiles two kernels ahead for sm_90, on a machine with or without a card, and says what then happens to launches.

    TRITON_CACHE_DIR=… python -m tests.kernels.triton.launching.precompiling

Prints one line of JSON; see test_precompiler.
"""

from __future__ import annotations

import json
import threading
from typing import Any

import torch
import triton
from triton import knobs
from triton.runtime.jit import JITFunction

from quire.compute.kernels.triton.attention.slot_mapping import compute_slot_mapping
from quire.compute.kernels.triton.launching.precompiler import Precompiler
from quire.compute.kernels.triton.step_inputs import embed
from tests.kernels.triton.compile_cases import NoCard


def main() -> None:
    triton.runtime.driver.set_active(NoCard())
    compiled: list[tuple[str, bool, str]] = []  # kernel, whether Triton's cache on disk had it, thread
    knobs.compilation.listener = lambda *, src, cache_hit, **_: compiled.append(
        (src.fn.__name__, cache_hit, threading.current_thread().name)
    )
    functions: list[JITFunction[Any]] = []

    def compile(function: JITFunction[Any], specialization: str) -> Any:
        functions.append(function)
        if function.fn.__name__ == "_compute_slot_mapping":
            raise OSError("no room on the device")
        return function.preload(specialization)

    found: dict[str, Any] = {}
    prepared: list[str] = []
    with Precompiler(2, compile, lambda: prepared.append(threading.current_thread().name)) as precompiler:
        with precompiler.warmup():
            for _ in range(3):
                launch_all()
        found["names"] = precompiler.names
    found["prepared"] = prepared
    found["ahead"] = sorted(compiled)
    compiled.clear()
    JITFunction.__getitem__ = look_up  # type: ignore[method-assign, assignment]
    launch_all()
    found["later"] = list(compiled)
    compiled.clear()
    for function in functions:
        function.device_caches.clear()
    launch_all()
    found["afresh"] = list(compiled)
    print(json.dumps(found))


def launch_all() -> None:
    """Two launches of one specialisation, one of another, and one of a kernel that fails to compile ahead."""
    numbers, weight = torch.zeros(8, dtype=torch.int64), torch.zeros(9, 32)
    for tokens in (numbers, numbers[:5]):
        embed(tokens, weight, None, torch.empty(len(tokens), 32))
    embed(numbers, weight, 2.5, torch.empty(8, 32))
    compute_slot_mapping(numbers.view(2, 4), numbers, numbers, 16, torch.empty_like(numbers))


def look_up(function: JITFunction[Any], grid: Any) -> Any:
    """What Triton's launches come to where there is no card."""
    return lambda *arguments, **named: function.run(*arguments, grid=grid, warmup=True, **named)


if __name__ == "__main__":
    main()
