"""The beginning of a step: where its rows stand, the embeddings of its tokens and the angles of their positions."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.compute.kernels.cpu.library import library, library_for, library_for_indices
from quire.compute.kernels.cpu.linear import PackedWeight, pack_linear
from quire.compute.kernels.reference import embedding as reference
from quire.compute.kernels.reference import rotary as rotary_reference
from quire.compute.kernels.reference import step_inputs as step_reference


def pack_tied(weight: Tensor) -> Tensor | PackedWeight:
    """Return the weight [vocab_size, width] as `embed` and `linear` take it: unchanged where our kernels do not
    serve."""
    kernels = library()
    return weight if kernels is None or not kernels.serves(weight) else pack_linear(weight)


def embed(tokens: Tensor, weight: Tensor | PackedWeight, scale: float | None, out: Tensor) -> None:
    if isinstance(weight, PackedWeight):
        assert tokens.is_contiguous() and out.is_contiguous() and out.dtype == weight.data.dtype
        factor = 1.0 if scale is None else scale
        weight.library("embed", out.dtype, tokens, len(tokens), weight.data, weight.columns, factor, out)
    elif scale is None:
        take_rows(weight, tokens, out)
    else:
        reference.embed(tokens, weight, scale, out)


def local_indices(indices: Tensor, first: int, count: int, out: Tensor) -> None:
    if (kernels := library_for_indices(indices, out)) is None:
        reference.local_indices(indices, first, count, out)
    else:
        kernels("local_indices", None, indices, len(indices), first, count, out)


def take_rows(x: Tensor, rows: Tensor, out: Tensor) -> None:
    if (kernels := library_for_indices(x, rows, out)) is None:
        reference.take_rows(x, rows, out)
        return
    assert x.dtype == out.dtype and rows.dtype == torch.int64
    kernels("take_rows", None, x, rows, len(rows), x.shape[1] * x.element_size(), out)


def angles(positions: Tensor, frequencies: Tensor, scale: float, cos: Tensor, sin: Tensor) -> None:
    kernels = library_for(cos, sin)
    whole = positions.is_contiguous() and frequencies.is_contiguous()
    if kernels is None or not whole or frequencies.dtype != torch.float32:
        reference.angles(positions, frequencies, scale, cos, sin)
        return
    (tokens, half), each = cos.shape, frequencies.dim() == 2
    kernels("angles", cos.dtype, positions, tokens, frequencies, half if each else 0, half, scale, cos, sin)


def sequence_lengths(least: Tensor, slots: Tensor, positions: Tensor, out: Tensor) -> None:
    if (kernels := library_for_indices(least, slots, positions, out)) is None:
        rotary_reference.sequence_lengths(least, slots, positions, out)
    else:
        kernels("sequence_lengths", None, least, slots, positions, len(positions), out)


def shifted_positions(shifts: Tensor, slots: Tensor, positions: Tensor, out: Tensor) -> None:
    if (kernels := library_for_indices(shifts, slots, positions, out)) is None:
        rotary_reference.shifted_positions(shifts, slots, positions, out)
    else:
        kernels("shifted_positions", None, shifts, slots, positions, len(positions), out)


def choose_frequencies(lengths: Tensor, both: Tensor, original: int, out: Tensor) -> None:
    if (kernels := library_for_indices(lengths, both, out)) is None:
        rotary_reference.choose_frequencies(lengths, both, original, out)
    else:
        kernels("choose_frequencies", None, lengths, len(lengths), both, both.shape[1], original, out)


def grow_frequencies(lengths: Tensor, theta: float, factor: float, original: int, out: Tensor) -> None:
    if (kernels := library_for_indices(lengths, out)) is None:
        rotary_reference.grow_frequencies(lengths, theta, factor, original, out)
    else:
        kernels("grow_frequencies", None, lengths, len(lengths), theta, factor, original, out.shape[1], out)


def query_scales(positions: Tensor, growth: float, length: int, first: int, out: Tensor) -> None:
    if (kernels := library_for_indices(positions, out)) is None:
        rotary_reference.query_scales(positions, growth, length, first, out)
    else:
        assert out.dtype == torch.float32
        kernels("query_scales", None, positions, len(positions), growth, length, first, out)


def prepare_inputs(
    slots: Tensor, counts: Tensor, row_of_token: Tensor, offsets: Tensor, ids: Tensor, length: Tensor, last: Tensor,
    dummy: int, starts: Tensor, positions: Tensor, slot_of_token: Tensor, tokens: Tensor,
) -> None:  # fmt: skip
    given, out = (slots, counts, row_of_token, offsets, ids), (starts, positions, slot_of_token, tokens)
    if (kernels := library_for_indices(*given, length, last, *out)) is None:
        step_reference.prepare_inputs(*given, length, last, dummy, *out)
    else:
        kernels("prepare_inputs", None, *given, len(slots), len(ids), length, last, dummy, *out)
