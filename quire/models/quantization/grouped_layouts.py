"""How tools lay out a module's integers of 4 or 8 bits in a checkpoint, each read into the same `Codes`.

Codes lie in words of 32 bits, the first one in the lowest bits unless said otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quire.models.quantization.dense import read_tensor
from quire.models.quantization.formats import GroupFormat
from quire.models.weights.checkpoint import Checkpoint, DummyValues, WeightSpec

WORD = 32
_INTS = ("I32",)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in its word each of eight outputs is: the order that AutoAWQ's GEMM kernels unpack fastest."""


class Codes(NamedTuple):
    """One module's weight: scale · (code - zero).

    Attributes:
        codes: [rows, columns] uint8.
        scales: [rows, groups] fp32.
        zeros: [rows, groups] uint8, or None: the middle.
        owners: [columns] int64, each column's group; None: in their order.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    owners: Tensor | None


@dataclass(frozen=True)
class Gptq:
    """AutoGPTQ's and GPTQModel's: everything is [in, out], eight inputs or eight outputs a word, zeros less one in the
    first version of the format."""

    form: GroupFormat
    group: int
    device: torch.device

    def specs(self, name: str, rows: int, columns: int) -> Iterator[WeightSpec]:
        each, groups = WORD // self.form.bits, columns // self.group
        yield WeightSpec(f"{name}.qweight", (columns // each, rows), _INTS)
        yield WeightSpec(f"{name}.qzeros", (groups, rows // each), _INTS)
        yield WeightSpec(f"{name}.scales", (groups, rows), dummy=_scales(self.form))
        dummy, divisible = DummyValues("groups", self.group), not _is_reordered(self.form)
        yield WeightSpec(f"{name}.g_idx", (columns,), _INTS, optional=True, dummy=dummy, divisible=divisible)

    def read(self, checkpoint: Checkpoint, name: str, rows: int, columns: int) -> Codes:
        bits, groups = self.form.bits, columns // self.group
        each = WORD // bits
        words = read_tensor(checkpoint, f"{name}.qweight", (columns // each, rows), torch.int32, self.device)
        scales = read_tensor(checkpoint, f"{name}.scales", (groups, rows), torch.float32, self.device)
        zeros = owners = None
        if not self.form.symmetric:
            packed = read_tensor(checkpoint, f"{name}.qzeros", (groups, rows // each), torch.int32, self.device)
            zeros = unpack(packed, bits)
            zeros = zeros + 1 & (1 << bits) - 1 if self.form.layout == "gptq" else zeros
        if self.form.reordered:
            owners = read_tensor(checkpoint, f"{name}.g_idx", (columns,), torch.int32, self.device).long()
        return Codes(unpack(words.T, bits), scales.T, None if zeros is None else zeros.T, owners)


@dataclass(frozen=True)
class Awq:
    """AutoAWQ's for GEMM kernels: everything is [in, out], eight outputs a word, in an order of their own."""

    form: GroupFormat
    group: int
    device: torch.device

    def specs(self, name: str, rows: int, columns: int) -> Iterator[WeightSpec]:
        each, groups = WORD // self.form.bits, columns // self.group
        yield WeightSpec(f"{name}.qweight", (columns, rows // each), _INTS)
        if not self.form.symmetric:
            yield WeightSpec(f"{name}.qzeros", (groups, rows // each), _INTS)
        yield WeightSpec(f"{name}.scales", (groups, rows), dummy=_scales(self.form))

    def read(self, checkpoint: Checkpoint, name: str, rows: int, columns: int) -> Codes:
        each, groups = WORD // self.form.bits, columns // self.group
        words = read_tensor(checkpoint, f"{name}.qweight", (columns, rows // each), torch.int32, self.device)
        scales = read_tensor(checkpoint, f"{name}.scales", (groups, rows), torch.float32, self.device)
        zeros = None
        if not self.form.symmetric:
            packed = read_tensor(checkpoint, f"{name}.qzeros", (groups, rows // each), torch.int32, self.device)
            zeros = self._in_order(packed).T
        return Codes(self._in_order(words).T, scales.T, zeros, None)

    def _in_order(self, words: Tensor) -> Tensor:
        codes = unpack(words, self.form.bits)
        return codes.view(len(codes), -1, len(_AWQ_ORDER))[:, :, _AWQ_ORDER].flatten(1)


@dataclass(frozen=True)
class Compressed:
    """compressed-tensors' `pack-quantized`: [out, in], eight inputs a word, and eight outputs a word of zeros; signed
    codes and zeros, stored as if they were not."""

    form: GroupFormat
    group: int
    device: torch.device

    def specs(self, name: str, rows: int, columns: int) -> Iterator[WeightSpec]:
        each, groups = WORD // self.form.bits, columns // self.group
        yield WeightSpec(f"{name}.weight_packed", (rows, columns // each), _INTS)
        yield WeightSpec(f"{name}.weight_scale", (rows, groups), dummy=_scales(self.form))
        yield WeightSpec(f"{name}.weight_shape", (2,), ("I64", "I32"), optional=True)
        if not self.form.symmetric:
            yield WeightSpec(f"{name}.weight_zero_point", (rows // each, groups), _INTS)
        if self.form.reordered:
            dummy, divisible = DummyValues("groups", self.group), not _is_reordered(self.form)
            yield WeightSpec(f"{name}.weight_g_idx", (columns,), _INTS, dummy=dummy, divisible=divisible)

    def read(self, checkpoint: Checkpoint, name: str, rows: int, columns: int) -> Codes:
        bits, groups = self.form.bits, columns // self.group
        each = WORD // bits
        words = read_tensor(checkpoint, f"{name}.weight_packed", (rows, columns // each), torch.int32, self.device)
        scales = read_tensor(checkpoint, f"{name}.weight_scale", (rows, groups), torch.float32, self.device)
        zeros = owners = None
        if not self.form.symmetric:
            packed = read_tensor(
                checkpoint, f"{name}.weight_zero_point", (rows // each, groups), torch.int32, self.device
            )
            zeros = unpack(packed.T, bits).T
        if self.form.reordered:
            owners = read_tensor(checkpoint, f"{name}.weight_g_idx", (columns,), torch.int32, self.device).long()
        return Codes(unpack(words, bits), scales, zeros, owners)


@dataclass(frozen=True)
class BitsandbytesInt8:
    """bitsandbytes' LLM.int8: [out, in] signed codes, and for each output the largest value, which 127 stands for."""

    form: GroupFormat
    group: int
    device: torch.device

    def specs(self, name: str, rows: int, columns: int) -> Iterator[WeightSpec]:
        yield WeightSpec(f"{name}.weight", (rows, columns), ("I8",))
        yield WeightSpec(f"{name}.SCB", (rows,), dummy=DummyValues("scales", 1))
        yield WeightSpec(f"{name}.weight_format", (), ("U8",), optional=True, any_rank=True)

    def read(self, checkpoint: Checkpoint, name: str, rows: int, columns: int) -> Codes:
        signed = read_tensor(checkpoint, f"{name}.weight", (rows, columns), torch.int8, self.device)
        largest = read_tensor(checkpoint, f"{name}.SCB", (rows,), torch.float32, self.device)
        middle = 1 << (self.form.bits - 1)
        return Codes(signed.view(torch.uint8) ^ middle, (largest / (middle - 1)).unsqueeze(1), None, None)


Layout = Gptq | Awq | Compressed | BitsandbytesInt8
"""A tool's: `specs` are the tensors of a module [rows, columns], and `read` reads it."""
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


def _is_reordered(form: GroupFormat) -> bool:
    """Whether it counts to which group a column belongs."""
    return form.reordered and form.group is not None


def _scales(form: GroupFormat) -> DummyValues:
    return DummyValues("scales", 1 << (form.bits - 1))
