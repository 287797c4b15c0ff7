// Rows of activations as 16-bit integers, a scale for 32 of them: finer than bf16.
#pragma once

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

template <class T>
void round_row(const T* x, int64_t columns, int16_t* whole, float* scales, int32_t* sums) {
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
    }
}

template <class T>
Rows round_rows(const T* x, int64_t xs, int64_t rows, int64_t columns) {
    int64_t runs = rows * columns / kRun, parts = rows * columns / kSum;
    char* own = static_cast<char*>(scratch(1, runs * 4 + parts * 4 + rows * columns * 2));
    float* scales = reinterpret_cast<float*>(own);
    int32_t* sums = reinterpret_cast<int32_t*>(scales + runs);
    int16_t* whole = reinterpret_cast<int16_t*>(sums + parts);
    Rows made{whole, scales, sums, columns};
    parallel_if(rows * columns >= kWorthSharing, rows, [&](int64_t row) {
        round_row(x + row * xs, columns, whole + row * columns, scales + row * (columns / kRun),
                  sums + row * (columns / kSum));
    });
    return made;
}

}  // namespace quire
