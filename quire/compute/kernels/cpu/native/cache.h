// What the elements of a KV cache may be beside the model's own: bytes that stand for floats. A head's keys, and its
// values, are stored divided by a scale.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "vec.h"

namespace quire {

// Sign, exponent, mantissa: 1 + 4 + 3 bits without infinities, and 1 + 5 + 2 (Micikevicius et al. 2022).
struct e4m3 {
    uint8_t bits;
    static constexpr int kMantissa = 3, kNaN = 0x7f;
    static constexpr float kLargest = 448.0f, kUp = 0x1p120f, kDown = 0x1p-120f;  // between its exponents and a float's
};
struct e5m2 {
    uint8_t bits;
    static constexpr int kMantissa = 2, kNaN = 0x7f;
    static constexpr float kLargest = 57344.0f, kUp = 0x1p112f, kDown = 0x1p-112f;
};

template <class C>
inline float to_float(C x) {
    uint32_t magnitude = uint32_t(x.bits & 0x7f) << (23 - C::kMantissa), sign = uint32_t(x.bits & 0x80) << 24;
    float wide;
    std::memcpy(&wide, &magnitude, 4);
    wide *= C::kUp;  // exact, of what has the smallest exponent as well
    std::memcpy(&magnitude, &wide, 4);
    magnitude |= sign;
    std::memcpy(&wide, &magnitude, 4);
    return wide;
}
inline float to_float(int8_t x) { return float(x); }

// To the nearest, of two the even one; what is too large becomes the largest.
template <class C>
inline void from_float(float x, C* to) {
    if (std::isnan(x)) {
        to->bits = C::kNaN;
        return;
    }
    float small = std::min(std::max(x, -C::kLargest), C::kLargest) * C::kDown;
    uint32_t bits;
    std::memcpy(&bits, &small, 4);
    uint32_t sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    constexpr int kDropped = 23 - C::kMantissa;
    magnitude = (magnitude + (1u << (kDropped - 1)) - 1 + (magnitude >> kDropped & 1)) >> kDropped;
    to->bits = uint8_t(sign | magnitude);
}
inline void from_float(float x, int8_t* to) {
    *to = std::isnan(x) ? int8_t(0) : int8_t(std::nearbyint(std::min(std::max(x, -127.0f), 127.0f)));
}

#if defined(__AVX512F__)
inline vi load_bytes(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
inline vf load(const int8_t* p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
// To the nearest, of two the even one; NaN becomes 0.
inline void store_whole(int8_t* p, vf x) {
    vf bounded = smaller(all(127.0f), larger(all(-127.0f), x));
    vi whole = _mm512_maskz_cvtps_epi32(_mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), bounded);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(whole));
}
template <class C>
inline vf load_float8(const C* p) {
    vi x = load_bytes(&p->bits), magnitude = _mm512_slli_epi32(_mm512_and_si512(x, _mm512_set1_epi32(0x7f)), 23 - C::kMantissa);
    vi sign = _mm512_slli_epi32(_mm512_and_si512(x, _mm512_set1_epi32(0x80)), 24);
    vf wide = mul(_mm512_castsi512_ps(magnitude), all(C::kUp));
    return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(wide), sign));
}
#else
inline vi load_bytes(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))); }
inline vf load(const int8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline void store_whole(int8_t* p, vf x) {
    vf numbers = _mm256_and_ps(x, _mm256_cmp_ps(x, x, _CMP_ORD_Q));
    vi whole = _mm256_cvtps_epi32(smaller(all(127.0f), larger(all(-127.0f), numbers)));
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(words, words));
}
template <class C>
inline vf load_float8(const C* p) {
    vi x = load_bytes(&p->bits), magnitude = _mm256_slli_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0x7f)), 23 - C::kMantissa);
    vi sign = _mm256_slli_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0x80)), 24);
    vf wide = mul(_mm256_castsi256_ps(magnitude), all(C::kUp));
    return _mm256_castsi256_ps(_mm256_or_si256(_mm256_castps_si256(wide), sign));
}
#endif
inline vf load(const e4m3* p) { return load_float8(p); }
inline vf load(const e5m2* p) { return load_float8(p); }

// Elements as the model's own, which holds each of them exactly.
template <class C, class T>
inline void widen_row(const C* from, int64_t n, T* to) {
    int64_t c = 0;
    for (; c + W <= n; c += W) store(to + c, load(from + c));
    for (; c < n; ++c) {
        if constexpr (std::is_same_v<T, float>)
            to[c] = to_float(from[c]);
        else
            to[c] = narrow(to_float(from[c]));
    }
}

// A row of the model's own, divided by a scale.
template <class T, class C>
inline void store_scaled(const T* from, int64_t n, float scale, C* to) {
    int64_t c = 0;
    if constexpr (std::is_same_v<C, int8_t>)
        for (; c + W <= n; c += W) store_whole(to + c, div(load(from + c), all(scale)));
    for (; c < n; ++c) from_float(load_one(from + c) / scale, to + c);
}

}  // namespace quire
