"""Weights of 8-bit codes with scales, fp8 or int8, whose products quantize activations too (W8A8)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.linear import ScaledWeight
from quire.compute.kernels.reference.quantized_rows import LARGEST, quantize_rows
from quire.errors import CheckpointError
from quire.models.quantization.dense import KernelWeight, dense_specs, read_dense, read_tensor
from quire.models.quantization.formats import Fp8Format, Int8Format
from quire.models.quantization.scheme import LinearShape, RowForm
from quire.models.weights.checkpoint import Checkpoint, DummyValues, WeightSpec
from quire.models.weights.tensor_options import TensorOptions

FIRST_WITH_FP8 = (8, 9)
"""Compute capability of the first GPUs whose matrix units take fp8."""


class ScaledLinearWeight(KernelWeight):
    """A LinearWeight of 8-bit codes with scales, fp8 or int8, whose product quantizes activations too.

    Raises:
        CheckpointError: The device does not multiply fp8.
    """

    def __init__(self, form: Fp8Format | Int8Format, shape: LinearShape, options: TensorOptions) -> None:
        _check_device(form, options.device)
        super().__init__("scaled_linear", shape, options)
        self._form = form
        is_fp8 = isinstance(form, Fp8Format)
        self._dtype, self._stored_dtype = (torch.float8_e4m3fn, "F8_E4M3") if is_fp8 else (torch.int8, "I8")
        self._largest = LARGEST[self._dtype]
        self.library_product = "scaled_linear" if is_fp8 and form.scales != "block" else None
        if form.scales != "block" and options.device.type == "cuda":
            self.row_form = RowForm(self._dtype, dense_up_to=int(is_fp8))  # a single row is not quantized for fp8
        self._pack = kernel("pack_scaled", options.device.type)

    def weight_specs(self) -> Iterator[WeightSpec]:
        form, shape = self._form, self._shape
        if isinstance(form, Fp8Format) and form.at_load:
            yield from dense_specs(shape)
            return
        for name, rows in zip(shape.names, shape.rows, strict=True):
            yield WeightSpec(f"{name}.weight", (rows, shape.columns), (self._stored_dtype,))
            yield from self._scale_specs(name, rows)

    def load(self, checkpoint: Checkpoint) -> None:
        shape = self._shape
        what = f"{self._form.name} {shape.names} {shape.rows} × {shape.columns}"
        self._weight = self._options.packed_weights.get(what, lambda: self._pack(self.read(checkpoint)))

    def read(self, checkpoint: Checkpoint) -> ScaledWeight:
        """Read the weight in the form of the reference kernels."""
        form, shape = self._form, self._shape
        if isinstance(form, Fp8Format) and form.at_load:
            dense = read_dense(shape, checkpoint, self._options)
            codes, scales = quantize_rows(dense, self._dtype, shape.columns)
            return ScaledWeight(codes, scales, (1, shape.columns))
        codes = torch.empty((shape.outputs, shape.columns), dtype=self._dtype, device=self._options.device)
        for name, part in zip(shape.names, torch.split(codes, list(shape.rows)), strict=True):
            checkpoint.read(f"{name}.weight", part)
        return ScaledWeight(codes, *self._read_scales(checkpoint))

    def read_values(self, checkpoint: Checkpoint) -> Tensor:
        return self.read(checkpoint).dense().to(self._options.dtype)

    def _scale_specs(self, name: str, rows: int) -> Iterator[WeightSpec]:
        form = self._form
        dummy = DummyValues("scales", self._largest)
        divisible = True
        if isinstance(form, Fp8Format) and form.scales == "block":
            divisible = rows % form.block[0] == self._shape.columns % form.block[1] == 0  # no block is cut short
        shape = self._scale_shape(rows)
        yield WeightSpec(f"{name}.{_scale_name(form)}", shape, any_rank=True, dummy=dummy, divisible=divisible)
        if isinstance(form, Fp8Format) and form.input_scale is not None:
            yield WeightSpec(f"{name}.{form.input_scale}", (), optional=True, any_rank=True)

    def _scale_shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape of the scales that the checkpoint has for a module with `rows` outputs."""
        form = self._form
        if form.scales == "tensor":
            return ()
        if form.scales == "channel":
            return (rows, 1)
        assert isinstance(form, Fp8Format)
        return -(-rows // form.block[0]), -(-self._shape.columns // form.block[1])

    def _read_scales(self, checkpoint: Checkpoint) -> tuple[Tensor, tuple[int, int]]:
        """Read the scales of ScaledWeight, and return them with the size of the block that shares one.

        Blocks of a module that does not end where a block does are cut to rows, because the next module's blocks begin
        there. Blocks of a single column are cut too: kernels take one scale of a row to be the scale of an output.
        """
        form, shape, parts = self._form, self._shape, []
        block = (1, shape.columns) if form.scales != "block" else (128, 128)
        if isinstance(form, Fp8Format) and form.scales == "block":
            whole = all(rows % form.block[0] == 0 for rows in shape.rows[:-1])
            block = form.block if whole and shape.columns > form.block[1] else (1, form.block[1])
        for name, rows in zip(shape.names, shape.rows, strict=True):
            scales, own = f"{name}.{_scale_name(form)}", self._scale_shape(rows)
            found = checkpoint.contents().get(scales)
            shape_there = own if found is None else found.shape
            stored = read_tensor(checkpoint, scales, shape_there, torch.float32, self._options.device).reshape(own)
            if form.scales != "block":
                stored = stored.expand(rows, 1)
            elif block[0] == 1:
                stored = stored.repeat_interleave(128, 0)[:rows]
            parts.append(stored)
        return torch.cat(parts).contiguous(), block


def _scale_name(form: Fp8Format | Int8Format) -> str:
    return form.scale_name if isinstance(form, Fp8Format) else "weight_scale"


def _check_device(form: Fp8Format | Int8Format, device: torch.device) -> None:
    if isinstance(form, Fp8Format) and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < FIRST_WITH_FP8:
            raise CheckpointError(
                f"fp8 weights need a GPU of compute capability 8.9 or higher, and this one has {capability[0]}."
                f"{capability[1]}: use a checkpoint with 4-bit or int8 weights, or one in bf16.",
                param="quantization",
            )
