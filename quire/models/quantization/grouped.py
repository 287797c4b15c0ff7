"""Weights of 4-bit or 8-bit integers whose columns share scales in groups, times dense activations (W4A16, W8A16).

What is done with them does not depend on the layout that a tool gave them; see grouped_layouts.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.linear import GroupedWeight, pack_grouped
from quire.compute.kernels.reference.quantized_rows import Rows
from quire.errors import CheckpointError
from quire.models.quantization.formats import GroupFormat
from quire.models.quantization.grouped_layouts import LAYOUTS, WORD, Codes, Layout
from quire.models.quantization.scheme import LinearShape, RowForm
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.tensor_options import TensorOptions


class GroupedLinearWeight:
    """A LinearWeight of 4-bit or 8-bit integers whose columns share scales in groups.

    Raises:
        CheckpointError: The shape does not suit the format.
    """

    library_product: str | None = None
    row_form: RowForm | None = None

    def __init__(self, form: GroupFormat, shape: LinearShape, options: TensorOptions) -> None:
        self._form = form
        self._shape = shape
        self._options = options
        self._group = form.group or shape.columns
        self._check()
        self._layout: Layout = LAYOUTS[form.layout](form, self._group, options.device)
        self._pack = kernel("pack_grouped", options.device.type)
        self._linear = kernel("grouped_linear", options.device.type)
        self._linear_silu_and_mul = kernel("grouped_linear_silu_and_mul", options.device.type)
        self._weight: Any

    def weight_specs(self) -> Iterator[WeightSpec]:
        for name, rows in zip(self._shape.names, self._shape.rows, strict=True):
            yield from self._layout.specs(name, rows, self._shape.columns)

    def load(self, checkpoint: Checkpoint) -> None:
        shape = self._shape
        what = f"{self._form.name} {shape.names} {shape.rows} × {shape.columns}"
        self._weight = self._options.packed_weights.get(
            what, lambda: self._pack(*self._parts(checkpoint), shape.gated, self._options.dtype)
        )

    def read(self, checkpoint: Checkpoint) -> GroupedWeight:
        """Read the weight in the form of the reference kernels."""
        return pack_grouped(*self._parts(checkpoint))

    def _parts(self, checkpoint: Checkpoint) -> tuple[Tensor, Tensor, Tensor | None, int, int, Tensor | None]:
        """Read what `pack_grouped` takes: codes, scales, zeros, bits, the group's columns and the columns' order."""
        shape, form = self._shape, self._form
        parts = [
            self._layout.read(checkpoint, name, rows, shape.columns)
            for name, rows in zip(shape.names, shape.rows, strict=True)
        ]
        order = None
        if form.reordered and form.group is not None and parts[0].owners is not None:
            order = parts[0].owners.argsort(stable=True)
            if checkpoint.contents():  # the compile warm-up's has nothing in it
                self._check_owners(parts, order)
        codes = torch.cat([part.codes for part in parts])
        if order is not None:
            codes = codes.index_select(1, order)
        scales = torch.cat([part.scales for part in parts])
        zeros = None if parts[0].zeros is None else torch.cat([part.zeros for part in parts if part.zeros is not None])
        return codes, scales, zeros, form.bits, self._group, order

    def multiply(self, x: Rows, bias: Tensor | None) -> Tensor:
        assert isinstance(x, Tensor)
        y: Tensor = self._linear(x, self._weight, bias)
        return y

    def multiply_silu_and_mul(self, x: Rows, bias: Tensor | None) -> Tensor:
        assert isinstance(x, Tensor)
        out = x.new_empty((x.shape[0], self._shape.outputs // 2))
        self._linear_silu_and_mul(x, self._weight, bias, out)
        return out

    def _check(self) -> None:
        shape = self._shape
        if shape.columns % self._group or shape.columns % WORD or any(rows % 8 for rows in shape.rows):
            raise CheckpointError(
                f"{shape.names[0]}: a weight of {shape.rows} × {shape.columns} in groups of {self._group} is not "
                f"supported: the group and {WORD} must divide its columns, 8 its outputs. Use the bf16 checkpoint.",
                param="quantization_config",
            )

    def _check_owners(self, parts: list[Codes], order: Tensor) -> None:
        """Modules whose weights are stacked have one order of columns, and all groups are full."""
        full = torch.arange(self._shape.columns, device=order.device) // self._group
        if not all(torch.equal(part.owners[order], full) for part in parts if part.owners is not None):
            raise CheckpointError(
                f"{', '.join(self._shape.names)}: their g_idx differ, or groups are not full, which is not supported: "
                "use a checkpoint without desc_act.",
                param="quantization_config",
            )
