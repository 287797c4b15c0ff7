// What surrounds the layers of a step: its inputs by the slot table, embeddings and angles, and the rows that are read.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "calls.h"
#include "pool.h"
#include "vec.h"

namespace quire {
namespace {

constexpr int64_t kAnglesOfChunk = 4096;  // take some 50 µs
constexpr int64_t kBytesOfChunk = 1 << 18;

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

extern "C" void quire_local_tokens(const int64_t* tokens, int64_t number, int64_t first, int64_t count, int64_t* rows) {
    for (int64_t i = 0; i < number; ++i) {
        int64_t row = tokens[i] - first;
        rows[i] = row >= 0 && row < count ? row : count;
    }
}

QUIRE_ENTRY(prepare_inputs)
QUIRE_ENTRY(compute_slot_mapping)
QUIRE_ENTRY(take_rows)
QUIRE_ENTRY(local_tokens)

#define QUIRE_STEP(name, T)                                                                                            \
    extern "C" void quire_angles_##name(const int64_t* positions, int64_t tokens, const float* frequencies,            \
                                        int64_t stride, int64_t half, float scale, T* cosines, T* sines) {             \
        angles<T>(positions, tokens, frequencies, stride, half, scale, cosines, sines);                                \
    }                                                                                                                  \
    QUIRE_ENTRY(angles_##name)

QUIRE_STEP(bf16, bf16)
QUIRE_STEP(fp32, float)
