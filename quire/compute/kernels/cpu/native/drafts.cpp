// Drafts: a few integers a position, on one thread.
#include <algorithm>

#include "calls.h"

using namespace quire;

// What each position is sampled with: its slot's parameters, and the counter that its token will have.
extern "C" void quire_position_columns(const int64_t* slots, const int64_t* offsets, int64_t number,
                                       const float* temperature, const int64_t* top_k, const float* top_p,
                                       const float* min_p, const int64_t* seed, const int64_t* drawn,
                                       float* own_temperature, int64_t* own_top_k, float* own_top_p, float* own_min_p,
                                       int64_t* own_seed, int64_t* own_drawn) {
    for (int64_t i = 0; i < number; ++i) {
        int64_t slot = slots[i];
        own_temperature[i] = temperature[slot], own_top_k[i] = top_k[slot], own_top_p[i] = top_p[slot];
        own_min_p[i] = min_p[slot], own_seed[i] = seed[slot], own_drawn[i] = drawn[slot] + offsets[i];
    }
}

// A row gains the tokens up to the first that is not the draft behind it; its slot, and the line of the slot's last
// `width` tokens, move on with them. No row has more positions than that.
extern "C" void quire_verify_drafts(const int64_t* tokens, const int8_t* faults, const int64_t* next_drafts,
                                    const int64_t* ends, const int64_t* slots, int64_t rows, int64_t* length,
                                    int64_t* last, int64_t* drawn, int64_t* recent, int64_t width, int64_t* counts) {
    int64_t first = 0;
    for (int64_t row = 0; row < rows; first = ends[row++]) {
        int64_t end = ends[row], at = first;
        if (end <= first) continue;  // padding
        while (at + 1 < end && tokens[at] == next_drafts[at] && !faults[at]) ++at;
        int64_t slot = slots[first], gained = at - first + 1;
        length[slot] += gained - (end - first);
        last[slot] = tokens[at];
        drawn[slot] += gained;
        counts[row] = gained;
        int64_t* line = recent + slot * width;
        std::copy(line + gained, line + width, line);
        std::copy(tokens + at + 1 - gained, tokens + at + 1, line + width - gained);
    }
}

QUIRE_ENTRY(position_columns)
QUIRE_ENTRY(verify_drafts)
