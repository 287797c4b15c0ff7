// The selective state space of Mamba2. A chunk of work is one head of a row. A block of its state stays in registers
// while a piece of the tokens passes, so prompts and single tokens have one order of sums, and the state is read once.
#include <algorithm>
#include <cmath>

#include "calls.h"
#include "pool.h"
#include "states.h"

namespace quire {
namespace {

constexpr int kPiece = 32;   // tokens that pass at a time
constexpr int kStates = 4;   // rows of a block of the state
constexpr int kVectors = 2;  // vectors of each of these rows
constexpr int64_t kEnough = 1 << 15;

template <class T>
struct Scan {
    const T* xbc;
    int64_t stride;
    const T* dt;
    int64_t dt_stride;
    const float *decay, *skip, *dt_bias;
    float least, most;
    int64_t heads, groups, n, p;
    float* state;
    const int64_t *states, *starts;
    T* out;
};

// One head's inputs of a piece, in fp32: Δ x, skip · x + what is read of the state, b and c.
struct Piece {
    int64_t wide;  // p, as whole blocks
    float kept[kPiece];
    float *dx, *y, *b, *c;

    Piece(int64_t n, int64_t p) : wide((p + kVectors * W - 1) / (kVectors * W) * kVectors * W) {
        dx = static_cast<float*>(scratch(0, kPiece * 2 * (wide + n) * int64_t(sizeof(float))));
        y = dx + kPiece * wide;
        b = y + kPiece * wide;
        c = b + kPiece * n;
    }
};

template <class T>
void widen_row(const T* x, int64_t width, float factor, float* out) {
    for (int64_t i = 0; i < width; i += W) {
        int n = within(width - i);
        store(out + i, mul(load(x + i, n), all(factor)), n);
    }
}

template <class T>
void read_piece(const Scan<T>& s, int64_t head, int64_t token, int count, Piece& piece) {
    int64_t group = head / (s.heads / s.groups), inner = s.heads * s.p;
    for (int i = 0; i < count; ++i) {
        const T* row = s.xbc + (token + i) * s.stride;
        float delta = softplus(load_one(s.dt + (token + i) * s.dt_stride + head) + s.dt_bias[head]);
        delta = std::min(s.most, std::max(s.least, delta));
        piece.kept[i] = std::exp(delta * s.decay[head]);
        float *dx = piece.dx + i * piece.wide, *y = piece.y + i * piece.wide;
        for (int64_t c = s.p; c < piece.wide; ++c) dx[c] = y[c] = 0.0f;
        widen_row(row + head * s.p, s.p, delta, dx);
        widen_row(row + head * s.p, s.p, s.skip[head], y);
        widen_row(row + inner + group * s.n, s.n, 1.0f, piece.b + i * s.n);
        widen_row(row + inner + (s.groups + group) * s.n, s.n, 1.0f, piece.c + i * s.n);
    }
}

// A block of the state, from row j and column c on, through the piece.
void pass(const Piece& piece, int count, int64_t n, int64_t p, int64_t j, int64_t c, float* state) {
    vf s[kStates][kVectors];
    int width[kVectors];
    for (int v = 0; v < kVectors; ++v) width[v] = within(p - c - v * W);
    for (int i = 0; i < kStates; ++i)
        for (int v = 0; v < kVectors; ++v) s[i][v] = load(state + (j + i) * p + c + v * W, width[v]);
    for (int t = 0; t < count; ++t) {
        const float *b = piece.b + t * n + j, *read = piece.c + t * n + j;
        const float* dx = piece.dx + t * piece.wide + c;
        float* y = piece.y + t * piece.wide + c;
        vf kept = all(piece.kept[t]);
        for (int v = 0; v < kVectors; ++v) {
            vf x = load(dx + v * W), sum = load(y + v * W);
            for (int i = 0; i < kStates; ++i) {
                s[i][v] = fma(s[i][v], kept, mul(all(b[i]), x));
                sum = fma(s[i][v], all(read[i]), sum);
            }
            store(y + v * W, sum);
        }
    }
    for (int i = 0; i < kStates; ++i)
        for (int v = 0; v < kVectors; ++v) store(state + (j + i) * p + c + v * W, s[i][v], width[v]);
}

template <class T>
void scan_head(const Scan<T>& s, int64_t row, int64_t head) {
    Piece piece(s.n, s.p);
    float* state = s.state + (s.states[row] * s.heads + head) * s.n * s.p;
    for (int64_t token = s.starts[row]; token < s.starts[row + 1]; token += kPiece) {
        int count = int(std::min<int64_t>(kPiece, s.starts[row + 1] - token));
        read_piece(s, head, token, count, piece);
        for (int64_t j = 0; j < s.n; j += kStates)
            for (int64_t c = 0; c < s.p; c += kVectors * W) pass(piece, count, s.n, s.p, j, c, state);
        for (int i = 0; i < count; ++i) {
            T* out = s.out + ((token + i) * s.heads + head) * s.p;
            for (int64_t c = 0; c < s.p; c += W) store(out + c, load(piece.y + i * piece.wide + c), within(s.p - c));
        }
    }
}

template <class T>
void ssd_scan(const Scan<T>& s, int64_t rows) {
    bool shared = (s.starts[rows] - s.starts[0]) * s.heads * s.n * s.p >= kEnough;
    parallel_if(shared, rows * s.heads, [&](int64_t chunk) { scan_head(s, chunk / s.heads, chunk % s.heads); });
}

}  // namespace
}  // namespace quire

using namespace quire;

#define QUIRE_SSD_SCAN(name, T)                                                                                        \
    extern "C" void quire_ssd_scan_##name(                                                                             \
        const T* xbc, int64_t stride, const T* dt, int64_t dt_stride, const float* decay, const float* skip,           \
        const float* dt_bias, float least, float most, int64_t heads, int64_t groups, int64_t n, int64_t p,            \
        float* state, int64_t count, const int64_t* states, const int64_t* starts, int64_t rows, T* out) {             \
        if (!are_states(states, rows, count)) return;                                                                  \
        ssd_scan(Scan<T>{xbc, stride, dt, dt_stride, decay, skip, dt_bias, least, most, heads, groups, n, p, state,    \
                         states, starts, out},                                                                         \
                 rows);                                                                                                \
    }                                                                                                                  \
    QUIRE_ENTRY(ssd_scan_##name)

QUIRE_SSD_SCAN(bf16, bf16)
QUIRE_SSD_SCAN(fp32, float)
