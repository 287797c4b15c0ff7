"""The compiled kernels, which a process loads once; where they cannot be compiled, torch computes."""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from quire.compute.kernels.cpu.build import FLAGS, BuildError, Processor, build, this_processor, usable_instruction_sets
from quire.foundation.config import environment
from quire.foundation.config.environment import NativeKernels

_P, _I, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_CACHED: dict[str, tuple[type, ...]] = {
    "paged_attention": (*[_P] * 5, _I, *[_P] * 3, *[_I] * 9, _F, _F, _P, _P, _P),
    "qk_norm_rope_and_cache": (_P, *[_I] * 5, _P, _P, _N, _F, _P, _P, _I, *[_P] * 5, _N, _F, _P, _P),
}
"""The argument types of kernels that read or write the KV cache, which may have a dtype of its own."""
QUANTIZED_CACHES = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2", torch.int8: "int8"}
SIGNATURES: dict[str, tuple[type, ...]] = {
    **_CACHED,
    **{f"{name}_{cache}": types for cache in QUANTIZED_CACHES.values() for name, types in _CACHED.items()},
    "pack": (_P, _I, _I, _I, _P),
    "embed": (_P, _I, _P, _I, _F, _P),
    "angles": (_P, _I, _P, _I, _I, _F, _P, _P),
    "linear": (_P, _I, _I, _P, _I, _I, _P, _P, _I),
    "linear_silu_and_mul": (_P, _I, _I, _P, _I, _I, _P, _P, _I),
    "block_linear": (_P, _I, _I, _P, _I, _I, _I, _P, _P, _I),
    "block_linear_silu_and_mul": (_P, _I, _I, _P, _I, _I, _I, _P, _P, _I),
    "block_embed": (_P, _I, _P, _I, _I, _F, _P),
    "rms_norm": (_P, _P, _P, _N, _I, _F, _I, _I, _P),
    "layer_norm": (*[_P] * 4, _F, _I, _I, _P),
    "gate_heads": (_P, _P, *[_I] * 4, _N, _N),
    "qk_mean_squares": (_P, *[_I] * 5, _P),
    "gated_norm": (_P, _P, _I, _P, _I, _F, *[_I] * 3, _N, _N, _P),
    "ssd_scan": (_P, _I, _P, _I, *[_P] * 3, _F, _F, *[_I] * 4, _P, _I, _P, _P, _I, _P),
    "selective_scan": (*[_P, _I] * 4, *[_P] * 3, _I, _I, _P, _I, _P, _P, _I, _P),
    "gated_delta": (_P, _I, _P, _I, _P, _I, _P, _P, *[_I] * 5, _P, _I, _P, _P, _I, _P, _F, _F),
    "short_conv": (*[_P] * 3, _I, _P, _P, _I, _I, _N, _P, _I, _P, _P, _I, _P, _I),
    "silu_and_mul": (_P, _I, _I, _P),
    "gelu_and_mul": (_P, _I, _I, _P),
    "gelu": (_P, _I, _I, _P),
    "gelu_exact": (_P, _I, _I, _P),
    "gelu_exact_and_mul": (_P, _I, _I, _P),
    "quick_gelu": (_P, _I, _I, _P),
    "relu": (_P, _I, _I, _P),
    "relu_squared": (_P, _I, _I, _P),
    "soft_cap": (_P, _I, _I, _F),
    "multiply": (_P, _I, _I, _F),
    "widen": (_P, _I, _I, _P),
    "narrow": (_P, _I, _I, _P),
    "copy_stream": (_P, _P, _I, _I, _I, _P),
    "spread_columns": (_P, _I, _I, _P, _I, _P),
    "sample": (_P, _I, _I, _I, *[_P] * 7, _F, *[_P] * 5),
    "apply_token_bitmask": (_P, _I, _I, _P, _I, _P),
    "all_reduce": (_P, _P, _I),
    "gather_columns": (_P, _P, _I, _I, _P, _I),
    "reduce_rows": (_P, _P, _I, _P, _P),
    "route": (_P, _I, _I, _I, _N, _P, _P),
    "route_by_scores": (_P, _I, _I, _I, _N, _N, _I, _I, _N, _F, _F, _F, _F, _P, _P, _P),
    "add_gated": (_P, _P, _P, _I, _I, _F),
    "lora_shrink": (_P, _I, _I, _P, _I, _P, _I, _I, _I, _P, _P, _I, _P),
    "lora_expand": (_P, _I, _P, _I, _I, _I, _P, _I, _I, _P, _P, _I, _P, _P, _P, _P, _I),
    "experts": (_P, _I, _P, _I, _P, _I, _I, _I, _I, _N, _F, _F, _F, *[_P] * 4, _I, _P, _P),
}
"""The argument types of each kernel that is compiled once for each dtype of SUFFIXES."""
SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
INDEX_SIGNATURES: dict[str, tuple[type, ...]] = {
    "prepare_inputs": (*[_P] * 5, _I, _I, _P, _P, _I, *[_P] * 4),
    "compute_slot_mapping": (_P, _I, _P, _P, _I, _I, _P),
    "take_rows": (_P, _P, _I, _I, _P),
    "put_rows": (_P, _P, _I, _I, _P),
    "state_rows": (_P, _P, _P, _I, _I, _P),
    "local_indices": (_P, _I, _I, _I, _P),
    "sequence_lengths": (_P, _P, _P, _I, _P),
    "shifted_positions": (_P, _P, _P, _I, _P),
    "gather_rows": (_P, _I, _P, _P, _I, _P, _P),
    "query_scales": (_P, _I, _F, _I, _I, _P),
    "choose_frequencies": (_P, _I, _P, _I, _I, _P),
    "grow_frequencies": (_P, _I, _F, _F, _I, _I, _P),
    "position_columns": (_P, _P, _I, *[_P] * 12),
    "verify_drafts": (*[_P] * 5, _I, *[_P] * 4, _I, _P),
}
"""The argument types of kernels that work on indices and whole rows, which are compiled once, for all dtypes."""
Arguments = tuple[float | None, ...]
"""A kernel's arguments: numbers and the addresses of tensors; None stands for an absent tensor."""

_log = logging.getLogger(__name__)


class Kernel:
    """One kernel of the library.

    Attributes:
        function: Takes the arguments one by one.
        entry: The address of a function that takes them from an array (native/calls.h).
        types: The types of the arguments.
    """

    def __init__(self, loaded: ctypes.CDLL, name: str, types: tuple[type, ...]) -> None:
        try:
            self.function = loaded[f"quire_{name}"]
            self.entry = ctypes.cast(loaded[f"quire_entry_{name}"], ctypes.c_void_p).value or 0
        except AttributeError as error:
            raise OSError(str(error)) from None
        self.function.argtypes, self.function.restype = types, None
        self.types = types


class Library:
    """The kernels by name and dtype, as functions of pointers and numbers.

    Attributes:
        name: A name that differs for other sources, flags, compilers and processors.
        multiplies_bytes: Whether int8 products take rows of 8 bits (scaled_linear.py).
        widens_bf16: Whether products of bf16 are products of floats, which take twice as long as those of 16-bit
            integers.

    Raises:
        OSError: The file is not the library.
    """

    def __init__(self, path: Path, threads: int) -> None:
        self.name = path.stem
        loaded = ctypes.CDLL(str(path))
        self._kernels: dict[tuple[str, torch.dtype | None], Kernel] = {}
        for name, types in SIGNATURES.items():
            for dtype, suffix in SUFFIXES.items():
                self._kernels[name, dtype] = Kernel(loaded, f"{name}_{suffix}", types)
        for name, types in INDEX_SIGNATURES.items():
            self._kernels[name, None] = Kernel(loaded, name, types)
        self._recorders: dict[int, Callable[[Kernel, Arguments], None]] = {}
        self.replay = loaded.quire_replay
        self.replay.argtypes, self.replay.restype = (_P, _P, _I, _I), None
        self.set_threads = loaded.quire_set_threads
        self.set_threads.argtypes, self.set_threads.restype = (_N,), None
        self.set_threads(threads)
        self._take_fault = loaded.quire_take_fault
        self.multiplies_bytes = bool(loaded.quire_multiplies_bytes())
        self.widens_bf16 = bool(loaded.quire_widens_bf16())

    def __call__(self, name: str, dtype: torch.dtype | None, *arguments: Tensor | float | None) -> None:
        """Run a kernel, which is given the address of each tensor's first element."""
        kernel = self._kernels[name, dtype]
        numbers = [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments]
        if self._recorders and (record := self._recorders.get(threading.get_ident())):
            record(kernel, tuple(numbers))
        else:
            kernel.function(*numbers)

    def raise_faults(self) -> None:
        """Raise an error if a kernel that this thread has called was given a state that there is not.

        Raises:
            IndexError: It was, and has changed nothing.
        """
        if self._take_fault():
            raise IndexError("The state of a row is none of the states that there are.")

    def function(self, name: str, dtype: torch.dtype | None) -> Callable[..., None]:
        """Return a kernel as a function of addresses and numbers, which runs also while a step is recorded."""
        function: Callable[..., None] = self._kernels[name, dtype].function
        return function

    def entries(self, name: str) -> set[int]:
        """Return the addresses `Kernel.entry` of a kernel's variants for all dtypes."""
        return {kernel.entry for (own, _), kernel in self._kernels.items() if own == name}

    @contextmanager
    def recorded(self, record: Callable[[Kernel, Arguments], None]) -> Iterator[None]:
        """Pass the kernels that this thread calls within the context to `record`, instead of running them."""
        thread = threading.get_ident()
        assert thread not in self._recorders, "one recording at a time"
        self._recorders[thread] = record
        try:
            yield
        finally:
            del self._recorders[thread]

    def serves(self, first: Tensor, *others: Tensor | None) -> bool:
        """Whether the tensors have one dtype, which is one that the kernels know."""
        dtype = first.dtype
        return dtype in SUFFIXES and not [tensor for tensor in others if tensor is not None and tensor.dtype != dtype]


def address(tensor: Tensor | None) -> int | None:
    """Return the address of a tensor's first element; None for an absent tensor."""
    return None if tensor is None else tensor.data_ptr()


def library_for(first: Tensor, *others: Tensor | None) -> Library | None:
    """Return the kernels if the tensors are contiguous and have one dtype, which the kernels know; otherwise None."""
    kernels = library_for_indices(first, *others)
    return kernels if kernels is not None and kernels.serves(first, *others) else None


def library_for_indices(*tensors: Tensor | None) -> Library | None:
    """Return the kernels if the tensors, of any dtypes, are contiguous; otherwise None."""
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            return None
    return library()


class _Once:
    """A function that runs at its first call; of several threads that call it then, the others wait."""

    def __init__(self, function: Callable[[], Library | None]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._lock = threading.Lock()
        self._results: list[Library | None] = []

    def __call__(self) -> Library | None:
        for known in self._results:
            return known
        with self._lock:
            if not self._results:
                self._results.append(self._function())
            return self._results[0]

    def cache_clear(self) -> None:
        """Let the next call run the function again."""
        with self._lock:
            self._results = []


@_Once
def library() -> Library | None:
    """Load the kernels for this machine, compiling them the first time; if that fails, a warning says why."""
    wanted = environment.native_kernels()
    if wanted.instructions == "none":
        return None
    try:
        return _load_best(wanted)
    except (BuildError, OSError) as error:
        _log.warning("CPU kernels are not used, torch computes, one stream about 5 times more slowly: %s.", error)
        return None


def _load_best(wanted: NativeKernels) -> Library:
    """Load the library for the best instruction set that the compiler knows.

    An old compiler does not know the instructions of a new processor.
    """
    processor = this_processor()
    *better, last = usable_instruction_sets(processor, wanted.instructions)
    for instructions in better:
        try:
            return _load(wanted, processor, instructions)
        except BuildError as error:
            _log.info("There are no CPU kernels for %s: %s", instructions, error)
    return _load(wanted, processor, last)


def _load(wanted: NativeKernels, processor: Processor, instructions: str) -> Library:
    path = build(wanted.compilers, wanted.cache, processor, instructions, FLAGS)
    try:
        return Library(path, torch.get_num_threads())
    except OSError:  # the file is broken
        path.unlink(missing_ok=True)
    return Library(build(wanted.compilers, wanted.cache, processor, instructions, FLAGS), torch.get_num_threads())
