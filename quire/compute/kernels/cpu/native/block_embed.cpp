// Rows of weights that are kept as a GGUF file has them, for embeddings; see block_forms.h.
#include <cstring>

#include "block_forms.h"
#include "calls.h"
#include "pool.h"

namespace quire {
namespace {

constexpr int64_t kWorthSharing = 1 << 19;

// A code's integer, before its zero is taken off.
int code_of(const Form& form, const uint8_t* codes, int64_t lane, int64_t column) {
    const uint8_t* group = codes + column / form.group * form.group_bytes();
    int64_t at = column % form.group, i = at % 8;
    if (form.bits == 8) return int8_t(group[(at / 2 * kPanel + lane) * 2 + at % 2]);
    int code = group[(at / 8 * kPanel + lane) * 4 + i % 2 * 2 + i / 4] >> (i / 2 % 2 * 4) & 15;
    if (int more = form.bits - 4) {
        uint16_t high;
        std::memcpy(&high, group + form.group * kPanel / 2 + lane * 4 + at % 2 * 2, 2);
        code |= (high >> (at / 2 * more) & ((1 << more) - 1)) << 4;
    }
    return form.nonlinear ? kNonlinear[code] : code;
}

inline void put(float& to, float value, float scale) { to = value * scale; }
inline void put(bf16& to, float value, float scale) { to = narrow(widen(narrow(value)) * scale); }

template <class T>
void unpack_row(const Form& form, const uint8_t* packed, int64_t columns, int64_t output, float factor, T* to) {
    const uint8_t* block = packed + output / kPanel * (columns / form.block * form.bytes());
    int64_t lane = output % kPanel;
    alignas(64) float halves[2][kPanel];
    for (int64_t begin = 0; begin < columns; begin += form.block, block += form.bytes()) {
        for (int v = 0; v < kVectors; ++v) {
            store(halves[0] + v * W, load_halves(block + v * 2 * W));
            if (form.minimum) store(halves[1] + v * W, load_halves(block + 2 * kPanel + v * 2 * W));
        }
        for (int64_t c = 0; c < form.block; ++c) {
            int64_t at = c / form.group * kPanel + lane;
            float scale = halves[0][lane], least = form.minimum ? halves[1][lane] : 0.0f;
            if (form.scales) {
                scale *= float(int8_t(block[form.scale_offset() + at]));
                if (form.minimum) least *= float(int8_t(block[form.minimum_offset() + at]));
            }
            int code = code_of(form, block + form.code_offset(), lane, c) - form.zero;
            put(to[begin + c], scale * float(code) - least, factor);
        }
    }
}

template <class T>
void block_embed(const int64_t* tokens, int64_t n, const uint8_t* packed, int64_t columns, int64_t type, float scale,
                 T* out) {
    const Form& form = form_of(type);
    parallel_if(n * columns >= kWorthSharing, n, [&](int64_t i) {
        unpack_row<T>(form, packed, columns, tokens[i], scale, out + i * columns);
    });
}

}  // namespace
}  // namespace quire

using namespace quire;

#define QUIRE_BLOCK_EMBED(name, T)                                                                                     \
    extern "C" void quire_block_embed_##name(const int64_t* tokens, int64_t n, const uint8_t* packed, int64_t columns, \
                                             int64_t type, float scale, T* out) {                                      \
        block_embed<T>(tokens, n, packed, columns, type, scale, out);                                                  \
    }                                                                                                                  \
    QUIRE_ENTRY(block_embed_##name)

QUIRE_BLOCK_EMBED(bf16, bf16)
QUIRE_BLOCK_EMBED(fp32, float)
