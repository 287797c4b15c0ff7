// The selective state space of Mamba, in which every channel has a state of its own. A chunk of work is a vector of a row's
// channels, whose states stay in the first cache while the row's tokens pass.
#include "calls.h"
#include "pool.h"
#include "states.h"

namespace quire {
namespace {

constexpr int64_t kEnough = 1 << 13;

template <class T>
struct Selection {
    const T *x, *dt;
    int64_t x_stride, dt_stride;
    const T *b, *c;
    int64_t b_stride, c_stride;
    const float *decay, *skip, *dt_bias;
    int64_t n, channels;
    float* state;
    const int64_t *states, *starts;
    T* out;
};

// ln(1 + exp(x)): the logarithm of 1 + u, with u at most 1, by the series of 2 artanh(u / (2 + u)).
inline vf softplus(vf x) {
    vf u = exponential(sub(zero(), larger(x, sub(zero(), x))));
    vf t = div(u, add(u, all(2.0f))), square = mul(t, t), series = all(1.0f / 13);
    for (int i = 11; i > 0; i -= 2) series = fma(series, square, all(1.0f / float(i)));
    return fma(mul(all(2.0f), t), series, larger(x, zero()));
}

template <class T>
void scan(const Selection<T>& s, int64_t row, int64_t first, int width) {
    float* now = static_cast<float*>(scratch(0, 2 * s.n * W * int64_t(sizeof(float))));
    float *decay = now + s.n * W, *state = s.state + s.states[row] * s.n * s.channels + first;
    for (int64_t j = 0; j < s.n; ++j) {
        store(now + j * W, load(state + j * s.channels, width));
        store(decay + j * W, load(s.decay + j * s.channels + first, width));
    }
    vf skip = load(s.skip + first, width), bias = load(s.dt_bias + first, width);
    for (int64_t token = s.starts[row]; token < s.starts[row + 1]; ++token) {
        vf x = load(s.x + token * s.x_stride + first, width);
        vf delta = softplus(add(load(s.dt + token * s.dt_stride + first, width), bias));
        vf change = mul(delta, x), y = mul(skip, x);
        const T *b = s.b + token * s.b_stride, *c = s.c + token * s.c_stride;
        for (int64_t j = 0; j < s.n; ++j) {
            vf kept = exponential(mul(delta, load(decay + j * W)));
            vf next = fma(load(now + j * W), kept, mul(change, all(load_one(b + j))));
            store(now + j * W, next);
            y = fma(next, all(load_one(c + j)), y);
        }
        store(s.out + token * s.channels + first, y, width);
    }
    for (int64_t j = 0; j < s.n; ++j) store(state + j * s.channels, load(now + j * W), width);
}

template <class T>
void selective_scan(const Selection<T>& s, int64_t rows) {
    int64_t blocks = (s.channels + W - 1) / W;
    bool shared = (s.starts[rows] - s.starts[0]) * s.channels * s.n >= kEnough;
    parallel_if(shared, rows * blocks, [&](int64_t chunk) {
        int64_t first = chunk % blocks * W;
        scan(s, chunk / blocks, first, within(s.channels - first));
    });
}

}  // namespace
}  // namespace quire

using namespace quire;

#define QUIRE_SELECTIVE_SCAN(name, T)                                                                                  \
    extern "C" void quire_selective_scan_##name(                                                                       \
        const T* x, int64_t x_stride, const T* dt, int64_t dt_stride, const T* b, int64_t b_stride, const T* c,        \
        int64_t c_stride, const float* decay, const float* skip, const float* dt_bias, int64_t n, int64_t channels,    \
        float* state, int64_t count, const int64_t* states, const int64_t* starts, int64_t rows, T* out) {             \
        if (!are_states(states, rows, count)) return;                                                                  \
        selective_scan(Selection<T>{x, dt, x_stride, dt_stride, b, c, b_stride, c_stride, decay, skip, dt_bias, n,     \
                                    channels, state, states, starts, out},                                             \
                       rows);                                                                                          \
    }                                                                                                                  \
    QUIRE_ENTRY(selective_scan_##name)

QUIRE_SELECTIVE_SCAN(bf16, bf16)
QUIRE_SELECTIVE_SCAN(fp32, float)
