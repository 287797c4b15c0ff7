"""The types of a GGUF file's tensors: the bytes of a block of each, and what it means.

Source: ggml's block layouts (ggml-common.h, ggml-quants.c), as the `gguf` package's `GGML_QUANT_SIZES` and quants.py
describe them. A quantized row is a row of blocks. One formula gives the weights of all types that are served:

    weight = d · s · (value(code) - zero) - dmin · m

A block has d and dmin, fp16. A group of its columns has s and m, integers, which are 1 where a type has none.
"""

from __future__ import annotations

from dataclasses import dataclass

NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the 4-bit codes of IQ4_NL and IQ4_XS stand for."""
PANEL = 16
"""Outputs that are neighbours in a processor's layout of quantized weights."""


@dataclass(frozen=True)
class TensorType:
    """A type, with its name in GGUF's own tools, which is the `dtype` of StoredTensor. A block has `block` weights, in
    `block_bytes` of the file."""

    name: str
    block: int
    block_bytes: int


@dataclass(frozen=True)
class QuantizedType(TensorType):
    """A type of integers with scales.

    Attributes:
        bits: Bits of a code where it is multiplied, 4, 5, 6 or 8; a code may have fewer.
        group: Columns that share s and m: 16 or 32.
        has_groups: Whether there is s, and m where there is dmin; otherwise a block is one group.
        has_minimum: Whether there is dmin.
        zero: What is subtracted from value(code); 0 for codes that have a sign.
        nonlinear: Whether value(code) is NONLINEAR[code] instead of the code.
    """

    bits: int = 4
    group: int = 32
    has_groups: bool = False
    has_minimum: bool = False
    zero: int = 0
    nonlinear: bool = False

    def packed_block_bytes(self) -> int:
        """Return the bytes of a block of PANEL outputs in a processor's layout: d, dmin, s, m and codes."""
        halves = 2 * PANEL * (1 + self.has_minimum)
        groups = self.block // self.group * PANEL * (1 + self.has_minimum) if self.has_groups else 0
        return halves + groups + self.block * PANEL * self.bits // 8

    def packed_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a weight in a processor's layout."""
        return -(-rows // PANEL) * (columns // self.block) * self.packed_block_bytes()

    @property
    def coded_bits(self) -> int:
        """The bits of a code on a GPU: 4 or 8."""
        return 4 if self.bits == 4 else 8

    def coded_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a weight on a GPU.

        These are codes, and for each group a scale (fp16, or fp32 where there is s) and, with a minimum, a zero (fp16).
        """
        of_group = (4 if self.has_groups else 2) + 2 * self.has_minimum
        return rows * (columns * self.coded_bits // 8 + columns // self.group * of_group)


TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: QuantizedType("Q4_0", 32, 18, zero=8),
    3: QuantizedType("Q4_1", 32, 20, has_minimum=True),
    6: QuantizedType("Q5_0", 32, 22, bits=5, zero=16),
    7: QuantizedType("Q5_1", 32, 24, bits=5, has_minimum=True),
    8: QuantizedType("Q8_0", 32, 34, bits=8),
    10: QuantizedType("Q2_K", 256, 84, group=16, has_groups=True, has_minimum=True),
    11: QuantizedType("Q3_K", 256, 110, group=16, has_groups=True, zero=4),
    12: QuantizedType("Q4_K", 256, 144, has_groups=True, has_minimum=True),
    13: QuantizedType("Q5_K", 256, 176, bits=5, has_groups=True, has_minimum=True),
    14: QuantizedType("Q6_K", 256, 210, bits=6, group=16, has_groups=True, zero=32),
    20: QuantizedType("IQ4_NL", 32, 18, nonlinear=True),
    23: QuantizedType("IQ4_XS", 256, 136, has_groups=True, nonlinear=True),
    30: TensorType("BF16", 1, 2),
}
"""The types that are served, by their number in a file's header."""
QUANTIZED = {form.name: form for form in TYPES.values() if isinstance(form, QuantizedType)}
NOT_SERVED = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    21: "IQ3_S", 22: "IQ2_S", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 31: "Q4_0_4_4",
    32: "Q4_0_4_8", 33: "Q4_0_8_8", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip
"""The names of other types, for errors."""
