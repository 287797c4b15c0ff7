// The product that linear layers and attention share: rows times a panel of weights. A panel holds, for one group of
// inputs after another, that group of every output: one float, or a pair of bf16.
#pragma once

#include "vec.h"

namespace quire {

template <class T>
struct Element;

template <>
struct Element<float> {
    using Row = float;                // what the rows of x are multiplied as
    static constexpr int kGroup = 1;  // inputs in a group
    static constexpr int kRows = 6, kVectors = W == 16 ? 4 : 2;  // of a tile whose sums stay in registers
};

template <>
struct Element<bf16> {
    static constexpr int kGroup = 2;
#if defined(__AVX512BF16__)
    using Row = bf16;
    static constexpr int kRows = 6, kVectors = 4;
#else
    using Row = float;  // widened once, not for each panel
    static constexpr int kRows = W == 16 ? 6 : 5, kVectors = 2;
#endif
};

template <int R, int N>
inline __attribute__((always_inline)) void multiply_group(const float* x, int64_t xs, const float* w, vf (&sums)[R][N]) {
    vf b[N];
    for (int v = 0; v < N; ++v) b[v] = load(w + v * W);
    for (int r = 0; r < R; ++r) {
        vf a = all(x[r * xs]);
        for (int v = 0; v < N; ++v) sums[r][v] = fma(a, b[v], sums[r][v]);
    }
}

template <int R, int N>
inline __attribute__((always_inline)) void multiply_group(const bf16* x, int64_t xs, const bf16* w, vf (&sums)[R][N]) {
#if defined(__AVX512BF16__)
    vi b[N];
    for (int v = 0; v < N; ++v) b[v] = load_pairs(w + v * 2 * W);
    for (int r = 0; r < R; ++r) {
        vi a = all_pairs(x + r * xs);
        for (int v = 0; v < N; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], (__m512bh)a, (__m512bh)b[v]);
    }
#else
    vf even[N], odd[N];
    for (int v = 0; v < N; ++v) {
        vi pairs = load_pairs(w + v * 2 * W);
        even[v] = low(pairs), odd[v] = high(pairs);
    }
    for (int r = 0; r < R; ++r) {
        vi pair = all_pairs(x + r * xs);
        vf a = low(pair), b = high(pair);
        for (int v = 0; v < N; ++v) sums[r][v] = fma(b, odd[v], fma(a, even[v], sums[r][v]));
    }
#endif
}

template <int R, int N>
inline __attribute__((always_inline)) void multiply_group(const float* x, int64_t xs, const bf16* w, vf (&sums)[R][N]) {
    if constexpr (R == 1) {  // no registers for all weights at once
        vf a = all(x[0]), b = all(x[1]);
        for (int v = 0; v < N; ++v) {
            vi pairs = load_pairs(w + v * 2 * W);
            sums[0][v] = fma(b, high(pairs), fma(a, low(pairs), sums[0][v]));
        }
    } else {
        vf even[N], odd[N];
        for (int v = 0; v < N; ++v) {
            vi pairs = load_pairs(w + v * 2 * W);
            even[v] = low(pairs), odd[v] = high(pairs);
        }
        for (int r = 0; r < R; ++r) {
            vf a = all(x[r * xs]);
            for (int v = 0; v < N; ++v) sums[r][v] = fma(a, even[v], sums[r][v]);
            vf b = all(x[r * xs + 1]);
            for (int v = 0; v < N; ++v) sums[r][v] = fma(b, odd[v], sums[r][v]);
        }
    }
}

// sums[r][v] (+)= Σ over groups; `sums` [R, N vectors] with stride `ss`. Beside each group, Ahead lines of memory that are
// read later are asked for.
template <class X, class T, int R, int N, int Ahead>
inline __attribute__((always_inline)) void multiply_tile(const X* x, int64_t xs, const T* w, int64_t ws, int64_t groups,
                                                         float* sums, int64_t ss, bool accumulate, const char* ahead) {
    constexpr int G = Element<T>::kGroup;
    vf own[R][N];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < N; ++v) own[r][v] = accumulate ? load(sums + r * ss + v * W) : zero();
    for (int64_t g = 0; g < groups; ++g) {
        if (Ahead)
            for (int line = 0; line < Ahead; ++line) _mm_prefetch(ahead + (g * Ahead + line) * 64, _MM_HINT_T0);
        multiply_group<R, N>(x + g * G, xs, w + g * ws, own);
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < N; ++v) store(sums + r * ss + v * W, own[r][v]);
}

template <class X, class T, int R, int Ahead>
inline void multiply_rows(const X* x, int64_t xs, const T* w, int64_t ws, int64_t groups, int vectors, float* sums,
                          int64_t ss, bool accumulate, const char* ahead) {
    constexpr int G = Element<T>::kGroup, N = R == 1 ? 64 / W : Element<T>::kVectors;
    int v = 0;
    for (; v + N <= vectors; v += N, ahead += groups * Ahead * 64) {
        multiply_tile<X, T, R, N, Ahead>(x, xs, w + v * W * G, ws, groups, sums + v * W, ss, accumulate, ahead);
    }
    for (; v < vectors; ++v) {
        multiply_tile<X, T, R, 1, 0>(x, xs, w + v * W * G, ws, groups, sums + v * W, ss, accumulate, nullptr);
    }
}

// Rows of x [rows ≤ kRows, groups · group] times a panel `vectors` wide whose groups are `ws` elements apart.
template <int Ahead, class X, class T>
inline void multiply_block(int rows, const X* x, int64_t xs, const T* w, int64_t ws, int64_t groups, int vectors,
                           float* sums, int64_t ss, bool accumulate, const char* ahead) {
    switch (rows) {
        case 1: return multiply_rows<X, T, 1, Ahead>(x, xs, w, ws, groups, vectors, sums, ss, accumulate, ahead);
        case 2: return multiply_rows<X, T, 2, Ahead>(x, xs, w, ws, groups, vectors, sums, ss, accumulate, ahead);
        case 3: return multiply_rows<X, T, 3, Ahead>(x, xs, w, ws, groups, vectors, sums, ss, accumulate, ahead);
        case 4: return multiply_rows<X, T, 4, Ahead>(x, xs, w, ws, groups, vectors, sums, ss, accumulate, ahead);
        default: break;
    }
    if constexpr (Element<T>::kRows >= 5)
        if (rows == 5) return multiply_rows<X, T, 5, Ahead>(x, xs, w, ws, groups, vectors, sums, ss, accumulate, ahead);
    if constexpr (Element<T>::kRows >= 6) {
        if (rows == 6) return multiply_rows<X, T, 6, Ahead>(x, xs, w, ws, groups, vectors, sums, ss, accumulate, ahead);
    }
}

}  // namespace quire
