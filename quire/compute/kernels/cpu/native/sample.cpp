// From logits to tokens: the likeliest one, or one draw from what temperature, min_p, top_k and top_p leave, in vLLM's
// order. Rows are worked on side by side.
#include <algorithm>
#include <cmath>
#include <vector>

#include "calls.h"
#include "pool.h"
#include "vec.h"

namespace quire {
namespace {

enum Fault : int8_t { kFine, kUnsound, kNothingLeft };  // as reference/sample.py has them

constexpr int64_t kAllTies = int64_t(1) << 62;
constexpr int64_t kBlock = 512;        // values whose largest one is searched again for its place
constexpr int64_t kWorthSharing = 1 << 15;  // logits
constexpr int64_t kFirstLook = 1024;  // likeliest tokens that are sorted first, as most cuts lie among them
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

struct Columns {
    const float* temperature;
    const int64_t* top_k;
    const float *top_p, *min_p;
    const int64_t* seed;
    int64_t* drawn;
};

struct Thresholds {
    float* value;
    int64_t* last_id;
};

// The first of the largest values; where there is a NaN, that is the largest.
template <class T>
int64_t likeliest(const T* logits, int64_t vocab, float& best) {
    int64_t found = 0;
    vf odd = zero();  // becomes NaN where a value is NaN or infinite
    best = kMinusInfinity;
    for (int64_t begin = 0; begin < vocab; begin += kBlock) {
        int64_t end = std::min(vocab, begin + kBlock), c = begin;
        vf most = all(kMinusInfinity);
        for (; c + W <= end; c += W) {
            vf x = load(logits + c);
            most = larger(most, x);
            odd = fma(x, zero(), odd);
        }
        float own = largest(most);
        for (; c < end; ++c) own = std::max(own, load_one(logits + c)), odd = fma(all(load_one(logits + c)), zero(), odd);
        if (own > best) best = own, found = begin;
    }
    if (sum(odd) != 0.0f)
        for (int64_t c = 0; c < vocab; ++c)
            if (std::isnan(load_one(logits + c))) return best = load_one(logits + c), c;
    while (load_one(logits + found) != best) ++found;
    return found;
}

// Philox4x32-10 (Salmon et al. 2011) of the counter `draw`: a number in [0, 1) with 53 random bits.
double uniform(uint64_t seed, uint64_t draw) {
    uint32_t c[4] = {uint32_t(draw), uint32_t(draw >> 32), 0, 0};
    uint32_t key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        uint64_t a = uint64_t(c[0]) * 0xD2511F53u, b = uint64_t(c[2]) * 0xCD9E8D57u;
        uint32_t next[4] = {uint32_t(b >> 32) ^ c[1] ^ key[0], uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ key[1], uint32_t(a)};
        std::copy(next, next + 4, c);
        key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
    }
    return double(uint64_t(c[0]) << 21 | c[1] >> 11) * 0x1p-53;
}

struct Scored {
    float score;
    int32_t id;
    bool operator<(const Scored& other) const {  // the likelier one first, of equal ones the lower id
        return score != other.score ? score > other.score : id < other.id;
    }
};

// Tokens with a score of more than -inf, and which of them stay: the `top_k` likeliest, of those the fewest that reach
// `top_p`, and one at least. What is cut gets -inf.
void cut_tail(float* scores, int64_t vocab, int64_t top_k, float top_p, double total, float highest) {
    static thread_local std::vector<Scored> found;
    found.clear();
    for (int64_t c = 0; c < vocab; ++c)
        if (scores[c] > kMinusInfinity) found.push_back({scores[c], int32_t(c)});
    int64_t number = int64_t(found.size()), most = top_k > 0 ? std::min(top_k, number) : number;
    if (number == 0) return;
    int64_t look = std::min(most, std::max<int64_t>(kFirstLook, top_k > 0 && top_k < vocab ? top_k : 0)), sorted = 0, kept = 0;
    auto sort_up_to = [&](int64_t end) {
        if (end < number) std::nth_element(found.begin() + sorted, found.begin() + end, found.end());
        std::sort(found.begin() + sorted, found.begin() + end);
        sorted = end;
    };
    sort_up_to(look);
    if (top_k > 0 && top_k < vocab) {
        total = 0;
        for (int64_t i = 0; i < most; ++i) total += std::exp(found[i].score - highest);
    }
    double before = 0;
    for (; kept < most && (top_p >= 1.0f || before < double(top_p) * total); ++kept) {
        if (kept == sorted) sort_up_to(std::min(most, 8 * sorted));
        before += std::exp(found[kept].score - highest);
    }
    for (int64_t i = std::max<int64_t>(1, kept); i < number; ++i) scores[found[i].id] = kMinusInfinity;
}

template <class T>
int64_t draw(const T* logits, int64_t vocab, const Columns& asked, int64_t slot, float best, float min_temperature,
             float* threshold, int64_t* last_id) {
    float* scores = static_cast<float*>(scratch(0, (vocab + W) * 4));
    float temperature = std::max(asked.temperature[slot], min_temperature);
    float highest = best / temperature, min_p = asked.min_p[slot], top_p = asked.top_p[slot];
    float floor = min_p > 0 ? highest + std::log(min_p) : kMinusInfinity;
    int64_t top_k = asked.top_k[slot];
    for (int64_t c = 0; c < vocab; c += W) {
        int n = int(std::min<int64_t>(W, vocab - c));
        vf score = div(load(logits + c, n), all(temperature));
        store(scores + c, score, n);
    }
    if (min_p > 0)
        for (int64_t c = 0; c < vocab; ++c)
            if (scores[c] < floor) scores[c] = kMinusInfinity;
    auto weight_from = [&](int64_t c, float* weights) {
        int n = int(std::min<int64_t>(W, vocab - c));
        store(weights, exponential(sub(load(scores + c, n), all(highest))));
        return n;
    };
    auto sum_all = [&] {
        double total = 0;
        float weights[W];
        for (int64_t c = 0; c < vocab; c += W) {
            int n = weight_from(c, weights);
            for (int i = 0; i < n; ++i) total += weights[i];
        }
        return total;
    };
    double total = sum_all();
    if (top_p < 1.0f || (top_k > 0 && top_k < vocab)) {
        cut_tail(scores, vocab, top_k, top_p, total, highest);
        total = sum_all();
    }
    double target = uniform(uint64_t(asked.seed[slot]), uint64_t(asked.drawn[slot])) * total, before = 0;
    int64_t token = vocab - 1;
    float weights[W];
    for (int64_t c = 0; c < vocab; c += W) {
        int n = weight_from(c, weights), i = 0;
        for (; i < n && (before += weights[i]) <= target; ++i) {
        }
        if (i < n) {
            token = c + i;
            break;
        }
    }
    if (threshold) {
        float value = std::numeric_limits<float>::infinity();
        int64_t last = -1;
        for (int64_t c = 0; c < vocab; ++c) {
            float logit = load_one(logits + c);
            if (scores[c] > kMinusInfinity && logit <= value) value = logit, last = c;
        }
        *threshold = value, *last_id = last;
    }
    return token;
}

template <class T>
void sample(const T* logits, int64_t stride, int64_t rows, int64_t vocab, const int64_t* slots, Columns asked,
            float min_temperature, int64_t* tokens, int8_t* faults, int64_t* last, Thresholds thresholds) {
    parallel_if(rows * vocab >= kWorthSharing, rows, [&](int64_t row) {
        const T* own = logits + row * stride;
        float best;
        tokens[row] = likeliest(own, vocab, best);
        faults[row] = best == kMinusInfinity ? kNothingLeft : std::isfinite(best) ? kFine : kUnsound;
        float* value = thresholds.value ? thresholds.value + row : nullptr;
        int64_t* last_id = thresholds.last_id ? thresholds.last_id + row : nullptr;
        if (value) *value = kMinusInfinity, *last_id = kAllTies;
        if (asked.temperature[slots[row]] > 0 && faults[row] == kFine)
            tokens[row] = draw(own, vocab, asked, slots[row], best, min_temperature, value, last_id);
    });
    if (!last) return;
    for (int64_t row = 0; row < rows; ++row) {
        last[slots[row]] = tokens[row];
        ++asked.drawn[slots[row]];
    }
}

inline void forbid(float& logit) { logit = kMinusInfinity; }
inline void forbid(bf16& logit) { logit = 0xFF80; }

// A mask's words have a bit for each token, the lowest first; its row gets -inf where that is 0.
template <class T>
void apply_token_bitmask(T* logits, int64_t stride, int64_t vocab, const int64_t* rows, int64_t number, const uint32_t* bits) {
    constexpr int64_t kBits = 32;
    int64_t words = (vocab + kBits - 1) / kBits;
    parallel_if(number * vocab >= kWorthSharing, number, [&](int64_t i) {
        T* own = logits + rows[i] * stride;
        const uint32_t* mask = bits + i * words;
        for (int64_t word = 0; word < words; ++word) {
            int64_t begin = word * kBits, count = std::min(kBits, vocab - begin);
            uint32_t allowed = mask[word];
            if (allowed == ~uint32_t(0)) continue;
            for (int64_t bit = 0; bit < count; ++bit)
                if (!(allowed >> bit & 1)) forbid(own[begin + bit]);
        }
    });
}

}  // namespace
}  // namespace quire

using namespace quire;

#define QUIRE_SAMPLE(name, T)                                                                                          \
    extern "C" void quire_sample_##name(                                                                               \
        const T* logits, int64_t stride, int64_t rows, int64_t vocab, const int64_t* slots, const float* temperature,  \
        const int64_t* top_k, const float* top_p, const float* min_p, const int64_t* seed, int64_t* drawn,             \
        float min_temperature, int64_t* tokens, int8_t* faults, int64_t* last, float* value, int64_t* last_id) {       \
        sample<T>(logits, stride, rows, vocab, slots, Columns{temperature, top_k, top_p, min_p, seed, drawn},          \
                  min_temperature, tokens, faults, last, Thresholds{value, last_id});                                  \
    }                                                                                                                  \
    QUIRE_ENTRY(sample_##name)

QUIRE_SAMPLE(bf16, bf16)
QUIRE_SAMPLE(fp32, float)

#define QUIRE_APPLY_TOKEN_BITMASK(name, T)                                                                             \
    extern "C" void quire_apply_token_bitmask_##name(T* logits, int64_t stride, int64_t vocab, const int64_t* rows,    \
                                                     int64_t number, const uint32_t* bits) {                           \
        apply_token_bitmask<T>(logits, stride, vocab, rows, number, bits);                                             \
    }                                                                                                                  \
    QUIRE_ENTRY(apply_token_bitmask_##name)

QUIRE_APPLY_TOKEN_BITMASK(bf16, bf16)
QUIRE_APPLY_TOKEN_BITMASK(fp32, float)
