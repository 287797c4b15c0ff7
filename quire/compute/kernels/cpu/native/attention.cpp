// Attention over a paged KV cache, with an online softmax (Milakov & Gimelshein 2018) over tiles of keys. A chunk of work
// is some tokens of a row and some KV heads, each with all query heads that share it.
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
#include "integers.h"
#include "pool.h"
#include "tile.h"

namespace quire {
namespace {

constexpr int kKeys = 64;         // in a tile
constexpr int kQueries = 64;      // query heads · tokens in a chunk of work, if one token has no more
constexpr int kQueriesInPlace = 4;  // so few go over keys and values where they lie
constexpr int kKeysAtOnce = W;    // whose products with one query are summed together, as many as a vector has sums
constexpr int64_t kChunksOfTokens = 2, kChunksOfPrompts = 8;  // of work for a thread at least; prompts' differ in size
constexpr int64_t kLine = 64;     // bytes of a cache line
constexpr int64_t kWorthSharing = 1 << 16;  // products of queries and keys; fewer take less than another thread's help
constexpr float kLargest = 32767.0f;  // integer: what a weight of 1 becomes, and the largest number of a query
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Of functions that take longer than a call: otherwise each of the many kernels below would have compiled its own.
#define QUIRE_ONCE __attribute__((noinline, noclone))

// Which keys a query sees: those of its own token and of the window - 1 tokens before it; or of its own chunk up to its own
// token; with 0 for both, of all tokens before it. If it is two-sided, of as many tokens behind its own, too.
struct Mask {
    int64_t window, chunk;
    bool two_sided;
};

struct Range {
    int64_t begin, end;
};

// The keys that queries at positions `first` to `end` - 1 see together, of a row that has `length` keys.
inline Range visible_range(const Mask& mask, int64_t first, int64_t end, int64_t length) {
    if (mask.chunk > 0) return {first / mask.chunk * mask.chunk, end};
    if (mask.two_sided) end = mask.window > 0 ? std::min(length, end - 1 + mask.window) : length;
    return {mask.window > 0 ? std::max<int64_t>(0, first + 1 - mask.window) : 0, end};
}

// Which of the n keys of a tile, the first of them at `begin`, a query at `position` sees. It may end before it begins.
inline Range tile_mask(const Mask& mask, int64_t position, int64_t begin, int64_t n) {
    Range seen = visible_range(mask, position, position + 1, begin + n);
    return {std::max<int64_t>(0, seen.begin - begin), std::min(n, seen.end - begin)};
}

template <class T, class C>
struct Step {
    const T* q;
    const C *keys, *values;
    T* out;
    const int64_t* table;
    int64_t table_stride;
    const int64_t *slots, *starts, *counts;
    int64_t rows, heads, kv_heads, d, block_size, block_stride;
    Mask mask;
    float scale, cap;
    const float* scales;  // [2, kv_heads] of a quantized cache
    const float* sinks;   // [heads], or none
    const float* slopes;  // [heads], or none

    static constexpr bool kQuantized = !std::is_same_v<T, C>;
    float value_scale(int64_t head) const { return kQuantized ? scales[kv_heads + head] : 1.0f; }
};

// Starts the softmax of n queries, those of heads from `head` on, over and over `group` of them: with each head's sink, if
// it has one, which counts like the score of a key without a value.
QUIRE_ONCE void start(const float* sinks, int64_t head, int64_t group, int64_t n, float* highest, float* total) {
    for (int64_t i = 0; i < n; ++i) {
        highest[i] = sinks == nullptr ? kMinusInfinity : sinks[head + i % group];
        total[i] = highest[i] == kMinusInfinity ? 0.0f : 1.0f;
    }
}

// Of one chunk of work: query tokens at `position` and after it, their first one's place in the batch, KV heads from `head`
// on, and the keys from `begin` to `end` that one of the tokens sees.
struct Piece {
    int64_t token, tokens, position, head, heads, begin, end;
    const int64_t* blocks;
};

template <class T, class C>
const C* at(const Step<T, C>& s, const C* cache, const Piece& piece, int64_t position) {
    int64_t block = piece.blocks[position / s.block_size], offset = position % s.block_size;
    return cache + block * s.block_stride + (offset * s.kv_heads + piece.head) * s.d;
}

QUIRE_ONCE void bound_scores(float scale, float cap, float* scores, int n) {
    for (int j = 0; j < n; j += W) {
        vf x = mul(load(scores + j), all(scale));
        if (cap > 0) x = mul(tanh(div(x, all(cap))), all(cap));
        store(scores + j, x);
    }
}

// What the keys from `begin` on are nearer to the query at `position`, times its head's slope.
QUIRE_ONCE void add_slopes(float slope, float* scores, int n, int64_t begin, int64_t position) {
    for (int j = 0; j < n; ++j) scores[j] += slope * float(begin + j - position);
}

template <class T>
void store_weights(T* to, vf weights) {
    store(to, weights);
}
inline void store_weights(int16_t* to, vf weights) { store_rounded(to, mul(weights, all(kLargest))); }

// Scores [kKeys] of one query become weights: those outside [begin, end) get none. Returns by how much what was summed
// before shrinks.
template <class T>
QUIRE_ONCE float weigh(float* scores, int begin, int end, T* weights, float& highest, float& total) {
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
        store_weights(weights + j, weight);
    }
    float shrunk = before == kMinusInfinity ? 0.0f : std::exp(before - highest);
    total = total * shrunk + sum(sums);
    return shrunk;
}

template <class T>
QUIRE_ONCE void finish(const float* sums, float total, float scale, T* out, int64_t d) {
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

// Where the keys of a tile of all heads are; those of the next head lie behind.
template <class C>
struct Keys {
    const C* at[kKeys];  // behind the last that is seen stands the last
    int count;
};

template <class T, class C>
QUIRE_ONCE void find_keys(const Step<T, C>& s, const Piece& piece, int64_t begin, Keys<C>& keys) {
    int64_t block = begin / s.block_size, offset = begin % s.block_size;
    keys.count = int(std::min<int64_t>(kKeys, std::max<int64_t>(0, piece.end - begin)));
    if (keys.count == 0) return;
    for (int j = 0; j < keys.count; ++j) {
        keys.at[j] = s.keys + piece.blocks[block] * s.block_stride + (offset * s.kv_heads + piece.head) * s.d;
        if (++offset == s.block_size) offset = 0, ++block;
    }
    for (int j = keys.count; j < kKeys; ++j) keys.at[j] = keys.at[j - 1];
}

// Asks for the keys and values of a tile bit by bit, in the order in which they lie: if it asked for all at once, what is
// computed meanwhile would have to wait.
template <class C>
struct Ahead {
    const Keys<C>& tile;
    int64_t to_values, heads, d, key = 0, head = 0;

    void step() {
        if (key >= tile.count) return;
        const C* from = tile.at[key] + head * d;
        for (int64_t c = 0; c < d; c += kLine / int64_t(sizeof(C))) {
            _mm_prefetch(from + c, _MM_HINT_T1);
            _mm_prefetch(from + to_values + c, _MM_HINT_T1);
        }
        if (++head == heads) head = 0, ++key;
    }
};

// What one KV head's R query heads compute, each in the model's floats: products with keys, and values times weights.
template <class T, class C, int R>
struct FloatProducts {
    static constexpr int kElements = Step<T, C>::kQuantized ? W : W * Element<T>::kGroup;
    const Step<T, C>& s;
    const T* queries;  // [heads, R, d]
    float weights[R][kKeys];

    FloatProducts(const Step<T, C>& step, const Piece&, const T* q) : s(step), queries(q) {}

    // Products of a head with kKeysAtOnce keys → scores.
    void score(int64_t head, const Keys<C>& keys, int first, float (&scores)[R][kKeys], Ahead<C>& ahead) const {
        for (int r = 0; r < R; ++r) {
            const T* q = queries + (head * R + r) * s.d;
            vf products[kKeysAtOnce];
            for (int j = 0; j < kKeysAtOnce; ++j) {
                if (r == 0) ahead.step();
                products[j] = multiply_add(q, keys.at[first + j] + head * s.d, zero());
            }
            for (int64_t c = kElements; c < s.d; c += kElements)
                for (int j = 0; j < kKeysAtOnce; ++j)
                    products[j] = multiply_add(q + c, keys.at[first + j] + head * s.d + c, products[j]);
            store_sums(scores[r] + first, products);
        }
    }

    float unit(int64_t, int) const { return 1.0f; }  // of scores

    // sums [R, d] += the values of a tile, as its scores weigh them.
    void add_values(int64_t head, const Keys<C>& keys, float (&scores)[R][kKeys], float* highest, float* total,
                    float* sums) {
        float shrunk[R];
        for (int r = 0; r < R; ++r) shrunk[r] = weigh(scores[r], 0, keys.count, weights[r], highest[r], total[r]);
        int64_t c = 0;
        for (; c + 32 <= s.d; c += 32) add_columns<32 / W>(head, keys, shrunk, c, sums);
        if (c < s.d) add_columns<16 / W>(head, keys, shrunk, c, sums);
    }

    template <int N>
    void add_columns(int64_t head, const Keys<C>& keys, const float* shrunk, int64_t c, float* sums) const {
        const C* values = s.values + head * s.d + c;
        vf own[R][N];
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < N; ++v) own[r][v] = mul(load(sums + r * s.d + c + v * W), all(shrunk[r]));
        for (int j = 0; j < keys.count; ++j) {
            vf x[N];
            for (int v = 0; v < N; ++v) x[v] = load(keys.at[j] - s.keys + values + v * W);
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < N; ++v) own[r][v] = fma(all(weights[r][j]), x[v], own[r][v]);
        }
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < N; ++v) store(sums + r * s.d + c + v * W, own[r][v]);
    }
};

// The same with a cache of integers: queries, and the weights of a tile, become 16-bit integers, finer than bf16; their
// sums are exact.
template <int R>
struct IntegerProducts {
    using T = bf16;
    using C = int8_t;
    static constexpr float kSmallest = 1e-30f;  // what is below is zero
    static constexpr int kVectors = W == 16 || R <= 2 ? 2 : 1;  // of values, whose sums stay in registers
    const Step<T, C>& s;
    float* units;      // [heads, R]
    int16_t* queries;  // [heads, R, d]
    int16_t weights[R][kKeys];

    IntegerProducts(const Step<T, C>& step, const Piece& piece, const T* q) : s(step) {
        const int64_t count = piece.heads * R;
        units = static_cast<float*>(scratch(1, count * (4 + 2 * s.d)));
        queries = reinterpret_cast<int16_t*>(units + count);
        for (int64_t i = 0; i < count; ++i) {
            const T* from = q + i * s.d;
            const Magnitude magnitude = magnitude_of(from, s.d);
            const float largest = std::max(magnitude.largest, kSmallest);
            units[i] = largest / kLargest + magnitude.nothing;
            for (int64_t c = 0; c < s.d; c += W)
                store_rounded(queries + i * s.d + c, mul(load(from + c), all(kLargest / largest)));
        }
    }

    void score(int64_t head, const Keys<C>& keys, int first, float (&scores)[R][kKeys], Ahead<C>& ahead) const {
        const int16_t* q = queries + head * R * s.d;
        vi products[R][kKeysAtOnce];
        for (int j = 0; j < kKeysAtOnce; ++j) {
            ahead.step();
            vi own[R];
            for (int r = 0; r < R; ++r) own[r] = integers(0);
            for (int64_t c = 0; c < s.d; c += 2 * W) {
                vi x = load_bytes(keys.at[first + j] + head * s.d + c);
                for (int r = 0; r < R; ++r) add_products(own[r], x, load_integers(q + r * s.d + c));
            }
            for (int r = 0; r < R; ++r) products[r][j] = own[r];
        }
        for (int r = 0; r < R; ++r) {
            vf whole[kKeysAtOnce];
            for (int j = 0; j < kKeysAtOnce; ++j) whole[j] = to_float(products[r][j]);
            store_sums(scores[r] + first, whole);
        }
    }

    float unit(int64_t head, int r) const { return units[head * R + r]; }

    void add_values(int64_t head, const Keys<C>& keys, float (&scores)[R][kKeys], float* highest, float* total,
                    float* sums) {
        float shrunk[R], unit[R];
        for (int r = 0; r < R; ++r) {
            // by the tile's own highest score: else the many small weights of a long context would be rounded to nothing
            float most = kMinusInfinity, of_tile = 0.0f, before = highest[r];
            weigh(scores[r], 0, keys.count, weights[r], most, of_tile);
            highest[r] = std::max(before, most);
            unit[r] = std::exp(most - highest[r]);
            shrunk[r] = before == kMinusInfinity ? 0.0f : std::exp(before - highest[r]);
            total[r] = total[r] * shrunk[r] + of_tile * unit[r];
            unit[r] /= kLargest;
        }
        int64_t c = 0;
        for (; c + kVectors * 2 * W <= s.d; c += kVectors * 2 * W)
            add_columns<kVectors>(head, keys, shrunk, unit, c, sums);
        for (; c < s.d; c += 2 * W) add_columns<1>(head, keys, shrunk, unit, c, sums);
    }

    template <int N>
    void add_columns(int64_t head, const Keys<C>& keys, const float* shrunk, const float* unit, int64_t c,
                     float* sums) const {
        const C* values = s.values + head * s.d + c;
        vi own[R][N][2];
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < N; ++v) own[r][v][0] = own[r][v][1] = integers(0);
        for (int j = 0; j < keys.count; j += 2) {  // behind the last one stands the last, with a weight of 0
            for (int v = 0; v < N; ++v) {
                vi low, high;
                pair_up(load_bytes(keys.at[j] - s.keys + values + v * 2 * W),
                        load_bytes(keys.at[j + 1] - s.keys + values + v * 2 * W), low, high);
                for (int r = 0; r < R; ++r) {
                    vi pair = all_pairs(weights[r] + j);
                    add_products(own[r][v][0], low, pair);
                    add_products(own[r][v][1], high, pair);
                }
            }
        }
        for (int r = 0; r < R; ++r) {
            for (int v = 0; v < N; ++v) {
                in_order(own[r][v][0], own[r][v][1]);
                for (int half = 0; half < 2; ++half) {
                    float* to = sums + r * s.d + c + (2 * v + half) * W;
                    store(to, fma(load(to), all(shrunk[r]), mul(to_float(own[r][v][half]), all(unit[r]))));
                }
            }
        }
    }
};

// One token's heads, R query heads for each of the piece's KV heads. All heads of a tile come before the next tile, since
// they lie side by side: memory is read in its order, and a tile is asked for while the one before it is computed.
template <class T, class C, int R>
void attend_in_place(const Step<T, C>& s, const Piece& piece) {
    constexpr bool kIntegers = std::is_same_v<T, bf16> && std::is_same_v<C, int8_t>;
    using Products = std::conditional_t<kIntegers, IntegerProducts<R>, FloatProducts<T, C, R>>;
    const int64_t queries = piece.heads * R, first_query = (piece.token * s.heads + piece.head * R) * s.d;
    float* sums = static_cast<float*>(scratch(0, queries * (s.d + 2) * 4 + W * 4));
    float *highest = sums + queries * s.d, *total = highest + queries;
    alignas(64) float scores[R][kKeys];
    std::fill(sums, highest, 0.0f);
    start(s.sinks, piece.head * R, queries, queries, highest, total);
    Keys<C> tiles[2];
    find_keys(s, piece, piece.begin, tiles[0]);
    Ahead<C> first{tiles[0], s.values - s.keys, piece.heads, s.d};
    for (int64_t i = 0; i < kKeys * piece.heads; ++i) first.step();
    Products products(s, piece, s.q + first_query);
    for (int64_t tile = 0, begin = piece.begin; begin < piece.end; begin += kKeys, ++tile) {
        const Keys<C>& keys = tiles[tile % 2];
        Keys<C>& next = tiles[(tile + 1) % 2];
        find_keys(s, piece, begin + kKeys, next);
        Ahead<C> ahead{next, s.values - s.keys, piece.heads, s.d};
        for (int64_t head = 0; head < piece.heads; ++head) {
            for (int first = 0; first < keys.count; first += kKeysAtOnce) products.score(head, keys, first, scores, ahead);
            for (int r = 0; r < R; ++r)
                bound_scores(s.scale * products.unit(head, r), s.cap, scores[r], keys.count);
            if (s.slopes)
                for (int r = 0; r < R; ++r)
                    add_slopes(s.slopes[(piece.head + head) * R + r], scores[r], keys.count, begin, piece.position);
            products.add_values(head, keys, scores, highest + head * R, total + head * R, sums + head * R * s.d);
        }
    }
    for (int64_t i = 0; i < queries; ++i)
        finish(sums + i * s.d, total[i], s.value_scale(piece.head + i / R), s.out + first_query + i * s.d, s.d);
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

// Values of as many keys as one product adds up → [width, group]; behind the last dimension stand zeros.
inline void interleave(const float* const (&from)[1], int64_t d, int64_t width, float* to) {
    std::copy(from[0], from[0] + d, to);
    std::fill(to + d, to + width, 0.0f);
}
inline void interleave(const bf16* const (&from)[2], int64_t d, int64_t width, bf16* to) {
    int64_t c = 0;
    for (; c + W <= d; c += W) store_pairs(to + 2 * c, from[0] + c, from[1] + c);
    for (; c < d; ++c) to[2 * c] = from[0][c], to[2 * c + 1] = from[1][c];
    std::fill(to + 2 * d, to + 2 * width, bf16(0));
}

// [n keys, d] → [keys / group, width, group]; behind the last key and the last dimension stand zeros. `wide` is [16, d].
template <class T, class C>
void gather_values(const Step<T, C>& s, const Piece& piece, int64_t begin, int n, int64_t width, T* wide, T* panel) {
    constexpr int G = Element<T>::kGroup;
    for (int j = 0; j < n; j += G) {
        const T* from[G];
        for (int i = 0; i < G; ++i) {
            T* own = wide + i * s.d;
            if (j + i < n) {
                from[i] = widened(s, at(s, s.values, piece, begin + j + i), own);
            } else {
                std::fill(own, own + s.d, T(0));
                from[i] = own;
            }
        }
        interleave(from, s.d, width, panel + j * width);
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
    start(s.sinks, piece.head * group, group, queries, highest, total);
    std::fill(sums, sums + queries * width, 0.0f);
    for (int64_t begin = piece.begin; begin < piece.end; begin += kKeys) {
        int n = int(std::min<int64_t>(kKeys, piece.end - begin));
        gather_keys(s, piece, begin, n, wide, keys);
        gather_values(s, piece, begin, n, width, wide, values);
        multiply_all<T>(queries, q, s.d, keys, kKeys * G, s.d / G, (n + W - 1) / W, scores, kKeys, false);
        for (int64_t r = 0; r < queries; ++r) {
            const Range seen = tile_mask(s.mask, piece.position + r / group, begin, n);
            if (seen.end <= seen.begin) {
                std::fill(weights + r * kKeys, weights + (r + 1) * kKeys, T(0));
                continue;
            }
            bound_scores(s.scale, s.cap, scores + r * kKeys, n);
            if (s.slopes)
                add_slopes(s.slopes[piece.head * group + r % group], scores + r * kKeys, n, begin,
                           piece.position + r / group);
            float* own = sums + r * width;
            float shrunk = weigh(scores + r * kKeys, int(seen.begin), int(seen.end), weights + r * kKeys, highest[r],
                                 total[r]);
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
    for (int64_t head = piece.head; head < piece.head + piece.heads; ++head) {
        Piece own = piece;
        own.head = head, own.heads = 1;
        attend_gathered(s, own);
    }
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
    if (all_pieces == 0) return;
    // Heads stay together where there are pieces enough for all threads, so that memory is read in its order.
    int64_t wanted = threads() * (tokens[s.rows] == s.rows ? kChunksOfTokens : kChunksOfPrompts);
    int64_t parts = std::min(s.kv_heads, (wanted + all_pieces - 1) / all_pieces);
    parallel_if(products >= kWorthSharing, all_pieces * parts, [&](int64_t chunk) {
        int64_t number = all_pieces - 1 - chunk / parts;  // of a long row, the piece that sees most comes first
        int64_t part = chunk % parts, head = s.kv_heads * part / parts, end = s.kv_heads * (part + 1) / parts;
        int64_t row = std::upper_bound(pieces.begin(), pieces.end(), number) - pieces.begin() - 1;
        int64_t first = (number - pieces[row]) * most, n = std::min(most, s.counts[row] - first);
        int64_t position = s.starts[row] + first;
        const Range seen = visible_range(s.mask, position, position + n, s.starts[row] + s.counts[row]);
        const int64_t* blocks = s.table + s.slots[row] * s.table_stride;
        attend_piece(s, Piece{tokens[row] + first, n, position, head, end - head, seen.begin, seen.end, blocks});
    });
}

}  // namespace
}  // namespace quire

using namespace quire;

#define QUIRE_ATTENTION(name, T, C)                                                                                    \
    extern "C" void quire_paged_attention_##name(                                                                      \
        const T* q, const C* keys, const C* values, T* out, const int64_t* table, int64_t table_stride,                \
        const int64_t* slots, const int64_t* starts, const int64_t* counts, int64_t rows, int64_t heads,               \
        int64_t kv_heads, int64_t d, int64_t block_size, int64_t block_stride, int64_t window, int64_t chunk,          \
        int64_t two_sided, float scale, float cap, const float* scales, const float* sinks, const float* slopes) {                        \
        paged_attention(Step<T, C>{q, keys, values, out, table, table_stride, slots, starts, counts, rows, heads, kv_heads,\
                             d, block_size, block_stride, {window, chunk, two_sided != 0}, scale, cap, scales, sinks, slopes});       \
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
