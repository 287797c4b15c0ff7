// Products with packed weights: [panels of 64 outputs, groups of inputs, 64, group], zeros behind the last output and
// input. One layout for any number of rows.
#include <sys/mman.h>

#include <algorithm>
#include <type_traits>

#include "calls.h"
#include "pool.h"
#include "tile.h"

namespace quire {
namespace {

constexpr int kPanel = 64;            // outputs
constexpr int64_t kGroups = W == 16 ? 128 : 64;  // that are multiplied with all rows before the next ones: they stay in the first cache
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
template <class X, class T>
void multiply_panel(const X* x, int64_t xs, int64_t rows, const T* panel, int64_t groups, float* sums) {
    constexpr int G = Element<T>::kGroup, most = Element<T>::kRows;
    constexpr int64_t ws = kPanel * G;
    constexpr int vectors = kPanel / W, passes = vectors / Element<T>::kVectors;  // over a part of the panel
    if (rows == 1 || (passes == 1 && rows <= most)) {
        const char* ahead = reinterpret_cast<const char*>(panel) + 4096;
        multiply_block<4>(int(rows), x, xs, panel, ws, groups, vectors, sums, kPanel, false, ahead);
        return;
    }
    int64_t blocks = (rows + most - 1) / most;
    for (int64_t begin = 0; begin < groups; begin += kGroups) {
        int64_t n = std::min(kGroups, groups - begin);
        const T* w = panel + begin * ws;
        const char* ahead = reinterpret_cast<const char*>(w + n * ws);
        for (int64_t block = 0; block < blocks; ++block) {
            int64_t first = rows * block / blocks, end = rows * (block + 1) / blocks;
            const X* from = x + first * xs + begin * G;
            float* to = sums + first * kPanel;
            auto multiply = [&](auto lines, const char* next) {  // so many lines of the next part beside each group
                constexpr int Ahead = decltype(lines)::value;
                multiply_block<Ahead>(int(end - first), from, xs, w, ws, n, vectors, to, kPanel, begin > 0, next);
            };
            if (passes > 1 && block == 0) {
                multiply(std::integral_constant<int, 4 / passes>(), ahead);
            } else if (passes == 1 && blocks <= 3 && block < 2) {
                multiply(std::integral_constant<int, 2>(), ahead + block * n * 128);
            } else if (passes == 1 && blocks > 3 && block < 4) {
                multiply(std::integral_constant<int, 1>(), ahead + block * n * 64);
            } else {
                multiply(std::integral_constant<int, 0>(), ahead);
            }
        }
    }
}

template <class T>
vf sum_and_bias(const float* sums, const T* bias, int64_t output, int n) {
    vf y = load(sums);
    return bias ? add(y, load(bias + output, n)) : y;
}

// x as it is multiplied: in whole groups, and widened where there are no products of bf16.
template <class X, class T>
const X* prepare_rows(const T* x, int64_t& xs, int64_t rows, int64_t columns, int64_t whole) {
    if constexpr (std::is_same_v<X, T>)
        if (whole == columns) return x;
    X* own = static_cast<X*>(scratch(1, rows * whole * int64_t(sizeof(X))));
    parallel_if(rows * columns >= kWorthSharing, rows, [&](int64_t row) {
        const T* from = x + row * xs;
        X* to = own + row * whole;
        if constexpr (std::is_same_v<X, T>) {
            std::memcpy(to, from, columns * sizeof(T));
        } else {
            for (int64_t c = 0; c < columns; c += W) {
                int n = int(std::min<int64_t>(W, columns - c));
                store(to + c, load(from + c, n), n);
            }
        }
        for (int64_t c = columns; c < whole; ++c) to[c] = X(0);
    });
    xs = whole;
    return own;
}

// A chunk is a panel (with a gate: a panel of gates and the panel of what they gate) times a part of the rows.
template <class T, bool Gated>
void linear(const T* x, int64_t xs, int64_t rows, const T* packed, int64_t outputs, int64_t columns, const T* bias,
            T* y, int64_t ys) {
    if (rows == 0) return;
    int64_t groups = groups_of<T>(columns), size = panel_size<T>(columns);
    int64_t width = Gated ? outputs / 2 : outputs;
    int64_t panels = (width + kPanel - 1) / kPanel;
    const auto* own = prepare_rows<typename Element<T>::Row>(x, xs, rows, columns, groups * Element<T>::kGroup);
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
            multiply_panel(own + first * xs, xs, n, packed + panel * size, groups, sums);
            if (Gated) multiply_panel(own + first * xs, xs, n, packed + (panels + panel) * size, groups, gated);
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
