"""Rotary embeddings by length, by our own kernels: so steps of such models are recorded too."""

from __future__ import annotations

from torch import Tensor

from quire.compute.kernels.cpu.library import library
from quire.compute.kernels.reference import rotary as reference


def sequence_lengths(least: Tensor, slots: Tensor, positions: Tensor, out: Tensor) -> None:
    """Arguments as in reference/rotary.py; all are contiguous."""
    if (kernels := library()) is None:
        reference.sequence_lengths(least, slots, positions, out)
        return
    assert all(tensor.is_contiguous() for tensor in (least, slots, positions, out))
    given = least.data_ptr(), slots.data_ptr(), positions.data_ptr()
    kernels("sequence_lengths", None, *given, len(positions), out.data_ptr())


def choose_frequencies(lengths: Tensor, both: Tensor, original: int, out: Tensor) -> None:
    """Arguments as in reference/rotary.py; all are contiguous."""
    if (kernels := library()) is None:
        reference.choose_frequencies(lengths, both, original, out)
        return
    assert all(tensor.is_contiguous() for tensor in (lengths, both, out))
    given = lengths.data_ptr(), len(lengths), both.data_ptr(), both.shape[1]
    kernels("choose_frequencies", None, *given, original, out.data_ptr())


def grow_frequencies(lengths: Tensor, theta: float, factor: float, original: int, out: Tensor) -> None:
    """Arguments as in reference/rotary.py; all are contiguous."""
    if (kernels := library()) is None:
        reference.grow_frequencies(lengths, theta, factor, original, out)
        return
    assert lengths.is_contiguous() and out.is_contiguous()
    given = lengths.data_ptr(), len(lengths), theta, factor, original, out.shape[1]
    kernels("grow_frequencies", None, *given, out.data_ptr())
