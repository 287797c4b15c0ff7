// Products with packed weights: [panels of 64 outputs, groups of inputs, 64, group], zeros behind the last output and
// input. One layout for any number of rows.
#include <sys/mman.h>

#include <algorithm>

#include "calls.h"
#include "pool.h"
#include "tile.h"

namespace quire {
namespace {

constexpr int kPanel = 64;            // outputs
constexpr int64_t kGroups = 128;      // that are multiplied with all rows before the next ones: 32 KB of a panel
constexpr int64_t kRowsAtOnce = 96;   // whose sums stay in the first cache
constexpr uintptr_t kPage = 1 << 21;
constexpr int64_t kFewRows = 8;       // take no longer than one
constexpr int64_t kWorthSharing = 1 << 19;  // products; fewer take some 2 µs, and so does another thread's help

template <class T>
int64_t groups_of(int64_t columns) {
    return (columns + Element<T>::kGroup - 1) / Element<T>::kGroup;
}

template <class T>
int64_t panel_size(int64_t columns) {
    return groups_of<T>(columns) * kPanel * Element<T>::kGroup;
}

// Memory that was not touched yet comes in pages of 2 MB, if the system has them.
void ask_for_large_pages(void* memory, int64_t bytes) {
    uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kPage - 1) / kPage * kPage;
    uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / kPage * kPage;
    if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

template <class T>
void pack(const T* weight, int64_t stride, int64_t outputs, int64_t columns, T* packed) {
    constexpr int G = Element<T>::kGroup;
    int64_t groups = groups_of<T>(columns), panels = (outputs + kPanel - 1) / kPanel;
    ask_for_large_pages(packed, panels * panel_size<T>(columns) * int64_t(sizeof(T)));
    parallel(panels, [&](int64_t panel) {
        T* to = packed + panel * panel_size<T>(columns);
        int64_t n = std::min<int64_t>(kPanel, outputs - panel * kPanel);
        const T* from = weight + panel * kPanel * stride;
        int64_t whole = n == kPanel ? columns / G : 0;
        for (int64_t first = 0; first < kPanel; first += 8)  // few outputs at a time, whose lines stay in the cache
            for (int64_t g = 0; g < whole; ++g)
                for (int64_t i = first; i < first + 8; ++i)  // a group has 4 bytes
                    std::memcpy(to + (g * kPanel + i) * G, from + i * stride + g * G, 4);
        for (int64_t g = whole; g < groups; ++g)
            for (int64_t i = 0; i < kPanel; ++i)
                for (int64_t j = 0; j < G; ++j)
                    to[(g * kPanel + i) * G + j] = i < n && g * G + j < columns ? from[i * stride + g * G + j] : T(0);
    });
}

inline void scale_one(float& x, float scale) { x *= scale; }
inline void scale_one(bf16& x, float scale) { x = narrow(widen(x) * scale); }

template <class T>
void unpack_row(const T* packed, int64_t columns, int64_t output, float scale, T* to) {
    constexpr int G = Element<T>::kGroup;
    const T* from = packed + output / kPanel * panel_size<T>(columns) + output % kPanel * G;
    for (int64_t c = 0; c < columns; ++c) to[c] = from[c / G * kPanel * G + c % G];
    if (scale != 1.0f)
        for (int64_t c = 0; c < columns; ++c) scale_one(to[c], scale);
}

// sums [rows, 64] = x [rows, columns] times one panel.
template <class T>
void multiply_panel(const T* x, int64_t xs, int64_t rows, const T* panel, int64_t groups, float* sums) {
    constexpr int G = Element<T>::kGroup, most = Element<T>::kRows;
    constexpr int64_t ws = kPanel * G;
    constexpr int vectors = kPanel / W;
    if (rows <= most) {
        const char* ahead = reinterpret_cast<const char*>(panel) + 4096;
        multiply_block<T, 4>(int(rows), x, xs, panel, ws, groups, vectors, sums, kPanel, false, ahead);
        return;
    }
    int64_t blocks = (rows + most - 1) / most;
    for (int64_t begin = 0; begin < groups; begin += kGroups) {
        int64_t n = std::min(kGroups, groups - begin);
        const T* w = panel + begin * ws;
        const char* ahead = reinterpret_cast<const char*>(w + n * ws);
        for (int64_t block = 0; block < blocks; ++block) {
            int64_t first = rows * block / blocks, end = rows * (block + 1) / blocks;
            const T* from = x + first * xs + begin * G;
            float* to = sums + first * kPanel;
            if (blocks <= 3 && block < 2) {
                multiply_block<T, 2>(int(end - first), from, xs, w, ws, n, vectors, to, kPanel, begin > 0, ahead + block * n * 128);
            } else if (blocks > 3 && block < 4) {
                multiply_block<T, 1>(int(end - first), from, xs, w, ws, n, vectors, to, kPanel, begin > 0, ahead + block * n * 64);
            } else {
                multiply_block<T, 0>(int(end - first), from, xs, w, ws, n, vectors, to, kPanel, begin > 0, nullptr);
            }
        }
    }
}

template <class T>
vf sum_and_bias(const float* sums, const T* bias, int64_t output, int n) {
    vf y = load(sums);
    return bias ? add(y, load(bias + output, n)) : y;
}

// A chunk is a panel (with a gate: a panel of gates and the panel of what they gate) times a part of the rows.
template <class T, bool Gated>
void linear(const T* x, int64_t xs, int64_t rows, const T* packed, int64_t outputs, int64_t columns, const T* bias,
            T* y, int64_t ys) {
    if (rows == 0) return;
    int64_t groups = groups_of<T>(columns), size = panel_size<T>(columns);
    int64_t width = Gated ? outputs / 2 : outputs;
    int64_t panels = (width + kPanel - 1) / kPanel;
    T* padded = nullptr;
    if (columns % Element<T>::kGroup) {  // the last group of x is not whole
        padded = static_cast<T*>(scratch(1, rows * (columns + 1) * int64_t(sizeof(T))));
        for (int64_t r = 0; r < rows; ++r) {
            std::memcpy(padded + r * (columns + 1), x + r * xs, columns * sizeof(T));
            padded[r * (columns + 1) + columns] = T(0);
        }
        x = padded, xs = columns + 1;
    }
    int64_t parts = (rows + kRowsAtOnce - 1) / kRowsAtOnce;
    int64_t parts_of_chunk = std::max<int64_t>(1, parts * panels / (8 * threads()));  // a panel stays in the cache
    parts_of_chunk = std::min(parts_of_chunk, parts);
    int64_t row_chunks = (parts + parts_of_chunk - 1) / parts_of_chunk;
    bool shared = outputs * columns * std::max(rows, kFewRows) >= kWorthSharing;
    parallel_if(shared, panels * row_chunks, [&](int64_t chunk) {
        int64_t panel = chunk / row_chunks, part = chunk % row_chunks * parts_of_chunk;
        float* sums = static_cast<float*>(scratch(0, 2 * kRowsAtOnce * kPanel * 4));
        float* gated = sums + kRowsAtOnce * kPanel;
        for (int64_t i = part; i < std::min(part + parts_of_chunk, parts); ++i) {
            int64_t first = i * kRowsAtOnce, n = std::min(kRowsAtOnce, rows - first);
            multiply_panel(x + first * xs, xs, n, packed + panel * size, groups, sums);
            if (Gated) multiply_panel(x + first * xs, xs, n, packed + (panels + panel) * size, groups, gated);
            for (int64_t r = 0; r < n; ++r) {
                for (int v = 0; v < kPanel / W; ++v) {
                    int64_t output = panel * kPanel + v * W;
                    int left = int(std::min<int64_t>(W, width - output));
                    if (left <= 0) break;
                    vf out = sum_and_bias(sums + r * kPanel + v * W, bias, output, left);
                    if (Gated) out = mul(silu(out), sum_and_bias(gated + r * kPanel + v * W, bias, width + output, left));
                    store(y + (first + r) * ys + output, out, left);
                }
            }
        }
    });
}

}  // namespace
}  // namespace quire

using namespace quire;

#define QUIRE_LINEAR(name, T)                                                                                          \
    extern "C" void quire_pack_##name(const T* weight, int64_t stride, int64_t outputs, int64_t columns, T* packed) {  \
        pack<T>(weight, stride, outputs, columns, packed);                                                             \
    }                                                                                                                  \
    QUIRE_ENTRY(pack_##name)                                                                                           \
    extern "C" void quire_embed_##name(const int64_t* tokens, int64_t n, const T* packed, int64_t columns,             \
                                       float scale, T* out) {                                                          \
        parallel_if(n * columns >= kWorthSharing, n,                                                                   \
                    [&](int64_t i) { unpack_row<T>(packed, columns, tokens[i], scale, out + i * columns); });          \
    }                                                                                                                  \
    QUIRE_ENTRY(embed_##name)                                                                                          \
    extern "C" void quire_linear_##name(const T* x, int64_t xs, int64_t rows, const T* packed, int64_t outputs,        \
                                        int64_t columns, const T* bias, T* y, int64_t ys) {                            \
        linear<T, false>(x, xs, rows, packed, outputs, columns, bias, y, ys);                                          \
    }                                                                                                                  \
    QUIRE_ENTRY(linear_##name)                                                                                         \
    extern "C" void quire_linear_silu_and_mul_##name(const T* x, int64_t xs, int64_t rows, const T* packed,            \
                                                     int64_t outputs, int64_t columns, const T* bias, T* y,            \
                                                     int64_t ys) {                                                     \
        linear<T, true>(x, xs, rows, packed, outputs, columns, bias, y, ys);                                           \
    }                                                                                                                  \
    QUIRE_ENTRY(linear_silu_and_mul_##name)

QUIRE_LINEAR(bf16, bf16)
QUIRE_LINEAR(fp32, float)
