// Rows of activations as 16-bit integers, a scale for a run of 32 to 256 of them: finer than bf16. Rows of floats are two
// such rows, one behind the other: the second has what the first has lost.
#pragma once

#include <algorithm>
#include <type_traits>

#include "integers.h"
#include "pool.h"

namespace quire {

constexpr int kSum = 16;       // columns whose sum is known at least
constexpr int kStretch = 256;  // columns of all rows that lie together, so that those of many rows stay in the nearest cache
constexpr float kLargest = 32767.0f;
constexpr float kSmallest = 1e-30f;  // what is below is zero
constexpr int64_t kWorthSharing = 1 << 19;

// Rows as integers: x = scale · whole. A stretch of columns of all rows comes before the next one.
struct Rows {
    const int16_t* whole;
    const float* scales;  // [rows, runs]; NaN where a value was not finite
    const int32_t* sums;  // [rows, parts]
    int64_t columns, count, first;
    int run_bits, part_bits;  // logarithms of the columns of a row that share a scale, that share a sum: nothing divides
    int64_t runs, parts;

    Rows from(int64_t row) const {
        Rows rest = *this;
        rest.first += row;
        return rest;
    }
    int64_t width(int64_t column) const {  // of the stretch: from a row to the next
        return std::min<int64_t>(kStretch, columns - column / kStretch * kStretch);
    }
    const int16_t* at(int64_t column) const {
        return whole + column / kStretch * kStretch * count + first * width(column) + column % kStretch;
    }
    int run() const { return 1 << run_bits; }
    const float* scale(int64_t column) const { return scales + first * runs + (column >> run_bits); }
    const int32_t* sum(int64_t column) const { return sums + first * parts + (column >> part_bits); }
};

// `left` [run]: what is lost; or null.
template <class T>
void round_run(const T* x, int run, int part, int16_t* whole, float* scale, int32_t* sums, float* left) {
    const Magnitude magnitude = magnitude_of(x, run);
    *scale = magnitude.largest / kLargest + magnitude.nothing;
    vf factor = all(magnitude.largest > kSmallest ? kLargest / magnitude.largest : 0.0f);
    for (int c = 0; c < run; c += W) store_rounded(whole + c, mul(load(x + c), factor));
    for (int c = 0; c < run; c += part, ++sums) {
        *sums = 0;
        for (int at = c; at < c + part; at += kSum) {
            int32_t total = 0;
            for (int i = 0; i < kSum; ++i) total += whole[at + i];
            *sums += total;
        }
    }
    if constexpr (std::is_same_v<T, float>)
        if (left)
            for (int i = 0; i < run; ++i) left[i] = x[i] - *scale * float(whole[i]);
}

// [rows · parts_of<T>, columns]
template <class T>
constexpr int64_t parts_of = std::is_same_v<T, float> ? 2 : 1;

template <class T>
Rows round_rows(const T* x, int64_t xs, int64_t rows, int64_t columns, int run, int part) {
    constexpr int64_t P = parts_of<T>;
    int64_t runs = columns / run, parts = columns / part, lost = P == 1 ? 0 : rows * columns;
    char* own = static_cast<char*>(scratch(1, P * rows * (runs + parts) * 4 + lost * 4 + P * rows * columns * 2));
    float* scales = reinterpret_cast<float*>(own);
    int32_t* sums = reinterpret_cast<int32_t*>(scales + P * rows * runs);
    float* left = reinterpret_cast<float*>(sums + P * rows * parts);
    int16_t* whole = reinterpret_cast<int16_t*>(left + lost);
    const Rows rounded{whole, scales, sums, columns, P * rows, 0, __builtin_ctz(run), __builtin_ctz(part), runs, parts};
    auto round = [&](const auto* from, int64_t row, float* rest) {
        const Rows to = rounded.from(row);
        for (int64_t c = 0; c < columns; c += run)
            round_run(from + c, run, part, whole + (to.at(c) - whole), scales + (to.scale(c) - scales),
                      sums + (to.sum(c) - sums), rest ? rest + c : nullptr);
    };
    parallel_if(rows * columns >= kWorthSharing, rows, [&](int64_t row) {
        float* rest = P == 1 ? nullptr : left + row * columns;
        round(x + row * xs, row, rest);
        if (P == 2) round(rest, rows + row, nullptr);
    });
    return rounded;
}

}  // namespace quire
