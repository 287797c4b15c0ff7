// What the kernels of layers that keep a state of each sequence have in common.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "vec.h"

namespace quire {

// Whether each of the rows has one of `count` states. If one has not, this thread's next quire_take_fault says so, and the
// caller must leave states and outputs alone.
bool are_states(const int64_t* states, int64_t rows, int64_t count);

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
inline int within(int64_t left) { return int(std::max<int64_t>(0, std::min<int64_t>(W, left))); }

}  // namespace quire
