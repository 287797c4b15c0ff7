// Vectors of integers, for products of quantized weights: W outputs side by side, and of each two 16-bit numbers.
#pragma once

#include <algorithm>
#include <cstdint>

#include "vec.h"

namespace quire {

#if defined(__AVX512F__)

inline vi integers(int32_t x) { return _mm512_set1_epi32(x); }
inline vi load_integers(const void* p) { return _mm512_loadu_si512(p); }
inline void store_integers(void* p, vi x) { _mm512_storeu_si512(p, x); }
inline vi add_integers(vi a, vi b) { return _mm512_add_epi32(a, b); }
// W pairs of 8-bit numbers, widened.
inline vi load_bytes(const void* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
// Of each 16 bits, those of the mask.
template <int Mask>
inline vi low_bits(vi x) {
    return _mm512_and_si512(x, _mm512_set1_epi16(Mask));
}
inline vi either(vi a, vi b) { return _mm512_or_si512(a, b); }
template <int N>
inline vi shift_left(vi x) {
    return _mm512_slli_epi16(x, N);
}
template <int N>
inline vi shift_right(vi x) {
    return _mm512_srli_epi16(x, N);
}
// The table's entries for 16-bit numbers below 16.
inline vi look_up(const uint8_t* table, vi x) {
    vi entries = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return _mm512_shuffle_epi8(entries, _mm512_or_si512(x, _mm512_set1_epi16(int16_t(0x8000))));
}
// sums += the products of both numbers of each pair; in turn, so that none waits in memory
inline void add_products(vi& sums, vi a, vi b) {
#if defined(__AVX512VNNI__)
    sums = _mm512_dpwssd_epi32(sums, a, b);
#else
    sums = _mm512_add_epi32(sums, _mm512_madd_epi16(a, b));
#endif
    asm("" : "+v"(sums));
}
inline vf to_float(vi x) { return _mm512_cvtepi32_ps(x); }
inline vf load_halves(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
// Powers of two of which a byte has the exponent, biased as in a float; the least is less than a normal float.
inline vf load_exponents(const uint8_t* p) {
    vi bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 23);
    return _mm512_castsi512_ps(_mm512_max_epi32(bits, _mm512_set1_epi32(0x400000)));
}
inline vf load_bytes_as_float(const uint8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline void store_rounded(int16_t* p, vf x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)));
}
inline vf absolute(vf x) { return _mm512_abs_ps(x); }
// Of two vectors of 16-bit numbers a and b the pairs (a, b), half of them in each result; `in_order` puts sums of them
// into the order of the numbers.
inline void pair_up(vi a, vi b, vi& low, vi& high) {
    low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
}
inline void in_order(vi& low, vi& high) {
    const vi first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
    vi own = low;
    low = _mm512_permutex2var_epi64(own, first, high), high = _mm512_permutex2var_epi64(own, second, high);
}

#else

inline vi integers(int32_t x) { return _mm256_set1_epi32(x); }
inline vi load_integers(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void store_integers(void* p, vi x) { _mm256_storeu_si256(static_cast<__m256i*>(p), x); }
inline vi add_integers(vi a, vi b) { return _mm256_add_epi32(a, b); }
inline vi load_bytes(const void* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p))); }
// Of each 16 bits, those of the mask.
template <int Mask>
inline vi low_bits(vi x) {
    return _mm256_and_si256(x, _mm256_set1_epi16(Mask));
}
inline vi either(vi a, vi b) { return _mm256_or_si256(a, b); }
template <int N>
inline vi shift_left(vi x) {
    return _mm256_slli_epi16(x, N);
}
template <int N>
inline vi shift_right(vi x) {
    return _mm256_srli_epi16(x, N);
}
inline vi look_up(const uint8_t* table, vi x) {
    vi entries = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return _mm256_shuffle_epi8(entries, _mm256_or_si256(x, _mm256_set1_epi16(int16_t(0x8000))));
}
inline void add_products(vi& sums, vi a, vi b) {
    vi products = _mm256_madd_epi16(a, b);
    // in place: the compiler would add into another register and move it back
    asm("vpaddd %1, %0, %0" : "+x"(sums) : "x"(products));
}
inline vf to_float(vi x) { return _mm256_cvtepi32_ps(x); }
inline vf load_halves(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline vf load_exponents(const uint8_t* p) {
    vi bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))), 23);
    return _mm256_castsi256_ps(_mm256_max_epi32(bits, _mm256_set1_epi32(0x400000)));
}
inline vf load_bytes_as_float(const uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline void store_rounded(int16_t* p, vf x) {
    vi whole = _mm256_cvtps_epi32(x);
    __m128i packed = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), packed);
}
inline vf absolute(vf x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
inline void pair_up(vi a, vi b, vi& low, vi& high) {
    low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
}
inline void in_order(vi& low, vi& high) {
    vi own = low;
    low = _mm256_permute2x128_si256(own, high, 0x20), high = _mm256_permute2x128_si256(own, high, 0x31);
}

#endif

// Of numbers that are to be rounded to integers.
struct Magnitude {
    float largest, nothing;  // nothing is NaN if a number is not finite, else 0
};

template <class T>
inline Magnitude magnitude_of(const T* x, int64_t n) {
    vf most = zero(), nothing = zero();
    for (int64_t i = 0; i < n; i += W) {
        vf values = load(x + i, int(std::min<int64_t>(W, n - i)));
        most = larger(absolute(values), most);
        nothing = fma(values, zero(), nothing);
    }
    return {largest(most), sum(nothing)};
}

#if defined(__AVX512F__)
// The magnitudes of bf16 are in the order of their bits.
inline Magnitude magnitude_of(const bf16* x, int64_t n) {
    constexpr int kValues = 2 * W;
    constexpr bf16 kInfinity = 0x7f80;
    vi most = integers(0);
    for (int64_t i = 0; i < n; i += kValues) {
        const __mmask32 there = n - i >= kValues ? ~__mmask32(0) : (__mmask32(1) << (n - i)) - 1;
        most = _mm512_max_epu16(most, low_bits<0x7fff>(_mm512_maskz_loadu_epi16(there, x + i)));
    }
    vi high = _mm512_srli_epi32(most, 16), low = _mm512_and_si512(most, integers(0xffff));
    const bf16 found = bf16(_mm512_reduce_max_epu32(_mm512_max_epu32(high, low)));
    return {widen(found), found < kInfinity ? 0.0f : std::numeric_limits<float>::quiet_NaN()};
}
#endif

inline vi all_pairs(const int16_t* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return integers(pair);
}

}  // namespace quire
