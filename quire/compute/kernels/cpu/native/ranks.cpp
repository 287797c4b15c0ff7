// Sums and parts of tensors over ranks: processes, or threads, that have mapped one piece of memory.
//
// Each rank writes what it gives to a buffer of its own, says that it has come, waits until all others have, and reads
// theirs. Calls use two sets of buffers in turn, so one meeting a call is enough: who has come to a call has read all of
// the one before it, and so nobody reads any more what the next call but one overwrites.
#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstring>
#include <numeric>

#include "calls.h"
#include "pool.h"
#include "vec.h"

namespace quire {
namespace {

constexpr int64_t kLine = 64;               // bytes; what ranks write lies this far apart
constexpr int64_t kTickMs = 20;             // a rank that waits looks around so often
constexpr int64_t kElementsOfChunk = 1 << 14;

struct Line {
    std::atomic<uint32_t> arrived;          // calls that the rank has come to
    std::atomic<uint32_t> asleep;           // who waits for it
    uint32_t unused[14];
};
static_assert(sizeof(Line) == kLine);

// What a rank knows; ranks.py makes it.
struct Ranks {
    char* shared;                           // a line each rank, one more, then the buffers
    int64_t rank, count;
    int64_t bytes;                          // of a buffer
    int64_t calls;                          // that this rank has come to
    int64_t spins;                          // pauses before it sleeps
    int64_t patience_ms;                    // how long it waits for another

    Line& line(int64_t number) const { return reinterpret_cast<Line*>(shared)[number]; }

    // 1 + the rank that somebody has waited for in vain; from then on nobody waits any more
    std::atomic<uint32_t>& missing() const { return line(count).arrived; }

    // Of the next call until it has met, then of that call.
    char* buffer(int64_t call, int64_t number) const {
        return shared + kLine * (count + 1) + ((call & 1) * count + number) * bytes;
    }
};

bool has_come(const Line& line, uint32_t call) {
    return int32_t(line.arrived.load(std::memory_order_acquire) - call) >= 0;
}

bool wait_for(const Ranks& ranks, Line& line, uint32_t call) {
    for (int64_t i = 0; i < ranks.spins; ++i) {
        if (has_come(line, call)) return true;
        _mm_pause();
    }
    for (int64_t waited = 0; waited <= ranks.patience_ms; waited += kTickMs) {  // of a machine that stood still, a tick
        timespec tick{0, kTickMs * 1000000};
        line.asleep.fetch_add(1);
        uint32_t seen = line.arrived.load();
        if (int32_t(seen - call) < 0) {
            syscall(SYS_futex, &line.arrived, FUTEX_WAIT, seen, &tick, nullptr, 0);
        }
        line.asleep.fetch_sub(1);
        if (has_come(line, call)) return true;
        if (ranks.missing().load(std::memory_order_relaxed)) return false;
    }
    return false;
}

// Whether all ranks have come to the call.
bool meet(Ranks& ranks) {
    uint32_t call = uint32_t(++ranks.calls);
    if (ranks.missing().load(std::memory_order_relaxed)) return false;
    Line& own = ranks.line(ranks.rank);
    own.arrived.store(call);
    if (own.asleep.load() > 0) syscall(SYS_futex, &own.arrived, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    for (int64_t number = 0; number < ranks.count; ++number) {
        if (number == ranks.rank || wait_for(ranks, ranks.line(number), call)) continue;
        uint32_t nobody = 0;
        ranks.missing().compare_exchange_strong(nobody, uint32_t(number) + 1);
        return false;
    }
    return true;
}

// Adds up what all ranks have in their buffers of this call, `n` elements from `first` on.
template <class T>
void add_buffers(const Ranks& ranks, int64_t call, int64_t first, int64_t n, T* out) {
    auto of = [&](int64_t number) { return reinterpret_cast<const T*>(ranks.buffer(call, number)) + first; };
    int64_t chunks = (n + kElementsOfChunk - 1) / kElementsOfChunk;
    parallel(chunks, [&](int64_t chunk) {
        int64_t end = std::min(n, (chunk + 1) * kElementsOfChunk);
        for (int64_t i = chunk * kElementsOfChunk; i < end; i += W) {
            int w = int(std::min<int64_t>(W, end - i));
            vf total = load(of(0) + i, w);
            for (int64_t number = 1; number < ranks.count; ++number) total = add(total, load(of(number) + i, w));
            store(out + i, total, w);
        }
    });
}

template <class T>
void all_reduce(Ranks& ranks, T* x, int64_t n) {
    int64_t most = ranks.bytes / int64_t(sizeof(T));
    for (int64_t at = 0; at < n; at += most) {
        int64_t length = std::min(most, n - at), call = ranks.calls + 1;
        std::memcpy(ranks.buffer(call, ranks.rank), x + at, length * sizeof(T));
        if (!meet(ranks)) return;
        add_buffers(ranks, call, 0, length, x + at);
    }
}

// x has `rows` rows `stride` apart, out rows of `width`.
template <class T>
void gather_columns(Ranks& ranks, const T* x, int64_t rows, int64_t stride, T* out, int64_t width) {
    int64_t each = (width + ranks.count - 1) / ranks.count;
    int64_t most = ranks.bytes / (each * int64_t(sizeof(T)));
    for (int64_t first = 0; first < rows; first += most) {
        int64_t number_of_rows = std::min(most, rows - first), call = ranks.calls + 1;
        auto columns = [&](int64_t number) { return std::min(each, width - number * each) * sizeof(T); };
        T* own = reinterpret_cast<T*>(ranks.buffer(call, ranks.rank));
        for (int64_t row = 0; row < number_of_rows; ++row)
            std::memcpy(own + row * each, x + (first + row) * stride, columns(ranks.rank));
        if (!meet(ranks)) return;
        for (int64_t number = 0; number < ranks.count; ++number) {
            const T* theirs = reinterpret_cast<const T*>(ranks.buffer(call, number));
            for (int64_t row = 0; row < number_of_rows; ++row)
                std::memcpy(out + (first + row) * width + number * each, theirs + row * each, columns(number));
        }
    }
}

// Rows of several groups of ranks, one group's behind the other's in all ranks. Groups are neighbours of equal number,
// and the ranks of one have the same rows. They are those of several tensors at once, each of so many bytes a row.
void gather_rows(Ranks& ranks, int64_t tensors, const char* const* x, const int64_t* widths, int64_t groups,
                 const int64_t* rows, char* const* out) {
    int64_t each = ranks.count / groups, longest = *std::max_element(rows, rows + groups);
    int64_t most = ranks.bytes / std::accumulate(widths, widths + tensors, int64_t(0));
    for (int64_t at = 0; at < longest; at += most) {
        int64_t call = ranks.calls + 1;
        auto length = [&](int64_t group) { return std::clamp<int64_t>(rows[group] - at, 0, most); };
        char* own = ranks.buffer(call, ranks.rank);
        int64_t given = ranks.rank % each ? 0 : length(ranks.rank / each);
        for (int64_t t = 0; given && t < tensors; own += most * widths[t++])
            std::memcpy(own, x[t] + at * widths[t], given * widths[t]);
        if (!meet(ranks)) return;
        for (int64_t group = 0, first = 0; group < groups; first += rows[group++]) {
            const char* theirs = ranks.buffer(call, group * each);
            for (int64_t t = 0; length(group) && t < tensors; theirs += most * widths[t++])
                std::memcpy(out[t] + (first + at) * widths[t], theirs, length(group) * widths[t]);
        }
    }
}

// x has the rows of each group, one behind the other, of so many elements in all; out the sum of all ranks' of the own
// group's.
template <class T>
void reduce_rows(Ranks& ranks, const T* x, int64_t groups, const int64_t* sizes, T* out) {
    int64_t own = ranks.rank / (ranks.count / groups), longest = *std::max_element(sizes, sizes + groups);
    int64_t most = ranks.bytes / (groups * int64_t(sizeof(T)));
    for (int64_t at = 0; at < longest; at += most) {
        int64_t call = ranks.calls + 1;
        auto length = [&](int64_t group) { return std::clamp<int64_t>(sizes[group] - at, 0, most); };
        T* buffer = reinterpret_cast<T*>(ranks.buffer(call, ranks.rank));
        const T* part = x;
        for (int64_t group = 0; group < groups; part += sizes[group++])
            if (length(group)) std::memcpy(buffer + group * most, part + at, length(group) * sizeof(T));
        if (!meet(ranks)) return;
        add_buffers(ranks, call, own * most, length(own), out + at);
    }
}

}  // namespace
}  // namespace quire

using namespace quire;

#define QUIRE_RANKS(name, T)                                                                                           \
    extern "C" void quire_all_reduce_##name(void* ranks, T* x, int64_t n) {                                            \
        all_reduce<T>(*static_cast<Ranks*>(ranks), x, n);                                                              \
    }                                                                                                                  \
    QUIRE_ENTRY(all_reduce_##name)                                                                                     \
    extern "C" void quire_gather_columns_##name(void* ranks, const T* x, int64_t rows, int64_t stride, T* out,         \
                                                int64_t width) {                                                       \
        gather_columns<T>(*static_cast<Ranks*>(ranks), x, rows, stride, out, width);                                   \
    }                                                                                                                  \
    QUIRE_ENTRY(gather_columns_##name)                                                                                 \
    extern "C" void quire_reduce_rows_##name(void* ranks, const T* x, int64_t groups, const int64_t* sizes, T* out) {  \
        reduce_rows<T>(*static_cast<Ranks*>(ranks), x, groups, sizes, out);                                            \
    }                                                                                                                  \
    QUIRE_ENTRY(reduce_rows_##name)

QUIRE_RANKS(bf16, bf16)
QUIRE_RANKS(fp32, float)

extern "C" void quire_gather_rows(void* ranks, int64_t tensors, const char* const* x, const int64_t* widths,
                                  int64_t groups, const int64_t* rows, char* const* out) {
    gather_rows(*static_cast<Ranks*>(ranks), tensors, x, widths, groups, rows, out);
}
QUIRE_ENTRY(gather_rows)
