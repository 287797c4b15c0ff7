// Products with weights of fp8 (e4m3), which are widened to floats where they are multiplied.
//
// A panel has 64 outputs: first their scales, block by block, then codes, [columns, 64]. Few rows widen codes in
// registers. For more, a stretch of a panel is widened once, and stays in the nearest cache for all of them.
#include "float8.h"

#include <algorithm>
#include <cstring>

#include "pool.h"
#include "tile.h"

namespace quire {

struct Float8 {
    uint8_t bits;
};

template <>
struct Element<Float8> {
    using Row = float;
    static constexpr int kGroup = 1;
    static constexpr int kRows = W == 16 ? 6 : 5, kVectors = 2;
};

// 2 W codes. Their bits are those of fp16 but for the bias of exponents: values are 2^-8 of what they stand for, which
// scales make up for. What is subnormal stays exact; there are no infinities, and a NaN would be 480.
inline __attribute__((always_inline)) void widen(const Float8* codes, vf& first, vf& second) {
#if defined(__AVX512F__)
    vi wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    vi magnitude = _mm512_and_si512(_mm512_slli_epi16(wide, 7), _mm512_set1_epi16(0x3f80));
    vi halves = _mm512_or_si512(magnitude, _mm512_and_si512(wide, _mm512_set1_epi16(int16_t(0x8000))));
    first = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    second = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
#else
    vi wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    vi magnitude = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(0x3f80));
    vi halves = _mm256_or_si256(magnitude, _mm256_and_si256(wide, _mm256_set1_epi16(int16_t(0x8000))));
    first = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    second = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
#endif
}

template <int R, int N>
inline __attribute__((always_inline)) void multiply_group(const float* x, int64_t xs, const Float8* w, vf (&sums)[R][N]) {
    for (int v = 0; v + 1 < N; v += 2) {  // panels have an even number of vectors
        vf first, second;
        widen(w + v * W, first, second);
        for (int r = 0; r < R; ++r) {
            vf a = all(x[r * xs]);
            sums[r][v] = fma(a, first, sums[r][v]);
            sums[r][v + 1] = fma(a, second, sums[r][v + 1]);
        }
    }
}

namespace {

constexpr int kPanel = 64, kVectors = kPanel / W;
constexpr int64_t kRowsAtOnce = 48;
constexpr int64_t kWidened = 64;  // columns
constexpr int64_t kFewRows = 2 * Element<Float8>::kRows;
constexpr int64_t kCheapRows = 8;  // take no longer than one
constexpr int64_t kWorthSharing = 1 << 19;

int64_t blocks_of(int64_t columns, int64_t block) { return (columns + block - 1) / block; }

// `part` [rows, 64] = rows times columns [begin, end) of a panel.
void multiply_block_of_few(const float* x, int64_t xs, int64_t rows, const Float8* codes, int64_t begin, int64_t end,
                           float* part) {
    constexpr int64_t most = Element<Float8>::kRows;
    const Float8* w = codes + begin * kPanel;
    const char* ahead = reinterpret_cast<const char*>(w) + 4096;
    for (int64_t r = 0; r < rows; r += most) {
        int n = int(std::min(most, rows - r));
        if (n == 1)
            multiply_block<1>(n, x + r * xs + begin, xs, w, kPanel, end - begin, kVectors, part + r * kPanel, kPanel,
                              false, ahead);
        else
            multiply_block<0>(n, x + r * xs + begin, xs, w, kPanel, end - begin, kVectors, part + r * kPanel, kPanel,
                              false, ahead);
    }
}

void multiply_block_of_many(const float* x, int64_t xs, int64_t rows, const Float8* codes, int64_t begin, int64_t end,
                            float* part) {
    constexpr int64_t most = Element<float>::kRows;
    alignas(64) float widened[kWidened * kPanel];
    for (int64_t column = begin; column < end; column += kWidened) {
        int64_t n = std::min(kWidened, end - column);
        for (int64_t at = 0; at < n * kPanel; at += 2 * W) {
            vf first, second;
            widen(codes + column * kPanel + at, first, second);
            store(widened + at, first), store(widened + at + W, second);
        }
        for (int64_t r = 0; r < rows; r += most)
            multiply_block<0>(int(std::min(most, rows - r)), x + r * xs + column, xs, widened, kPanel, n, kVectors,
                              part + r * kPanel, kPanel, column > begin, nullptr);
    }
}

// totals [rows ≤ kRowsAtOnce, 64] = rows times a panel.
void multiply_panel(const float* x, int64_t xs, int64_t rows, const uint8_t* panel, int64_t columns, int64_t block,
                    float* totals) {
    alignas(64) float part[kRowsAtOnce * kPanel];
    const float* scales = reinterpret_cast<const float*>(panel);
    const Float8* codes = reinterpret_cast<const Float8*>(scales + blocks_of(columns, block) * kPanel);
    std::memset(totals, 0, rows * kPanel * sizeof(float));
    for (int64_t begin = 0; begin < columns; begin += block, scales += kPanel) {
        int64_t end = std::min(columns, begin + block);
        auto multiply = rows > kFewRows ? multiply_block_of_many : multiply_block_of_few;
        multiply(x, xs, rows, codes, begin, end, part);
        for (int64_t r = 0; r < rows; ++r)
            for (int v = 0; v < kVectors; ++v) {
                int64_t at = r * kPanel + v * W;
                store(totals + at, fma(load(part + at), load(scales + v * W), load(totals + at)));
            }
    }
}

const float* as_floats(const float* x, int64_t&, int64_t, int64_t) { return x; }

const float* as_floats(const bf16* x, int64_t& xs, int64_t rows, int64_t columns) {
    float* own = static_cast<float*>(scratch(1, rows * columns * int64_t(sizeof(float))));
    parallel_if(rows * columns >= kWorthSharing, rows, [&](int64_t row) {
        for (int64_t c = 0; c < columns; c += W) {
            int n = int(std::min<int64_t>(W, columns - c));
            store(own + row * columns + c, load(x + row * xs + c, n), n);
        }
    });
    xs = columns;
    return own;
}

template <class T>
vf with_bias(const float* sums, const T* bias, int64_t output, int n) {
    vf y = load(sums);
    return bias ? add(y, load(bias + output, n)) : y;
}

template <class T>
void linear(const T* x, int64_t xs, int64_t rows, const uint8_t* packed, int64_t outputs, int64_t columns,
            int64_t block, bool gated, const T* bias, T* y, int64_t ys) {
    if (rows == 0) return;
    const float* own = as_floats(x, xs, rows, columns);
    int64_t size = (blocks_of(columns, block) * int64_t(sizeof(float)) + columns) * kPanel;
    int64_t width = gated ? outputs / 2 : outputs, panels = (width + kPanel - 1) / kPanel;
    bool shared = outputs * columns * std::max(rows, kCheapRows) >= kWorthSharing;
    parallel_if(shared, panels, [&](int64_t panel) {
        alignas(64) float sums[kRowsAtOnce * kPanel], gates[kRowsAtOnce * kPanel];
        for (int64_t first = 0; first < rows; first += kRowsAtOnce) {
            int64_t n = std::min(kRowsAtOnce, rows - first);
            multiply_panel(own + first * xs, xs, n, packed + panel * size, columns, block, sums);
            if (gated) multiply_panel(own + first * xs, xs, n, packed + (panels + panel) * size, columns, block, gates);
            for (int64_t r = 0; r < n; ++r) {
                for (int at = 0; at < kPanel; at += W) {
                    int64_t output = panel * kPanel + at;
                    int left = int(std::min<int64_t>(W, width - output));
                    if (left <= 0) break;
                    vf out = with_bias(sums + r * kPanel + at, bias, output, left);
                    if (gated) out = mul(silu(out), with_bias(gates + r * kPanel + at, bias, width + output, left));
                    store(y + (first + r) * ys + output, out, left);
                }
            }
        }
    });
}

}  // namespace

void float8_linear(const float* x, int64_t xs, int64_t rows, const uint8_t* packed, int64_t outputs, int64_t columns,
                   int64_t block, bool gated, const float* bias, float* y, int64_t ys) {
    linear(x, xs, rows, packed, outputs, columns, block, gated, bias, y, ys);
}

void float8_linear(const bf16* x, int64_t xs, int64_t rows, const uint8_t* packed, int64_t outputs, int64_t columns,
                   int64_t block, bool gated, const bf16* bias, bf16* y, int64_t ys) {
    linear(x, xs, rows, packed, outputs, columns, block, gated, bias, y, ys);
}

}  // namespace quire
