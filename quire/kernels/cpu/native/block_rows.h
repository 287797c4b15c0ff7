// Rows of activations as 16-bit integers, a scale for 32 of them: finer than bf16. Rows of floats are two such rows, one
// behind the other: the second has what the first has lost.
#pragma once

#include <type_traits>

#include "integers.h"
#include "pool.h"

namespace quire {

constexpr int kRun = 32;             // columns of a row that share a scale
constexpr int kSum = 16;             // columns whose sum is known
constexpr float kLargest = 32767.0f;
constexpr float kSmallest = 1e-30f;  // what is below is zero
constexpr int64_t kWorthSharing = 1 << 19;

// Rows as integers: x = scale · whole.
struct Rows {
    const int16_t* whole;   // [rows, columns]
    const float* scales;    // [rows, columns / kRun]; NaN where a value was not finite
    const int32_t* sums;    // [rows, columns / kSum]
    int64_t columns;

    Rows from(int64_t row) const {
        return {whole + row * columns, scales + row * (columns / kRun), sums + row * (columns / kSum), columns};
    }
};

// `left` [columns]: what is lost; or null.
template <class T>
void round_row(const T* x, int64_t columns, int16_t* whole, float* scales, int32_t* sums, float* left = nullptr) {
    for (int64_t c = 0; c < columns; c += kRun) {
        vf values[kRun / W], most = zero(), nothing = zero();
        for (int v = 0; v < kRun / W; ++v) {
            values[v] = load(x + c + v * W);
            most = larger(absolute(values[v]), most);
            nothing = fma(values[v], zero(), nothing);  // NaN if a value is not finite
        }
        float largest_value = largest(most);
        scales[c / kRun] = largest_value / kLargest + sum(nothing);
        vf factor = all(largest_value > kSmallest ? kLargest / largest_value : 0.0f);
        for (int v = 0; v < kRun / W; ++v) store_rounded(whole + c + v * W, mul(values[v], factor));
        for (int part = 0; part < kRun / kSum; ++part) {
            int32_t total = 0;
            for (int i = 0; i < kSum; ++i) total += whole[c + part * kSum + i];
            sums[c / kSum + part] = total;
        }
        if constexpr (std::is_same_v<T, float>)
            if (left)
                for (int i = 0; i < kRun; ++i) left[c + i] = x[c + i] - scales[c / kRun] * float(whole[c + i]);
    }
}

// [rows · parts_of<T>, columns]
template <class T>
constexpr int64_t parts_of = std::is_same_v<T, float> ? 2 : 1;

template <class T>
Rows round_rows(const T* x, int64_t xs, int64_t rows, int64_t columns) {
    constexpr int64_t P = parts_of<T>;
    int64_t runs = P * rows * columns / kRun, parts = P * rows * columns / kSum;
    int64_t lost = P == 1 ? 0 : rows * columns;
    char* own = static_cast<char*>(scratch(1, runs * 4 + parts * 4 + lost * 4 + P * rows * columns * 2));
    float* scales = reinterpret_cast<float*>(own);
    int32_t* sums = reinterpret_cast<int32_t*>(scales + runs);
    float* left = reinterpret_cast<float*>(sums + parts);
    int16_t* whole = reinterpret_cast<int16_t*>(left + lost);
    auto round = [&](const auto* from, int64_t row, float* rest) {
        round_row(from, columns, whole + row * columns, scales + row * (columns / kRun), sums + row * (columns / kSum),
                  rest);
    };
    parallel_if(rows * columns >= kWorthSharing, rows, [&](int64_t row) {
        float* rest = P == 1 ? nullptr : left + row * columns;
        round(x + row * xs, row, rest);
        if (P == 2) round(rest, rows + row, nullptr);
    });
    return {whole, scales, sums, columns};
}

}  // namespace quire
