"""Launching a kernel for the second time: what Triton compiled for arguments of the same kinds is remembered.

Triton finds the compiled kernel anew at every launch, from the specialisation of every argument, which takes several
times as long as launching it. Steps that are not in a graph launch hundreds of kernels, and the card waits for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_INT32 = range(-(2**31), 2**31)


class Launcher:
    """A kernel that is launched as `launcher[grid](arguments by position, constants and options by name)`."""

    def __init__(self, kernel: JITFunction[Any]) -> None:
        self.kernel = kernel
        self._specialised = [
            not parameter.do_not_specialize for parameter in kernel.params if not parameter.is_constexpr
        ]
        self._constants = {parameter.name: parameter.default for parameter in kernel.params if parameter.is_constexpr}
        self._known: dict[tuple[Any, ...], Callable[..., None]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        if len(args) != len(self._specialised):  # some are given by name
            self.kernel.run(*args, grid=grid, warmup=False, **options)
            return
        kinds = [driver.active.get_current_device(), *options, *options.values()]
        for arg, specialised in zip(args, self._specialised, strict=True):
            if isinstance(arg, torch.Tensor):
                kinds.append(arg.dtype)
                kinds.append(arg.data_ptr() % 16)
            elif specialised and type(arg) is int:  # a kernel of its own for 1, for multiples of 16, and for 64 bits
                kinds.append((arg == 1, arg % 16 == 0, arg in _INT32))
            else:
                kinds.append((type(arg), type(arg) is int and arg in _INT32))
        known = self._known.get(kind := tuple(kinds))
        if known is None:
            compiled = self.kernel.run(*args, grid=grid, warmup=False, **options)
            self._known[kind] = self._direct(compiled, options)
        else:
            known(grid, args)

    def _direct(self, compiled: Any, options: dict[str, Any]) -> Callable[..., None]:
        """How CompiledKernel launches itself, without what only profilers of Triton's own look at."""
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        constants = tuple(options.get(name, default) for name, default in self._constants.items())

        def launch(grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
            x, y, z = (*grid, 1, 1)[:3]
            stream = driver.active.get_current_stream(driver.active.get_current_device())
            run(x, y, z, stream, function, metadata, None, None, None, *args, *constants)

        return launch


def launchable(kernel: Any) -> Any:
    """A decorator for kernels that the host launches; an interpreted one stays what it is."""
    return Launcher(kernel) if isinstance(kernel, JITFunction) else kernel


def ceil_div(whole: int, part: int) -> int:
    """How many parts it takes; Triton's own function for this costs the host as much as a launch."""
    return -(-whole // part)
