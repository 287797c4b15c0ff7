// What is done token by token: norm, rotation with the write to the KV cache, gate. Sums and products are taken in fp32;
// a value that the reference stores in between is rounded here as well.
#include <algorithm>
#include <cmath>

#include "cache.h"
#include "calls.h"
#include "pool.h"
#include "tile.h"

namespace quire {
namespace {

constexpr int64_t kEnough = 16384;  // values of a chunk: less is not worth another thread

template <class F>
void parallel_rows(int64_t rows, int64_t width, const F& body) {
    int64_t each = std::max<int64_t>(1, kEnough / std::max<int64_t>(1, width));
    parallel((rows + each - 1) / each, [&](int64_t chunk) {
        for (int64_t row = chunk * each; row < std::min(rows, (chunk + 1) * each); ++row) body(row);
    });
}

inline vf rounded(vf x, const float*) { return x; }
inline vf rounded(vf x, const bf16*) { return widen(narrow(x)); }

template <class T>
float squares_of(const T* x, int64_t width) {
    vf squares = zero();
    for (int64_t c = 0; c < width; c += W) {
        vf v = load(x + c, int(std::min<int64_t>(W, width - c)));
        squares = fma(v, v, squares);
    }
    return sum(squares);
}

// out = x / sqrt(mean(x²) + eps) · weight. A weight of x's dtype is applied after rounding, as the reference does.
template <class T, class V>
void scale_row(const T* x, const V* weight, float mean_square, int64_t width, T* out) {
    vf factor = all(1.0f / std::sqrt(mean_square));
    for (int64_t c = 0; c < width; c += W) {
        int n = int(std::min<int64_t>(W, width - c));
        vf v = mul(load(x + c, n), factor);
        if (sizeof(T) == sizeof(V)) v = rounded(v, x);
        store(out + c, mul(v, load(weight + c, n)), n);
    }
}

template <class T, class V>
void norm_row(const T* x, const V* weight, float eps, int64_t width, T* out) {
    scale_row(x, weight, squares_of(x, width) / float(width) + eps, width, out);
}

// out = x / sqrt(mean square + eps)
template <class T>
void unit_row(const T* x, float eps, int64_t width, T* out) {
    vf factor = all(1.0f / std::sqrt(squares_of(x, width) / float(width) + eps));
    for (int64_t c = 0; c < width; c += W) {
        int n = int(std::min<int64_t>(W, width - c));
        store(out + c, mul(load(x + c, n), factor), n);
    }
}

template <class T>
void add_row(T* x, const T* delta, int64_t width) {
    for (int64_t c = 0; c < width; c += W) {
        int n = int(std::min<int64_t>(W, width - c));
        store(x + c, add(load(x + c, n), load(delta + c, n)), n);
    }
}

template <class T, class V>
void rms_norm(T* x, const T* delta, const V* weight, int64_t heads, float eps, int64_t rows, int64_t width, T* out) {
    parallel_rows(rows, width, [&](int64_t row) {
        T* own = x + row * width;
        if (delta) add_row(own, delta + row * width, width);
        norm_row(own, weight + row % heads * width, eps, width, out + row * width);
    });
}

// out = x / sqrt(var(x) + eps) · weight + bias, after the mean is taken off x; there may be no bias.
template <class T, class V>
void layer_norm_row(const T* x, const V* weight, const V* bias, float eps, int64_t width, T* out) {
    vf sums = zero(), squares = zero();
    for (int64_t c = 0; c < width; c += W) sums = add(sums, load(x + c, int(std::min<int64_t>(W, width - c))));
    vf mean = all(sum(sums) / float(width));
    for (int64_t c = 0; c < width; c += W) {
        int n = int(std::min<int64_t>(W, width - c));
        vf v = sub(load(x + c, n), mean);
        if (n < W) {  // behind the row stand zeros, less the mean
            float some[W] = {};
            store(some, v, n);
            v = load(some);
        }
        squares = fma(v, v, squares);
    }
    vf factor = all(1.0f / std::sqrt(sum(squares) / float(width) + eps));
    for (int64_t c = 0; c < width; c += W) {
        int n = int(std::min<int64_t>(W, width - c));
        vf v = mul(sub(load(x + c, n), mean), factor);
        store(out + c, fma(v, load(weight + c, n), bias ? load(bias + c, n) : zero()), n);
    }
}

template <class T>
void layer_norm(T* x, const T* delta, const T* weight, const T* bias, float eps, int64_t rows, int64_t width, T* out) {
    parallel_rows(rows, width, [&](int64_t row) {
        T* own = x + row * width;
        if (delta) add_row(own, delta + row * width, width);
        layer_norm_row(own, weight, bias, eps, width, out + row * width);
    });
}

// The mean squares of a token's queries and of its keys, over all heads; or a part's summand of them.
template <class T>
void qk_mean_squares(const T* qkv, int64_t stride, int64_t tokens, int64_t queries, int64_t keys, int64_t parts,
                     float* out) {
    parallel_rows(tokens, queries + keys, [&](int64_t token) {
        const T* own = qkv + token * stride;
        out[2 * token] = squares_of(own, queries) / float(queries * parts);
        out[2 * token + 1] = squares_of(own + queries, keys) / float(keys * parts);
    });
}

// Pairs (2i, 2i + 1) turned by the token's angles; what lies behind them stays.
template <class T>
void rotate_interleaved(const T* x, const T* cos, const T* sin, int64_t half, int64_t d, T* out) {
    float a[W], b[W];
    for (int64_t c = 0; c < half; c += W) {
        int n = int(std::min<int64_t>(W, half - c));
        for (int i = 0; i < n; ++i) a[i] = load_one(x + 2 * (c + i)), b[i] = load_one(x + 2 * (c + i) + 1);
        vf u = load(a, n), v = load(b, n), co = load(cos + c, n), si = load(sin + c, n);
        store(a, sub(mul(u, co), mul(v, si)));
        store(b, fma(v, co, mul(u, si)));
        for (int i = 0; i < n; ++i) store_one(out + 2 * (c + i), a[i]), store_one(out + 2 * (c + i) + 1, b[i]);
    }
    if (2 * half < d && x != out) std::memcpy(out + 2 * half, x + 2 * half, (d - 2 * half) * sizeof(T));
}

template <class T>
void clip_row(const T* x, float bound, int64_t width, T* out) {
    for (int64_t c = 0; c < width; c += W) {
        int n = int(std::min<int64_t>(W, width - c));
        store(out + c, smaller(all(bound), larger(all(-bound), load(x + c, n))), n);
    }
}

// Pairs (i, i + half) turned by the token's angles; what lies behind them stays.
template <class T>
void rotate_head(const T* x, const T* cos, const T* sin, int64_t half, int64_t d, T* out) {
    for (int64_t c = 0; c < half; c += W) {
        int n = int(std::min<int64_t>(W, half - c));
        vf a = load(x + c, n), b = load(x + half + c, n), co = load(cos + c, n), si = load(sin + c, n);
        vf first = sub(mul(a, co), mul(b, si)), second = fma(b, co, mul(a, si));
        store(out + c, first, n);
        store(out + half + c, second, n);
    }
    if (2 * half < d && x != out) std::memcpy(out + 2 * half, x + 2 * half, (d - 2 * half) * sizeof(T));
}

template <class T, class C>
struct Projected {
    const T* qkv;
    int64_t stride, tokens, heads, kv_heads, d;
    const T *cos, *sin;
    int64_t half;
    const int64_t* places;
    C *keys, *values;
    T* q;
    const float* scales;  // [2, kv_heads] of a quantized cache
    int32_t form;         // of the flags below
    float clip;           // 0: nothing is clipped
    const float *mean_squares, *query_scale;
};

constexpr int32_t kInterleaved = 1, kCentered = 2, kNormLast = 4;
constexpr int32_t kNormValues = 8, kValuesOfKeys = 16, kStoresNothing = 32;

// A query that is multiplied with the scale of its keys; what is in the model's own type is stored divided by one.
template <class T>
void multiply_row(T* x, int64_t width, float scale) {
    for (int64_t c = 0; c < width; c += W) {
        int n = int(std::min<int64_t>(W, width - c));
        store(x + c, mul(load(x + c, n), all(scale)), n);
    }
}

// A query's or a key's head, rotated, or as it is.
template <class T, class C>
void rotate(const Projected<T, C>& s, const T* x, int64_t token, T* out) {
    const T *cos = s.cos + token * s.half, *sin = s.sin + token * s.half;
    if (s.form & kInterleaved)
        rotate_interleaved(x, cos, sin, s.half, s.d, out);
    else
        rotate_head(x, cos, sin, s.half, s.d, out);
}

template <class T, class C, class V>
void norm_head(const Projected<T, C>& s, const T* x, int64_t token, int64_t head, const V* norm, const V* bias,
               float eps, T* out) {
    const V* weight = norm + head * s.d;
    if (s.form & kCentered)
        layer_norm_row(x, weight, bias ? bias + head * s.d : nullptr, eps, s.d, out);
    else if (s.mean_squares)
        scale_row(x, weight, s.mean_squares[2 * token + (head >= s.heads)] + eps, s.d, out);
    else
        norm_row(x, weight, eps, s.d, out);
}

template <class T, class C, class V>
void norm_rope_and_cache(const Projected<T, C>& s, const V* norm, const V* bias, float eps) {
    constexpr bool kQuantized = !std::is_same_v<T, C>;

    const bool apart = static_cast<const void*>(s.keys) != s.values;  // otherwise, keys are values too
    const int64_t stored = s.form & kStoresNothing ? 0 : s.kv_heads;
    int64_t wide = (s.heads + (apart && !(s.form & kValuesOfKeys) ? 2 : 1) * stored) * s.d;
    parallel_rows(s.tokens, wide, [&](int64_t token) {
        const T* x = s.qkv + token * s.stride;
        C* key = s.keys + s.places[token] * s.kv_heads * s.d;
        C* value = s.values + s.places[token] * s.kv_heads * s.d;
        T* normed = static_cast<T*>(scratch(0, (s.d * 2 + (s.clip > 0 ? wide : 0)) * 4));
        T* rotated = normed + s.d;
        if (s.clip > 0) {
            clip_row(x, s.clip, wide, rotated + s.d);
            x = rotated + s.d;
        }
        for (int64_t head = 0; head < s.heads + stored; ++head) {
            T* to = s.q + (token * s.heads + head) * s.d;
            if (head >= s.heads) {
                if constexpr (kQuantized)
                    to = rotated;
                else
                    to = key + (head - s.heads) * s.d;
            }
            const T* from = x + head * s.d;
            if (norm && (s.form & kNormLast)) {
                rotate(s, from, token, normed);
                norm_head(s, normed, token, head, norm, bias, eps, to);
            } else {
                if (norm) {
                    norm_head(s, from, token, head, norm, bias, eps, normed);
                    from = normed;
                }
                rotate(s, from, token, to);
            }
            if (s.query_scale && head < s.heads) multiply_row(to, s.d, s.query_scale[token]);
            if constexpr (kQuantized) {
                if (head < s.heads)
                    multiply_row(to, s.d, s.scales[head / (s.heads / s.kv_heads)]);
                else
                    store_scaled(to, s.d, s.scales[head - s.heads], key + (head - s.heads) * s.d);
            }
        }
        if (!apart || !stored) return;
        const T* from = x + (s.heads + (s.form & kValuesOfKeys ? 0 : s.kv_heads)) * s.d;
        if (s.form & kNormValues) {
            for (int64_t head = 0; head < s.kv_heads; ++head) {
                if constexpr (kQuantized) {
                    unit_row(from + head * s.d, eps, s.d, normed);
                    store_scaled(normed, s.d, s.scales[s.kv_heads + head], value + head * s.d);
                } else {
                    unit_row(from + head * s.d, eps, s.d, value + head * s.d);
                }
            }
            return;
        }
        if constexpr (kQuantized) {
            for (int64_t head = 0; head < s.kv_heads; ++head)
                store_scaled(from + head * s.d, s.d, s.scales[s.kv_heads + head], value + head * s.d);
        } else {
            std::memcpy(value, from, s.kv_heads * s.d * sizeof(T));
        }
    });
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// x · activate(gate), where a head has one gate, or each of its elements its own.
template <class T>
void gate_heads(T* x, const T* gate, int64_t stride, int64_t tokens, int64_t heads, int64_t d, bool shared, bool soft) {
    parallel_rows(tokens, 4 * heads * d, [&](int64_t token) {
        const T* gates = gate + token * stride;
        for (int64_t head = 0; head < heads; ++head) {
            T* own = x + (token * heads + head) * d;
            for (int64_t c = 0; c < d; c += W) {
                int n = int(std::min<int64_t>(W, d - c));
                vf factor = shared ? all(load_one(gates + head)) : load(gates + head * d + c, n);
                if (soft) {
                    float some[W];
                    store(some, factor);
                    for (int i = 0; i < (shared ? 1 : n); ++i) some[i] = softplus(some[i]);
                    factor = shared ? all(some[0]) : load(some, n);
                } else {
                    factor = div(all(1.0f), add(all(1.0f), exponential(sub(zero(), factor))));
                }
                store(own + c, mul(load(own + c, n), rounded(factor, own)), n);
            }
        }
    });
}

inline vf logistic(vf x) { return div(all(1.0f), add(all(1.0f), exponential(sub(zero(), x)))); }

// norm(x) · activate(gate) or norm(x · activate(gate)), of groups of elements. Without a weight, there is no norm.
template <class T>
void gated_norm(const T* x, const T* gate, int64_t stride, const T* weight, int64_t weights, float eps, int64_t rows,
                int64_t width, int64_t group, bool norm_first, bool is_logistic, T* out) {
    parallel_rows(rows * (width / group), 4 * group, [&](int64_t number) {
        int64_t at = number % (width / group) * group, row = number / (width / group);
        const T *own = x + row * width + at, *gates = gate + row * stride + at;
        auto gated = [&](int64_t c, int n, bool now) {
            vf v = load(own + c, n), g = load(gates + c, n);
            return now ? mul(v, is_logistic ? logistic(g) : silu(g)) : v;
        };
        vf squares = zero();
        for (int64_t c = 0; weight && c < group; c += W) {
            vf v = gated(c, int(std::min<int64_t>(W, group - c)), !norm_first);
            squares = fma(v, v, squares);
        }
        vf factor = all(weight ? 1.0f / std::sqrt(sum(squares) / float(group) + eps) : 1.0f);
        for (int64_t c = 0; c < group; c += W) {
            int n = int(std::min<int64_t>(W, group - c));
            vf v = mul(gated(c, n, true), factor);
            store(out + row * width + at + c, weight ? mul(v, load(weight + (at + c) % weights, n)) : v, n);
        }
    });
}

// out = activate(gate) · up, where a row of x has all gates, then all that they gate; or out = activate(x).
template <bool Gated, class T, class F>
void activate_rows(const T* x, int64_t rows, int64_t width, T* out, const F& activate) {
    int64_t wide = Gated ? 2 * width : width;
    parallel_rows(rows, 4 * width, [&](int64_t row) {
        const T* own = x + row * wide;
        for (int64_t c = 0; c < width; c += W) {
            int n = int(std::min<int64_t>(W, width - c));
            vf y = activate(load(own + c, n));
            if (Gated) y = mul(y, load(own + width + c, n));
            store(out + row * width + c, y, n);
        }
    });
}

// The same numbers in another dtype, each rounded to the nearest.
template <class A, class B>
void convert_rows(const A* x, int64_t rows, int64_t width, B* out) {
    parallel_rows(rows, width, [&](int64_t row) {
        for (int64_t c = 0; c < width; c += W) {
            int n = int(std::min<int64_t>(W, width - c));
            store(out + row * width + c, load(x + row * width + c, n), n);
        }
    });
}

}  // namespace
}  // namespace quire

using namespace quire;

#define QUIRE_ROWS(name, T)                                                                                            \
    extern "C" void quire_rms_norm_##name(T* x, const T* delta, const void* weight, int32_t wide, int64_t heads,       \
                                          float eps, int64_t rows, int64_t width, T* out) {                            \
        if (wide) {                                                                                                    \
            rms_norm(x, delta, static_cast<const float*>(weight), heads, eps, rows, width, out);                       \
        } else {                                                                                                       \
            rms_norm(x, delta, static_cast<const T*>(weight), heads, eps, rows, width, out);                           \
        }                                                                                                              \
    }                                                                                                                  \
    extern "C" void quire_layer_norm_##name(T* x, const T* delta, const T* weight, const T* bias, float eps,           \
                                            int64_t rows, int64_t width, T* out) {                                     \
        layer_norm(x, delta, weight, bias, eps, rows, width, out);                                                     \
    }                                                                                                                  \
    extern "C" void quire_qk_mean_squares_##name(const T* qkv, int64_t stride, int64_t tokens, int64_t queries,         \
                                                 int64_t keys, int64_t parts, float* out) {                            \
        qk_mean_squares(qkv, stride, tokens, queries, keys, parts, out);                                               \
    }                                                                                                                  \
    extern "C" void quire_gate_heads_##name(T* x, const T* gate, int64_t stride, int64_t tokens, int64_t heads,         \
                                            int64_t d, int32_t shared, int32_t soft) {                                 \
        gate_heads(x, gate, stride, tokens, heads, d, shared, soft);                                                   \
    }                                                                                                                  \
    extern "C" void quire_gated_norm_##name(const T* x, const T* gate, int64_t stride, const T* weight,                \
                                            int64_t weights, float eps, int64_t rows, int64_t width, int64_t group,    \
                                            int32_t norm_first, int32_t is_logistic, T* out) {                         \
        gated_norm(x, gate, stride, weight, weights, eps, rows, width, group, norm_first, is_logistic, out);           \
    }                                                                                                                  \
    extern "C" void quire_silu_and_mul_##name(const T* x, int64_t rows, int64_t width, T* out) {                       \
        activate_rows<true>(x, rows, width, out, [](vf v) { return silu(v); });                                        \
    }                                                                                                                  \
    extern "C" void quire_gelu_and_mul_##name(const T* x, int64_t rows, int64_t width, T* out) {                       \
        activate_rows<true>(x, rows, width, out, [](vf v) { return gelu(v); });                                        \
    }                                                                                                                  \
    extern "C" void quire_gelu_##name(const T* x, int64_t rows, int64_t width, T* out) {                               \
        activate_rows<false>(x, rows, width, out, [](vf v) { return gelu(v); });                                       \
    }                                                                                                                  \
    extern "C" void quire_gelu_exact_##name(const T* x, int64_t rows, int64_t width, T* out) {                         \
        activate_rows<false>(x, rows, width, out, [](vf v) { return gelu_exact(v); });                                 \
    }                                                                                                                  \
    extern "C" void quire_quick_gelu_##name(const T* x, int64_t rows, int64_t width, T* out) {                         \
        activate_rows<false>(x, rows, width, out, [](vf v) { return quick_gelu(v); });                                 \
    }                                                                                                                  \
    extern "C" void quire_relu_##name(const T* x, int64_t rows, int64_t width, T* out) {                               \
        activate_rows<false>(x, rows, width, out, [](vf v) { return relu(v); });                                       \
    }                                                                                                                  \
    extern "C" void quire_gelu_exact_and_mul_##name(const T* x, int64_t rows, int64_t width, T* out) {                 \
        activate_rows<true>(x, rows, width, out, [](vf v) { return gelu_exact(v); });                                  \
    }                                                                                                                  \
    extern "C" void quire_relu_squared_##name(const T* x, int64_t rows, int64_t width, T* out) {                       \
        activate_rows<false>(x, rows, width, out, [](vf v) { return mul(relu(v), relu(v)); });                         \
    }                                                                                                                  \
    extern "C" void quire_soft_cap_##name(T* x, int64_t rows, int64_t width, float cap) {                              \
        activate_rows<false>(x, rows, width, x, [cap](vf v) { return mul(tanh(div(v, all(cap))), all(cap)); });        \
    }                                                                                                                  \
    extern "C" void quire_multiply_##name(T* x, int64_t rows, int64_t width, float factor) {                           \
        activate_rows<false>(x, rows, width, x, [factor](vf v) { return mul(v, all(factor)); });                       \
    }                                                                                                                  \
    extern "C" void quire_widen_##name(const T* x, int64_t rows, int64_t width, float* out) {                          \
        convert_rows(x, rows, width, out);                                                                             \
    }                                                                                                                  \
    extern "C" void quire_narrow_##name(const float* x, int64_t rows, int64_t width, T* out) {                         \
        convert_rows(x, rows, width, out);                                                                             \
    }                                                                                                                  \
    QUIRE_ENTRY(widen_##name)                                                                                          \
    QUIRE_ENTRY(narrow_##name)                                                                                         \
    QUIRE_ENTRY(multiply_##name)                                                                                       \
    QUIRE_ENTRY(rms_norm_##name)                                                                                       \
    QUIRE_ENTRY(layer_norm_##name)                                                                                     \
    QUIRE_ENTRY(gated_norm_##name)                                                                                     \
    QUIRE_ENTRY(gate_heads_##name)                                                                                     \
    QUIRE_ENTRY(qk_mean_squares_##name)                                                                                \
    QUIRE_ENTRY(silu_and_mul_##name)                                                                                   \
    QUIRE_ENTRY(gelu_and_mul_##name)                                                                                   \
    QUIRE_ENTRY(gelu_exact_##name)                                                                                     \
    QUIRE_ENTRY(gelu_exact_and_mul_##name)                                                                             \
    QUIRE_ENTRY(quick_gelu_##name)                                                                                     \
    QUIRE_ENTRY(relu_##name)                                                                                           \
    QUIRE_ENTRY(relu_squared_##name)                                                                                   \
    QUIRE_ENTRY(gelu_##name)                                                                                           \
    QUIRE_ENTRY(soft_cap_##name)

QUIRE_ROWS(bf16, bf16)
QUIRE_ROWS(fp32, float)

#define QUIRE_QK_NORM_ROPE_AND_CACHE(name, T, C)                                                                       \
    extern "C" void quire_qk_norm_rope_and_cache_##name(                                                               \
        const T* qkv, int64_t stride, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t d, const void* norm,    \
        const void* bias, int32_t wide, float eps, const T* cos, const T* sin, int64_t half, const int64_t* places,    \
        C* keys, C* values, T* q, const float* scales, int32_t form, float clip, const float* mean_squares,            \
        const float* query_scale) {                                                                                    \
        Projected<T, C> s{qkv, stride, tokens, heads, kv_heads, d, cos, sin, half, places, keys, values, q, scales,    \
                          form, clip, mean_squares, query_scale};                                                      \
        if (wide) {                                                                                                    \
            norm_rope_and_cache(s, static_cast<const float*>(norm), static_cast<const float*>(bias), eps);             \
        } else {                                                                                                       \
            norm_rope_and_cache(s, static_cast<const T*>(norm), static_cast<const T*>(bias), eps);                     \
        }                                                                                                              \
    }                                                                                                                  \
    QUIRE_ENTRY(qk_norm_rope_and_cache_##name)

QUIRE_QK_NORM_ROPE_AND_CACHE(bf16, bf16, bf16)
QUIRE_QK_NORM_ROPE_AND_CACHE(fp32, float, float)
QUIRE_QK_NORM_ROPE_AND_CACHE(fp8_e4m3_bf16, bf16, e4m3)
QUIRE_QK_NORM_ROPE_AND_CACHE(fp8_e4m3_fp32, float, e4m3)
QUIRE_QK_NORM_ROPE_AND_CACHE(fp8_e5m2_bf16, bf16, e5m2)
QUIRE_QK_NORM_ROPE_AND_CACHE(fp8_e5m2_fp32, float, e5m2)
QUIRE_QK_NORM_ROPE_AND_CACHE(int8_bf16, bf16, int8_t)
QUIRE_QK_NORM_ROPE_AND_CACHE(int8_fp32, float, int8_t)
