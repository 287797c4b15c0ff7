"""Records the kernels that a step calls, so that one call replays them all without the interpreter.

A step is traced at a few sizes. Its kernels do not run meanwhile; their arguments are noted, and tensors that the step
makes are told apart from tensors that live longer. Every argument and the bytes of every tensor must be a constant plus
a multiple of each size. Then one recording serves steps of any sizes, and tensors get places in one piece of memory, by
the calls that use them. A step that computes anything by torch is not recordable.
"""

from __future__ import annotations

import ctypes
import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.compute.kernels.cpu.library import Arguments, Kernel, Library

_aten = torch.ops.aten
_ALLOCATIONS = {_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default}
_VIEWS = {
    _aten.view.default,
    _aten.view.dtype,
    _aten.slice.Tensor,
    _aten.select.int,
    _aten.unbind.int,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.unsqueeze.default,
    _aten.detach.default,
    _aten.alias.default,
}
_ALIGNED = 64
"""Tensors begin at multiples of this many bytes."""
_ELSEWHERE = -1
"""Stands for the number of a tensor where an argument is a number, or an address that outlives the step."""


class NotRecordable(Exception):
    """The step does not only call kernels, or arguments are no linear functions of its sizes."""


class Sizes(NamedTuple):
    tokens: int
    rows: int
    sampled: int


class Recording:
    """Calls of kernels, as functions of a step's sizes.

    Args:
        kernels: The library of the kernels.
        entries: [calls] uint64, the addresses `Kernel.entry`.
        constant: [calls, arguments] int64.
        factors: [calls, arguments, 3] int64, what each unit of a size adds to the argument.
        memory: [bytes] uint8, the memory of the step's tensors.
        output: The step's output for the largest sizes, with a row for each sampled position.
    """

    def __init__(
        self,
        kernels: Library,
        entries: npt.NDArray[np.uint64],
        constant: npt.NDArray[np.int64],
        factors: npt.NDArray[np.int64],
        memory: Tensor,
        output: Tensor,
    ) -> None:
        self._kernels = kernels
        self._entries = entries
        self._constant = constant
        self._factors = factors
        self._memory = memory
        self._output = output
        self._sizes: Sizes | None = None
        self._arguments = constant
        self._held_back = 0

    @property
    def last_entry(self) -> int:
        return int(self._entries[-1])

    def replay(self, sizes: Sizes, held_back: int = 0) -> Tensor:
        """Call the kernels with what is now in the memory of the traced steps' inputs.

        Args:
            sizes: The step's sizes.
            held_back: How many of the last calls wait for `replay_rest`.

        Returns:
            The step's output for these sizes, valid until the next replay.
        """
        if sizes != self._sizes:
            self._arguments = self._constant + self._factors @ np.array(sizes, dtype=np.int64)
            self._sizes = sizes
        self._held_back = held_back
        self._call(0, len(self._entries) - held_back)
        return self._output[: sizes.sampled]

    def replay_rest(self) -> None:
        """Make the calls that the last replay held back."""
        held_back, self._held_back = self._held_back, 0
        self._call(len(self._entries) - held_back, held_back)

    def _call(self, first: int, number: int) -> None:
        entries, arguments = self._entries[first:], self._arguments[first:]
        self._kernels.replay(entries.ctypes.data, arguments.ctypes.data, arguments.shape[1], number)
        self._kernels.raise_faults()


def record(kernels: Library, step: Callable[[Sizes], Callable[[], Tensor]], most: Sizes) -> Recording:
    """Trace a step.

    Args:
        kernels: The library whose kernels the step calls.
        step: Prepares a step of these sizes, and returns the function to trace, which allocates and returns the output,
            [sampled, …].
        most: The largest sizes that will be replayed.

    Raises:
        NotRecordable: The step cannot be recorded.
    """
    base, other = Sizes(7, 4, 2), Sizes(23, 9, 5)
    larger = [base._replace(tokens=8), base._replace(rows=5), base._replace(sampled=3)]
    traces = [_trace(kernels, step(sizes)) for sizes in (base, *larger, other)]
    layout = traces[0].layout
    if any(trace.layout != layout for trace in traces):
        raise NotRecordable("its calls depend on its sizes")
    at_base, *at_larger, at_other = (trace.numbers for trace in traces)
    factors = np.stack([numbers - at_base for numbers in at_larger], axis=-1)
    constant = at_base - factors @ np.array(base, dtype=np.int64)
    if not np.array_equal(constant + factors @ np.array(other, dtype=np.int64), at_other):
        raise NotRecordable("its arguments are no linear functions of its sizes")
    return _placed(kernels, traces[0], constant, factors, most)


@dataclass(frozen=True)
class _Layout:
    """What traces of all sizes have in common.

    Attributes:
        entries: The entries of the kernels that are called.
        tensors: By call and argument, the number of the traced tensor that it points into, or _ELSEWHERE.
        output: The number of the output.
        output_dtype: The output's dtype.
        output_width: The output's shape without the first dimension.
    """

    entries: tuple[int, ...]
    tensors: tuple[tuple[int, ...], ...]
    output: int
    output_dtype: torch.dtype
    output_width: tuple[int, ...]


@dataclass(frozen=True)
class _Traced:
    """One trace.

    Attributes:
        layout: What all traces have in common.
        numbers: int64, the arguments of all calls: numbers, addresses, or offsets into a traced tensor; then the bytes
            of each tensor.
    """

    layout: _Layout
    numbers: npt.NDArray[np.int64]


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the tensors that are allocated within the context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[Tensor] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, because skipping dynamo means importing it, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _ALLOCATIONS and func not in _VIEWS:
            raise NotRecordable(f"it calls {func}")
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.tensors.append(result)
        return result


def _trace(kernels: Library, step: Callable[[], Tensor]) -> _Traced:
    calls: list[tuple[Kernel, Arguments]] = []
    with _Allocations() as made, kernels.recorded(lambda kernel, arguments: calls.append((kernel, arguments))):
        output = step()
    order = sorted(range(len(made.tensors)), key=lambda number: made.tensors[number].data_ptr())
    begins = [made.tensors[number].data_ptr() for number in order]
    sizes = [tensor.nbytes for tensor in made.tensors]

    def locate(address: int) -> tuple[int, int]:
        """Return the number of the traced tensor that an address lies in, and the offset in it."""
        at = bisect_right(begins, address) - 1
        if at >= 0 and address - begins[at] < sizes[order[at]]:
            return order[at], address - begins[at]
        return _ELSEWHERE, address

    located = [
        [
            locate(int(value or 0)) if kind is ctypes.c_void_p else (_ELSEWHERE, _word(kind, value))
            for kind, value in pairs
        ]
        for pairs in (zip(kernel.types, arguments, strict=True) for kernel, arguments in calls)
    ]
    number, offset = locate(output.data_ptr())
    if number == _ELSEWHERE or offset or not output.is_contiguous():
        raise NotRecordable("its output lives longer than the step")
    layout = _Layout(
        entries=tuple(kernel.entry for kernel, _ in calls),
        tensors=tuple(tuple(number for number, _ in arguments) for arguments in located),
        output=number,
        output_dtype=output.dtype,
        output_width=tuple(output.shape[1:]),
    )
    numbers = [offset for arguments in located for _, offset in arguments] + sizes
    return _Traced(layout, np.array(numbers, dtype=np.int64))


def _word(kind: type, value: Any) -> int:
    """Return the word whose first bytes are the argument, as C has it."""
    if kind is ctypes.c_float:
        return int.from_bytes(struct.pack("<f", value), "little")
    return int(value)


def _placed(
    kernels: Library, trace: _Traced, constant: npt.NDArray[np.int64], factors: npt.NDArray[np.int64], most: Sizes
) -> Recording:
    """Return the recording, with places in one piece of memory for the traced tensors."""
    layout = trace.layout
    arguments = sum(map(len, layout.tensors))
    sizes = (constant + factors @ np.array(most, dtype=np.int64))[arguments:]
    places, total = _place([-(-int(size) // _ALIGNED) * _ALIGNED for size in sizes], layout)
    memory = torch.empty(total + _ALIGNED, dtype=torch.uint8)
    begin = -memory.data_ptr() % _ALIGNED
    widest = max(map(len, layout.tensors))
    shape = (len(layout.entries), widest)
    placed, placed_factors = np.zeros(shape, dtype=np.int64), np.zeros((*shape, len(most)), dtype=np.int64)
    at = 0
    for call, numbers in enumerate(layout.tensors):
        part, own = slice(at, at + len(numbers)), np.array(numbers, dtype=np.int64)
        bases = np.where(own == _ELSEWHERE, 0, memory.data_ptr() + begin + places[own])
        placed[call, : len(numbers)] = constant[part] + bases
        placed_factors[call, : len(numbers)] = factors[part]
        at += len(numbers)
    first = begin + int(places[layout.output])
    output = memory[first : first + int(sizes[layout.output])].view(layout.output_dtype)
    entries = np.array(layout.entries, dtype=np.uint64)
    return Recording(kernels, entries, placed, placed_factors, memory, output.view(-1, *layout.output_width))


def _place(sizes: Sequence[int], layout: _Layout) -> tuple[npt.NDArray[np.int64], int]:
    """Return the place of each tensor, and the bytes of all; tensors that are in use at the same time do not
    overlap."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for call, numbers in enumerate(layout.tensors):
        for number in numbers:
            first.setdefault(number, call)
            last[number] = call
    last[layout.output] = len(layout.tensors)
    places = np.zeros(len(sizes), dtype=np.int64)
    in_use: list[tuple[int, int, int]] = []  # begin, end, last call
    total = 0
    for number in sorted(first.keys() - {_ELSEWHERE}, key=lambda number: first[number]):
        in_use = sorted(use for use in in_use if use[2] >= first[number])
        begin = 0
        for use_begin, use_end, _ in in_use:
            if begin + sizes[number] <= use_begin:
                break
            begin = max(begin, use_end)
        in_use.append((begin, begin + sizes[number], last[number]))
        places[number], total = begin, max(total, begin + sizes[number])
    return places, total
