// Attention over a paged KV cache, with an online softmax (Milakov & Gimelshein 2018) over tiles of keys. A chunk of work
// is some tokens of a row and one KV head with all query heads that share it.
//
// Few queries at once go over keys and values where they lie; more are worth rearranging a tile of keys and values
// into panels, which the product of linear layers then multiplies. A quantized cache's elements (C is not T) are widened
// as they are read; queries have their keys' scale already, and sums take their values'.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "cache.h"
#include "calls.h"
#include "pool.h"
#include "tile.h"

namespace quire {
namespace {

constexpr int kKeys = 64;         // in a tile
constexpr int kQueries = 64;      // query heads · tokens in a chunk of work, if one token has no more
constexpr int kQueriesInPlace = 4;  // so few go over keys and values where they lie
constexpr int kKeysAtOnce = W;    // whose products with one query are summed together, as many as a vector has sums
constexpr int kAhead = 16;        // keys that are asked for before they are needed
constexpr int64_t kLine = 64;     // bytes of a cache line
constexpr int64_t kWorthSharing = 1 << 16;  // products of queries and keys; fewer take less than another thread's help
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

template <class T, class C>
struct Step {
    const T* q;
    const C *keys, *values;
    T* out;
    const int64_t* table;
    int64_t table_stride;
    const int64_t *slots, *starts, *counts;
    int64_t rows, heads, kv_heads, d, block_size, block_stride, window;
    float scale, cap;
    const float* scales;  // [2, kv_heads] of a quantized cache

    static constexpr bool kQuantized = !std::is_same_v<T, C>;
    float value_scale(int64_t head) const { return kQuantized ? scales[kv_heads + head] : 1.0f; }
};

// Of one chunk of work: query tokens at `position` and after it, their first one's place in the batch, and the keys from
// `begin` to `end` that one of them sees.
struct Piece {
    int64_t token, tokens, position, head, begin, end;
    const int64_t* blocks;
};

template <class T, class C>
const C* at(const Step<T, C>& s, const C* cache, const Piece& piece, int64_t position) {
    int64_t block = piece.blocks[position / s.block_size], offset = position % s.block_size;
    return cache + block * s.block_stride + (offset * s.kv_heads + piece.head) * s.d;
}

// The keys of a tile and those behind it; behind the last that is seen stands the last.
template <class T, class C>
void find_keys(const Step<T, C>& s, const Piece& piece, int64_t begin, const C** key) {
    int64_t block = begin / s.block_size, offset = begin % s.block_size;
    int n = int(std::min<int64_t>(kKeys + kAhead, piece.end - begin));
    for (int j = 0; j < n; ++j) {
        key[j] = s.keys + piece.blocks[block] * s.block_stride + (offset * s.kv_heads + piece.head) * s.d;
        if (++offset == s.block_size) offset = 0, ++block;
    }
    for (int j = n; j < kKeys + kAhead; ++j) key[j] = key[n - 1];
}

template <class T, class C>
void bound_scores(const Step<T, C>& s, float* scores, int n) {
    for (int j = 0; j < n; j += W) {
        vf x = mul(load(scores + j), all(s.scale));
        if (s.cap > 0) x = mul(tanh(div(x, all(s.cap))), all(s.cap));
        store(scores + j, x);
    }
}

// Scores [kKeys] of one query become weights: those outside [begin, end) get none. Returns by how much what was summed
// before shrinks.
template <class T>
float weigh(float* scores, int begin, int end, T* weights, float& highest, float& total) {
    std::fill(scores, scores + begin, kMinusInfinity);
    std::fill(scores + end, scores + kKeys, kMinusInfinity);
    vf most = load(scores);
    for (int j = W; j < kKeys; j += W) most = larger(most, load(scores + j));
    float before = highest;
    highest = std::max(highest, largest(most));
    vf sums = zero();
    for (int j = 0; j < kKeys; j += W) {
        vf weight = exponential(sub(load(scores + j), all(highest)));
        sums = add(sums, weight);
        store(weights + j, weight);
    }
    float shrunk = before == kMinusInfinity ? 0.0f : std::exp(before - highest);
    total = total * shrunk + sum(sums);
    return shrunk;
}

template <class T>
void finish(const float* sums, float total, float scale, T* out, int64_t d) {
    vf factor = all(scale / total);
    for (int64_t c = 0; c < d; c += W) store(out + c, mul(load(sums + c), factor), int(std::min<int64_t>(W, d - c)));
}

inline vf multiply_add(const float* a, const float* b, vf c) { return fma(load(a), load(b), c); }

inline vf multiply_add(const bf16* a, const bf16* b, vf c) {
    vi x = load_pairs(a), y = load_pairs(b);
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(c, (__m512bh)x, (__m512bh)y);
#else
    return fma(high(x), high(y), fma(low(x), low(y), c));
#endif
}

template <class T, class C>
inline vf multiply_add(const T* a, const C* b, vf c) {
    return fma(load(a), load(b), c);
}

template <class T, class C, int R>
void attend_in_place(const Step<T, C>& s, const Piece& piece) {
    constexpr int E = s.kQuantized ? W : W * Element<T>::kGroup;
    const T* q = s.q + (piece.token * s.heads + piece.head * R) * s.d;
    T* out = s.out + (piece.token * s.heads + piece.head * R) * s.d;
    float* sums = static_cast<float*>(scratch(0, R * (s.d + W) * 4));
    alignas(64) float scores[R][kKeys], weights[R][kKeys];
    const C* key[kKeys + kAhead];
    float highest[R], total[R] = {};
    std::fill(highest, highest + R, kMinusInfinity);
    std::fill(sums, sums + R * s.d, 0.0f);
    for (int64_t begin = piece.begin; begin < piece.end; begin += kKeys) {
        int n = int(std::min<int64_t>(kKeys, piece.end - begin));
        find_keys(s, piece, begin, key);
        for (int first = 0; first < n; first += kKeysAtOnce) {
            for (int j = first; j < first + kKeysAtOnce; ++j) {
                for (int64_t c = 0; c < s.d; c += kLine / int64_t(sizeof(C))) {
                    _mm_prefetch(key[j + kAhead] + c, _MM_HINT_T0);
                    _mm_prefetch(key[j] - s.keys + s.values + c, _MM_HINT_T0);
                }
            }
            for (int r = 0; r < R; ++r) {
                vf products[kKeysAtOnce];
                for (int j = 0; j < kKeysAtOnce; ++j) products[j] = zero();
                for (int64_t c = 0; c < s.d; c += E)
                    for (int j = 0; j < kKeysAtOnce; ++j)
                        products[j] = multiply_add(q + r * s.d + c, key[first + j] + c, products[j]);
                store_sums(scores[r] + first, products);
            }
        }
        float shrunk[R];
        for (int r = 0; r < R; ++r) {
            bound_scores(s, scores[r], n);
            shrunk[r] = weigh(scores[r], 0, n, weights[r], highest[r], total[r]);
        }
        auto add_values = [&](auto vectors, int64_t c) {
            constexpr int N = decltype(vectors)::value;
            vf own[R][N];
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < N; ++v) own[r][v] = mul(load(sums + r * s.d + c + v * W), all(shrunk[r]));
            for (int j = 0; j < n; ++j) {
                vf x[N];
                for (int v = 0; v < N; ++v) x[v] = load(key[j] - s.keys + s.values + c + v * W);
                for (int r = 0; r < R; ++r)
                    for (int v = 0; v < N; ++v) own[r][v] = fma(all(weights[r][j]), x[v], own[r][v]);
            }
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < N; ++v) store(sums + r * s.d + c + v * W, own[r][v]);
        };
        int64_t c = 0;
        for (; c + 32 <= s.d; c += 32) add_values(std::integral_constant<int, 32 / W>(), c);
        if (c < s.d) add_values(std::integral_constant<int, 16 / W>(), c);
    }
    float scale = s.value_scale(piece.head);
    for (int r = 0; r < R; ++r) finish(sums + r * s.d, total[r], scale, out + r * s.d, s.d);
}

// A key or value as T, in `own` [d] unless that is what it is in the cache.
template <class T, class C>
const T* widened(const Step<T, C>& s, const C* from, T* own) {
    if constexpr (Step<T, C>::kQuantized) {
        widen_row(from, s.d, own);
        return own;
    } else {
        return from;
    }
}

// [n keys, d] → [d / group, kKeys, group], each key and value where the block table says; `wide` is [16, d].
template <class T, class C>
void gather_keys(const Step<T, C>& s, const Piece& piece, int64_t begin, int n, T* wide, T* panel) {
    constexpr int G = Element<T>::kGroup;
    int64_t groups = s.d / G;
    for (int first = 0; first < n; first += 16) {
        const T* key[16];
        int some = std::min(16, n - first);
        for (int j = 0; j < some; ++j) key[j] = widened(s, at(s, s.keys, piece, begin + first + j), wide + j * s.d);
        for (int64_t g = 0; g < groups; ++g)
            for (int j = 0; j < some; ++j) std::memcpy(panel + (g * kKeys + first + j) * G, key[j] + g * G, 4);
    }
}

// [n keys, d] → [keys / group, width, group]; behind the last key and the last dimension stand zeros.
template <class T, class C>
void gather_values(const Step<T, C>& s, const Piece& piece, int64_t begin, int n, int64_t width, T* wide, T* panel) {
    constexpr int G = Element<T>::kGroup;
    for (int j = 0; j < n; j += G) {
        T* to = panel + j * width;
        for (int i = 0; i < G; ++i) {
            const T* from = j + i < n ? widened(s, at(s, s.values, piece, begin + j + i), wide) : nullptr;
            for (int64_t c = 0; c < s.d; ++c) to[c * G + i] = from ? from[c] : T(0);
            for (int64_t c = s.d; c < width; ++c) to[c * G + i] = T(0);
        }
    }
}

template <class T>
void multiply_all(int64_t rows, const T* x, int64_t xs, const T* w, int64_t ws, int64_t groups, int vectors, float* sums,
                  int64_t ss, bool accumulate) {
    constexpr int most = Element<T>::kRows;
    for (int64_t r = 0; r < rows; r += most) {
        int n = int(std::min<int64_t>(most, rows - r));
        multiply_block<0>(n, x + r * xs, xs, w, ws, groups, vectors, sums + r * ss, ss, accumulate, nullptr);
    }
}

template <class T>
T* take(char*& memory, int64_t n) {
    T* part = reinterpret_cast<T*>(memory);
    memory += (n * int64_t(sizeof(T)) + 63) / 64 * 64;
    return part;
}

template <class T, class C>
void attend_gathered(const Step<T, C>& s, const Piece& piece) {
    constexpr int G = Element<T>::kGroup;
    int64_t group = s.heads / s.kv_heads, queries = piece.tokens * group, width = (s.d + W - 1) / W * W;
    int64_t bytes = queries * (s.d + 2 * kKeys + width + 4) * 4 + (kKeys * (s.d + width) + 16 * s.d) * 4 + 1024;
    char* memory = static_cast<char*>(scratch(0, bytes));
    T* q = take<T>(memory, queries * s.d);
    T* keys = take<T>(memory, kKeys * s.d);
    T* values = take<T>(memory, kKeys * width);
    T* wide = take<T>(memory, 16 * s.d);
    T* weights = take<T>(memory, queries * kKeys);
    float* scores = take<float>(memory, queries * kKeys);
    float* sums = take<float>(memory, queries * width);
    float* highest = take<float>(memory, queries);
    float* total = take<float>(memory, queries);
    for (int64_t i = 0; i < piece.tokens; ++i) {
        const T* from = s.q + ((piece.token + i) * s.heads + piece.head * group) * s.d;
        std::memcpy(q + i * group * s.d, from, group * s.d * sizeof(T));
    }
    std::fill(highest, highest + queries, kMinusInfinity);
    std::fill(total, total + queries, 0.0f);
    std::fill(sums, sums + queries * width, 0.0f);
    for (int64_t begin = piece.begin; begin < piece.end; begin += kKeys) {
        int n = int(std::min<int64_t>(kKeys, piece.end - begin));
        gather_keys(s, piece, begin, n, wide, keys);
        gather_values(s, piece, begin, n, width, wide, values);
        multiply_all<T>(queries, q, s.d, keys, kKeys * G, s.d / G, (n + W - 1) / W, scores, kKeys, false);
        for (int64_t r = 0; r < queries; ++r) {
            int64_t position = piece.position + r / group;
            int64_t first = s.window > 0 ? std::max<int64_t>(0, position - s.window + 1 - begin) : 0;
            int64_t end = std::min<int64_t>(n, position + 1 - begin);
            if (end <= first) {
                std::fill(weights + r * kKeys, weights + (r + 1) * kKeys, T(0));
                continue;
            }
            bound_scores(s, scores + r * kKeys, n);
            float* own = sums + r * width;
            float shrunk = weigh(scores + r * kKeys, int(first), int(end), weights + r * kKeys, highest[r], total[r]);
            if (shrunk != 1.0f)
                for (int64_t c = 0; c < width; c += W) store(own + c, mul(load(own + c), all(shrunk)));
        }
        multiply_all<T>(queries, weights, kKeys, values, width * G, (n + G - 1) / G, int(width / W), sums, width, true);
    }
    for (int64_t r = 0; r < queries; ++r) {
        T* out = s.out + ((piece.token + r / group) * s.heads + piece.head * group + r % group) * s.d;
        finish(sums + r * width, total[r], s.value_scale(piece.head), out, s.d);
    }
}

template <class T, class C>
void attend_piece(const Step<T, C>& s, const Piece& piece) {
    int64_t group = s.heads / s.kv_heads;
    constexpr int E = std::max(16, W * Element<T>::kGroup);  // whole vectors of keys and of sums
    if (piece.tokens == 1 && group <= kQueriesInPlace && s.d % E == 0) {
        switch (group) {
            case 1: return attend_in_place<T, C, 1>(s, piece);
            case 2: return attend_in_place<T, C, 2>(s, piece);
            case 3: return attend_in_place<T, C, 3>(s, piece);
            default: return attend_in_place<T, C, 4>(s, piece);
        }
    }
    attend_gathered(s, piece);
}

template <class T, class C>
void paged_attention(const Step<T, C>& s) {
    int64_t most = std::max<int64_t>(1, kQueries * s.kv_heads / s.heads);  // tokens in a piece
    std::vector<int64_t> pieces(s.rows + 1), tokens(s.rows + 1);           // before each row
    int64_t products = 0;
    for (int64_t row = 0; row < s.rows; ++row) {
        pieces[row + 1] = pieces[row] + (s.counts[row] + most - 1) / most;
        tokens[row + 1] = tokens[row] + s.counts[row];
        products += s.counts[row] * (s.starts[row] + s.counts[row]) * s.heads * s.d;
    }
    int64_t all_pieces = pieces[s.rows];
    parallel_if(products >= kWorthSharing, all_pieces * s.kv_heads, [&](int64_t chunk) {
        int64_t number = all_pieces - 1 - chunk / s.kv_heads;  // of a long row, the piece that sees most comes first
        int64_t row = std::upper_bound(pieces.begin(), pieces.end(), number) - pieces.begin() - 1;
        int64_t first = (number - pieces[row]) * most, n = std::min(most, s.counts[row] - first);
        int64_t position = s.starts[row] + first;
        int64_t begin = s.window > 0 ? std::max<int64_t>(0, position - s.window + 1) : 0;
        const int64_t* blocks = s.table + s.slots[row] * s.table_stride;
        attend_piece(s, Piece{tokens[row] + first, n, position, chunk % s.kv_heads, begin, position + n, blocks});
    });
}

}  // namespace
}  // namespace quire

using namespace quire;

#define QUIRE_ATTENTION(name, T, C)                                                                                    \
    extern "C" void quire_paged_attention_##name(                                                                      \
        const T* q, const C* keys, const C* values, T* out, const int64_t* table, int64_t table_stride,                \
        const int64_t* slots, const int64_t* starts, const int64_t* counts, int64_t rows, int64_t heads,               \
        int64_t kv_heads, int64_t d, int64_t block_size, int64_t block_stride, int64_t window, float scale,            \
        float cap, const float* scales) {                                                                              \
        paged_attention(Step<T, C>{q, keys, values, out, table, table_stride, slots, starts, counts, rows, heads, kv_heads,\
                             d, block_size, block_stride, window, scale, cap, scales});                             \
    }                                                                                                                  \
    QUIRE_ENTRY(paged_attention_##name)

QUIRE_ATTENTION(bf16, bf16, bf16)
QUIRE_ATTENTION(fp32, float, float)
QUIRE_ATTENTION(fp8_e4m3_bf16, bf16, e4m3)
QUIRE_ATTENTION(fp8_e4m3_fp32, float, e4m3)
QUIRE_ATTENTION(fp8_e5m2_bf16, bf16, e5m2)
QUIRE_ATTENTION(fp8_e5m2_fp32, float, e5m2)
QUIRE_ATTENTION(int8_bf16, bf16, int8_t)
QUIRE_ATTENTION(int8_fp32, float, int8_t)
