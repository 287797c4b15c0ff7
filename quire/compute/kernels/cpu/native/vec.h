// Vectors of floats of the instruction set that this is compiled for: AVX2 with FMA, AVX-512, AVX-512 with BF16. Another
// one (Arm's) would define the same names.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <limits>

namespace quire {

using bf16 = uint16_t;

inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x) << 16;
    float wide;
    std::memcpy(&wide, &bits, 4);
    return wide;
}

inline bf16 narrow(float x) {  // to the nearest, of two the even one
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return bf16(bits >> 16 | 0x40);  // NaN
    return bf16((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float load_one(const float* p) { return *p; }
inline float load_one(const bf16* p) { return widen(*p); }
inline void store_one(float* p, float x) { *p = x; }
inline void store_one(bf16* p, float x) { *p = narrow(x); }

#if defined(__AVX512F__)

constexpr int W = 16;  // floats in a vector
using vf = __m512;
using vi = __m512i;

inline vf zero() { return _mm512_setzero_ps(); }
inline vf all(float x) { return _mm512_set1_ps(x); }
inline vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm512_div_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
inline vf larger(vf a, vf b) { return _mm512_max_ps(a, b); }
inline vf smaller(vf a, vf b) { return _mm512_min_ps(a, b); }
inline float sum(vf a) { return _mm512_reduce_add_ps(a); }
inline float largest(vf a) { return _mm512_reduce_max_ps(a); }
inline void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
// The sums of 16 vectors, in order: four times pairs are merged, which takes less than 16 sums one by one.
inline vf sums_of(const vf (&x)[16]) {
    vf pairs[8], fours[4], eights[2];
    for (int i = 0; i < 8; ++i)
        pairs[i] = add(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
    for (int i = 0; i < 4; ++i) {
        __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
        fours[i] = add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    for (int i = 0; i < 2; ++i) {
        vf a = fours[2 * i], b = fours[2 * i + 1];
        eights[i] = add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    vf a = eights[0], b = eights[1];
    return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
inline void store_sums(float* p, const vf (&x)[16]) { store(p, sums_of(x)); }
inline vf nearest(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf power_of_two(vf whole) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(whole), _mm512_set1_epi32(127)), 23));
}
// x, but 0 where a < b
inline vf zero_below(vf x, vf a, vf b) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, b, _CMP_NLT_UQ), x); }

inline __mmask16 first(int n) { return n >= W ? __mmask16(0xffff) : __mmask16((1u << n) - 1); }
inline vf load(const float* p) { return _mm512_loadu_ps(p); }
inline vf load(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline vf widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
inline vf load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline vf load(const bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first(n), p)); }
inline void store(float* p, vf x, int n) {
    if (n >= W) return store(p, x);
    _mm512_mask_storeu_ps(p, first(n), x);
}

inline __m256i narrow(vf x) {
#if defined(__AVX512BF16__)
    return (__m256i)_mm512_cvtneps_pbh(x);
#else
    vi bits = _mm512_castps_si512(x);
    vi odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    vi rounded = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    vi nan = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), nan));
#endif
}
inline void store(bf16* p, vf x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x)); }
inline void store(bf16* p, vf x, int n) {
    if (n >= W) return store(p, x);
    _mm256_mask_storeu_epi16(p, first(n), narrow(x));
}

inline vi load_pairs(const bf16* p) { return _mm512_loadu_si512(p); }
inline vi all_pairs(const bf16* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return _mm512_set1_epi32(pair);
}
// (a, b) for each of W numbers.
inline void store_pairs(bf16* p, const bf16* a, const bf16* b) {
    vi first = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)));
    vi second = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(b)));
    _mm512_storeu_si512(p, _mm512_or_si512(first, _mm512_slli_epi32(second, 16)));
}
inline vf low(vi pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline vf high(vi pairs) { return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000)))); }

#else

constexpr int W = 8;
using vf = __m256;
using vi = __m256i;

inline vf zero() { return _mm256_setzero_ps(); }
inline vf all(float x) { return _mm256_set1_ps(x); }
inline vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
inline vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
inline vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
inline vf div(vf a, vf b) { return _mm256_div_ps(a, b); }
inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
inline vf larger(vf a, vf b) { return _mm256_max_ps(a, b); }
inline vf smaller(vf a, vf b) { return _mm256_min_ps(a, b); }
inline float sum(vf a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float largest(vf a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}
inline void store_sums(float* p, const vf (&x)[8]) {
    vf low = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    vf high = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
    vf halves = _mm256_permute2f128_ps(low, high, 0x20), others = _mm256_permute2f128_ps(low, high, 0x31);
    _mm256_storeu_ps(p, _mm256_add_ps(halves, others));
}
inline vf nearest(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline vf power_of_two(vf whole) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(whole), _mm256_set1_epi32(127)), 23));
}
inline vf zero_below(vf x, vf a, vf b) { return _mm256_and_ps(x, _mm256_cmp_ps(a, b, _CMP_NLT_UQ)); }

inline vf load(const float* p) { return _mm256_loadu_ps(p); }
inline vf load(const float* p, int n) {
    if (n >= W) return load(p);
    float own[W] = {};
    for (int i = 0; i < n; ++i) own[i] = p[i];
    return _mm256_loadu_ps(own);
}
inline vf widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline vf load(const bf16* p) { return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline vf load(const bf16* p, int n) {
    if (n >= W) return load(p);
    bf16 own[W] = {};
    for (int i = 0; i < n; ++i) own[i] = p[i];
    return load(own);
}
inline void store(float* p, vf x) { _mm256_storeu_ps(p, x); }
inline void store(float* p, vf x, int n) {
    if (n >= W) return store(p, x);
    float own[W];
    store(own, x);
    for (int i = 0; i < n; ++i) p[i] = own[i];
}
inline __m128i narrow(vf x) {
    vi bits = _mm256_castps_si256(x);
    vi odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    vi rounded = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    vi nan = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
    vi unordered = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    vi chosen = _mm256_blendv_epi8(rounded, nan, unordered);
    return _mm_packus_epi32(_mm256_castsi256_si128(chosen), _mm256_extracti128_si256(chosen, 1));
}
inline void store(bf16* p, vf x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(x)); }
inline void store(bf16* p, vf x, int n) {
    if (n >= W) return store(p, x);
    bf16 own[W];
    store(own, x);
    for (int i = 0; i < n; ++i) p[i] = own[i];
}

inline vi load_pairs(const bf16* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline vi all_pairs(const bf16* p) {
    int32_t pair;
    std::memcpy(&pair, p, 4);
    return _mm256_set1_epi32(pair);
}
inline void store_pairs(bf16* p, const bf16* a, const bf16* b) {
    __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a)), y = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_unpacklo_epi16(x, y));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p) + 1, _mm_unpackhi_epi16(x, y));
}
inline vf low(vi pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline vf high(vi pairs) { return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000)))); }

#endif

// e to the x, within 2 units in the last place (Cody & Waite's reduction, a polynomial of degree 6); 0 below -87, infinite
// above 88.4. NaN stays NaN: of a NaN and a number, larger and smaller return what comes second.
inline vf exponential(vf x) {
    vf bounded = smaller(all(89.0f), larger(all(-87.0f), x));
    vf whole = nearest(mul(bounded, all(1.44269504088896f)));
    vf r = fma(whole, all(-0.693359375f), bounded);
    r = fma(whole, all(2.12194440e-4f), r);
    vf p = all(1.9875691500e-4f);
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    p = add(fma(mul(r, r), p, r), all(1.0f));
    return zero_below(mul(p, power_of_two(whole)), x, all(-87.0f));
}

inline vf silu(vf x) { return div(x, add(all(1.0f), exponential(sub(zero(), x)))); }

// As precise as what it is stored in shows. For bf16, 2 to a fraction is a polynomial that is right to 2^-17, and the
// quotient to 2^-14.
inline vf silu(vf x, const float*) { return silu(x); }
#if defined(__AVX512F__)
inline vf silu(vf x, const bf16*) {
    vf exponent = larger(all(-126.0f), mul(x, all(-1.44269504088896f))), whole = nearest(exponent);
    vf f = sub(exponent, whole);
    vf p = fma(f, all(9.5700096e-3f), all(5.5874772e-2f));
    p = fma(fma(fma(p, f, all(2.4022652e-1f)), f, all(6.9314720e-1f)), f, all(1.0f));
    return mul(x, _mm512_rcp14_ps(add(all(1.0f), _mm512_scalef_ps(p, whole))));
}
#else
inline vf silu(vf x, const bf16*) { return silu(x); }
#endif

// In its tanh form (Hendrycks & Gimpel 2016); (1 + tanh(u)) / 2 is a logistic function of 2u.
inline vf gelu(vf x) {
    vf u = mul(x, fma(mul(x, x), all(0.0713548162726f), all(1.59576912161f)));
    return div(x, add(all(1.0f), exponential(sub(zero(), u))));
}

// x Φ(x). The error function is right to 1.5e-7 (Abramowitz & Stegun 1964, 7.1.26).
inline vf gelu_exact(vf x) {
    vf size = larger(x, sub(zero(), x)), z = mul(size, all(0.70710678118655f));
    vf t = div(all(1.0f), fma(z, all(0.3275911f), all(1.0f)));
    vf p = fma(t, all(1.061405429f), all(-1.453152027f));
    p = fma(fma(fma(p, t, all(1.421413741f)), t, all(-0.284496736f)), t, all(0.254829592f));
    vf rest = mul(mul(p, t), exponential(sub(zero(), mul(z, z))));
    return sub(larger(x, zero()), mul(mul(size, all(0.5f)), rest));
}

inline vf quick_gelu(vf x) { return div(x, add(all(1.0f), exponential(mul(x, all(-1.702f))))); }

inline vf relu(vf x) { return larger(x, zero()); }

inline vf tanh(vf x) {
    return sub(all(1.0f), div(all(2.0f), add(exponential(add(x, x)), all(1.0f))));
}

}  // namespace quire
