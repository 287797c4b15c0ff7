// Products with weights that are kept as integers with scales; see block_forms.h, and block_rows.h for the rows. Sums of
// products are exact within a group, or within up to 256 columns that share a scale. Panels of 16 outputs lie side by
// side, so nothing is added across a vector.
//
// Few rows read codes where they lie. For more, a stretch of a panel is widened to 16 bits once, and stays in the nearest
// cache for all of them. Both ways make the same bits.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "block_forms.h"
#include "block_rows.h"
#include "calls.h"
#include "float8.h"
#include "int16.h"
#include "int8.h"

namespace quire {
namespace {

constexpr int kRows = W == 16 ? 8 : 6;  // whose sums stay in registers, with widened codes
constexpr int kLeastRows = 4;           // more than kFewRows are split in tiles of so many to kRows
constexpr int64_t kFewRows = 8;
constexpr int64_t kRowsAtOnce = 192;  // with a stretch that is widened

struct alignas(64) Scales {
    float scale[kPanel], least[kPanel];
};

// A part of a panel, widened.
struct alignas(64) Stretch {
    int16_t codes[kStretch * kPanel];  // in pairs of columns
    Scales scales[kStretch / 16];      // by group
};

// Asks for memory that is read soon.
inline void fetch(const uint8_t* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) _mm_prefetch(reinterpret_cast<const char*>(from + i), _MM_HINT_T0);
}

template <int R>
using Sums = vi[R][kVectors];  // stay in registers only where all that takes them is inlined

// Sums of few rows are added up by turns in so many, else each product would wait for the one before it.
template <int R>
constexpr int kTurns = W == 16 && R < 4 ? 4 / R : 1;

#define QUIRE_INLINE inline __attribute__((always_inline))

// What is done with widened weights, which the types of a kind have in common: those whose groups are as long, and that have
// minimums or zeros or neither. Others would have compiled their own.
template <int Group, bool Minimum, bool Zeros>
struct Widened {
    // Columns whose products are added as integers.
    QUIRE_INLINE static int together(const Rows& rows) { return Zeros ? rows.run() : Group; }

    template <int R>
    QUIRE_INLINE static void start(const Rows& rows, int64_t column, int zero, Sums<R>& sums, int32_t (&of_x)[R]) {
        const int32_t* known = rows.sum(column);
        for (int r = 0; r < R; ++r, known += rows.parts) {
            of_x[r] = !Zeros && Group == 2 * kSum ? known[0] + known[1] : known[0];
            for (int v = 0; v < kVectors; ++v) sums[r][v] = integers(-zero * of_x[r]);
        }
    }

    template <int R>
    QUIRE_INLINE static void add_pair(const vi (&w)[kVectors], const int16_t* x, int64_t xs, Sums<R>& sums) {
        for (int r = 0; r < R; ++r) {
            vi pair = all_pairs(x + r * xs);
            for (int v = 0; v < kVectors; ++v) add_products(sums[r][v], w[v], pair);
        }
    }

    // totals [R, 16] += a group's part.
    template <int R>
    QUIRE_INLINE static void finish(const Scales& scales, const Rows& rows, int64_t column, const Sums<R>& sums,
                                    const int32_t (&of_x)[R], float* totals) {
        asm volatile("" : : "r"(totals) : "memory");  // else totals take the registers that sums need
        const float* units = rows.scale(column);
        for (int r = 0; r < R; ++r, units += rows.runs) {
            vf unit = all(*units);
            for (int v = 0; v < kVectors; ++v) {
                vf product = mul(load(scales.scale + v * W), to_float(sums[r][v]));
                if (Minimum) product = fma(load(scales.least + v * W), all(-float(of_x[r])), product);
                float* total = totals + r * kPanel + v * W;
                store(total, fma(product, unit, load(total)));
            }
        }
    }

    // totals [R, 16] += R rows times a stretch of a panel, which begins at this column.
    template <int R>
    __attribute__((noinline, noclone)) static void multiply_stretch(const Rows& rows, int64_t begin, int columns, int zero,
                                                                    const Stretch& stretch, float* totals) {
        const int step = together(rows);
        const int64_t xs = rows.width(begin);
        for (int done = 0; done < columns; done += step) {
            int64_t column = begin + done;
            Sums<R> sums;
            int32_t of_x[R];
            start<R>(rows, column, zero, sums, of_x);
            const int16_t *codes = stretch.codes + done * kPanel, *x = rows.at(column);
#pragma GCC unroll 4
            for (int pair = 0; pair < step / 2; ++pair) {
                vi w[kVectors];
                for (int v = 0; v < kVectors; ++v) {
                    w[v] = load_integers(codes + (pair * kVectors + v) * 2 * W);
                    asm("" : "+v"(w[v]));  // loaded once, not for each row
                }
                add_pair<R>(w, x + 2 * pair, xs, sums);
            }
            finish<R>(stretch.scales[done / Group], rows, column, sums, of_x, totals);
        }
    }

    template <int R>
    static void multiply_tile(int64_t n, const Rows& rows, int64_t begin, int columns, int zero, const Stretch& stretch,
                              float* totals) {
        if constexpr (R < kRows)
            if (n > R) return multiply_tile<R + 1>(n, rows, begin, columns, zero, stretch, totals);
        multiply_stretch<R>(rows, begin, columns, zero, stretch, totals);
    }
};

// What is done with a type's weights; Type is its number in a file.
template <int Type>
struct Product {
    static constexpr Form form = form_of(Type);
    static constexpr int Group = form.group;
    static constexpr bool Scaled = form.scales, Minimum = form.minimum;
    using Kind = Widened<Group, Minimum, form.zeros>;

    // The scales of a group; `block` is the block that it belongs to.
    QUIRE_INLINE static void read_scales(const uint8_t* block, int group, Scales& to) {
        for (int v = 0; v < kVectors; ++v) {
            if (form.zeros) {
                vf own = load(reinterpret_cast<const float*>(block) + v * W);
                store(to.scale + v * W, own);
                store(to.least + v * W, mul(own, load_bytes_as_float(block + form.minimum_offset() + v * W)));
                continue;
            }
            if (form.exponents) {  // codes stand for twice their values
                store(to.scale + v * W, mul(load_exponents(block + v * W), all(0.5f)));
                continue;
            }
            int64_t at = group * kPanel + v * W;
            vf scale = load_halves(block + v * 2 * W);
            if (Scaled) scale = mul(scale, load_bytes_as_float(block + form.scale_offset() + at));
            store(to.scale + v * W, scale);
            if (Minimum) {
                vf least = load_halves(block + 2 * kPanel + v * 2 * W);
                if (Scaled) least = mul(least, load_bytes_as_float(block + form.minimum_offset() + at));
                store(to.least + v * W, least);
            }
        }
    }

    template <int R, int... K>
    QUIRE_INLINE static void add_group(const uint8_t* codes, const int16_t* x, int64_t xs, Sums<R> (&turns)[kTurns<R>],
                          std::integer_sequence<int, K...>) {
        (
            [&]() __attribute__((always_inline)) {
                vi w[kVectors];
                for (int v = 0; v < kVectors; ++v) w[v] = codes_of_pair<Type, K>(codes, v);
                Kind::template add_pair<R>(w, x + 2 * K, xs, turns[K % kTurns<R>]);
            }(),
            ...);
    }

    // turns[0] += the others
    template <int R>
    QUIRE_INLINE static void add_turns(Sums<R> (&turns)[kTurns<R>]) {
        for (int turn = 1; turn < kTurns<R>; ++turn)
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < kVectors; ++v) turns[0][r][v] = add_integers(turns[0][r][v], turns[turn][r][v]);
    }

    // totals [R, 16] = R rows times a panel.
    template <int R>
    static void multiply(const Rows& rows, int64_t block, const uint8_t* panel, float* totals) {
        const int groups = form.groups(block), step = Kind::together(rows) / Group;
        std::memset(totals, 0, R * kPanel * sizeof(float));
        for (int64_t begin = 0; begin < rows.columns; begin += groups * Group, panel += form.bytes(block)) {
            for (int group = 0; group < groups; group += step) {
                int64_t column = begin + group * Group, xs = rows.width(column);
                Scales scales;
                Sums<R> turns[kTurns<R>] = {};
                int32_t of_x[R];
                Kind::template start<R>(rows, column, form.zero, turns[0], of_x);
                const uint8_t* codes = panel + form.code_offset() + group * form.group_bytes();
                const int16_t* x = rows.at(column);
                for (int i = 0; i < step; ++i, codes += form.group_bytes(), x += Group) {
                    add_group<R>(codes, x, xs, turns, std::make_integer_sequence<int, Group / 2>());
                }
                add_turns<R>(turns);
                read_scales(panel, group, scales);
                Kind::template finish<R>(scales, rows, column, turns[0], of_x, totals);
            }
        }
    }

    template <int... K>
    QUIRE_INLINE static void widen_group(const uint8_t* codes, int16_t* to, std::integer_sequence<int, K...>) {
        (
            [&]() __attribute__((always_inline)) {
                for (int v = 0; v < kVectors; ++v)
                    store_integers(to + (K * kVectors + v) * 2 * W, codes_of_pair<Type, K>(codes, v));
            }(),
            ...);
    }

    static void widen(const uint8_t* panel, int64_t block, int64_t begin, int columns, Stretch& to) {
        const int groups = form.groups(block), first = int(begin / Group);
        for (int group = 0; group < columns / Group; ++group) {
            const uint8_t* own = panel + (first + group) / groups * form.bytes(block);
            int in_block = (first + group) % groups;
            widen_group(own + form.code_offset() + in_block * form.group_bytes(),
                        to.codes + group * Group * kPanel, std::make_integer_sequence<int, Group / 2>());
            read_scales(own, in_block, to.scales[group]);
        }
    }

    static void multiply_few(const Rows& rows, int64_t count, int64_t block, const uint8_t* panel, float* totals) {
        auto run = [&](auto tile, int64_t first) {
            multiply<tile.value>(rows.from(first), block, panel, totals + first * kPanel);
        };
        int64_t first = 0;
        if (W == 16 && count == 8) return run(std::integral_constant<int, 8>(), 0);
        for (; count - first >= 4; first += 4) run(std::integral_constant<int, 4>(), first);
        if (count - first >= 2) run(std::integral_constant<int, 2>(), first), first += 2;
        if (count - first >= 1) run(std::integral_constant<int, 1>(), first);
    }

    static void multiply_many(const Rows& rows, int64_t count, int64_t block, const uint8_t* panel, float* totals) {
        const int groups = form.groups(block);
        Stretch stretch;
        std::memset(totals, 0, count * kPanel * sizeof(float));
        for (int64_t begin = 0; begin < rows.columns; begin += kStretch) {
            int columns = int(std::min<int64_t>(kStretch, rows.columns - begin));
            widen(panel, block, begin, columns, stretch);
            const int64_t tiles = (count + kRows - 1) / kRows, end = (begin + columns) / Group;
            const int64_t bytes = form.bytes(block) * columns / (groups * Group);
            const uint8_t* next = panel + end / groups * form.bytes(block) + end % groups * form.group_bytes();
            for (int64_t tile = 0; tile < tiles; ++tile) {  // each asks for a part of the next stretch
                fetch(next + bytes * tile / tiles, bytes * (tile + 1) / tiles - bytes * tile / tiles);
                int64_t first = count * tile / tiles, n = count * (tile + 1) / tiles - first;
                Kind::template multiply_tile<kLeastRows>(n, rows.from(first), begin, columns, form.zero, stretch,
                                                         totals + first * kPanel);
            }
        }
    }

    // totals [count, 16] = at most kRowsAtOnce rows times a panel.
    static void run(const Rows& rows, int64_t count, int64_t block, const uint8_t* panel, float* totals) {
        count > kFewRows ? multiply_many(rows, count, block, panel, totals)
                         : multiply_few(rows, count, block, panel, totals);
    }
};

using Multiply = void (*)(const Rows&, int64_t count, int64_t block, const uint8_t* panel, float* totals);

Multiply multiply_of(int64_t type) {
    switch (type) {
        case 2: return Product<2>::run;
        case 3: return Product<3>::run;
        case 6: return Product<6>::run;
        case 7: return Product<7>::run;
        case 8: return Product<8>::run;
        case 10: return Product<10>::run;
        case 11: return Product<11>::run;
        case 12: return Product<12>::run;
        case 13: return Product<13>::run;
        case 14: return Product<14>::run;
        case 20: return Product<20>::run;
        case 23: return Product<23>::run;
        case 260: return Product<260>::run;
        case 256: return Product<256>::run;
        default: return Product<257>::run;
    }
}

template <class T>
vf with_bias(const float* sums, const T* bias, int64_t output, int n) {
    vf y = load(sums);
    return bias ? add(y, load(bias + output, n)) : y;
}

template <class T, bool Gated>
void block_linear(const T* x, int64_t xs, int64_t rows, const uint8_t* packed, int64_t outputs, int64_t columns,
                  int64_t given_type, const T* bias, T* y, int64_t ys) {
    if (rows == 0) return;
    const WeightType type(given_type);
    if (type.number == kFloat8) {
        float8_linear(x, xs, rows, packed, outputs, columns, type.block, Gated, bias, y, ys);
        return;
    }
    if (type.number == kInt8) {
        int8_linear(x, xs, rows, packed, outputs, columns, Gated, bias, y, ys);
        return;
    }
    if (type.number == kInt16) {
        int16_linear(x, xs, rows, packed, outputs, columns, Gated, bias, y, ys);
        return;
    }
    Multiply multiply = multiply_of(type.number);
    const Form& form = form_of(type.number);
    const int run = form.run(type.block);
    Rows own = round_rows(x, xs, rows, columns, run, form.zeros ? run : kSum);
    int64_t size = columns / type.block * form.bytes(type.block), width = Gated ? outputs / 2 : outputs;
    int64_t panels = (width + kPanel - 1) / kPanel, each = panels_of_chunk(panels, size);
    bool shared = outputs * columns * std::max(rows, kFewRows) >= kWorthSharing;
    parallel_if(shared, (panels + each - 1) / each, [&](int64_t chunk) {
        alignas(64) float sums[kRowsAtOnce * kPanel], gated[Gated ? kRowsAtOnce * kPanel : 1], rest[kRowsAtOnce * kPanel];
        auto multiply_rows = [&](int64_t first, int64_t n, const uint8_t* own_panel, float* to) {
            multiply(own.from(first), n, type.block, own_panel, to);
            if (parts_of<T> == 1) return;
            multiply(own.from(rows + first), n, type.block, own_panel, rest);
            for (int64_t i = 0; i < n * kPanel; ++i) to[i] += rest[i];
        };
        for (int64_t panel = chunk * each; panel < std::min(panels, (chunk + 1) * each); ++panel) {
            int64_t output = panel * kPanel;
            for (int64_t first = 0; first < rows; first += kRowsAtOnce) {
                int64_t n = std::min(kRowsAtOnce, rows - first);
                multiply_rows(first, n, packed + panel * size, sums);
                if (Gated) multiply_rows(first, n, packed + (panels + panel) * size, gated);
                for (int64_t r = 0; r < n; ++r) {
                    for (int64_t at = 0; at < kPanel && output + at < width; at += W) {
                        int left = int(std::min<int64_t>(W, width - output - at));
                        vf out = with_bias(sums + r * kPanel + at, bias, output + at, left);
                        if (Gated) out = mul(silu(out), with_bias(gated + r * kPanel + at, bias, width + output + at, left));
                        store(y + (first + r) * ys + output + at, out, left);
                    }
                }
            }
        }
    });
}

}  // namespace
}  // namespace quire

using namespace quire;

#define QUIRE_BLOCKS(name, T)                                                                                          \
    extern "C" void quire_block_linear_##name(const T* x, int64_t xs, int64_t rows, const uint8_t* packed,             \
                                              int64_t outputs, int64_t columns, int64_t type, const T* bias, T* y,     \
                                              int64_t ys) {                                                            \
        block_linear<T, false>(x, xs, rows, packed, outputs, columns, type, bias, y, ys);                              \
    }                                                                                                                  \
    QUIRE_ENTRY(block_linear_##name)                                                                                   \
    extern "C" void quire_block_linear_silu_and_mul_##name(const T* x, int64_t xs, int64_t rows,                       \
                                                           const uint8_t* packed, int64_t outputs, int64_t columns,    \
                                                           int64_t type, const T* bias, T* y, int64_t ys) {            \
        block_linear<T, true>(x, xs, rows, packed, outputs, columns, type, bias, y, ys);                               \
    }                                                                                                                  \
    QUIRE_ENTRY(block_linear_silu_and_mul_##name)

QUIRE_BLOCKS(bf16, bf16)
QUIRE_BLOCKS(fp32, float)
