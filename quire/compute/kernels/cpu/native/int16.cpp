// Products of 16-bit weights with rows of 16 bits, by the instruction that adds the products of two pairs (AVX-512 VNNI):
// of many processors the fastest one whose sums are exact.
//
// A panel has 64 outputs, and is divided into stretches of columns: the outputs' scales, fp32, then codes, [columns / 2,
// 64, 2]. Weights are packed so that no sum of a stretch overflows, whatever the rows are; each stretch of a row has a scale
// of its own, so that a few large values leave the others their precision.
#include "int16.h"

#include <algorithm>

#include "integers.h"
#include "pool.h"

namespace quire {

#if defined(__AVX512VNNI__)

namespace {

constexpr int kPanel = 64, kVectors = kPanel / W;
constexpr int64_t kStretch = 256;    // columns, as rounded_linear.py packs them; a panel's stay in the first cache
constexpr int64_t kMostRows = 6;     // whose sums stay in registers
constexpr int64_t kRowsAtOnce = 96;  // a multiple of it; their sums stay in the first caches
constexpr int64_t kRowsOfChunk = 16;  // that one thread rounds
constexpr int64_t kCheapRows = 8;    // take no longer than one
constexpr int64_t kWorthSharing = 1 << 19, kWorthRounding = 1 << 15;
constexpr float kLargest = 32767.0f, kSmallest = 1e-30f;

// x = scale · whole. A stretch of columns of all rows comes before the next one.
struct Rows {
    const int16_t* whole;  // [stretches, rows, kStretch], zeros up to an even number of columns
    const float* scales;   // [stretches, rows]; NaN where a value was not finite
    int64_t count;
};

template <class T>
void round_stretch(const T* x, int64_t columns, int16_t* whole, float* scale) {
    const Magnitude magnitude = magnitude_of(x, columns);
    const float size = std::max(magnitude.largest, kSmallest);
    const vf inverse = all(kLargest / size);
    for (int64_t c = 0; c < columns; c += W)
        store_rounded(whole + c, mul(load(x + c, int(std::min<int64_t>(W, columns - c))), inverse));
    *scale = size / kLargest + magnitude.nothing;
}

template <class T>
Rows round_rows(const T* x, int64_t xs, int64_t rows, int64_t columns) {
    const int64_t stretches = (columns + kStretch - 1) / kStretch;
    char* own = static_cast<char*>(scratch(1, rows * stretches * (kStretch * 2 + 4)));
    int16_t* whole = reinterpret_cast<int16_t*>(own);
    float* scales = reinterpret_cast<float*>(whole + rows * stretches * kStretch);
    const int64_t chunks = (rows + kRowsOfChunk - 1) / kRowsOfChunk;
    parallel_if(rows * columns >= kWorthRounding, chunks, [&](int64_t chunk) {
        for (int64_t row = chunk * kRowsOfChunk; row < std::min(rows, (chunk + 1) * kRowsOfChunk); ++row)
            for (int64_t i = 0; i < stretches; ++i) {
                const int64_t at = i * rows + row, n = std::min(kStretch, columns - i * kStretch);
                round_stretch(x + row * xs + i * kStretch, n, whole + at * kStretch, scales + at);
            }
    });
    return {whole, scales, rows};
}

// sums [R, 64] (+)= R rows of a stretch times its codes, as their scales say.
template <int R>
void multiply(const int16_t* x, const float* row_scales, const float* scales, int64_t pairs, bool accumulate,
              float* sums) {
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(scales + kPanel);
    vi own[R][kVectors];  // stay in registers only if every loop over them is unrolled
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) own[r][v] = integers(0);
    for (int64_t pair = 0; pair < pairs; ++pair, codes += kPanel * 4) {
        vi w[kVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            w[v] = load_integers(codes + v * 64);
            asm("" : "+v"(w[v]));  // loaded once, not for each row
        }
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            const vi both = all_pairs(x + r * kStretch + 2 * pair);
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) asm("vpdpwssd %2, %1, %0" : "+v"(own[r][v]) : "v"(w[v]), "v"(both));
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
            float* to = sums + r * kPanel + v * W;
            const vf unit = mul(load(scales + v * W), all(row_scales[r])), product = to_float(own[r][v]);
            store(to, accumulate ? fma(product, unit, load(to)) : mul(product, unit));
        }
}

template <int R>
void multiply_tile(int64_t n, const int16_t* x, const float* row_scales, const float* scales, int64_t pairs,
                   bool accumulate, float* sums) {
    if constexpr (R < kMostRows)
        if (n > R) return multiply_tile<R + 1>(n, x, row_scales, scales, pairs, accumulate, sums);
    multiply<R>(x, row_scales, scales, pairs, accumulate, sums);
}

// sums [n, 64] = n rows from `first` on times one panel.
void multiply_panel(const Rows& rows, int64_t first, int64_t n, const uint8_t* panel, int64_t columns, float* sums) {
    const int64_t tiles = (n + kMostRows - 1) / kMostRows;
    for (int64_t begin = 0; begin < columns; begin += kStretch) {
        const int64_t pairs = (std::min(kStretch, columns - begin) + 1) / 2, at = begin / kStretch * rows.count + first;
        const float* scales = reinterpret_cast<const float*>(panel);
        for (int64_t tile = 0; tile < tiles; ++tile) {
            const int64_t row = n * tile / tiles, count = n * (tile + 1) / tiles - row;
            multiply_tile<1>(count, rows.whole + (at + row) * kStretch, rows.scales + at + row, scales, pairs, begin > 0,
                             sums + row * kPanel);
        }
        panel += (pairs + 1) * kPanel * 4;
    }
}

template <class T>
void linear(const T* x, int64_t xs, int64_t count, const uint8_t* packed, int64_t outputs, int64_t columns, bool gated,
            const T* bias, T* y, int64_t ys) {
    if (count == 0) return;
    const Rows rows = round_rows(x, xs, count, columns);
    const int64_t stretches = (columns + kStretch - 1) / kStretch;
    const int64_t size = ((columns + 1) / 2 + stretches) * kPanel * 4;
    const int64_t width = gated ? outputs / 2 : outputs, panels = (width + kPanel - 1) / kPanel;
    const int64_t parts = (count + kRowsAtOnce - 1) / kRowsAtOnce;
    const int64_t each = std::min(parts, std::max<int64_t>(1, parts * panels / (8 * threads())));  // of a chunk
    const int64_t chunks = (parts + each - 1) / each;  // of a panel, which stays in the second cache
    const bool shared = outputs * columns * std::max(count, kCheapRows) >= kWorthSharing;
    parallel_if(shared, panels * chunks, [&](int64_t chunk) {
        const int64_t panel = chunk / chunks, part = chunk % chunks * each;
        float* sums = static_cast<float*>(scratch(0, 2 * kRowsAtOnce * kPanel * 4));
        float* ups = sums + kRowsAtOnce * kPanel;
        for (int64_t i = part; i < std::min(part + each, parts); ++i) {
            const int64_t first = i * kRowsAtOnce, n = std::min(kRowsAtOnce, count - first);
            multiply_panel(rows, first, n, packed + panel * size, columns, sums);
            if (gated) multiply_panel(rows, first, n, packed + (panels + panel) * size, columns, ups);
            for (int64_t r = 0; r < n; ++r) {
                for (int64_t at = 0, output = panel * kPanel; at < kPanel && output < width; at += W, output += W) {
                    const int left = int(std::min<int64_t>(W, width - output));
                    auto finished = [&](const float* of, int64_t from) {
                        const vf product = load(of + r * kPanel + at);
                        return bias ? add(product, load(bias + from, left)) : product;
                    };
                    vf out = finished(sums, output);
                    if (gated) out = mul(silu(out, y), finished(ups, width + output));
                    store(y + (first + r) * ys + output, out, left);
                }
            }
        }
    });
}

}  // namespace

#else

namespace {

template <class... Arguments>
void linear(Arguments...) {}  // nothing is packed for it

}  // namespace

#endif

void int16_linear(const float* x, int64_t xs, int64_t rows, const uint8_t* packed, int64_t outputs, int64_t columns,
                  bool gated, const float* bias, float* y, int64_t ys) {
    linear(x, xs, rows, packed, outputs, columns, gated, bias, y, ys);
}

void int16_linear(const bf16* x, int64_t xs, int64_t rows, const uint8_t* packed, int64_t outputs, int64_t columns,
                  bool gated, const bf16* bias, bf16* y, int64_t ys) {
    linear(x, xs, rows, packed, outputs, columns, gated, bias, y, ys);
}

}  // namespace quire
