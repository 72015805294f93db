// Gated means with near and far keys, compiled.
//
// The plain form writes its sums to memory and reads them again several times over. Here sixteen columns of a
// chunk stay in the fastest cache while eight rows at a time are summed in registers, and memory is read and
// written once, in long stretches.
#include "forward.h"

#include "backward.h"

extern "C" void aft_forward(const Problem* p) {
    split_columns(*p, [&](int64_t, int64_t from, int64_t to) {
        for (int64_t vector = from; vector < to; vector += TILE)
            Up(*p, vector, std::min(vector + TILE, to)).run();
    });
}

extern "C" void aft_backward(const Problem* p) {
    split_columns(*p, [&](int64_t thread, int64_t from, int64_t to) {
        float* dnear = p->dnear + thread * p->blocks * p->rows * p->listed;
        for (int64_t vector = from; vector < to; vector += TILE)
            Down(*p, vector, std::min(vector + TILE, to), dnear).run();
    });
}
