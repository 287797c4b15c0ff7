// A causal convolution of each channel over K tokens. A chunk of work is one row's tokens in some of the channels; the
// tokens before the current one stay in registers.
#include "calls.h"
#include "pool.h"
#include "states.h"

namespace quire {
namespace {

constexpr int64_t kChannels = 128;  // of a chunk of work
constexpr int64_t kEnough = 16384;  // values of a step: less is not worth another thread

inline vf rounded(vf x, const float*) { return x; }
inline vf rounded(vf x, const bf16*) { return widen(narrow(x)); }

template <class T>
struct Conv {
    const T *x, *before, *after;
    int64_t stride;
    const T *weight, *bias;
    int64_t channels;
    bool silu;
    T* state;
    const int64_t *states, *starts;
    T* out;
    int64_t out_stride;
};

template <int K, class T>
void convolve(const Conv<T>& s, int64_t row, int64_t c, int n) {
    vf weights[K], past[K];
    T* state = s.state + s.states[row] * (K - 1) * s.channels + c;
    for (int i = 0; i < K; ++i) weights[i] = load(s.weight + i * s.channels + c, n);
    for (int i = 0; i < K - 1; ++i) past[i] = load(state + i * s.channels, n);
    vf bias = s.bias ? load(s.bias + c, n) : zero();
    for (int64_t token = s.starts[row]; token < s.starts[row + 1]; ++token) {
        int64_t at = token * s.stride + c;
        vf u = load(s.x + at, n);
        if (s.before) u = rounded(mul(u, load(s.before + at, n)), s.x);
        past[K - 1] = u;
        vf y = bias;
        for (int i = 0; i < K; ++i) y = fma(weights[i], past[i], y);
        for (int i = 0; i < K - 1; ++i) past[i] = past[i + 1];
        if (s.silu) y = silu(y);
        if (s.after) y = mul(y, load(s.after + at, n));
        store(s.out + token * s.out_stride + c, y, n);
    }
    for (int i = 0; i < K - 1; ++i) store(state + i * s.channels, past[i], n);
}

template <int K, class T>
void short_conv(const Conv<T>& s, int64_t rows) {
    int64_t blocks = (s.channels + kChannels - 1) / kChannels;
    bool shared = (s.starts[rows] - s.starts[0]) * s.channels >= kEnough;
    parallel_if(shared, rows * blocks, [&](int64_t chunk) {
        int64_t first = chunk % blocks * kChannels, end = std::min(s.channels, first + kChannels);
        for (int64_t c = first; c < end; c += W)
            convolve<K>(s, chunk / blocks, c, int(std::min<int64_t>(W, end - c)));
    });
}

}  // namespace
}  // namespace quire

using namespace quire;

#define QUIRE_SHORT_CONV(name, T)                                                                                      \
    extern "C" void quire_short_conv_##name(const T* x, const T* before, const T* after, int64_t stride,               \
                                            const T* weight, const T* bias, int64_t k, int64_t channels, int32_t silu, \
                                            T* state, int64_t count, const int64_t* states, const int64_t* starts,     \
                                            int64_t rows, T* out, int64_t out_stride) {                                \
        if (!are_states(states, rows, count)) return;                                                                  \
        Conv<T> s{x, before, after, stride, weight, bias, channels, silu != 0, state, states, starts, out, out_stride};\
        if (k == 2) short_conv<2>(s, rows);                                                                            \
        if (k == 3) short_conv<3>(s, rows);                                                                            \
        if (k == 4) short_conv<4>(s, rows);                                                                            \
    }                                                                                                                  \
    QUIRE_ENTRY(short_conv_##name)

QUIRE_SHORT_CONV(bf16, bf16)
QUIRE_SHORT_CONV(fp32, float)
