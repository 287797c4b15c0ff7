"""Weights of 4-bit codes that name one of sixteen values (nf4, fp4, mxfp4, NVFP4), times dense activations (W4A16).

What is done with them does not depend on the layout that a tool gave them; see codebook_layouts.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.linear import RUN, CodebookWeight, nearest_codes, pack_codebook
from quire.compute.kernels.reference.quantized_rows import Rows
from quire.errors import CheckpointError
from quire.models.quantization.codebook_layouts import CODEBOOK_LAYOUTS, CodebookLayout, CodedModule
from quire.models.quantization.dense import dense_specs, read_dense
from quire.models.quantization.formats import CodebookFormat
from quire.models.quantization.scheme import LinearShape, RowForm
from quire.models.weights.checkpoint import Checkpoint, WeightSpec
from quire.models.weights.tensor_options import TensorOptions


class CodebookLinearWeight:
    """A LinearWeight of 4-bit codes, each of which names one of sixteen values.

    Raises:
        CheckpointError: The shape does not suit the format.
    """

    library_product: str | None = None
    row_form: RowForm | None = None

    def __init__(self, form: CodebookFormat, shape: LinearShape, options: TensorOptions) -> None:
        self._form = form
        self._shape = shape
        self._options = options
        self._check()
        self._layout: CodebookLayout | None = None
        if not form.at_load:
            self._layout = CODEBOOK_LAYOUTS[form.layout](form, options.device)
        self._pack = kernel("pack_codebook", options.device.type)
        self._linear = kernel("codebook_linear", options.device.type)
        self._linear_silu_and_mul = kernel("codebook_linear_silu_and_mul", options.device.type)
        self._weight: Any

    def weight_specs(self) -> Iterator[WeightSpec]:
        if self._layout is None:
            yield from dense_specs(self._shape)
            return
        for name, rows in zip(self._shape.names, self._shape.rows, strict=True):
            yield from self._layout.specs(name, rows, self._shape.columns)

    def load(self, checkpoint: Checkpoint) -> None:
        self._weight = self._pack(*self._parts(checkpoint))

    def read(self, checkpoint: Checkpoint) -> CodebookWeight:
        """Read the weight in the form of the reference kernels."""
        return pack_codebook(*self._parts(checkpoint))

    def _parts(self, checkpoint: Checkpoint) -> tuple[Tensor, Tensor, Tensor | None, str, int]:
        """Read what `pack_codebook` takes: codes, scales, factors, the name of the values and the group's columns."""
        shape, form = self._shape, self._form
        if self._layout is None:
            codes, scales = nearest_codes(read_dense(shape, checkpoint, self._options), form.values, form.group)
            return codes, scales, None, form.values, form.group
        modules = [
            self._layout.read(checkpoint, name, rows, shape.columns)
            for name, rows in zip(shape.names, shape.rows, strict=True)
        ]
        codes = torch.cat([module.codes for module in modules])
        scales = _below_each_other([module.scales for module in modules])
        return codes, scales, _factors(modules), form.values, form.group

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
        shape, group = self._shape, self._form.group
        if shape.columns % math.lcm(group, 2 * RUN):
            raise CheckpointError(
                f"{shape.names[0]}: a weight of {shape.rows} × {shape.columns} as {self._form.name} is not supported: "
                f"{math.lcm(group, 2 * RUN)} must divide its columns. Use the bf16 checkpoint.",
                param="quantization_config",
            )


def _below_each_other(parts: list[Tensor]) -> Tensor:
    """Concatenate along the first dimension; torch.cat may lack types of one byte on some devices."""
    dtype = parts[0].dtype
    if dtype.itemsize > 1:
        return torch.cat(parts)
    return torch.cat([part.view(torch.uint8) for part in parts]).view(dtype)


def _factors(modules: list[CodedModule]) -> Tensor | None:
    """[outputs]: each module's for all of its rows."""
    factors = [module.factor.expand(len(module.codes)) for module in modules if module.factor is not None]
    return torch.cat(factors) if factors else None
