// One pool of threads for all kernels. A job is a number of chunks that whoever is awake takes one by one: a thread that
// sleeps, or that another program keeps from running, is not waited for.
#pragma once

#include <cstdint>

namespace quire {

using Work = void (*)(void* context, int64_t chunk);

// Calls work(context, chunk) for every chunk, each once, and returns when all are done.
void run_chunks(int64_t chunks, Work work, void* context);

// How many threads share a job, the caller's included.
int threads();

template <class F>
void parallel(int64_t chunks, F&& body) {
    run_chunks(chunks, [](void* context, int64_t chunk) { (*static_cast<F*>(context))(chunk); }, &body);
}

// Room for a thread's intermediate results, at least this many bytes, aligned to 64. One number is one piece of memory:
// the next call with the number may move it.
void* scratch(int number, int64_t bytes);

}  // namespace quire
