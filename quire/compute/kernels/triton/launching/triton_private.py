"""The uses of Triton's private API, which may change with any version. Imports no torch.

Two features need it:

    launching          launch.py calls what launches a compilation, without Triton's own look at each argument
    compiling ahead    precompiler.py and compiler.py learn which compilations will be wanted, and make them early

Each is used only where all of its names are found (LAUNCHING, COMPILING_AHEAD). Otherwise one line of the log says what
is missing and what it costs, and Triton launches, or compiles at the first launch, by itself. The rest of Quire uses
`triton.jit`, `gluon.jit`, the two languages, tensor descriptors and `triton.knobs` only.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.runtime import JITFunction
from triton.runtime.driver import driver

# Checked with Triton 3.6.0, on GPUs, and 3.9.0.
LAUNCHING = (
    "triton.compiler:CompiledKernel.run",
    "triton.knobs:runtime.launch_enter_hook.calls",
    "triton.knobs:runtime.launch_exit_hook.calls",
    "triton.runtime.jit:JITFunction.run",
    "triton.runtime.jit:KernelParam.annotation_type",
    "triton.runtime.jit:KernelParam.has_default",
    "triton.runtime.jit:KernelParam.is_constexpr",
)
"""Names of Triton that launching uses, as "module:path".

Launching also uses `params` and `pre_run_hooks` of a JITFunction, `module`, `function` and `packed_metadata` of a
CompiledKernel, and the arguments of its `run` (see RUN).
"""
COMPILING_AHEAD = (
    "triton.backends.compiler:GPUTarget",
    "triton.backends.nvidia.driver:CudaUtils",
    "triton.knobs:runtime.jit_cache_hook",
    "triton.runtime.cache:triton_key",
    "triton.runtime.jit:JITCallable.cache_key",
    "triton.runtime.jit:JITFunction.__getitem__",
    "triton.runtime.jit:JITFunction.preload",
    "triton.runtime.jit:JITFunction.run",
)
"""Names of Triton that compiling ahead uses, as "module:path".

Compiling ahead also uses `device_caches` and `fn` of a JITFunction, and the arguments of the hook (see CacheMiss).
"""
RUN = "_run(_x, _y, _z, _stream_of(_device), _function, _metadata, None, None, None, {values})"
"""The call of `CompiledKernel.run`: grid, stream, loaded function and its metadata, no launch metadata, no hooks,
values.

The values are the kernel's arguments, including constants.
"""
_log = logging.getLogger(__name__)
_loading = threading.Lock()


@functools.cache
def can_launch() -> bool:
    """Whether kernels can be launched without Triton's own look at each argument."""
    return _all_found(LAUNCHING, "launched by Triton itself, which takes the host some 10 µs more each")


@functools.cache
def can_compile_ahead() -> bool:
    """Whether kernels can be compiled before they are launched."""
    return _all_found(COMPILING_AHEAD, "compiled at their first launch: the start and the first requests take longer")


def missing(names: tuple[str, ...]) -> list[str]:
    """Return the `names` ("module:path") that the installed Triton does not have."""
    return [name for name in names if not _found(name)]


def _all_found(names: tuple[str, ...], otherwise: str) -> bool:
    lacking = missing(names)
    if lacking:
        _log.info("kernels     %s: Triton %s has no %s", otherwise, triton.__version__, ", ".join(lacking))
    return not lacking


def _found(name: str) -> bool:
    module, _, path = name.partition(":")
    try:
        functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError):
        return False
    return True


# --- launching ------------------------------------------------------------------------------------------------------


def parameters_of(function: JITFunction[Any]) -> list[Any]:
    """Return a kernel's parameters, of which only constants may have annotations, and none a default."""
    for each in function.params:
        assert not each.has_default, each.name
        assert each.is_constexpr or not each.annotation_type, each.name
    return list(function.params)


class CompiledLaunch(NamedTuple):
    """The launcher of a compilation, called as in RUN."""

    run: Callable[..., None]
    stream_of: Callable[[int], int]
    device: int
    function: int
    metadata: tuple[object, ...]


def compiled_launch(kernel: Any) -> CompiledLaunch | None:
    """Return the launcher of `kernel`, the result of a launch by Triton; None if it is not compiled or loaded."""
    from triton.compiler import CompiledKernel

    if not isinstance(kernel, CompiledKernel) or kernel.module is None:
        return None
    active = driver.active
    return CompiledLaunch(
        kernel.run, active.get_current_stream, active.get_current_device(), kernel.function, kernel.packed_metadata
    )


# --- compiling ahead ------------------------------------------------------------------------------------------------


class CacheMiss(NamedTuple):
    """A compilation that a launch lacks.

    Attributes:
        specialization: Triton's JSON that identifies one of its compilations.
        kernels, key: Where Triton looks for the compilation.
    """

    function: JITFunction[Any]
    specialization: str
    kernels: dict[str, Any]
    key: str


@contextmanager
def intercept_launches(
    on_miss: Callable[[CacheMiss], bool], getitem: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Within the context, pass launches without a compilation to `on_miss`, and let `getitem` make `kernel[grid]`.

    `on_miss` returns whether Triton must not compile; `getitem` is given Triton's own `__getitem__`.
    """
    hook, own = knobs.runtime.jit_cache_hook, JITFunction.__getitem__

    def miss(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        kernels = fn.jit_function.device_caches[compile["device"]][0]
        return on_miss(CacheMiss(fn.jit_function, compile["specialization_data"], kernels, compile["key"]))

    knobs.runtime.jit_cache_hook = miss
    JITFunction.__getitem__ = getitem(own)
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook, JITFunction.__getitem__ = hook, own


@functools.cache
def prepare_to_load() -> None:
    """Make what Triton needs for its first kernel: a module that it compiles from C, and the hash of its own 400 MB."""
    from triton.backends.nvidia.driver import CudaUtils

    CudaUtils()
    hash_triton()


def hash_triton() -> None:
    """Let Triton make and keep the hash that is part of every key on disk, for this process and its forks."""
    from triton.runtime import cache

    cache.triton_key()


def compile_and_load(function: JITFunction[Any], specialization: str) -> Any:
    """Load one of a function's compilations onto the device, from the cache on disk if it is there.

    Triton makes what launches it by a C compiler.
    """
    kernel = function.preload(specialization)
    kernel.run  # noqa: B018
    return kernel


def compile_on_disk(function: JITFunction[Any], specialization: str) -> None:
    """Put one of a function's compilations into the cache on disk, and what launches it where Triton compiles that."""
    kernel = function.preload(specialization)
    function.device_caches.clear()
    with suppress(Exception):  # no C compiler, or no driver to link to: the parent will say so. Later Tritons need none
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(kernel.src, kernel.metadata)


def current_target() -> dict[str, Any]:
    """Return the fields of Triton's `GPUTarget` that this process compiles for."""
    target: dict[str, Any] = vars(driver.active.get_current_target())
    return target


def compile_for(target: dict[str, Any]) -> None:
    """Compile for this target from now on, with a GPU or without."""
    from triton.backends.compiler import GPUTarget

    driver.set_active(_TargetOnly(GPUTarget(**target)))


class _TargetOnly:
    """A Triton driver that knows the target to compile for, and can do nothing else."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0


def make_cache_key(function: Any, met: set[Callable[..., Any]] | None = None) -> None:
    """Let Triton make this function's key on disk after the keys of all functions that it calls. Thread-safe.

    A key has the constants that the function and its callees read. Triton 3.6 knows the constants of a callee only when
    the callee has a key, so the key of a kernel would depend on which kernels were compiled before it. Made from the
    inside out, keys are equal in every process.

    Args:
        function: A JITFunction, or another function that kernels call.
        met: Functions whose keys are made, or are about to be.
    """
    from triton.runtime.jit import JITCallable

    met = set() if met is None else met
    met.add(function.fn)
    for name in function.fn.__code__.co_names:  # Triton does not look into its own
        callee = function.fn.__globals__.get(name)
        if isinstance(callee, JITCallable) and callee.fn not in met:
            make_cache_key(callee, met)
    function.cache_key  # noqa: B018


def has_cache_key(function: JITFunction[Any]) -> bool:
    """Whether a function's key on disk is made, or is being made by another thread."""
    return getattr(function, "hash", None) is not None


def load_launchers_apart() -> None:
    """Make each module that Triton loads from now on a separate object.

    Triton 3.6 compiles a C module for each signature of a kernel, all under one name. CPython gives modules of one name
    one object with the contents of the last, so a thread may find the launcher of another thread, which reads other
    arguments. Later versions of Triton have one launcher for all.
    """
    from triton.runtime import build

    load = getattr(build, "_load_module_from_path", None)
    if load is None or hasattr(load, "apart"):
        return

    def load_one(name: str, *where: Any, **named: Any) -> ModuleType:
        module = ModuleType(name)
        with _loading:
            module.__dict__.update(load(name, *where, **named).__dict__)
        return module

    load_one.apart = True  # type: ignore[attr-defined]
    build._load_module_from_path = load_one
