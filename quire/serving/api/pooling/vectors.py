"""Vectors in the forms that answers have: JSON numbers, base64, and bytes of several number types.

A vector comes from the engine as float32, little-endian, in C order.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quire.serving.api.pooling.schemas import EmbedDType, Endianness

    Floats = NDArray[np.float32]
    """float32, of any shape."""
    Numbers = NDArray[Any]
    """Of any type and shape."""

_encode = msgspec.json.Encoder().encode
LARGE_BYTES = 2**18
"""Vectors of more bytes are written beside the event loop."""
_AT_ONCE = 2**14
"""Numbers that are made and written at a time."""


@dataclass(frozen=True)
class Pooled:
    """What the model made of one text.

    Attributes:
        data: float32, little-endian, in C order.
        shape: [dim], or [tokens, dim].
        tokens, cached_tokens: Tokens of the text, and how many of them were cached.
    """

    data: bytes
    shape: tuple[int, ...]
    tokens: int
    cached_tokens: int = 0

    @cached_property
    def array(self) -> Floats:
        """The values, which cannot be written to; float32 of `shape`."""
        import numpy as np

        return np.frombuffer(self.data, "<f4").reshape(self.shape)


def json_numbers(values: Numbers) -> bytes:
    """A JSON list of numbers, or of lists of them. A float32 is written with all digits of its value as a double, so
    that it reads as what its bytes in base64 read as. Many rows are written in parts, so that other threads go on."""
    if values.ndim < 2 or values.size <= _AT_ONCE:
        return _encode(values.tolist())
    rows = max(1, _AT_ONCE // values.shape[1])
    parts = (_encode(values[first : first + rows].tolist())[1:-1] for first in range(0, len(values), rows))
    return b"[" + b",".join(parts) + b"]"


async def written(index: int, result: Pooled, write: Callable[[int, Pooled], bytes]) -> bytes:
    """What `write` makes of a result; beside the event loop if that takes long."""
    if len(result.data) <= LARGE_BYTES:
        return write(index, result)
    return await asyncio.to_thread(write, index, result)


def base64_text(data: bytes) -> bytes:
    """A JSON string of bytes in base64."""
    return b'"' + base64.b64encode(data) + b'"'


def as_bytes(values: Floats, dtype: EmbedDType, endianness: Endianness) -> bytes:
    """The bytes of values in C order, each rounded to the nearest number of the type. What fp8 cannot hold becomes its
    largest number."""
    numbers = _CASTS[dtype](values)
    big = sys.byteorder == "big" if endianness == "native" else endianness == "big"
    return numbers.astype(numbers.dtype.newbyteorder(">" if big else "<"), copy=False).tobytes()


def _bfloat16(values: Floats) -> Numbers:
    """The bits of bfloat16: the upper half of float32, rounded to even (NaN stays NaN)."""
    import numpy as np

    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def _float8(exponent_bits: int) -> Callable[[Floats], Numbers]:
    def cast(values: Floats) -> Numbers:
        import numpy as np

        known = _float8_values(exponent_bits)
        between = (known[:-1] + known[1:]) / 2
        magnitude = np.abs(values.astype(np.float64))
        codes = np.searchsorted(between, magnitude)
        is_tie = between[np.minimum(codes, len(between) - 1)] == magnitude
        codes += is_tie & (codes % 2 == 1)
        codes[np.isnan(values)] = 0x7F
        return (codes | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)

    return cast


@cache
def _float8_values(exponent_bits: int) -> Numbers:
    """The finite numbers from 0 on in the order of their codes (Micikevicius et al. 2022, FP8 Formats for Deep
    Learning): e4m3 has no infinities, and e5m2 is the upper half of float16."""
    import numpy as np

    codes = np.arange(0x7F if exponent_bits == 4 else 0x7C)
    mantissa_bits, bias = 7 - exponent_bits, 2 ** (exponent_bits - 1) - 1
    exponents, fractions = codes >> mantissa_bits, (codes & (2**mantissa_bits - 1)) / 2**mantissa_bits
    subnormal = fractions * 2.0 ** (1 - bias)
    values: Numbers = np.where(exponents == 0, subnormal, (1 + fractions) * 2.0 ** (exponents - bias))
    return values


_CASTS: dict[EmbedDType, Callable[[Floats], Numbers]] = {
    "float32": lambda values: values,
    "float16": lambda values: values.astype("<f2"),
    "bfloat16": _bfloat16,
    "fp8_e4m3": _float8(4),
    "fp8_e5m2": _float8(5),
}


def packed_bits(values: Floats) -> Numbers:
    """One bit for each value, 1 for 0 and above, eight in a byte with the first one highest: uint8 of [dim / 8]."""
    import numpy as np

    return np.packbits(values >= 0, axis=-1)


def int8_numbers(values: Floats) -> Numbers:
    """Values of [dim] as integers from -127 to 127, int16: the one that is largest in size becomes ±127. Cosines stay
    nearly as they are."""
    import numpy as np

    largest = np.abs(values).max(initial=0.0)
    scale = 127 / largest if largest > 0 else 0.0
    numbers: Numbers = np.rint(values * np.float32(scale)).astype(np.int16)
    return numbers
