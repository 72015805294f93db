// What the kernel is given: sizes and pointers, in the order in which kernel/__init__.py lists them.
//
// Every tensor has the layout it has in the plain form: memory `[G, H, B, S, E]`, queries `[H, B, T, L, E]`,
// scores `[H, B, T, L, 16 + S]`, everything else time-major. So the two forms can take turns.
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
    float *dkeys, *dvalues, *dx, *dmixed, *dkey_value, *scores, *answers;
    float *dquery, *dquery_bias, *dpositions, *dposition_bias, *doutput, *doutput_bias;
    float *dlayer1, *dlayer1_bias, *dlayer2, *dlayer2_bias;

    int64_t S() const { return carried + T; }
    int64_t row() const { return CHUNK + S(); }
    int64_t first(int64_t t) const { return std::max<int64_t>(0, carried + t - window); }
    int64_t last(int64_t t) const { return carried + t; }
    int64_t memory(int64_t g, int64_t h, int64_t b) const { return ((g * H + h) * B + b) * S() * E; }
    int64_t query_at(int64_t h, int64_t b, int64_t t, int64_t l) const {
        return (((h * B + b) * T + t) * L + l) * E;
    }
    int64_t score_at(int64_t h, int64_t b, int64_t t, int64_t l) const {
        return (((h * B + b) * T + t) * L + l) * row() + CHUNK;
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

// Keys, or values, sixteen positions side by side: sixteen scores then take one multiplication for each of
// the E numbers of a head, and no sum across lanes.
struct Columns {
    int64_t E, blocks;
    std::vector<float> data;

    Columns(int64_t heads, int64_t positions, int64_t width)
        : E(width), blocks((positions + LANES - 1) / LANES), data(heads * blocks * width * LANES) {}

    void put(int64_t head, int64_t j, const float* row) {
        float* to = &data[(head * blocks + j / LANES) * E * LANES + j % LANES];
        for (int64_t e = 0; e < E; ++e) to[e * LANES] = row[e];
    }

    // scores[j] = row . column j, for all blocks that hold some of first <= j < last.
    void scores(int64_t head, const float* row, int64_t first, int64_t last, float* scores) const {
        int64_t block = first / LANES, end = (last + LANES - 1) / LANES;
        const float* from = &data[head * blocks * E * LANES];
        for (; block + 4 <= end; block += 4) some<4>(from, row, block, scores);
        for (; block < end; ++block) some<1>(from, row, block, scores);
    }

   private:
    template <int N>
    void some(const float* from, const float* row, int64_t block, float* scores) const {
        v16 c[N] = {};
        const float* at = from + block * E * LANES;
        for (int64_t e = 0; e < E; ++e)
            for (int n = 0; n < N; ++n) add_product(c[n], row[e], load(at + (n * E + e) * LANES));
        for (int n = 0; n < N; ++n) store(scores + (block + n) * LANES, c[n]);
    }
};

// out[e] = sum_j weights[j] rows[j, e], for N times sixteen e. Four sums run side by side, because one
// addition waits for the one before it.
template <int N>
static inline void weighted_sum_of(const float* weights, const float* rows, int64_t first, int64_t last,
                                   int64_t E, float* out) {
    v16 c[4][N] = {};
    int64_t j = first;
    for (; j + 4 <= last; j += 4)
        for (int i = 0; i < 4; ++i)
            for (int n = 0; n < N; ++n)
                add_product(c[i][n], weights[j + i], load(rows + (j + i) * E + n * LANES));
    for (; j < last; ++j)
        for (int n = 0; n < N; ++n) add_product(c[0][n], weights[j], load(rows + j * E + n * LANES));
    for (int n = 0; n < N; ++n) store(out + n * LANES, (c[0][n] + c[1][n]) + (c[2][n] + c[3][n]));
}

static inline void weighted_sum(const float* weights, const float* rows, int64_t first, int64_t last,
                                int64_t E, float* out) {
    int64_t e = 0;
    for (; e + 2 * LANES <= E; e += 2 * LANES)
        weighted_sum_of<2>(weights, rows + e, first, last, E, out + e);
    if (e < E) weighted_sum_of<1>(weights, rows + e, first, last, E, out + e);
}

// ds = p (dp - sum p dp)
static inline void softmax_backward(const float* p, const float* dp, float* ds, int64_t first,
                                    int64_t last) {
    v16 products = all(0);
    int64_t j = first;
    for (; j + LANES <= last; j += LANES) add_product(products, load(p + j), load(dp + j));
    float mean = sum(products);
    for (; j < last; ++j) mean += p[j] * dp[j];
    for (j = first; j + LANES <= last; j += LANES) store(ds + j, load(p + j) * (load(dp + j) - all(mean)));
    for (; j < last; ++j) ds[j] = p[j] * (dp[j] - mean);
}
