// Low-rank updates of some rows of a product, y += B A x, each by the adapter of its token. Entries are tokens in the
// order of their adapters, so that a run of them shares each read of the adapter's weights while those are in the cache.
#include <algorithm>

#include "calls.h"
#include "pool.h"
#include "vec.h"

namespace quire {
namespace {

constexpr int64_t kWorthSharing = 1 << 18;  // products
constexpr int64_t kEntriesOfChunk = 32;     // at most; more would not read weights less often

inline void store_one(float* p, float x) { *p = x; }
inline void store_one(bf16* p, float x) { *p = narrow(x); }

// Which adapters have which tokens.
struct Entries {
    const int64_t* slots;  // each one's adapter, from 1; 0: it has none
    const int64_t* tokens;
    const int64_t* ranks;  // of adapters, in this product; 0: it is left alone
    int64_t stride;        // between those of two adapters
    int64_t number;

    int64_t rank(int64_t entry) const { return slots[entry] ? ranks[(slots[entry] - 1) * stride] : 0; }
};

// Calls body(first, end) for runs of entries of one adapter, whose rank is not 0.
template <class F>
void by_adapter(const Entries& entries, int64_t products, const F& body) {
    int64_t parts = 2 * threads();
    int64_t each = std::clamp<int64_t>((entries.number + parts - 1) / parts, 1, kEntriesOfChunk);
    bool shared = entries.number * products >= kWorthSharing;
    parallel_if(shared, (entries.number + each - 1) / each, [&](int64_t chunk) {
        int64_t end = std::min(entries.number, (chunk + 1) * each);
        for (int64_t first = chunk * each, next; first < end; first = next) {
            for (next = first + 1; next < end && entries.slots[next] == entries.slots[first];) ++next;
            if (entries.rank(first)) body(first, next);
        }
    });
}

// out[i] = Σ x[c] a[i, c] for R rows of a.
template <int R, class T>
inline void dot_rows(const T* x, const T* a, int64_t columns, T* out) {
    vf sums[W];
    for (int i = 0; i < W; ++i) sums[i] = zero();
    int64_t c = 0;
    for (; c + W <= columns; c += W) {
        vf own = load(x + c);
        for (int i = 0; i < R; ++i) sums[i] = fma(own, load(a + i * columns + c), sums[i]);
    }
    if (int n = int(columns - c)) {
        vf own = load(x + c, n);
        for (int i = 0; i < R; ++i) sums[i] = fma(own, load(a + i * columns + c, n), sums[i]);
    }
    float all[W];
    store_sums(all, sums);
    for (int i = 0; i < R; ++i) store_one(out + i, all[i]);
}

// low[entry, module · most + r] = A x, for the ranks that are in use.
template <class T>
void shrink(const T* x, int64_t xs, int64_t columns, const T* a, int64_t as, int64_t modules, int64_t most,
            const Entries& entries, T* low) {
    by_adapter(entries, modules * most * columns, [&](int64_t first, int64_t end) {
        int64_t rank = entries.rank(first);
        for (int64_t module = 0; module < modules; ++module) {
            const T* own = a + (entries.slots[first] - 1) * as + module * most * columns;
            for (int64_t r = 0; r < rank;) {
                int64_t left = rank - r, n = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
                for (int64_t entry = first; entry < end; ++entry) {
                    const T* from = x + entries.tokens[entry] * xs;
                    T* to = low + (entry * modules + module) * most + r;
                    switch (n) {
                        case 8: dot_rows<8>(from, own + r * columns, columns, to); break;
                        case 4: dot_rows<4>(from, own + r * columns, columns, to); break;
                        case 2: dot_rows<2>(from, own + r * columns, columns, to); break;
                        default: dot_rows<1>(from, own + r * columns, columns, to);
                    }
                }
                r += n;
            }
        }
    });
}

// What an adapter does to its rows of y before anything is added: y += factor · y + summand. No pointers: nothing.
template <class T>
struct Scaling {
    const T* factors;
    const T* summands;

    Scaling from(int64_t output) const { return factors ? Scaling{factors + output, summands + output} : *this; }
};

// y[i] += Σ low[i, r] b[r] for N vectors of outputs, of R rows, scaled before; of the last vector, `last` outputs.
template <int R, int N, class T>
inline void add_tile(const T* const* low, const T* b, int64_t bs, int64_t rank, const Scaling<T>& scaling, T* const* y,
                     int last) {
    vf sums[R][N];
    for (int i = 0; i < R; ++i)
        for (int v = 0; v < N; ++v) sums[i][v] = zero();
    for (int64_t r = 0; r < rank; ++r) {
        vf own[N];
        for (int v = 0; v < N; ++v) own[v] = load(b + r * bs + v * W, v == N - 1 ? last : W);
        for (int i = 0; i < R; ++i) {
            vf x = all(load_one(low[i] + r));
            for (int v = 0; v < N; ++v) sums[i][v] = fma(x, own[v], sums[i][v]);
        }
    }
    for (int i = 0; i < R; ++i)
        for (int v = 0; v < N; ++v) {
            int n = v == N - 1 ? last : W;
            vf own = load(y[i] + v * W, n), sum = add(own, sums[i][v]);
            if (scaling.factors)
                sum = add(sum, fma(own, load(scaling.factors + v * W, n), load(scaling.summands + v * W, n)));
            store(y[i] + v * W, sum, n);
        }
}

// The same, for all outputs.
template <int R, class T>
inline void add_rows(const T* const* low, const T* b, int64_t bs, int64_t rank, const Scaling<T>& scaling, T* const* y,
                     int64_t outputs) {
    constexpr int N = R == 1 ? 4 : 2;
    T* own[R];
    for (int64_t o = 0; o < outputs; o += N * W) {
        for (int i = 0; i < R; ++i) own[i] = y[i] + o;
        int64_t left = outputs - o;
        if (left >= N * W) {
            add_tile<R, N>(low, b + o, bs, rank, scaling.from(o), own, W);
            continue;
        }
        for (; left > 0; left -= W, o += W) {
            for (int i = 0; i < R; ++i) own[i] = y[i] + o;
            add_tile<R, 1>(low, b + o, bs, rank, scaling.from(o), own, int(std::min<int64_t>(W, left)));
        }
    }
}

// y[token] += B low[entry], for one module: b [rank, outputs], its rows `bs` apart. Adapters that are marked in `scaled`
// scale y before; their factors and summands are as far apart as their other weights, and marks as ranks are.
template <class T>
void expand(const T* low, int64_t ls, const T* b, int64_t as, int64_t bs, int64_t outputs, int64_t most,
            const Entries& entries, const Scaling<T>& scaling, const int64_t* scaled, T* y, int64_t ys) {
    constexpr int64_t kRows = 4;
    by_adapter(entries, most * outputs, [&](int64_t first, int64_t end) {
        int64_t rank = entries.rank(first), slot = entries.slots[first] - 1;
        const T* own = b + slot * as;
        bool scales = scaled && scaled[slot * entries.stride];
        Scaling<T> own_scaling = scales ? scaling.from(slot * as) : Scaling<T>{nullptr, nullptr};
        for (int64_t entry = first; entry < end;) {
            const T* from[kRows];
            T* to[kRows];
            int64_t n = end - entry >= kRows ? kRows : 1;
            for (int64_t i = 0; i < n; ++i) {
                from[i] = low + (entry + i) * ls;
                to[i] = y + entries.tokens[entry + i] * ys;
            }
            if (n == kRows) {
                add_rows<kRows>(from, own, bs, rank, own_scaling, to, outputs);
            } else {
                add_rows<1>(from, own, bs, rank, own_scaling, to, outputs);
            }
            entry += n;
        }
    });
}

}  // namespace
}  // namespace quire

using namespace quire;

#define QUIRE_LORA(name, T)                                                                                            \
    extern "C" void quire_lora_shrink_##name(const T* x, int64_t xs, int64_t columns, const T* a, int64_t as,          \
                                             const int64_t* ranks, int64_t rs, int64_t modules, int64_t most,          \
                                             const int64_t* slots, const int64_t* tokens, int64_t entries, T* low) {   \
        shrink<T>(x, xs, columns, a, as, modules, most, Entries{slots, tokens, ranks, rs, entries}, low);              \
    }                                                                                                                  \
    QUIRE_ENTRY(lora_shrink_##name)                                                                                    \
    extern "C" void quire_lora_expand_##name(const T* low, int64_t ls, const T* b, int64_t as, int64_t bs,             \
                                             int64_t outputs, const int64_t* ranks, int64_t rs, int64_t most,          \
                                             const int64_t* slots, const int64_t* tokens, int64_t entries,             \
                                             const T* factors, const T* summands, const int64_t* scaled, T* y,         \
                                             int64_t ys) {                                                             \
        expand<T>(low, ls, b, as, bs, outputs, most, Entries{slots, tokens, ranks, rs, entries},                       \
                  Scaling<T>{factors, summands}, scaled, y, ys);                                                       \
    }                                                                                                                  \
    QUIRE_ENTRY(lora_expand_##name)

QUIRE_LORA(bf16, bf16)
QUIRE_LORA(fp32, float)
