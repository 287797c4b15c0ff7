// How weights lie that are kept as a GGUF file has them: integers with scales; see quire/kernels/cpu/blocks.py.
#pragma once

#include "integers.h"

namespace quire {

constexpr int kPanel = 16;            // outputs side by side
constexpr int kVectors = kPanel / W;  // of a panel

constexpr int kMiddle = 127;  // added to IQ4's values, so that none is negative
alignas(16) constexpr uint8_t kNonlinear[16] = {0,   23,  44,  62,  78,  92,  105, 117,
                                                128, 140, 152, 165, 180, 196, 216, 240};

// How a type's weights are kept; see QuantizedType in quire/gguf/tensor_types.py.
struct Form {
    int type, bits, block, group;
    bool scales, minimum;
    int zero;
    bool nonlinear;

    constexpr int groups() const { return block / group; }
    constexpr int64_t scale_offset() const { return 2 * kPanel * (1 + minimum); }
    constexpr int64_t minimum_offset() const { return scale_offset() + groups() * kPanel; }
    constexpr int64_t code_offset() const { return scale_offset() + (scales ? groups() * kPanel * (1 + minimum) : 0); }
    constexpr int64_t group_bytes() const { return int64_t(group) * kPanel * bits / 8; }
    constexpr int64_t bytes() const { return code_offset() + groups() * group_bytes(); }
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
};

constexpr const Form& form_of(int64_t type) {
    const Form* found = kForms;
    while (found->type != type) ++found;
    return *found;
}

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
        return form_of(Type).nonlinear ? look_up(kNonlinear, low) : low;
    }
}

}  // namespace quire
