"""Makes fp16 operands for the tensor cores from caches of 8-bit elements, in Gluon.

fp16 holds every 8-bit element exactly, including NaN. Elements are read as pairs, words of 16 bits, which `ldmatrix`
distributes as it does bf16 values, also across rows. A register then has two elements of each of two places. Split into
the first and the second element of each pair, it makes two operands of half as many columns: scores are the sum of both
products, and sums of values are two halves whose columns alternate. Queries in bf16 are scaled by a power of two for
each row, to the range where fp16 is exact.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# (b0, b1), (b2, b3) → (b0, b2), (b1, b3), as fp16
_E4M3 = gl.constexpr("""
{
 .reg .b32 t;
 .reg .b16 first, second;
 prmt.b32 t, $2, $2, 0x3120;
 mov.b32 {first, second}, t;
 cvt.rn.f16x2.e4m3x2 $0, first;
 cvt.rn.f16x2.e4m3x2 $1, second;
}
""")
_E5M2 = gl.constexpr("""
{
 shl.b32 $0, $2, 8;
 and.b32 $0, $0, 0xFF00FF00;
 and.b32 $1, $2, 0xFF00FF00;
}
""")  # the upper half of an fp16
_INT8 = gl.constexpr("""
{
 .reg .b32 t, high, bias;
 xor.b32 t, $2, 0x80808080;
 mov.b32 high, 0x64646464;
 mov.b32 bias, 0x64806480;
 prmt.b32 $0, t, high, 0x4240;
 sub.rn.f16x2 $0, $0, bias;
 prmt.b32 $1, t, high, 0x4341;
 sub.rn.f16x2 $1, $1, bias;
}
""")  # 0x6400 | code is 1024 + code


@gluon.jit
def halves_of_pairs(pairs, KIND: gl.constexpr):
    """Return the first and the second elements of int16 pairs as fp16, in a layout that has pairs of words in
    registers.

    Args:
        KIND: The type of the elements: e4m3, e5m2 or int8.
    """
    gl.static_assert(KIND == "e4m3" or KIND == "e5m2" or KIND == "int8")
    if KIND == "e4m3":
        first, second = _split(pairs, _E4M3)
    elif KIND == "e5m2":
        first, second = _split(pairs, _E5M2)
    else:
        first, second = _split(pairs, _INT8)
    return first, second


@gluon.jit
def _split(pairs, CODE: gl.constexpr):
    return gl.inline_asm_elementwise(
        CODE, "=&r,=&r,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )  # fmt: skip


@gluon.jit
def halves_of_queries(pairs, dtype: gl.constexpr):
    """Return the first and the second elements of query pairs [rows, pairs] int32 as fp16, and the factor of each row.

    `dtype` is the type of the queries in the pairs.
    """
    if dtype == gl.float16:
        first = (pairs & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True)
        second = (pairs >> 16).to(gl.int16).to(gl.float16, bitcast=True)
        factor = gl.full([pairs.shape[0]], 1.0, gl.float32, gl.SliceLayout(1, pairs.type.layout))
    else:
        wide_first = (pairs << 16).to(gl.float32, bitcast=True)
        wide_second = (pairs & -65536).to(gl.float32, bitcast=True)
        largest = gl.max(gl.maximum(gl.abs(wide_first), gl.abs(wide_second)), 1)
        exponent = largest.to(gl.int32, bitcast=True) & 0x7F800000
        factor = exponent.to(gl.float32, bitcast=True)
        shrink = (0x7F000000 - gl.minimum(exponent, 0x7E800000)).to(gl.float32, bitcast=True)
        first = (wide_first * shrink[:, None]).to(gl.float16)
        second = (wide_second * shrink[:, None]).to(gl.float16)
    return first, second, factor
