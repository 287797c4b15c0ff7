"""Launches kernels in a few microseconds, where Triton's own way takes ten to twenty.

At each launch Triton looks at every argument anew: at its type, and whether 16 divides it, and so which compilation of
the kernel serves. Here a function is written for each kernel (`_source`) that makes a key of these facts from values
that Python compares by identity, finds the compilation that Triton made for them, and calls what launches it. A new key
goes through Triton, which compiles. So does every launch with something unusual: an argument that is no tensor of the
device, no number and not None, or a profiler's hook.

The key says at least as much as Triton's own: for a tensor its dtype and whether 16 divides its address, for an integer
whether it is 1 and whether 16 divides it, each as far as the kernel asks to be specialised; for a descriptor its tiles;
for others their type; and the values of all constants. Addresses are handed on as numbers, which saves asking the
driver about each; the key says that they are the device's, but not for descriptors, of which Triton does not ask it
either.

The copy engine is given descriptors of tensors that it takes tiles of. Making one of Triton's TensorDescriptors, and
saying what a kernel is specialised by for it, takes some 3 µs: as long as the rest of a launch, where three are given.
So one is kept for each address, shape and cut, and a step's tensors come to the same addresses layer after layer. Only
the address is kept, so memory is free when its tensors are.

triton_private.py has the uses of Triton's private API. A process launches on one device, which is the current one when
a kernel is launched first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import JITFunction

from quire.compute.kernels.triton.launching import triton_private
from quire.compute.kernels.triton.launching.triton_private import CompiledLaunch

_MAX_DESCRIPTORS = 4_096
"""The number of descriptors that are kept: for a weight of each layer of a large model, and tensors of steps."""

_KIND = "_quire_kind"
"""The attribute of a descriptor with the result of `specialization_of`."""


class _Memory(NamedTuple):
    """The part of a tensor that Triton reads through a descriptor."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def tensor_descriptor(
    x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], tile: tuple[int, ...], layout: gl.NVMMASharedLayout
) -> TensorDescriptor:
    """Describe the memory of `x`, seen as this shape, to the copy engine.

    Args:
        x: 16 bytes divide its address.
        shape: Entries along each axis.
        strides: Entries between neighbours along each axis: the last is 1, and 16 bytes divide the others.
        tile: Entries of a tile along each axis.
        layout: The layout of a tile in shared memory.
    """
    return _tensor_descriptor(x.data_ptr(), x.dtype, shape, strides, tile, layout)


@functools.lru_cache(_MAX_DESCRIPTORS)
def _tensor_descriptor(
    address: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    tile: tuple[int, ...],
    layout: gl.NVMMASharedLayout,
) -> TensorDescriptor:
    return TensorDescriptor(_Memory(address, dtype), [*shape], [*strides], [*tile], layout)


def specialization_of(descriptor: TensorDescriptor) -> str:
    """Return what a kernel is specialised by for a descriptor."""
    kind: str | None = getattr(descriptor, _KIND, None)
    if kind is None:
        kind = f"{descriptor.base.dtype} {descriptor.block_shape} {descriptor.layout}"
        setattr(descriptor, _KIND, kind)
    return kind


OPTIONS = ("num_warps", "num_stages", "launch_pdl", "maxnreg")
"""The options that a launch may have besides the kernel's own parameters."""
_ELSE = object()
"""The kind, in a key, of arguments that are left to Triton."""
_FUNCTION = f"""
def launch(_grid, {{parameters}}):
{{facts}}
    _compiled = _known.get(({{key}},))
    if _compiled is None or _pre_run_hooks or _runtime.launch_enter_hook.calls or _runtime.launch_exit_hook.calls:
        return _launch_by_triton(_grid, ({{key}},), ({{arguments}},), {{{{{{options}}}}}})
    _x, _y, _z = _grid if len(_grid) == 3 else (*_grid, 1, 1)[:3]
    _run, _stream_of, _device, _function, _metadata = _compiled
    {triton_private.RUN}
"""
"""The function that `_source` writes for a kernel.

For `k(x, n, SIZE: constexpr)`, the key is (x__kind, x__by, n__kind, n__by, SIZE), and the values are (x__value,
n__value, SIZE).
"""
_FACTS = """
    {name}__kind = type({name})
    if {name}__kind is _Tensor:
        {name}__kind = {name}.dtype if {name}.{on_device} else _ELSE
        {name}__value = {name}.data_ptr()
        {name}__by = {of_address}
    elif {name}__kind is int:
        {name}__value = {name}
        {name}__kind = int if -0x80000000 <= {name} < 0x80000000 else _ELSE
        {name}__by = {of_number}
    elif {name}__kind is _Descriptor:
        {name}__value = {name}
        {name}__by = _specialization_of({name})
    else:
        {name}__value = {name}
        {name}__by = None
        if not ({name} is None or {name}__kind is float or {name}__kind is bool):
            {name}__kind = _ELSE
"""
"""The lines that find an argument's kind, what else its kernel is specialised by, and the value that is passed on."""


def fast_launch(function: Any) -> Any:
    """Make Triton's kernel launch faster; stands above `triton.jit` or `gluon.jit` where Python launches the kernel.

    Interpreted kernels are returned unchanged, and so are all where Triton lacks what this needs.
    """
    return Kernel(function) if isinstance(function, JITFunction) and triton_private.can_launch() else function


class Kernel:
    """A kernel, which `kernel[grid](*arguments, CONSTANT=…, num_warps=…)` launches.

    Args:
        function: Triton's function. Only constants among its parameters have annotations, and none has a default.
        on_device: The attribute of a tensor that says whether it is the device's.
    """

    def __init__(self, function: JITFunction[Any], on_device: str = "is_cuda") -> None:
        self.function = function
        self._known: dict[tuple[object, ...], CompiledLaunch] = {}
        names = {
            "_known": self._known,
            "_launch_by_triton": self._launch_by_triton,
            "_pre_run_hooks": function.pre_run_hooks,
            "_runtime": knobs.runtime,
            "_Tensor": Tensor,
            "_Descriptor": TensorDescriptor,
            "_specialization_of": specialization_of,
            "_ELSE": _ELSE,
        }
        exec(_source(triton_private.parameters_of(function), on_device), names)
        self._launch: Callable[..., None] = names["launch"]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """Return the function that launches the kernel on this grid of programs."""
        return partial(self._launch, grid)

    def look_up(self, *arguments: object, **named: object) -> None:
        """Let Triton find the compilation that serves this launch, without launching."""
        constants = {name: value for name, value in named.items() if name not in OPTIONS}
        self.function.run(*arguments, **constants, **_given_options(named), grid=None, warmup=True)

    def _launch_by_triton(
        self, grid: tuple[int, ...], key: tuple[object, ...], arguments: tuple[object, ...], options: dict[str, object]
    ) -> None:
        if triton_private.can_compile_ahead() and not triton_private.has_cache_key(self.function):
            triton_private.make_cache_key(self.function)  # or it may be on disk under a key that no other process makes
        compiled = triton_private.compiled_launch(self.function[grid](*arguments, **_given_options(options)))
        if compiled is not None and _ELSE not in key:
            self._known[key] = compiled


def _given_options(named: Mapping[str, object]) -> dict[str, object]:
    """Return the options that a launch gives, always in one order.

    Triton's key of a compilation has them in the order given, and another order would not find what was compiled ahead.
    """
    return {name: named[name] for name in OPTIONS if named.get(name) is not None}


def _source(parameters: list[Any], on_device: str) -> str:
    """Return the source of a function `launch(grid, *arguments, constants, options)` for these parameters."""
    names = [each.name for each in parameters]
    arguments = [each for each in parameters if not each.is_constexpr]
    key = [
        part
        for each in parameters
        for part in ((each.name,) if each.is_constexpr else (f"{each.name}__kind", f"{each.name}__by"))
    ]
    values = [each.name if each.is_constexpr else f"{each.name}__value" for each in parameters]
    return _FUNCTION.format(
        parameters=", ".join([*names, *(f"{option}=None" for option in OPTIONS)]),
        facts="".join(_facts(each, on_device) for each in arguments),
        key=", ".join([*key, *OPTIONS]),
        arguments=", ".join(names),
        options=", ".join(f'"{option}": {option}' for option in OPTIONS),
        values=", ".join(values),
    )


def _facts(argument: Any, on_device: str) -> str:
    name, by_value, by_16 = argument.name, not argument.do_not_specialize, not argument.do_not_specialize_on_alignment
    whole = f"16 if {name} & 15 == 0 else 0" if by_16 else "0"
    return _FACTS.format(
        name=name,
        on_device=on_device,
        of_address=f"{name}__value & 15 == 0" if by_value and by_16 else "None",
        of_number=f"1 if {name} == 1 else {whole}" if by_value else "None",
    )


def cdiv(whole: int, part: int) -> int:
    """Return how many parts hold the whole; `triton.cdiv`, which serves kernels too, takes 2 µs."""
    return -(-whole // part)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of 2 that is at least `n`, which is positive."""
    return 1 << (n - 1).bit_length()
