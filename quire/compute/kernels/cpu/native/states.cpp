// Errors of kernels that the caller of a list of kernels must learn of.
#include "states.h"

namespace quire {
namespace {

thread_local bool fault = false;

}  // namespace

bool are_states(const int64_t* states, int64_t rows, int64_t count) {
    for (int64_t row = 0; row < rows; ++row)
        if (states[row] < 0 || states[row] >= count) fault = true;
    return !fault;
}

}  // namespace quire

// Whether a kernel that this thread called since the last question was given a state that there is not.
extern "C" int32_t quire_take_fault() {
    bool was = quire::fault;
    quire::fault = false;
    return was;
}
