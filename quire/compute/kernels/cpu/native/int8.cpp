// Products of int8 weights with rows of 8 bits, a scale for a row and one for an output, by the instruction that adds four
// products of bytes (AVX-512 VNNI). Where there is none, blocks.cpp multiplies such weights with rows of 16 bits.
//
// A panel has 32 outputs: their scales, fp32, then codes, [columns / 4, 32, 4]. The instruction takes one operand without
// a sign, which is the weight's: codes are 128 more than they were, and 128 times a row's sum is taken off. All of a row's
// sum is exact, so a tile's sums stay in registers from the first column to the last.
#include "int8.h"

#include <algorithm>

#include "integers.h"
#include "pool.h"

extern "C" int quire_widens_bf16() {
#if defined(__AVX512BF16__)
    return 0;
#else
    return 1;
#endif
}

extern "C" int quire_multiplies_bytes() {
#if defined(__AVX512VNNI__)
    return 1;
#else
    return 0;
#endif
}

namespace quire {

#if defined(__AVX512VNNI__)

namespace {

constexpr int kPanel = 32, kQuad = 4;
constexpr int64_t kMostRows = 12;  // whose sums stay in registers
constexpr int64_t kStretch = 256;  // columns of all rows that lie together, so that a tile's stay in the nearest cache
constexpr int64_t kWorthSharing = 1 << 19;
constexpr int64_t kWorthRounding = 1 << 15;  // values whose rounding is worth sharing
constexpr int64_t kRowsOfChunk = 16;         // that one thread rounds: their scales fill a cache line
constexpr int64_t kAtOnce = 64;              // values that are rounded together, as many as a vector has bytes
constexpr int64_t kCheapRows = 8;            // take no longer than one
constexpr int64_t kLine = 64;                // bytes of a cache line
constexpr int64_t kQuadsOfLine = 4;          // that are multiplied for each line that is asked for
constexpr int64_t kTilesAhead = 6;           // that leave memory time for the next panel
constexpr int64_t kSmallerChunks = 8;        // times, where memory is not what bounds them: no thread waits long at the end
constexpr float kLargest = 127.0f, kSmallest = 1e-20f;

// x = scale · whole. A stretch of columns of all rows comes before the next one.
struct Rows {
    const int8_t* whole;   // [stretches, rows, kStretch], nothing of use behind the last column
    const float* scales;   // NaN where a value was not finite
    const int32_t* zeros;  // what a sum begins with
    int64_t count;

    const int8_t* at(int64_t stretch, int64_t row) const { return whole + (stretch * count + row) * kStretch; }
};

inline vi all_quads(const int8_t* p) {
    int32_t quad;
    std::memcpy(&quad, p, kQuad);
    return integers(quad);
}

// sums += the products of four bytes, without a sign and with one; in place: the compiler would move sums.
inline void add_products_of_bytes(vi& sums, vi unsigned_ones, vi signed_ones) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(unsigned_ones), "v"(signed_ones));
}

// As many values as `lanes` has, from x on, divided by a unit: the quotient of a product with the inverse, and of what
// that leaves, is the rounded one (Markstein 1990).
template <class T>
inline vi quotients(const T* x, int lanes, vf unit, vf inverse) {
    vf value = lanes == W ? load(x) : load(x, lanes), near = mul(value, inverse);
    return _mm512_cvtps_epi32(fma(_mm512_fnmadd_ps(near, unit, value), inverse, near));
}

// One row → whole + stretch · step. As `quantize_rows` of quire/compute/kernels/reference/quantized_rows.py.
template <class T>
void round_row(const T* x, int64_t columns, int8_t* whole, int64_t step, float* scale, int32_t* start) {
    const vi order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);  // of packed vectors
    const vi ones = _mm512_set1_epi8(1);
    const Magnitude magnitude = magnitude_of(x, columns);
    const float size = std::max(magnitude.largest, kSmallest) / kLargest;
    const vf unit = all(size), inverse = all(1.0f / size);
    vi sums = integers(0);
    for (int64_t c = 0; c < columns; c += kAtOnce) {
        const int64_t left = columns - c;
        vi codes[4];
        for (int i = 0; i < 4; ++i)
            codes[i] = quotients(x + c + i * W, int(std::clamp<int64_t>(left - i * W, 0, W)), unit, inverse);
        vi first = _mm512_packs_epi32(codes[0], codes[1]), second = _mm512_packs_epi32(codes[2], codes[3]);
        vi bytes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(first, second));
        add_products_of_bytes(sums, ones, bytes);
        store_integers(whole + c / kStretch * step + c % kStretch, bytes);
    }
    *scale = size + magnitude.nothing;
    *start = -128 * _mm512_reduce_add_epi32(sums);
}

template <class T>
Rows round_rows(const T* x, int64_t xs, int64_t rows, int64_t columns) {
    int64_t stretches = (columns + kStretch - 1) / kStretch;
    char* own = static_cast<char*>(scratch(1, rows * (stretches * kStretch + 8)));
    int8_t* whole = reinterpret_cast<int8_t*>(own);
    float* scales = reinterpret_cast<float*>(own + rows * stretches * kStretch);
    int32_t* zeros = reinterpret_cast<int32_t*>(scales + rows);
    const int64_t chunks = (rows + kRowsOfChunk - 1) / kRowsOfChunk;
    parallel_if(rows * columns >= kWorthRounding, chunks, [&](int64_t chunk) {
        for (int64_t row = chunk * kRowsOfChunk; row < std::min(rows, (chunk + 1) * kRowsOfChunk); ++row)
            round_row(x + row * xs, columns, whole + row * kStretch, rows * kStretch, scales + row, zeros + row);
    });
    return {whole, scales, zeros, rows};
}

// sums [R, 32] = R rows times a panel's codes. Those of one row are added up by turns, else each product would wait for the
// one before it. Lines from `ahead` on are asked for.
template <int R>
void multiply(const Rows& rows, int64_t first, const uint8_t* codes, int64_t columns, const uint8_t* ahead,
              int32_t* sums) {
    constexpr int kTurns = R == 1 ? 2 : 1;
    vi own[kTurns * R][2];  // stay in registers only if every loop over them is unrolled
#pragma GCC unroll 12
    for (int r = 0; r < kTurns * R; ++r) own[r][0] = own[r][1] = integers(r < R ? rows.zeros[first + r] : 0);
    for (int64_t begin = 0; begin < columns; begin += kStretch) {
        const int8_t* x = rows.at(begin / kStretch, first);
        int64_t end = std::min(kStretch, columns - begin);
        for (int64_t c = 0; c < end;) {
            if (R > 1) _mm_prefetch(ahead, _MM_HINT_T1), ahead += kLine;
#pragma GCC unroll 4
            for (int turn = 0; turn < kQuadsOfLine; ++turn, codes += kQuad * kPanel, c += kQuad) {
                vi a = load_integers(codes), b = load_integers(codes + 64);
                asm("" : "+v"(a), "+v"(b));  // loaded once, not for each row
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) {
                    vi quad = all_quads(x + r * kStretch + c);
                    add_products_of_bytes(own[turn % kTurns * R + r][0], a, quad);
                    add_products_of_bytes(own[turn % kTurns * R + r][1], b, quad);
                }
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        vi a = own[r][0], b = own[r][1];
        if (kTurns == 2) a = add_integers(a, own[R + r][0]), b = add_integers(b, own[R + r][1]);
        store_integers(sums + r * kPanel, a);
        store_integers(sums + r * kPanel + W, b);
    }
}

template <int R>
void multiply_tile(int64_t n, const Rows& rows, int64_t first, const uint8_t* codes, int64_t columns,
                   const uint8_t* ahead, int32_t* sums) {
    if constexpr (R < kMostRows)
        if (n > R) return multiply_tile<R + 1>(n, rows, first, codes, columns, ahead, sums);
    multiply<R>(rows, first, codes, columns, ahead, sums);
}

template <class T>
void linear(const T* x, int64_t xs, int64_t count, const uint8_t* packed, int64_t outputs, int64_t columns, bool gated,
            const T* bias, T* y, int64_t ys) {
    if (count == 0) return;
    const Rows rows = round_rows(x, xs, count, columns);
    const int64_t head = kPanel * sizeof(float), size = columns * kPanel + head;
    const int64_t width = gated ? outputs / 2 : outputs, panels = (width + kPanel - 1) / kPanel;
    const int64_t tiles = (count + kMostRows - 1) / kMostRows;
    const int64_t most = panels_of_chunk(panels, size);
    const int64_t each = tiles > 1 ? std::max<int64_t>(1, most / kSmallerChunks) : most;
    bool shared = outputs * columns * std::max(count, kCheapRows) >= kWorthSharing;
    parallel_if(shared, (panels + each - 1) / each, [&](int64_t chunk) {
        alignas(64) int32_t sums[kMostRows * kPanel], ups[kMostRows * kPanel];
        for (int64_t panel = chunk * each; panel < std::min(panels, (chunk + 1) * each); ++panel) {
            const uint8_t *own = packed + panel * size, *up = own + panels * size;
            for (int64_t tile = 0; tile < tiles; ++tile) {
                int64_t first = count * tile / tiles, n = count * (tile + 1) / tiles - first;
                // All tiles together ask for the next panel.
                auto multiply_panel = [&](const uint8_t* from, int32_t* to) {
                    const uint8_t* ahead = tiles < kTilesAhead ? from : from + size + columns * kPanel * tile / tiles;
                    multiply_tile<1>(n, rows, first, from + head, columns, ahead, to);
                };
                multiply_panel(own, sums);
                if (gated) multiply_panel(up, ups);
                for (int64_t at = 0, output = panel * kPanel; at < kPanel && output < width; at += W, output += W) {
                    const int left = int(std::min<int64_t>(W, width - output));
                    for (int64_t r = 0; r < n; ++r) {
                        auto finished = [&](const int32_t* of, const uint8_t* scales, int64_t from) {
                            vf unit = mul(load(reinterpret_cast<const float*>(scales) + at), all(rows.scales[first + r]));
                            vf product = mul(to_float(load_integers(of + r * kPanel + at)), unit);
                            return bias ? add(product, load(bias + from, left)) : product;
                        };
                        vf out = finished(sums, own, output);
                        if (gated) out = mul(silu(out, y), finished(ups, up, width + output));
                        store(y + (first + r) * ys + output, out, left);
                    }
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

void int8_linear(const float* x, int64_t xs, int64_t rows, const uint8_t* packed, int64_t outputs, int64_t columns,
                 bool gated, const float* bias, float* y, int64_t ys) {
    linear(x, xs, rows, packed, outputs, columns, gated, bias, y, ys);
}

void int8_linear(const bf16* x, int64_t xs, int64_t rows, const uint8_t* packed, int64_t outputs, int64_t columns,
                 bool gated, const bf16* bias, bf16* y, int64_t ys) {
    linear(x, xs, rows, packed, outputs, columns, gated, bias, y, ys);
}

}  // namespace quire
