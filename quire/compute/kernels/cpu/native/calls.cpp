// Replays a list of calls. recording.py makes them.
#include "calls.h"

extern "C" void quire_replay(const quire::Entry* entries, const uint64_t* arguments, int64_t most, int64_t calls) {
    for (int64_t i = 0; i < calls; ++i) entries[i](arguments + i * most);
}
