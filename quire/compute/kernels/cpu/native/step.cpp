// What surrounds the layers of a step: its inputs by the slot table, embeddings and angles, and the rows that are read.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "calls.h"
#include "pool.h"
#include "vec.h"

namespace quire {
namespace {

constexpr int64_t kAnglesOfChunk = 4096;  // take some 50 µs
constexpr int64_t kBytesOfChunk = 1 << 18;
constexpr int64_t kValuesOfChunk = 1 << 16;

template <class T>
void angles(const int64_t* positions, int64_t tokens, const float* frequencies, int64_t stride, int64_t half,
            float scale, T* cosines, T* sines) {
    int64_t each = std::max<int64_t>(1, kAnglesOfChunk / std::max<int64_t>(1, half));
    parallel((tokens + each - 1) / each, [&](int64_t chunk) {
        for (int64_t token = chunk * each; token < std::min(tokens, (chunk + 1) * each); ++token) {
            for (int64_t c = 0; c < half; c += W) {
                int n = int(std::min<int64_t>(W, half - c));
                float cosine[W] = {}, sine[W] = {};
                for (int i = 0; i < n; ++i) {
                    float angle = float(positions[token]) * frequencies[token * stride + c + i];
                    cosine[i] = std::cos(angle) * scale, sine[i] = std::sin(angle) * scale;
                }
                store(cosines + token * half + c, load(cosine), n);
                store(sines + token * half + c, load(sine), n);
            }
        }
    });
}

// out = x + delta, or x; rows of `out` are `stride` values apart.
template <class T>
void copy_stream(const T* x, const T* delta, int64_t rows, int64_t width, int64_t stride, T* out) {
    int64_t each = std::max<int64_t>(1, kValuesOfChunk / std::max<int64_t>(1, width));
    parallel((rows + each - 1) / each, [&](int64_t chunk) {
        for (int64_t row = chunk * each; row < std::min(rows, (chunk + 1) * each); ++row) {
            const T* own = x + row * width;
            if (!delta) {
                std::memcpy(out + row * stride, own, width * sizeof(T));
                continue;
            }
            for (int64_t c = 0; c < width; c += W) {
                int n = int(std::min<int64_t>(W, width - c));
                store(out + row * stride + c, add(load(own + c, n), load(delta + row * width + c, n)), n);
            }
        }
    });
}

inline void set_minus_infinity(float* out, int64_t number) {
    std::fill(out, out + number, -std::numeric_limits<float>::infinity());
}
inline void set_minus_infinity(bf16* out, int64_t number) { std::fill(out, out + number, bf16(0xff80)); }

template <class T>
void spread_columns(const T* x, int64_t rows, int64_t width, const int64_t* columns, int64_t wide, T* out) {
    parallel(rows, [&](int64_t row) {
        T* own = out + row * wide;
        set_minus_infinity(own, wide);
        for (int64_t c = 0; c < width; ++c) own[columns[c]] = x[row * width + c];
    });
}

}  // namespace
}  // namespace quire

using namespace quire;

extern "C" void quire_prepare_inputs(const int64_t* slots, const int64_t* counts, const int64_t* row_of_token,
                                     const int64_t* offsets, const int64_t* ids, int64_t rows, int64_t tokens,
                                     int64_t* length, const int64_t* last, int64_t dummy, int64_t* starts,
                                     int64_t* positions, int64_t* slot_of_token, int64_t* out) {
    for (int64_t row = 0; row < rows; ++row) starts[row] = length[slots[row]];
    for (int64_t token = 0; token < tokens; ++token) {
        int64_t row = row_of_token[token], slot = slots[row];
        slot_of_token[token] = slot;
        positions[token] = starts[row] + offsets[token];
        out[token] = ids[token] < 0 ? last[slot] : ids[token];
    }
    for (int64_t row = 0; row < rows; ++row) length[slots[row]] += counts[row];
    length[dummy] = 0;
}

extern "C" void quire_compute_slot_mapping(const int64_t* table, int64_t stride, const int64_t* slots,
                                           const int64_t* positions, int64_t tokens, int64_t block_size,
                                           int64_t* mapping) {
    for (int64_t token = 0; token < tokens; ++token) {
        int64_t position = positions[token];
        mapping[token] = table[slots[token] * stride + position / block_size] * block_size + position % block_size;
    }
}

// out = from[rows]; a row has `bytes`.
extern "C" void quire_take_rows(const char* from, const int64_t* rows, int64_t number, int64_t bytes, char* out) {
    int64_t each = std::max<int64_t>(1, kBytesOfChunk / std::max<int64_t>(1, bytes));
    parallel((number + each - 1) / each, [&](int64_t chunk) {
        for (int64_t i = chunk * each; i < std::min(number, (chunk + 1) * each); ++i)
            std::memcpy(out + i * bytes, from + rows[i] * bytes, bytes);
    });
}

// out[rows] = from; a row has `bytes`. Of equal rows, the last one stays.
extern "C" void quire_put_rows(const char* from, const int64_t* rows, int64_t number, int64_t bytes, char* out) {
    for (int64_t i = 0; i < number; ++i) std::memcpy(out + rows[i] * bytes, from + i * bytes, bytes);
}

// Where each token's state lies: that of its place, or that of its slot where the token is the slot's last one.
extern "C" void quire_state_rows(const int64_t* ids, const int64_t* places, const int64_t* slots, int64_t tokens,
                                 int64_t first, int64_t* out) {
    for (int64_t token = 0; token < tokens; ++token)
        out[token] = ids[token] == -1 ? first + slots[token] : places[token];
}

extern "C" void quire_local_indices(const int64_t* indices, int64_t number, int64_t first, int64_t count,
                                    int64_t* out) {
    for (int64_t i = 0; i < number; ++i) {
        int64_t local = indices[i] - first;
        out[i] = local >= 0 && local < count ? local : count;
    }
}

// The length that each token's sequence counts as: its slot's, and at least up to the token.
extern "C" void quire_sequence_lengths(const int64_t* least, const int64_t* slots, const int64_t* positions,
                                       int64_t tokens, int64_t* lengths) {
    for (int64_t token = 0; token < tokens; ++token)
        lengths[token] = std::max(least[slots[token]], positions[token] + 1);
}

// The position that each token counts as behind images.
extern "C" void quire_shifted_positions(const int64_t* shifts, const int64_t* slots, const int64_t* positions,
                                        int64_t tokens, int64_t* out) {
    for (int64_t token = 0; token < tokens; ++token) out[token] = positions[token] + shifts[slots[token]];
}

// Each token's frequencies, [tokens, half]: the first list of `both` up to the original length, the second beyond it.
extern "C" void quire_choose_frequencies(const int64_t* lengths, int64_t tokens, const float* both, int64_t half,
                                         int64_t original, float* out) {
    for (int64_t token = 0; token < tokens; ++token)
        std::memcpy(out + token * half, both + (lengths[token] > original ? half : 0), half * sizeof(float));
}

// Each token's frequencies, [tokens, half], of a base that grows beyond the original length.
extern "C" void quire_grow_frequencies(const int64_t* lengths, int64_t tokens, float theta, float factor,
                                       int64_t original, int64_t half, float* out) {
    auto clamped = [&](int64_t token) { return std::max(lengths[token], original); };
    for (int64_t token = 0; token < tokens; ++token) {
        float* own = out + token * half;
        if (token > 0 && clamped(token) == clamped(token - 1)) {
            std::memcpy(own, own - half, half * sizeof(float));
            continue;
        }
        double growth = double(factor) * double(clamped(token)) / double(original) - (double(factor) - 1);
        double base = theta * std::pow(growth, double(half) / double(half - 1));  // width / (width - 2)
        for (int64_t c = 0; c < half; ++c) own[c] = float(1 / std::pow(base, double(c) / double(half)));
    }
}

// Factors of queries, which grow with the logarithm of how often `length` positions lie before.
extern "C" void quire_query_scales(const int64_t* positions, int64_t tokens, float growth, int64_t length, int64_t first,
                                   float* out) {
    for (int64_t token = 0; token < tokens; ++token)
        out[token] = 1.0f + growth * std::log1p(float((positions[token] + first) / length));
}

QUIRE_ENTRY(sequence_lengths)
QUIRE_ENTRY(shifted_positions)
QUIRE_ENTRY(query_scales)
QUIRE_ENTRY(choose_frequencies)
QUIRE_ENTRY(grow_frequencies)
QUIRE_ENTRY(prepare_inputs)
QUIRE_ENTRY(compute_slot_mapping)
QUIRE_ENTRY(take_rows)
QUIRE_ENTRY(put_rows)
QUIRE_ENTRY(state_rows)
QUIRE_ENTRY(local_indices)

#define QUIRE_STEP(name, T)                                                                                            \
    extern "C" void quire_angles_##name(const int64_t* positions, int64_t tokens, const float* frequencies,            \
                                        int64_t stride, int64_t half, float scale, T* cosines, T* sines) {             \
        angles<T>(positions, tokens, frequencies, stride, half, scale, cosines, sines);                                \
    }                                                                                                                  \
    extern "C" void quire_copy_stream_##name(const T* x, const T* delta, int64_t rows, int64_t width, int64_t stride,  \
                                             T* out) {                                                                 \
        copy_stream<T>(x, delta, rows, width, stride, out);                                                            \
    }                                                                                                                  \
    extern "C" void quire_spread_columns_##name(const T* x, int64_t rows, int64_t width, const int64_t* columns,       \
                                                int64_t wide, T* out) {                                                \
        spread_columns<T>(x, rows, width, columns, wide, out);                                                         \
    }                                                                                                                  \
    QUIRE_ENTRY(copy_stream_##name)                                                                                    \
    QUIRE_ENTRY(spread_columns_##name)                                                                                 \
    QUIRE_ENTRY(angles_##name)

QUIRE_STEP(bf16, bf16)
QUIRE_STEP(fp32, float)
