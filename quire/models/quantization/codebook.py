"""Weights of 4-bit codes that name one of sixteen values (nf4, fp4, mxfp4, NVFP4), times dense activations (W4A16).

Tools lay out codes, two to a byte, and scales in different ways; each layout is read into a `CodedModule`. Sources:
bitsandbytes' `QuantState.as_dict`, the Open Compute Project's microscaling formats as transformers' gpt-oss,
compressed-tensors (`mxfp4-pack-quantized`, `nvfp4-pack-quantized`) and AMD's Quark store them, and NVIDIA's ModelOpt
(NVFP4).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.linear import RUN, CodebookWeight, nearest_codes, pack_codebook
from quire.errors import CheckpointError
from quire.models.quantization.dense import KernelWeight, dense_specs, read_dense, read_tensor
from quire.models.quantization.formats import MICROSCALED, CodebookFormat
from quire.models.quantization.scheme import LinearShape
from quire.models.weights.checkpoint import SPREAD, Checkpoint, DummyValues, WeightSpec
from quire.models.weights.tensor_options import TensorOptions

_BYTES = ("U8",)
_EXPONENTS = ("U8", "F8_E8M0")
_LARGEST = 6
"""The largest value of e2m1."""
_NESTED_GROUP = 256
"""How many of bitsandbytes' scales share a scale themselves."""


class CodedModule(NamedTuple):
    """One module's weight.

    Attributes:
        codes: [rows, columns] uint8 below 16.
        scales: [rows, groups]: fp32, float8_e4m3fn or float8_e8m0fnu.
        factor: [] fp32, of the whole module; None: 1.
    """

    codes: Tensor
    scales: Tensor
    factor: Tensor | None


@dataclass(frozen=True)
class Bitsandbytes:
    """Codes in one column, the first one of a byte in its high bits; groups follow each other over rows' ends."""

    form: CodebookFormat
    device: torch.device

    def specs(self, name: str, rows: int, columns: int) -> Iterator[WeightSpec]:
        name, groups = f"{name}.weight", rows * columns // self.form.group
        yield WeightSpec(name, (rows * columns // 2, 1), _BYTES, divisible=False)
        if self.form.nested:
            yield WeightSpec(f"{name}.absmax", (groups,), _BYTES, divisible=False)
            nested = -(-groups // _NESTED_GROUP)
            yield WeightSpec(f"{name}.nested_absmax", (nested,), divisible=False, dummy=DummyValues("scales", 1))
            yield WeightSpec(f"{name}.nested_quant_map", (256,), dummy=DummyValues("scales", 1e-3))
        else:
            yield WeightSpec(f"{name}.absmax", (groups,), divisible=False, dummy=DummyValues("scales", 1))
        yield WeightSpec(f"{name}.quant_map", (16,), optional=True)
        yield WeightSpec(f"{name}.{self._state}", (0,), _BYTES, any_shape=True)

    def read(self, checkpoint: Checkpoint, name: str, rows: int, columns: int) -> CodedModule:
        name, groups = f"{name}.weight", rows * columns // self.form.group
        packed = read_tensor(checkpoint, name, (rows * columns // 2, 1), torch.uint8, self.device)
        codes = torch.cat((packed >> 4, packed & 15), 1).view(rows, columns)
        if not self.form.nested:
            scales = read_tensor(checkpoint, f"{name}.absmax", (groups,), torch.float32, self.device)
        else:
            stored = read_tensor(checkpoint, f"{name}.absmax", (groups,), torch.uint8, self.device)
            values = read_tensor(checkpoint, f"{name}.nested_quant_map", (256,), torch.float32, self.device)
            shape = (-(-groups // _NESTED_GROUP),)
            outer = read_tensor(checkpoint, f"{name}.nested_absmax", shape, torch.float32, self.device)
            scales = values[stored.long()] * outer.repeat_interleave(_NESTED_GROUP)[:groups]
            scales += self._nested_offset(checkpoint, name)
        return CodedModule(codes, scales.view(rows, -1), None)

    @property
    def _state(self) -> str:
        return f"quant_state.bitsandbytes__{self.form.values}"

    def _nested_offset(self, checkpoint: Checkpoint, name: str) -> float:
        """The mean of all scales, which was subtracted from them before they were quantized."""
        state = f"{name}.{self._state}"
        stored = checkpoint.contents().get(state)
        if stored is None or stored.shape == (0,):  # dummy weights
            return 0.0
        text = read_tensor(checkpoint, state, stored.shape, torch.uint8, torch.device("cpu"))
        try:
            return float(json.loads(bytes(text.tolist()))["nested_offset"])
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{state} cannot be read ({error!r}): quantize the model again with bitsandbytes."
            ) from None


class _Names(NamedTuple):
    """What a layout calls a module's tensors.

    Attributes:
        codes, scales: The names of codes and scales.
        factor: The name of the module's factor on top of the scales; None: there is none.
        divides: Whether scales are divided by the factor.
        ignored: Scales of activations, which stay dense.
    """

    codes: str
    scales: str
    factor: str | None = None
    divides: bool = False
    ignored: tuple[str, ...] = ()


_POWERS_OF_TWO = {
    "mxfp4": _Names("blocks", "scales"),
    "compressed-tensors": _Names("weight_packed", "weight_scale"),
    "quark": _Names("weight", "weight_scale"),
}
_WITH_FACTOR = {
    "compressed-tensors": _Names(
        "weight_packed", "weight_scale", "weight_global_scale", divides=True, ignored=("input_global_scale",)
    ),
    "modelopt": _Names("weight", "weight_scale", "weight_scale_2", ignored=("input_scale",)),
}


@dataclass(frozen=True)
class Microscaled:
    """Rows of codes, the first one of a byte in its low bits. Scales of 32 columns are powers of two (e8m0); those of
    16 are e4m3, with a factor for the whole module (NVFP4)."""

    form: CodebookFormat
    device: torch.device

    def specs(self, name: str, rows: int, columns: int) -> Iterator[WeightSpec]:
        names, groups = self._names, columns // self.form.group
        yield WeightSpec(f"{name}.{names.codes}", (rows, columns // 2), _BYTES)
        if names.factor is None:
            dummy = DummyValues("exponents", _LARGEST)
            yield WeightSpec(f"{name}.{names.scales}", (rows, groups), _EXPONENTS, dummy=dummy)
            return
        yield WeightSpec(f"{name}.{names.scales}", (rows, groups), ("F8_E4M3",), dummy=DummyValues("scales", SPREAD))
        dummy = DummyValues("scales", SPREAD * SPREAD / (2 * _LARGEST) if names.divides else _LARGEST)
        yield WeightSpec(f"{name}.{names.factor}", (1,), any_rank=True, dummy=dummy)
        for other in names.ignored:
            yield WeightSpec(f"{name}.{other}", (1,), optional=True, any_rank=True)

    def read(self, checkpoint: Checkpoint, name: str, rows: int, columns: int) -> CodedModule:
        names, groups = self._names, columns // self.form.group
        packed = read_tensor(checkpoint, f"{name}.{names.codes}", (rows, columns // 2), torch.uint8, self.device)
        codes = torch.stack((packed & 15, packed >> 4), 2).flatten(1)
        if names.factor is None:
            stored = checkpoint.contents().get(f"{name}.{names.scales}")
            dtype = torch.uint8 if stored is None or stored.dtype == "U8" else torch.float8_e8m0fnu
            scales = read_tensor(checkpoint, f"{name}.{names.scales}", (rows, groups), dtype, self.device)
            return CodedModule(codes, scales.view(torch.float8_e8m0fnu), None)
        scales = read_tensor(checkpoint, f"{name}.{names.scales}", (rows, groups), torch.float8_e4m3fn, self.device)
        stored = checkpoint.contents().get(f"{name}.{names.factor}")
        factor = read_tensor(
            checkpoint, f"{name}.{names.factor}", stored.shape if stored else (1,), torch.float32, self.device
        ).reshape(())
        return CodedModule(codes, scales, 1 / factor if names.divides else factor)

    @property
    def _names(self) -> _Names:
        return (_POWERS_OF_TWO if self.form.group == MICROSCALED else _WITH_FACTOR)[self.form.layout]


CodebookLayout = Bitsandbytes | Microscaled
"""A tool's layout: `specs` yields the tensors of a module [rows, columns], and `read` reads them."""
CODEBOOK_LAYOUTS: dict[str, type[CodebookLayout]] = {
    "bitsandbytes": Bitsandbytes,
    "mxfp4": Microscaled,
    "compressed-tensors": Microscaled,
    "quark": Microscaled,
    "modelopt": Microscaled,
}
"""By CodebookFormat.layout."""


class CodebookLinearWeight(KernelWeight):
    """A LinearWeight of 4-bit codes, each of which names one of sixteen values.

    Raises:
        CheckpointError: The shape does not suit the format.
    """

    def __init__(self, form: CodebookFormat, shape: LinearShape, options: TensorOptions) -> None:
        super().__init__("codebook_linear", shape, options)
        self._form = form
        self._check()
        self._layout: CodebookLayout | None = None
        if not form.at_load:
            self._layout = CODEBOOK_LAYOUTS[form.layout](form, options.device)
        self._pack = kernel("pack_codebook", options.device.type)

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

    def _check(self) -> None:
        shape, group = self._shape, self._form.group
        if shape.columns % math.lcm(group, 2 * RUN):
            raise CheckpointError(
                f"{shape.names[0]}: a weight of {shape.rows} × {shape.columns} as {self._form.name} is not supported: "
                f"{math.lcm(group, 2 * RUN)} must divide its columns. Use the bf16 checkpoint.",
                param="quantization_config",
            )


def _below_each_other(parts: list[Tensor]) -> Tensor:
    """Concatenate along the first dimension; on some devices torch.cat lacks dtypes of one byte."""
    dtype = parts[0].dtype
    if dtype.itemsize > 1:
        return torch.cat(parts)
    return torch.cat([part.view(torch.uint8) for part in parts]).view(dtype)


def _factors(modules: list[CodedModule]) -> Tensor | None:
    """Each module's factor for all of its rows, [outputs]; None: modules have none."""
    factors = [module.factor.expand(len(module.codes)) for module in modules if module.factor is not None]
    return torch.cat(factors) if factors else None
