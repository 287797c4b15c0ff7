// Products with weights that are kept as a GGUF file has them: integers with scales; see quire/kernels/cpu/blocks.py for
// the layout. Rows are rounded to 16-bit integers, a scale for 32 of them, which is finer than bf16; sums of products are
// exact within a group. Panels of 16 outputs lie side by side, so nothing is added across a vector.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "calls.h"
#include "integers.h"
#include "pool.h"

namespace quire {
namespace {

constexpr int kPanel = 16;             // outputs
constexpr int kVectors = kPanel / W;   // of a panel
constexpr int kRows = W == 16 ? 8 : 4;  // whose sums stay in registers
constexpr int kRun = 32;               // columns of a row that share a scale
constexpr int kSum = 16;               // columns whose sum is known
constexpr float kLargest = 32767.0f;
constexpr float kSmallest = 1e-30f;    // what is below is zero
constexpr int64_t kFewRows = 8;
constexpr int64_t kWorthSharing = 1 << 19;
constexpr int64_t kBytesOfChunk = 1 << 16;

constexpr int kMiddle = 127;  // added to IQ4's values, so that none is negative
alignas(16) constexpr uint8_t kNonlinear[16] = {0,   23,  44,  62,  78,  92,  105, 117,
                                                128, 140, 152, 165, 180, 196, 216, 240};

// How a type's weights are kept; see QuantizedType in quire/gguf/tensor_types.py.
struct Form {
    int type, bits, block, group;
    bool scales, minimum;
    int zero;
    bool nonlinear;

    int groups() const { return block / group; }
    int64_t scale_offset() const { return 2 * kPanel * (1 + minimum); }
    int64_t minimum_offset() const { return scale_offset() + groups() * kPanel; }
    int64_t code_offset() const { return scale_offset() + (scales ? groups() * kPanel * (1 + minimum) : 0); }
    int64_t bytes() const { return code_offset() + int64_t(block) * kPanel * bits / 8; }
};

constexpr Form kForms[] = {
    {2, 4, 32, 32, false, false, 8, false},          // Q4_0
    {3, 4, 32, 32, false, true, 0, false},           // Q4_1
    {6, 8, 32, 32, false, false, 0, false},          // Q5_0
    {7, 8, 32, 32, false, true, 0, false},           // Q5_1
    {8, 8, 32, 32, false, false, 0, false},          // Q8_0
    {10, 4, 256, 16, true, true, 0, false},          // Q2_K
    {11, 4, 256, 16, true, false, 4, false},         // Q3_K
    {12, 4, 256, 32, true, true, 0, false},          // Q4_K
    {13, 8, 256, 32, true, true, 0, false},          // Q5_K
    {14, 8, 256, 16, true, false, 0, false},         // Q6_K
    {20, 4, 32, 32, false, false, kMiddle, true},    // IQ4_NL
    {23, 4, 256, 32, true, false, kMiddle, true},    // IQ4_XS
};

const Form& form_of(int64_t type) {
    const Form* found = kForms;
    while (found->type != type) ++found;
    return *found;
}

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

// sums += the products of a group's codes and R rows, which begin at `x` with stride `xs`.
template <int Bits, int Group, bool Nonlinear, int R>
inline __attribute__((always_inline)) void multiply_codes(const uint8_t* codes, const int16_t* x, int64_t xs,
                                                          vi (&sums)[R][kVectors]) {
    auto multiply = [&](const vi(&w)[kVectors], int column) {
        for (int r = 0; r < R; ++r) {
            vi pair = all_pairs(x + r * xs + column);
            for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_pairs(sums[r][v], w[v], pair);
        }
    };
    vi w[kVectors];
    if constexpr (Bits == 8) {
        for (int column = 0; column < Group; column += 2) {
            for (int v = 0; v < kVectors; ++v) w[v] = load_bytes(codes + column * kPanel + v * 2 * W);
            multiply(w, column);
        }
    } else {
        for (int column = 0; column < Group; column += 8) {
            vi words[kVectors];
            for (int v = 0; v < kVectors; ++v) words[v] = load_integers(codes + column * kPanel / 2 + v * 4 * W);
            auto take = [&](auto shifted, int at) {
                for (int v = 0; v < kVectors; ++v) {
                    w[v] = shifted(words[v]);
                    if constexpr (Nonlinear) w[v] = look_up(kNonlinear, w[v]);
                }
                multiply(w, column + at);
            };
            take([](vi x) { return low_nibbles(x); }, 0);
            take([](vi x) { return low_nibbles(shift_right<4>(x)); }, 2);
            take([](vi x) { return low_nibbles(shift_right<8>(x)); }, 4);
            take([](vi x) { return shift_right<12>(x); }, 6);
        }
    }
}

// out [R, 16] = R rows times a panel.
template <int Bits, int Group, bool Scales, bool Minimum, bool Nonlinear, int R>
void multiply_panel(const Form& form, const Rows& rows, const uint8_t* panel, float* out) {
    int64_t runs = rows.columns / kRun, parts = rows.columns / kSum;
    const int groups = form.groups();
    const int64_t size = form.bytes(), code_offset = form.code_offset();
    const int32_t zero_code = form.zero;
    vf totals[R][kVectors];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < kVectors; ++v) totals[r][v] = zero();
    for (int64_t begin = 0; begin < rows.columns; begin += groups * Group, panel += size) {
        vf d[kVectors], dmin[kVectors];
        for (int v = 0; v < kVectors; ++v) {
            d[v] = load_halves(panel + v * 2 * W);
            if (Minimum) dmin[v] = load_halves(panel + 2 * kPanel + v * 2 * W);
        }
        for (int group = 0; group < groups; ++group) {
            int64_t column = begin + group * Group;
            int32_t totals_of_x[R];
            vi sums[R][kVectors];
            for (int r = 0; r < R; ++r) {
                const int32_t* known = rows.sums + r * parts + column / kSum;
                totals_of_x[r] = Group == kRun ? known[0] + known[1] : known[0];
                for (int v = 0; v < kVectors; ++v) sums[r][v] = integers(-zero_code * totals_of_x[r]);
            }
            const uint8_t* codes = panel + code_offset + int64_t(group) * Group * kPanel * Bits / 8;
            multiply_codes<Bits, Group, Nonlinear, R>(codes, rows.whole + column, rows.columns, sums);
            for (int v = 0; v < kVectors; ++v) {
                int64_t at = group * kPanel + v * W;
                vf scale = d[v], least;
                if (Scales) scale = mul(scale, load_bytes_as_float(panel + form.scale_offset() + at));
                if (Minimum) least = dmin[v];
                if (Scales && Minimum) least = mul(least, load_bytes_as_float(panel + form.minimum_offset() + at));
                for (int r = 0; r < R; ++r) {
                    float unit = rows.scales[r * runs + column / kRun];
                    vf product = mul(scale, to_float(sums[r][v]));
                    if (Minimum) product = sub(product, mul(least, all(float(totals_of_x[r]))));
                    totals[r][v] = fma(product, all(unit), totals[r][v]);
                }
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < kVectors; ++v) store(out + r * kPanel + v * W, totals[r][v]);
}

template <int Bits, int Group, bool Scales, bool Minimum, bool Nonlinear>
int multiply_some(const Form& form, const Rows& rows, int64_t left, const uint8_t* panel, float* out) {
    if (kRows == 8 && left >= 8) {
        multiply_panel<Bits, Group, Scales, Minimum, Nonlinear, kRows>(form, rows, panel, out);
        return 8;
    }
    if (left >= 4) {
        multiply_panel<Bits, Group, Scales, Minimum, Nonlinear, 4>(form, rows, panel, out);
        return 4;
    }
    if (left >= 2) {
        multiply_panel<Bits, Group, Scales, Minimum, Nonlinear, 2>(form, rows, panel, out);
        return 2;
    }
    multiply_panel<Bits, Group, Scales, Minimum, Nonlinear, 1>(form, rows, panel, out);
    return 1;
}

// Multiplies the first of these rows with a panel, at most kRows; returns how many.
using Multiply = int (*)(const Form&, const Rows&, int64_t left, const uint8_t* panel, float* out);

Multiply multiply_of(const Form& form) {
    switch (form.type) {
        case 2: return multiply_some<4, 32, false, false, false>;
        case 3: return multiply_some<4, 32, false, true, false>;
        case 6:
        case 8: return multiply_some<8, 32, false, false, false>;
        case 7: return multiply_some<8, 32, false, true, false>;
        case 10: return multiply_some<4, 16, true, true, false>;
        case 11: return multiply_some<4, 16, true, false, false>;
        case 12: return multiply_some<4, 32, true, true, false>;
        case 13: return multiply_some<8, 32, true, true, false>;
        case 14: return multiply_some<8, 16, true, false, false>;
        case 20: return multiply_some<4, 32, false, false, true>;
        default: return multiply_some<4, 32, true, false, true>;
    }
}

template <class T>
vf with_bias(const float* sums, const T* bias, int64_t output, int n) {
    vf y = load(sums);
    return bias ? add(y, load(bias + output, n)) : y;
}

template <class T, bool Gated>
void block_linear(const T* x, int64_t xs, int64_t rows, const uint8_t* packed, int64_t outputs, int64_t columns,
                  int64_t type, const T* bias, T* y, int64_t ys) {
    if (rows == 0) return;
    const Form& form = form_of(type);
    Multiply multiply = multiply_of(form);
    Rows own = round_rows(x, xs, rows, columns);
    int64_t size = columns / form.block * form.bytes(), width = Gated ? outputs / 2 : outputs;
    int64_t panels = (width + kPanel - 1) / kPanel, each = std::max<int64_t>(1, kBytesOfChunk / size);
    each = std::max<int64_t>(1, std::min(each, panels / (4 * threads())));
    bool shared = outputs * columns * std::max(rows, kFewRows) >= kWorthSharing;
    parallel_if(shared, (panels + each - 1) / each, [&](int64_t chunk) {
        alignas(64) float sums[kRows * kPanel], gated[kRows * kPanel];
        for (int64_t panel = chunk * each; panel < std::min(panels, (chunk + 1) * each); ++panel) {
            int64_t output = panel * kPanel;
            for (int64_t first = 0, n; first < rows; first += n) {
                n = multiply(form, own.from(first), rows - first, packed + panel * size, sums);
                if (Gated) multiply(form, own.from(first), rows - first, packed + (panels + panel) * size, gated);
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

// A code's integer, before its zero is taken off.
int code_of(const Form& form, const uint8_t* codes, int64_t lane, int64_t column) {
    if (form.bits == 8) return int8_t(codes[(column / 2 * kPanel + lane) * 2 + column % 2]);
    const uint8_t* word = codes + (column / 8 * kPanel + lane) * 4;
    int64_t i = column % 8;
    int code = word[i % 2 * 2 + i / 4] >> (i / 2 % 2 * 4) & 15;
    return form.nonlinear ? kNonlinear[code] : code;
}

inline void put(float& to, float value, float scale) { to = value * scale; }
inline void put(bf16& to, float value, float scale) { to = narrow(widen(narrow(value)) * scale); }

template <class T>
void unpack_row(const Form& form, const uint8_t* packed, int64_t columns, int64_t output, float factor, T* to) {
    const uint8_t* block = packed + output / kPanel * (columns / form.block * form.bytes());
    int64_t lane = output % kPanel;
    alignas(64) float halves[2][kPanel];
    for (int64_t begin = 0; begin < columns; begin += form.block, block += form.bytes()) {
        for (int v = 0; v < kVectors; ++v) {
            store(halves[0] + v * W, load_halves(block + v * 2 * W));
            if (form.minimum) store(halves[1] + v * W, load_halves(block + 2 * kPanel + v * 2 * W));
        }
        for (int64_t c = 0; c < form.block; ++c) {
            int64_t at = c / form.group * kPanel + lane;
            float scale = halves[0][lane], least = form.minimum ? halves[1][lane] : 0.0f;
            if (form.scales) {
                scale *= float(int8_t(block[form.scale_offset() + at]));
                if (form.minimum) least *= float(int8_t(block[form.minimum_offset() + at]));
            }
            int code = code_of(form, block + form.code_offset(), lane, c) - form.zero;
            put(to[begin + c], scale * float(code) - least, factor);
        }
    }
}

template <class T>
void block_embed(const int64_t* tokens, int64_t n, const uint8_t* packed, int64_t columns, int64_t type, float scale,
                 T* out) {
    const Form& form = form_of(type);
    parallel_if(n * columns >= kWorthSharing, n, [&](int64_t i) {
        unpack_row<T>(form, packed, columns, tokens[i], scale, out + i * columns);
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
    QUIRE_ENTRY(block_linear_silu_and_mul_##name)                                                                      \
    extern "C" void quire_block_embed_##name(const int64_t* tokens, int64_t n, const uint8_t* packed, int64_t columns, \
                                             int64_t type, float scale, T* out) {                                      \
        block_embed<T>(tokens, n, packed, columns, type, scale, out);                                                  \
    }                                                                                                                  \
    QUIRE_ENTRY(block_embed_##name)

QUIRE_BLOCKS(bf16, bf16)
QUIRE_BLOCKS(fp32, float)
