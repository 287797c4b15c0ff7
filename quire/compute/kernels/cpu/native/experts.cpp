// A mixture of experts: which experts a token goes to, and their gated products, one expert after the other, each on all
// rows that go to it.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "calls.h"
#include "pool.h"
#include "vec.h"

namespace quire {
namespace {

constexpr int64_t kWorthSharing = 1 << 16;   // values that are moved or added
constexpr int64_t kScoresToShare = 1 << 12;  // exponentials
constexpr float kTaken = -1.0f;              // a score that no softmax has

inline void put(float* to, float x) { *to = x; }
inline void put(bf16* to, float x) { *to = narrow(x); }

// The likeliest experts by a softmax in fp32, of equal ones the first; where a logit is NaN, all weights are.
template <class T>
void route(const T* logits, int64_t tokens, int64_t count, int64_t chosen, bool renormalise, T* weights, int64_t* numbers) {
    parallel_if(tokens * count >= kScoresToShare, tokens, [&](int64_t token) {
        float* scores = static_cast<float*>(scratch(0, 2 * count * 4));
        float* shares = scores + count;
        float most = -std::numeric_limits<float>::infinity(), total = 0, taken = 0;
        for (int64_t e = 0; e < count; ++e) most = std::max(most, scores[e] = load_one(logits + token * count + e));
        for (int64_t e = 0; e < count; ++e) total += scores[e] = std::exp(scores[e] - most);
        for (int64_t e = 0; e < count; ++e) scores[e] /= total;
        for (int64_t i = 0; i < chosen; ++i) {
            int64_t best = 0;
            while (scores[best] == kTaken) ++best;
            for (int64_t e = best + 1; e < count; ++e)
                if (scores[e] > scores[best]) best = e;
            numbers[token * chosen + i] = best;
            taken += shares[i] = scores[best];
            scores[best] = kTaken;
        }
        for (int64_t i = 0; i < chosen; ++i) put(weights + token * chosen + i, renormalise ? shares[i] / taken : shares[i]);
    });
}

enum Scoring : int32_t { kSoftmax, kSigmoid, kSqrtSoftplus, kSparsemixer };  // as Scoring of kernels/routing.py

struct Rules {
    int64_t count, chosen;
    bool renormalise;
    Scoring scoring;
    int64_t groups, kept_groups;
    bool of_best_two;  // whether a group's score is the sum of its best two, and not its best
    float scale, epsilon;
    float cap;     // of logits; 0: no bound
    float margin;  // of kSparsemixer
};

// The first of the largest values among the places that are free; NaN is never larger.
inline int64_t best_of(const float* values, const uint8_t* taken, int64_t count) {
    int64_t best = 0;
    while (best < count - 1 && taken[best]) ++best;
    for (int64_t i = best + 1; i < count; ++i)
        if (!taken[i] && values[i] > values[best]) best = i;
    return best;
}

// Turns a token's logits into its scores.
inline void score(float* x, const Rules& r) {
    if (r.cap > 0)
        for (int64_t e = 0; e < r.count; ++e) x[e] = r.cap * std::tanh(x[e] / r.cap);
    if (r.scoring == kSoftmax) {
        float most = -std::numeric_limits<float>::infinity(), total = 0;
        for (int64_t e = 0; e < r.count; ++e) most = std::max(most, x[e]);
        for (int64_t e = 0; e < r.count; ++e) total += x[e] = std::exp(x[e] - most);
        for (int64_t e = 0; e < r.count; ++e) x[e] /= total;
    } else if (r.scoring == kSigmoid) {
        for (int64_t e = 0; e < r.count; ++e) x[e] = 1.0f / (1.0f + std::exp(-x[e]));
    } else if (r.scoring == kSqrtSoftplus) {
        for (int64_t e = 0; e < r.count; ++e)
            x[e] = std::sqrt(std::max(x[e], 0.0f) + std::log1p(std::exp(-std::fabs(x[e]))));
    }
}

// Marks the experts of all groups but the best as taken.
inline void take_other_groups(const float* values, uint8_t* taken, float* of_groups, uint8_t* kept, const Rules& r) {
    int64_t size = r.count / r.groups;
    for (int64_t g = 0; g < r.groups; ++g) {
        const float* own = values + g * size;
        int64_t best = best_of(own, taken + g * size, size);
        of_groups[g] = own[best];
        if (r.of_best_two && size > 1) {
            taken[g * size + best] = 1;
            of_groups[g] += own[best_of(own, taken + g * size, size)];
            taken[g * size + best] = 0;
        }
        kept[g] = 0;
    }
    for (int64_t i = 0; i < r.kept_groups; ++i) kept[best_of(of_groups, kept, r.groups)] = 1;
    for (int64_t e = 0; e < r.count; ++e) taken[e] = !kept[e / size];
}

// The share of an expert among all whose logits are near its own, without those taken before.
inline float share_among_near(const float* x, const uint8_t* taken, int64_t best, const Rules& r) {
    float total = 0;
    for (int64_t e = 0; e < r.count; ++e) {
        bool far = (x[best] - x[e]) / std::max(std::fabs(x[e]), x[best]) > 2 * r.margin;
        if (!taken[e] && !far) total += std::exp(x[e] - x[best]);
    }
    return 1.0f / total;
}

template <class T>
void route_by_scores(const T* logits, int64_t tokens, const Rules& r, const float* correction, T* weights,
                     int64_t* numbers) {
    parallel_if(tokens * r.count >= kScoresToShare, tokens, [&](int64_t token) {
        float* scores = static_cast<float*>(scratch(0, (3 * r.count + r.groups + r.chosen) * 4));
        float *preferred = scores + r.count, *of_groups = preferred + r.count, *shares = of_groups + r.groups;
        uint8_t* taken = reinterpret_cast<uint8_t*>(shares + r.chosen);  // of experts, then of groups
        for (int64_t e = 0; e < r.count; ++e) scores[e] = load_one(logits + token * r.count + e);
        score(scores, r);
        for (int64_t e = 0; e < r.count; ++e) preferred[e] = scores[e] + (correction ? correction[e] : 0.0f);
        std::fill(taken, taken + r.count, uint8_t(0));
        if (r.kept_groups < r.groups) take_other_groups(preferred, taken, of_groups, taken + r.count, r);
        float total = 0;
        for (int64_t i = 0; i < r.chosen; ++i) {
            int64_t best = best_of(preferred, taken, r.count);
            shares[i] = r.scoring == kSparsemixer ? share_among_near(scores, taken, best, r) : scores[best];
            total += shares[i];
            taken[best] = 1;
            numbers[token * r.chosen + i] = best;
        }
        float divisor = r.renormalise ? total + r.epsilon : 1.0f;
        for (int64_t i = 0; i < r.chosen; ++i) put(weights + token * r.chosen + i, shares[i] / divisor * r.scale);
    });
}

// out = factor · (out + sigmoid(gate) · y), where y has a gate.
template <class T>
void add_gated(T* out, const T* y, const T* gate, int64_t tokens, int64_t width, float factor) {
    parallel_if(tokens * width >= kWorthSharing, tokens, [&](int64_t token) {
        vf share = all(gate ? 1.0f / (1.0f + std::exp(-load_one(gate + token))) : 1.0f), times = all(factor);
        for (int64_t c = 0; c < width; c += W) {
            int left = int(std::min<int64_t>(W, width - c));
            T* own = out + token * width + c;
            store(own, mul(add(load(own, left), mul(load(y + token * width + c, left), share)), times), left);
        }
    });
}

}  // namespace
}  // namespace quire

using namespace quire;

// The products, from linear.cpp and rows.cpp.
#define QUIRE_PRODUCTS(name, T)                                                                                        \
    extern "C" void quire_linear_##name(const T* x, int64_t xs, int64_t rows, const T* packed, int64_t outputs,        \
                                        int64_t columns, const T* bias, T* y, int64_t ys);                             \
    extern "C" void quire_linear_silu_and_mul_##name(const T* x, int64_t xs, int64_t rows, const T* packed,            \
                                                     int64_t outputs, int64_t columns, const T* bias, T* y,            \
                                                     int64_t ys);                                                      \
    extern "C" void quire_silu_and_mul_##name(const T* x, int64_t rows, int64_t width, T* out);                        \
    namespace quire {                                                                                                  \
    namespace {                                                                                                        \
    inline void multiply(const T* x, int64_t rows, const T* packed, int64_t outputs, int64_t columns, const T* bias,   \
                         T* y) {                                                                                       \
        quire_linear_##name(x, columns, rows, packed, outputs, columns, bias, y, outputs);                             \
    }                                                                                                                  \
    inline void multiply_gated(const T* x, int64_t rows, const T* packed, int64_t width, int64_t columns,              \
                               const T* bias, T* y) {                                                                  \
        quire_linear_silu_and_mul_##name(x, columns, rows, packed, 2 * width, columns, bias, y, width);                \
    }                                                                                                                  \
    inline void gate(const T* x, int64_t rows, int64_t width, T* y) { quire_silu_and_mul_##name(x, rows, width, y); }  \
    }                                                                                                                  \
    }

QUIRE_PRODUCTS(bf16, bf16)
QUIRE_PRODUCTS(fp32, float)

namespace quire {
namespace {

// Pieces of the caller's memory, one behind the other.
struct Workspace {
    char* at;
    template <class T>
    T* take(int64_t number) {
        T* own = reinterpret_cast<T*>(at);
        at += (number * int64_t(sizeof(T)) + 63) / 64 * 64;
        return own;
    }
};

template <class T>
struct Mixture {
    const T *gate_up, *down;           // packed, one expert behind the other
    int64_t gate_up_size, down_size;   // elements of one
    int64_t count, hidden, width;
    bool fused;                        // whether gates are applied as products are written, which only silu is
    float alpha, added, limit;         // of the activation: gate · σ(alpha · gate) · (up + added), both within the limit,
                                       // which bounds gate · σ(gate) instead of the gate if nothing is added;
                                       // alpha 0 stands for gelu(gate) · (up + added), -1 for max(up, 0)² without gates
    const T *gate_up_bias, *down_bias;  // [count, inner()], [count, hidden], or none

    bool is_silu() const { return alpha == 1.0f && added == 0.0f && std::isinf(limit); }
    bool has_gates() const { return alpha >= 0.0f; }
    int64_t inner() const { return has_gates() ? 2 * width : width; }  // of gates and ups
    const T* bias_of(const T* biases, int64_t expert, int64_t size) const {
        return biases ? biases + expert * size : nullptr;
    }
};

// y [rows, width] = max(x, 0)² of x [rows, width].
template <class T>
void square_positive(const T* x, int64_t rows, int64_t width, T* y) {
    parallel_if(rows * width >= kWorthSharing, rows, [&](int64_t row) {
        for (int64_t c = row * width, end = c + width; c < end; c += W) {
            int left = int(std::min<int64_t>(W, end - c));
            vf up = larger(load(x + c, left), all(0.0f));
            store(y + c, mul(up, up), left);
        }
    });
}

// y [rows, width] = the activation of x [rows, inner()]: gates, then ups, or ups alone.
template <class T>
void activate(const Mixture<T>& m, const T* x, int64_t rows, T* y) {
    if (!m.has_gates()) return square_positive(x, rows, m.width, y);
    vf most = all(m.limit), least = all(-m.limit);
    parallel_if(rows * m.width >= kScoresToShare, rows, [&](int64_t row) {
        const T *gates = x + row * 2 * m.width, *ups = gates + m.width;
        for (int64_t c = 0; c < m.width; c += W) {
            int left = int(std::min<int64_t>(W, m.width - c));
            vf gate = load(gates + c, left), up = load(ups + c, left);
            up = larger(smaller(up, most), least);
            if (m.added != 0.0f) gate = smaller(gate, most);
            vf share = m.alpha == 0.0f ? gelu(gate)
                                       : div(gate, add(all(1.0f), exponential(mul(gate, all(-m.alpha)))));
            if (m.added == 0.0f) share = smaller(share, most);
            store(y + row * m.width + c, mul(share, add(up, all(m.added))), left);
        }
    });
}

// out = Σ weight · down(activation(gate(x), up(x))) over each token's experts, summed in fp32. Pairs of expert m.count, which
// is another rank's, come last and are left out.
template <class T>
void experts(const T* x, int64_t tokens, const Mixture<T>& m, const int64_t* numbers, const T* weights, int64_t chosen,
             char* memory, T* out) {
    int64_t pairs = tokens * chosen;
    Workspace free{memory};
    int64_t* ends = free.take<int64_t>(m.count + 2);
    int64_t* order = free.take<int64_t>(pairs);  // (token, choice) pairs, expert by expert
    float* sums = free.take<float>(tokens * m.hidden);
    T* rows = free.take<T>(tokens * m.hidden);
    T* products = free.take<T>(tokens * m.hidden);
    T* gated = free.take<T>(tokens * m.width);
    T* both = m.fused ? nullptr : free.take<T>(2 * tokens * m.width);

    std::fill(ends, ends + m.count + 2, 0);
    for (int64_t p = 0; p < pairs; ++p) ++ends[numbers[p] + 1];
    for (int64_t e = 0; e < m.count; ++e) ends[e + 1] += ends[e];
    for (int64_t p = 0; p < pairs; ++p) order[ends[numbers[p]]++] = p;  // now ends[e] is the end of e
    std::fill(sums, sums + tokens * m.hidden, 0.0f);

    for (int64_t e = 0, first = 0; e < m.count; first = ends[e++]) {
        int64_t n = ends[e] - first;
        if (n == 0) continue;
        const int64_t* own = order + first;
        bool shared = n * m.hidden >= kWorthSharing;
        parallel_if(shared, n, [&](int64_t i) {
            std::memcpy(rows + i * m.hidden, x + own[i] / chosen * m.hidden, m.hidden * sizeof(T));
        });
        const T* gate_up = m.gate_up + e * m.gate_up_size;
        const T* bias = m.bias_of(m.gate_up_bias, e, m.inner());
        if (m.fused) {
            multiply_gated(rows, n, gate_up, m.width, m.hidden, bias, gated);
        } else {
            multiply(rows, n, gate_up, m.inner(), m.hidden, bias, both);
            m.is_silu() ? gate(both, n, m.width, gated) : activate(m, both, n, gated);
        }
        bias = m.bias_of(m.down_bias, e, m.hidden);
        multiply(gated, n, m.down + e * m.down_size, m.hidden, m.width, bias, products);
        parallel_if(shared, n, [&](int64_t i) {  // a token goes to an expert once
            float* sum = sums + own[i] / chosen * m.hidden;
            vf share = all(load_one(weights + own[i]));
            for (int64_t c = 0; c < m.hidden; c += W) {
                int left = int(std::min<int64_t>(W, m.hidden - c));
                store(sum + c, add(load(sum + c, left), mul(load(products + i * m.hidden + c, left), share)), left);
            }
        });
    }
    parallel_if(tokens * m.hidden >= kWorthSharing, tokens, [&](int64_t token) {
        for (int64_t c = 0; c < m.hidden; c += W) {
            int left = int(std::min<int64_t>(W, m.hidden - c));
            store(out + token * m.hidden + c, load(sums + token * m.hidden + c, left), left);
        }
    });
}

}  // namespace
}  // namespace quire

#define QUIRE_EXPERTS(name, T)                                                                                         \
    extern "C" void quire_route_##name(const T* logits, int64_t tokens, int64_t count, int64_t chosen,                 \
                                       int32_t renormalise, T* weights, int64_t* numbers) {                            \
        route<T>(logits, tokens, count, chosen, renormalise != 0, weights, numbers);                                   \
    }                                                                                                                  \
    QUIRE_ENTRY(route_##name)                                                                                          \
    extern "C" void quire_route_by_scores_##name(                                                                      \
        const T* logits, int64_t tokens, int64_t count, int64_t chosen, int32_t renormalise, int32_t scoring,          \
        int64_t groups, int64_t kept_groups, int32_t of_best_two, float scale, float epsilon, float cap, float margin, \
        const float* correction, T* weights, int64_t* numbers) {                                                       \
        Rules rules{count, chosen, renormalise != 0, Scoring(scoring), groups, kept_groups, of_best_two != 0,          \
                    scale, epsilon, cap, margin};                                                                      \
        route_by_scores<T>(logits, tokens, rules, correction, weights, numbers);                                       \
    }                                                                                                                  \
    QUIRE_ENTRY(route_by_scores_##name)                                                                                \
    extern "C" void quire_add_gated_##name(T* out, const T* y, const T* gate, int64_t tokens, int64_t width,           \
                                           float factor) {                                                             \
        add_gated<T>(out, y, gate, tokens, width, factor);                                                             \
    }                                                                                                                  \
    QUIRE_ENTRY(add_gated_##name)                                                                                      \
    extern "C" void quire_experts_##name(const T* x, int64_t tokens, const T* gate_up, int64_t gate_up_size,           \
                                         const T* down, int64_t down_size, int64_t count, int64_t hidden,              \
                                         int64_t width, int32_t fused, float alpha, float added, float limit,          \
                                         const T* gate_up_bias, const T* down_bias, const int64_t* numbers,            \
                                         const T* weights, int64_t chosen, char* memory, T* out) {                     \
        Mixture<T> mixture{gate_up, down,  gate_up_size, down_size, count,        hidden,   width,                     \
                           fused != 0, alpha, added, limit, gate_up_bias, down_bias};                                  \
        experts<T>(x, tokens, mixture, numbers, weights, chosen, memory, out);                                         \
    }                                                                                                                  \
    QUIRE_ENTRY(experts_##name)

QUIRE_EXPERTS(bf16, bf16)
QUIRE_EXPERTS(fp32, float)
