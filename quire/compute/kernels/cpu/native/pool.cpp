#include "pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>

namespace quire {
namespace {

constexpr uint64_t kOpen = 1 << 15;         // of `state`: the job takes threads
constexpr uint64_t kJoined = kOpen - 1;     // of `state`: how many threads besides the caller are in the job
constexpr int kJobShift = 16;               // of `state`: the job's number
constexpr int kSpins = 3000;                // pauses before a thread without work sleeps: some 50 µs
constexpr int kSpinsAtEnd = 2000;           // pauses before the caller lets others run while it waits for the last chunk

struct Pool {
    std::mutex one_job;
    std::atomic<uint64_t> state{0};
    std::atomic<uint32_t> bell{0};
    std::atomic<int> asleep{0};
    std::atomic<int> wanted{1};
    int started = 1;
    alignas(64) std::atomic<int64_t> next{0};
    int64_t chunks = 0;
    Work work = nullptr;
    void* context = nullptr;

    void drain() {
        for (int64_t chunk; (chunk = next.fetch_add(1, std::memory_order_relaxed)) < chunks;) work(context, chunk);
    }

    bool is_new(uint64_t s, uint64_t seen) const { return (s & kOpen) && (s >> kJobShift) != seen; }

    void sleep(uint64_t seen) {
        asleep.fetch_add(1);
        uint32_t rung = bell.load();
        if (!is_new(state.load(), seen)) syscall(SYS_futex, &bell, FUTEX_WAIT_PRIVATE, rung, nullptr, nullptr, 0);
        asleep.fetch_sub(1);
    }

    void serve(int number) {
        uint64_t seen = 0;
        for (;;) {
            uint64_t s = state.load(std::memory_order_acquire);
            for (int i = 0; i < kSpins && !is_new(s, seen); ++i) {
                _mm_pause();
                s = state.load(std::memory_order_acquire);
            }
            if (!is_new(s, seen) || number >= wanted.load(std::memory_order_relaxed)) {
                if (is_new(s, seen)) seen = s >> kJobShift;
                sleep(seen);
                continue;
            }
            if (!state.compare_exchange_weak(s, s + 1, std::memory_order_acq_rel)) continue;
            seen = s >> kJobShift;
            drain();
            state.fetch_sub(1, std::memory_order_release);
        }
    }

    void start() {
        try {
            for (; started < wanted.load(); ++started) std::thread(&Pool::serve, this, started).detach();
        } catch (const std::system_error&) {
            wanted.store(started);  // the system gives no more: those that are there do the work
        }
    }

    void run(int64_t n, Work w, void* c) {
        start();
        chunks = n, work = w, context = c;
        next.store(0, std::memory_order_relaxed);
        uint64_t job = (state.load(std::memory_order_relaxed) >> kJobShift) + 1;
        state.store(job << kJobShift | kOpen);
        if (asleep.load() > 0) {
            bell.fetch_add(1);
            syscall(SYS_futex, &bell, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
        }
        drain();
        state.fetch_and(~kOpen, std::memory_order_acq_rel);
        for (int i = 0; state.load(std::memory_order_acquire) & kJoined; ++i) {
            if (i < kSpinsAtEnd) {
                _mm_pause();
            } else {
                sched_yield();
            }
        }
    }
};

Pool* current = new Pool;  // never freed: its threads run until the process ends

// A fork has none of the threads, and a job of its parent may have been under way.
void start_afresh() {
    int wanted = current->wanted.load();
    current = new Pool;
    current->wanted.store(wanted);
}

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, start_afresh);

Pool& pool() { return *current; }

struct Scratch {
    void* memory = nullptr;
    int64_t bytes = 0;
    ~Scratch() { std::free(memory); }
};

}  // namespace

int threads() { return pool().wanted.load(std::memory_order_relaxed); }

void run_chunks(int64_t chunks, Work work, void* context) {
    Pool& p = pool();
    if (chunks > 1 && threads() > 1 && p.one_job.try_lock()) {
        p.run(chunks, work, context);
        p.one_job.unlock();
        return;
    }
    for (int64_t chunk = 0; chunk < chunks; ++chunk) work(context, chunk);
}

void* scratch(int number, int64_t bytes) {
    thread_local Scratch own[4];
    Scratch& s = own[number];
    if (s.bytes < bytes) {
        std::free(s.memory);
        s.bytes = (bytes + bytes / 2 + 4095) / 4096 * 4096;
        s.memory = std::aligned_alloc(4096, s.bytes);
        if (!s.memory) std::abort();
    }
    return s.memory;
}

}  // namespace quire

extern "C" void quire_set_threads(int32_t number) { quire::pool().wanted.store(number < 1 ? 1 : number); }
