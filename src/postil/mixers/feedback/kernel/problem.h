// What the kernel is given: sizes and pointers, in the order in which kernel/__init__.py lists them.
//
// Memory is `[G, H, B, S, E]`, queries are `[H, B, T, L, E]`, everything else is time-major, as in the plain
// form. Only the table of probabilities has a layout of its own.
#pragma once
#include <algorithm>
#include <thread>

#include "products.h"

constexpr int64_t CHUNK = 16;

struct Problem {
    int64_t T, B, D, F, L, H, E, G, carried, R, window, norm_memory, mask_rows, mask_batch, threads;
    const uint8_t* allowed;
    const float *x, *query, *query_bias, *positions, *position_bias, *output, *output_bias;
    const float *layer1, *layer1_bias, *layer2, *layer2_bias, *mixing, *key_value, *key_value_bias;
    float *y, *keys, *values;
    float *inputs, *middles, *hidden, *attended, *queries, *probabilities, *mixed, *mixed_rstd;
    const float* dy;
    float *dkeys, *dvalues, *dx, *dmixed, *dkey_value;
    float *dquery, *dquery_bias, *dpositions, *dposition_bias, *doutput, *doutput_bias;
    float *dlayer1, *dlayer1_bias, *dlayer2, *dlayer2_bias;

    int64_t S() const { return carried + T; }
    int64_t first(int64_t t) const { return std::max<int64_t>(0, carried + t - window); }
    int64_t last(int64_t t) const { return carried + t; }
    int64_t memory(int64_t g, int64_t h, int64_t b) const { return ((g * H + h) * B + b) * S() * E; }
    int64_t query_at(int64_t h, int64_t b, int64_t t, int64_t l) const {
        return (((h * B + b) * T + t) * L + l) * E;
    }
    bool may_read(int64_t t, int64_t j, int64_t b) const {
        int64_t r = mask_rows == 1 ? 0 : t, c = mask_batch == 1 ? 0 : b;
        return allowed[(r * S() + j) * mask_batch + c];
    }
    // Attention is skipped where nothing may be read.
    bool reads(int64_t t, int64_t b) const {
        if (!allowed) return last(t) > first(t);
        for (int64_t j = first(t); j < last(t); ++j)
            if (may_read(t, j, b)) return true;
        return false;
    }
};

// A row of the table of probabilities holds what any step of its chunk may read, and no more: the triangle
// above stays unused. Rows are an odd number of cache lines apart, else those of one column would all fall
// into the same few places of the cache.
struct Rows {
    int64_t start, stop, origin, width, stride;

    Rows(const Problem& p, int64_t t)
        : start(t / CHUNK * CHUNK), stop(std::min(p.T, start + CHUNK)),
          origin(p.first(start) / LANES * LANES),
          width(std::max<int64_t>(LANES, (p.last(stop - 1) - origin + LANES - 1) / LANES * LANES)),
          stride((width / LANES | 1) * LANES) {}

    // Writes a row: zeros up to the first memory that this step may read, then its probabilities.
    void put(const Problem& p, int64_t t, const float* weights, float scale, float* row) const {
        int64_t j = origin, first = p.first(t) / LANES * LANES, last = p.last(t);
        for (; j < first; j += LANES) store(row + j - origin, all(0));
        for (; j < last; j += LANES) store(row + j - origin, load(weights + j) * scale);
    }
};

struct Table {
    std::vector<int64_t> before;
    int64_t size = 0;

    explicit Table(const Problem& p) {
        for (int64_t t = 0; t < p.T; t += CHUNK) {
            Rows rows(p, t);
            before.push_back(size);
            size += (rows.stop - rows.start) * p.L * rows.stride;
        }
    }

    int64_t at(const Problem& p, const Rows& rows, int64_t h, int64_t b, int64_t t, int64_t l) const {
        return (h * p.B + b) * size + before[t / CHUNK] + ((t - rows.start) * p.L + l) * rows.stride;
    }
};

// Rows of a batch never meet, so each thread takes some of them through the whole sequence. Nobody waits for
// anybody until the end.
template <class Work>
static void split_batch(const Problem& p, Work&& work) {
    int64_t threads = std::max<int64_t>(1, std::min(p.threads, p.B));
    std::vector<std::thread> others;
    for (int64_t i = 1; i < threads; ++i)
        others.emplace_back([&, i] { work(i, p.B * i / threads, p.B * (i + 1) / threads); });
    work(0, 0, p.B / threads);
    for (auto& other : others) other.join();
}
