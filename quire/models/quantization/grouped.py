"""Weights of 4-bit or 8-bit integers whose columns share scales in groups, times dense activations (W4A16, W8A16).

Tools lay out codes in different ways, in words of 32 bits, the first code in the lowest bits unless said otherwise.
Each layout is read into `Codes`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.compute.kernels.dispatch import kernel
from quire.compute.kernels.reference.linear import GroupedWeight, pack_grouped
from quire.errors import CheckpointError
from quire.models.quantization.dense import KernelWeight, read_tensor
from quire.models.quantization.formats import GroupFormat
from quire.models.quantization.scheme import LinearShape
from quire.models.weights.checkpoint import Checkpoint, DummyValues, WeightSpec
from quire.models.weights.tensor_options import TensorOptions

WORD = 32
_INTS = ("I32",)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in its word each of eight outputs is: the order that AutoAWQ's GEMM kernels unpack fastest."""


class Codes(NamedTuple):
    """One module's weight: scale · (code - zero).

    Attributes:
        codes: [rows, columns] uint8.
        scales: [rows, groups] fp32.
        zeros: [rows, groups] uint8; None: the middle of the codes.
        owners: [columns] int64, each column's group; None: groups follow each other.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    owners: Tensor | None


@dataclass(frozen=True)
class _Layout:
    form: GroupFormat
    group: int
    device: torch.device

    def sizes(self, columns: int) -> tuple[int, int]:
        """How many codes a word has, and how many groups a row."""
        return WORD // self.form.bits, columns // self.group

    def tensor(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Read a whole tensor."""
        return read_tensor(checkpoint, name, shape, dtype, self.device)

    def words(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read a tensor of int32."""
        return self.tensor(checkpoint, name, shape, torch.int32)

    def scales(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read a tensor as fp32."""
        return self.tensor(checkpoint, name, shape, torch.float32)

    def owners_spec(self, name: str, columns: int, *, optional: bool) -> WeightSpec:
        """The spec of the tensor that says to which group a column belongs."""
        dummy, is_reordered = DummyValues("groups", self.group), self.form.reordered and self.form.group is not None
        return WeightSpec(name, (columns,), _INTS, optional=optional, dummy=dummy, divisible=not is_reordered)


class Gptq(_Layout):
    """AutoGPTQ's and GPTQModel's: everything is [in, out], eight inputs or eight outputs a word, zeros less one in the
    first version of the format."""

    def specs(self, name: str, rows: int, columns: int) -> Iterator[WeightSpec]:
        each, groups = self.sizes(columns)
        yield WeightSpec(f"{name}.qweight", (columns // each, rows), _INTS)
        yield WeightSpec(f"{name}.qzeros", (groups, rows // each), _INTS)
        yield WeightSpec(f"{name}.scales", (groups, rows), dummy=_scales(self.form))
        yield self.owners_spec(f"{name}.g_idx", columns, optional=True)

    def read(self, checkpoint: Checkpoint, name: str, rows: int, columns: int) -> Codes:
        bits, (each, groups) = self.form.bits, self.sizes(columns)
        words = self.words(checkpoint, f"{name}.qweight", (columns // each, rows))
        scales = self.scales(checkpoint, f"{name}.scales", (groups, rows))
        zeros = owners = None
        if not self.form.symmetric:
            zeros = unpack(self.words(checkpoint, f"{name}.qzeros", (groups, rows // each)), bits)
            zeros = zeros + 1 & (1 << bits) - 1 if self.form.layout == "gptq" else zeros
        if self.form.reordered:
            owners = self.words(checkpoint, f"{name}.g_idx", (columns,)).long()
        return Codes(unpack(words.T, bits), scales.T, None if zeros is None else zeros.T, owners)


class Awq(_Layout):
    """AutoAWQ's for GEMM kernels: everything is [in, out], eight outputs a word, in an order of their own."""

    def specs(self, name: str, rows: int, columns: int) -> Iterator[WeightSpec]:
        each, groups = self.sizes(columns)
        yield WeightSpec(f"{name}.qweight", (columns, rows // each), _INTS)
        if not self.form.symmetric:
            yield WeightSpec(f"{name}.qzeros", (groups, rows // each), _INTS)
        yield WeightSpec(f"{name}.scales", (groups, rows), dummy=_scales(self.form))

    def read(self, checkpoint: Checkpoint, name: str, rows: int, columns: int) -> Codes:
        each, groups = self.sizes(columns)
        words = self.words(checkpoint, f"{name}.qweight", (columns, rows // each))
        scales = self.scales(checkpoint, f"{name}.scales", (groups, rows))
        zeros = None
        if not self.form.symmetric:
            zeros = self._in_order(self.words(checkpoint, f"{name}.qzeros", (groups, rows // each))).T
        return Codes(self._in_order(words).T, scales.T, zeros, None)

    def _in_order(self, words: Tensor) -> Tensor:
        codes = unpack(words, self.form.bits)
        return codes.view(len(codes), -1, len(_AWQ_ORDER))[:, :, _AWQ_ORDER].flatten(1)


class Compressed(_Layout):
    """compressed-tensors' `pack-quantized`: [out, in], eight inputs a word, and eight outputs a word of zeros; signed
    codes and zeros, stored as if they were not."""

    def specs(self, name: str, rows: int, columns: int) -> Iterator[WeightSpec]:
        each, groups = self.sizes(columns)
        yield WeightSpec(f"{name}.weight_packed", (rows, columns // each), _INTS)
        yield WeightSpec(f"{name}.weight_scale", (rows, groups), dummy=_scales(self.form))
        yield WeightSpec(f"{name}.weight_shape", (2,), ("I64", "I32"), optional=True)
        if not self.form.symmetric:
            yield WeightSpec(f"{name}.weight_zero_point", (rows // each, groups), _INTS)
        if self.form.reordered:
            yield self.owners_spec(f"{name}.weight_g_idx", columns, optional=False)

    def read(self, checkpoint: Checkpoint, name: str, rows: int, columns: int) -> Codes:
        bits, (each, groups) = self.form.bits, self.sizes(columns)
        words = self.words(checkpoint, f"{name}.weight_packed", (rows, columns // each))
        scales = self.scales(checkpoint, f"{name}.weight_scale", (rows, groups))
        zeros = owners = None
        if not self.form.symmetric:
            packed = self.words(checkpoint, f"{name}.weight_zero_point", (rows // each, groups))
            zeros = unpack(packed.T, bits).T
        if self.form.reordered:
            owners = self.words(checkpoint, f"{name}.weight_g_idx", (columns,)).long()
        return Codes(unpack(words, bits), scales, zeros, owners)


class BitsandbytesInt8(_Layout):
    """bitsandbytes' LLM.int8: [out, in] signed codes, and for each output the largest value, which 127 stands for."""

    def specs(self, name: str, rows: int, columns: int) -> Iterator[WeightSpec]:
        yield WeightSpec(f"{name}.weight", (rows, columns), ("I8",))
        yield WeightSpec(f"{name}.SCB", (rows,), dummy=DummyValues("scales", 1))
        yield WeightSpec(f"{name}.weight_format", (), ("U8",), optional=True, any_rank=True)

    def read(self, checkpoint: Checkpoint, name: str, rows: int, columns: int) -> Codes:
        signed = self.tensor(checkpoint, f"{name}.weight", (rows, columns), torch.int8)
        largest = self.scales(checkpoint, f"{name}.SCB", (rows,))
        middle = 1 << (self.form.bits - 1)
        return Codes(signed.view(torch.uint8) ^ middle, (largest / (middle - 1)).unsqueeze(1), None, None)


Layout = Gptq | Awq | Compressed | BitsandbytesInt8
"""A tool's layout: `specs` yields the tensors of a module [rows, columns], and `read` reads them."""
LAYOUTS: dict[str, type[Layout]] = {
    "gptq": Gptq,
    "gptq_v2": Gptq,
    "awq": Awq,
    "compressed-tensors": Compressed,
    "bitsandbytes": BitsandbytesInt8,
}
"""By GroupFormat.layout."""


def unpack(words: Tensor, bits: int) -> Tensor:
    """[n, m] int32 → [n, m · 32 / bits] uint8."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=words.device)
    codes = words.unsqueeze(-1) >> shifts & (1 << bits) - 1  # [n, m, codes of a word]
    return codes.to(torch.uint8).flatten(1)


def _scales(form: GroupFormat) -> DummyValues:
    return DummyValues("scales", 1 << (form.bits - 1))


class GroupedLinearWeight(KernelWeight):
    """A LinearWeight of 4-bit or 8-bit integers whose columns share scales in groups.

    Raises:
        CheckpointError: The shape does not suit the format.
    """

    def __init__(self, form: GroupFormat, shape: LinearShape, options: TensorOptions) -> None:
        super().__init__("grouped_linear", shape, options)
        self._form = form
        self._group = form.group or shape.columns
        self._check()
        self._layout: Layout = LAYOUTS[form.layout](form, self._group, options.device)
        self._pack = kernel("pack_grouped", options.device.type)

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
