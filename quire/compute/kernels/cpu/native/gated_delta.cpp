// The gated delta rule. A chunk of work is one head of values of a row. A token passes a block of columns of the state
// twice: what the state has for its key and its query, then the change; the block stays in the first cache meanwhile.
#include <algorithm>
#include <cmath>

#include "calls.h"
#include "pool.h"
#include "states.h"

namespace quire {
namespace {

constexpr int kPiece = 16;   // tokens that pass a block at a time
constexpr int kVectors = 4;  // vectors of a block's columns
constexpr int64_t kEnough = 1 << 15;
constexpr float kEps = 1e-6f;

template <class T>
struct Rule {
    const T* qkv;
    int64_t stride;
    const T* a;
    int64_t a_stride;
    const T* b;
    int64_t b_stride;
    const float *decay, *a_bias;
    int64_t each;  // numbers of `a` that a head has: 1, or dk
    int64_t keys, values, dk, dv;
    float* state;
    const int64_t *states, *starts;
    T* out;
    float factor;  // of beta
    float bound;   // the least logarithm of what is kept; 0: none
};

// What a gate keeps of the state.
template <class T>
inline float kept_by(const Rule<T>& s, float decay, float gate) {
    return std::exp(s.bound < 0 ? s.bound / (1.0f + std::exp(decay * gate)) : decay * softplus(gate));
}

// One head's inputs of a token: unit keys, what is kept of each row of the state, and its products with key and query.
struct Token {
    float *key, *kept, *of_key, *of_query;
    float beta, score;  // score: query · key

    Token(float* room, int64_t dk) : key(room), kept(room + dk), of_key(room + 2 * dk), of_query(room + 3 * dk) {}
};

// out = x / |x| · factor
template <class T>
void unit(const T* x, int64_t width, float factor, float* out) {
    vf squares = zero();
    for (int64_t i = 0; i < width; i += W) {
        vf v = load(x + i, within(width - i));
        squares = fma(v, v, squares);
    }
    vf scale = all(factor / std::sqrt(sum(squares) + kEps));
    for (int64_t i = 0; i < width; i += W) store(out + i, mul(load(x + i, within(width - i)), scale), within(width - i));
}

template <class T>
Token read_token(const Rule<T>& s, int64_t head, int64_t token, float* room) {
    int64_t own = head / (s.values / s.keys), dk = s.dk;
    const T *row = s.qkv + token * s.stride, *a = s.a + token * s.a_stride + head * s.each;
    Token t(room, dk);
    unit(row + own * dk, dk, 1.0f / std::sqrt(float(dk)), t.of_query);
    unit(row + (s.keys + own) * dk, dk, 1.0f, t.key);
    for (int64_t i = 0; i < s.each; ++i)
        t.kept[i] = kept_by(s, s.decay[head], load_one(a + i) + s.a_bias[head * s.each + i]);
    for (int64_t i = s.each; i < dk; ++i) t.kept[i] = t.kept[0];
    vf score = zero();
    for (int64_t i = 0; i < dk; i += W) {
        int n = within(dk - i);
        vf kept = load(t.kept + i, n), key = load(t.key + i, n), query = load(t.of_query + i, n);
        score = fma(key, query, score);
        store(t.of_key + i, mul(kept, key), n);
        store(t.of_query + i, mul(kept, query), n);
    }
    t.score = sum(score);
    t.beta = s.factor / (1.0f + std::exp(-load_one(s.b + token * s.b_stride + head)));
    return t;
}

template <class T>
void pass(const Token& t, const T* v, int64_t dk, int64_t dv, const int (&width)[kVectors], float* state, T* out) {
    vf known[kVectors], read[kVectors], change[kVectors];
    for (int i = 0; i < kVectors; ++i) known[i] = read[i] = zero();
    for (int64_t j = 0; j < dk; ++j) {
        vf key = all(t.of_key[j]), query = all(t.of_query[j]);
        for (int i = 0; i < kVectors; ++i) {
            vf s = load(state + j * dv + i * W, width[i]);
            known[i] = fma(s, key, known[i]);
            read[i] = fma(s, query, read[i]);
        }
    }
    for (int i = 0; i < kVectors; ++i) {
        change[i] = mul(sub(load(v + i * W, width[i]), known[i]), all(t.beta));
        store(out + i * W, fma(change[i], all(t.score), read[i]), width[i]);
    }
    for (int64_t j = 0; j < dk; ++j) {
        vf key = all(t.key[j]), kept = all(t.kept[j]);
        for (int i = 0; i < kVectors; ++i) {
            float* at = state + j * dv + i * W;
            store(at, fma(load(at, width[i]), kept, mul(key, change[i])), width[i]);
        }
    }
}

template <class T>
void through(const Rule<T>& s, int64_t row, int64_t head) {
    int64_t dk = s.dk, dv = s.dv;
    float* room = static_cast<float*>(scratch(0, kPiece * 4 * dk * int64_t(sizeof(float))));
    float* state = s.state + (s.states[row] * s.values + head) * dk * dv;
    for (int64_t first = s.starts[row]; first < s.starts[row + 1]; first += kPiece) {
        int count = int(std::min<int64_t>(kPiece, s.starts[row + 1] - first));
        Token* tokens = static_cast<Token*>(scratch(1, kPiece * sizeof(Token)));
        for (int i = 0; i < count; ++i) tokens[i] = read_token(s, head, first + i, room + i * 4 * dk);
        for (int64_t c = 0; c < dv; c += kVectors * W) {
            int width[kVectors];
            for (int i = 0; i < kVectors; ++i) width[i] = within(dv - c - i * W);
            for (int i = 0; i < count; ++i) {
                const T* v = s.qkv + (first + i) * s.stride + 2 * s.keys * dk + head * dv + c;
                pass(tokens[i], v, dk, dv, width, state + c, s.out + ((first + i) * s.values + head) * dv + c);
            }
        }
    }
}

template <class T>
void gated_delta(const Rule<T>& s, int64_t rows) {
    bool shared = (s.starts[rows] - s.starts[0]) * s.values * s.dk * s.dv >= kEnough;
    parallel_if(shared, rows * s.values, [&](int64_t chunk) { through(s, chunk / s.values, chunk % s.values); });
}

}  // namespace
}  // namespace quire

using namespace quire;

#define QUIRE_GATED_DELTA(name, T)                                                                                     \
    extern "C" void quire_gated_delta_##name(                                                                          \
        const T* qkv, int64_t stride, const T* a, int64_t a_stride, const T* b, int64_t b_stride, const float* decay,  \
        const float* a_bias, int64_t each, int64_t keys, int64_t values, int64_t dk, int64_t dv, float* state,         \
        int64_t count, const int64_t* states, const int64_t* starts, int64_t rows, T* out, float factor,               \
        float bound) {                                                                                                 \
        if (!are_states(states, rows, count)) return;                                                                  \
        gated_delta(Rule<T>{qkv, stride, a, a_stride, b, b_stride, decay, a_bias, each, keys, values, dk, dv, state,   \
                            states, starts, out, factor, bound},                                                       \
                    rows);                                                                                             \
    }                                                                                                                  \
    QUIRE_ENTRY(gated_delta_##name)

QUIRE_GATED_DELTA(bf16, bf16)
QUIRE_GATED_DELTA(fp32, float)
