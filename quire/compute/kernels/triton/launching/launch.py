"""Launching kernels in a few microseconds, where Triton's own way takes ten to twenty.

Triton looks at every argument anew at each launch: of what type it is, whether 16 divides it, and so which compilation
of the kernel serves. Here a function is written for each kernel (`_source`) that makes a key of these facts from values
that Python compares by identity, finds the compilation that Triton made for them, and calls what launches it. A key
that is new goes through Triton, which compiles; and so does every launch in which something is not as usual: an
argument that is no tensor of the device, no number and not None, or a profiler's hook.

The key says at least as much as Triton's own: for a tensor its dtype and whether 16 divides its address, for an integer
whether it is 1 and whether 16 divides it, each as far as the kernel asks to be specialised; for a descriptor what its
tiles are; for others their type; and the values of all that is known at compile time. Addresses are handed on as
numbers, which saves asking the driver about each; that they are the device's is part of the key, but for descriptors,
of which Triton does not ask it either.

What this uses of Triton's inside is in triton_private.py. A process launches on one device, the one that is current
when a kernel is launched first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import JITFunction

from quire.compute.kernels.triton.launching import triton_private
from quire.compute.kernels.triton.launching.tensor_descriptors import specialization_of
from quire.compute.kernels.triton.launching.triton_private import CompiledLaunch, Parameter

OPTIONS = ("num_warps", "num_stages", "launch_pdl", "maxnreg")
"""What a launch may say beside the kernel's own parameters."""
_ELSE = object()
"""In a key: a kind of argument that is left to Triton."""
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
"""What `_source` writes for a kernel. For `k(x, n, SIZE: constexpr)`, the key is (x__kind, x__by, n__kind, n__by, SIZE)
and the values are (x__value, n__value, SIZE)."""
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
"""An argument's kind, what else its kernel is specialised by, and the value that is handed on."""


def fast_launch(function: Any) -> Any:
    """What Triton made of a kernel, launched in the same way but sooner. Stands above `triton.jit` or `gluon.jit` where
    a kernel is launched from Python; functions that kernels call do without. Interpreted kernels stay what they are,
    and so do all where Triton lacks what this needs.
    """
    return Kernel(function) if isinstance(function, JITFunction) and triton_private.can_launch() else function


class Kernel:
    """A kernel: `kernel[grid](*arguments, CONSTANT=…, num_warps=…)` launches it.

    Args:
        function: Triton's. Only constants among its parameters have annotations, and none has a default.
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
        """What launches it on this grid of programs."""
        return partial(self._launch, grid)

    def look_up(self, *arguments: object, **named: object) -> None:
        """Let Triton look for what serves this launch, as the launch itself would, and launch nothing."""
        constants = {name: value for name, value in named.items() if name not in OPTIONS}
        triton_private.look_up(self.function, arguments, constants | _given_options(named))

    def _launch_by_triton(
        self,
        grid: tuple[int, ...],
        key: tuple[object, ...],
        arguments: tuple[object, ...],
        options: dict[str, object],
    ) -> None:
        """Launch by Triton, and remember what it compiled."""
        if triton_private.can_compile_ahead() and not triton_private.has_cache_key(self.function):
            triton_private.make_cache_key(self.function)  # or it may be on disk under a key that no other process makes
        compiled = triton_private.compiled_launch(self.function[grid](*arguments, **_given_options(options)))
        if compiled is not None and _ELSE not in key:
            self._known[key] = compiled


def _given_options(named: Mapping[str, object]) -> dict[str, object]:
    """The options that a launch gives, always in one order: Triton's key of a compilation has them as they come, and
    would not find under another what was compiled ahead.
    """
    return {name: named[name] for name in OPTIONS if named.get(name) is not None}


def _source(parameters: list[Parameter], on_device: str) -> str:
    """A function that launches a kernel with these parameters: `launch(grid, *arguments, constants, options)`."""
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


def _facts(argument: Parameter, on_device: str) -> str:
    """The lines that look at one argument."""
    name, by_value, by_16 = argument.name, argument.by_value, argument.by_alignment
    whole = f"16 if {name} & 15 == 0 else 0" if by_16 else "0"
    return _FACTS.format(
        name=name,
        on_device=on_device,
        of_address=f"{name}__value & 15 == 0" if by_value and by_16 else "None",
        of_number=f"1 if {name} == 1 else {whole}" if by_value else "None",
    )


def cdiv(whole: int, part: int) -> int:
    """How many parts hold the whole. `triton.cdiv` takes 2 µs, for it serves kernels too; so does the next."""
    return -(-whole // part)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 from `n` on; `n` is positive."""
    return 1 << (n - 1).bit_length()
