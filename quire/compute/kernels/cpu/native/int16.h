// Products of 16-bit weights with rows that are rounded to 16 bits; see quire/compute/kernels/cpu/rounded_linear.py.
#pragma once

#include <cstdint>

#include "vec.h"

namespace quire {

// y = x Wᵀ + bias; if gated, silu of the first half of the outputs times the second.
void int16_linear(const float* x, int64_t xs, int64_t rows, const uint8_t* packed, int64_t outputs, int64_t columns,
                  bool gated, const float* bias, float* y, int64_t ys);
void int16_linear(const bf16* x, int64_t xs, int64_t rows, const uint8_t* packed, int64_t outputs, int64_t columns,
                  bool gated, const bf16* bias, bf16* y, int64_t ys);

}  // namespace quire
