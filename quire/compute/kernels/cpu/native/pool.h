// One pool of threads for all kernels. A job is a number of chunks that whoever is awake takes one by one: a thread that
// sleeps, or that another program keeps from running, is not waited for.
#pragma once

#include <algorithm>
#include <cstdint>

namespace quire {

using Work = void (*)(void* context, int64_t chunk);

// Calls work(context, chunk) for every chunk, each once, and returns when all are done.
void run_chunks(int64_t chunks, Work work, void* context);

// How many threads share a job, the caller's included.
int threads();

// How many panels of a weight, each of so many bytes, a thread takes at a time: half a megabyte that lies side by side,
// because a processor reads ahead in long streams by itself.
inline int64_t panels_of_chunk(int64_t panels, int64_t bytes) {
    return std::max<int64_t>(1, std::min((int64_t(1) << 19) / bytes, panels / (2 * threads())));
}

template <class F>
void parallel(int64_t chunks, const F& body) {
    run_chunks(chunks, [](void* context, int64_t chunk) { (*static_cast<const F*>(context))(chunk); },
               const_cast<F*>(&body));
}

// The same, by the caller alone where the work is not worth sharing.
template <class F>
void parallel_if(bool shared, int64_t chunks, const F& body) {
    if (shared) {
        parallel(chunks, body);
    } else {
        for (int64_t chunk = 0; chunk < chunks; ++chunk) body(chunk);
    }
}

// Room for a thread's intermediate results, at least this many bytes, aligned to 64. One number is one piece of memory:
// the next call with the number may move it.
void* scratch(int number, int64_t bytes);

}  // namespace quire
