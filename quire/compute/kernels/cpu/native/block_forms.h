// How weights lie that are kept as integers with scales, those of GGUF files as these have them: see
// quire/compute/kernels/cpu/blocks.py and grouped_linear.py.
#pragma once

#include "integers.h"

namespace quire {

constexpr int kPanel = 16;            // outputs side by side
constexpr int kVectors = kPanel / W;  // of a panel

constexpr int kMiddle = 127;  // added to IQ4's values, so that none is negative
alignas(16) constexpr uint8_t kNonlinear[16] = {0,   23,  44,  62,  78,  92,  105, 117,
                                                128, 140, 152, 165, 180, 196, 216, 240};

constexpr int kMicroMiddle = 12;  // added to twice e2m1's values
alignas(16) constexpr uint8_t kMicro[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

// How a type's weights are kept; see QuantizedType in quire/compute/gguf/tensor_types.py. Types with zeros are no file's: their
// weights are scale · (code - zero), scales are floats, each block has a zero for each output, one signed byte, and as
// many groups as the weight says. Types with exponents have scales that are powers of two, of which a byte is kept, and
// codes that stand for twice e2m1's values.
struct Form {
    int type, bits, block, group;
    bool scales, minimum;
    int zero;
    bool nonlinear, zeros, exponents;

    constexpr int groups() const { return block / group; }
    constexpr int groups(int64_t of_weight) const { return zeros ? int(of_weight / group) : groups(); }
    // Columns of x that share a scale.
    constexpr int run(int64_t of_weight) const {
        int own = zeros ? 256 : 32;
        while (zeros && of_weight % own) own /= 2;
        return own;
    }
    constexpr int64_t scale_offset() const { return exponents ? kPanel : zeros ? 4 * kPanel : 2 * kPanel * (1 + minimum); }
    constexpr int64_t minimum_offset() const { return scale_offset() + (scales ? groups() * kPanel : 0); }
    constexpr int64_t code_offset() const {
        return minimum_offset() + (zeros ? kPanel : scales && minimum ? groups() * kPanel : 0);
    }
    constexpr int64_t group_bytes() const { return int64_t(group) * kPanel * bits / 8; }
    constexpr int64_t bytes() const { return bytes(block); }
    constexpr int64_t bytes(int64_t of_weight) const { return code_offset() + groups(of_weight) * group_bytes(); }
};

constexpr Form kForms[] = {
    {2, 4, 32, 32, false, false, 8, false},          // Q4_0
    {3, 4, 32, 32, false, true, 0, false},           // Q4_1
    {6, 5, 32, 32, false, false, 16, false},         // Q5_0
    {7, 5, 32, 32, false, true, 0, false},           // Q5_1
    {8, 8, 32, 32, false, false, 0, false},          // Q8_0
    {10, 4, 256, 16, true, true, 0, false},          // Q2_K
    {11, 4, 256, 16, true, false, 4, false},         // Q3_K
    {12, 4, 256, 32, true, true, 0, false},          // Q4_K
    {13, 5, 256, 32, true, true, 0, false},          // Q5_K
    {14, 6, 256, 16, true, false, 32, false},        // Q6_K
    {20, 4, 32, 32, false, false, kMiddle, true},    // IQ4_NL
    {23, 4, 256, 32, true, false, kMiddle, true},    // IQ4_XS
    {256, 4, 32, 32, false, true, 0, false, true},   // see grouped_linear.py
    {257, 8, 32, 32, false, true, 0, false, true},
    {260, 4, 32, 32, false, false, kMicroMiddle, true, false, true},  // see codebook_linear.py
};

constexpr int64_t kFloat8 = 258;  // no integers: see float8.h
constexpr int64_t kInt8 = 259;    // with rows of 8 bits: see int8.h
constexpr int64_t kInt16 = 261;   // with rows of 16 bits: see int16.h

constexpr const Form& form_of(int64_t type) {
    const Form* found = kForms;
    while (found->type != type) ++found;
    return *found;
}

// A weight's type, and where types leave it open the columns of its blocks.
struct WeightType {
    int64_t number, block;

    explicit WeightType(int64_t given) : number(given & 0xffff), block(given >> 16) {
        if (!block) block = form_of(number).block;  // a file's type
    }
};

// The K-th pair of columns of a group: 16-bit codes of W outputs, from the v-th of the panel's vectors.
template <int Type, int K>
inline __attribute__((always_inline)) vi codes_of_pair(const uint8_t* codes, int v) {
    constexpr int Bits = form_of(Type).bits, Group = form_of(Type).group;
    if constexpr (Bits == 8) {
        return load_bytes(codes + K * 2 * kPanel + v * 2 * W);
    } else {
        vi words = load_integers(codes + K / 4 * 4 * kPanel + v * 4 * W);
        vi low = shift_right<K % 4 * 4>(words);
        if constexpr (K % 4 != 3) low = low_bits<15>(low);
        if constexpr (Bits > 4) {  // bits from the fifth on: a word for each output
            constexpr int kAt = K * (Bits - 4);
            vi high = load_integers(codes + Group * kPanel / 2 + v * 4 * W);
            high = kAt < 4 ? shift_left<(kAt < 4 ? 4 - kAt : 0)>(high) : shift_right<(kAt < 4 ? 0 : kAt - 4)>(high);
            low = either(low, low_bits<((1 << (Bits - 4)) - 1) << 4>(high));
        }
        return form_of(Type).nonlinear ? look_up(form_of(Type).exponents ? kMicro : kNonlinear, low) : low;
    }
}

}  // namespace quire
