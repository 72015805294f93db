// Attention of one position, for all heads and rows of a thread.
#pragma once
#include "problem.h"

// Keys, or values, 64 positions side by side: sixteen scores then take one multiplication for each of the E
// numbers of a head, and no sum across lanes. What is read lies in one stretch.
struct Columns {
    static constexpr int64_t BLOCKS = 4, SPAN = BLOCKS * LANES;
    int64_t E, spans;
    float* data;

    Columns(Arena& arena, int64_t heads, int64_t positions, int64_t width)
        : E(width), spans((positions + SPAN - 1) / SPAN), data(arena.zeros(heads * spans * width * SPAN)) {}

    void put(int64_t head, int64_t j, const float* row) {
        float* to = data + (head * spans + j / SPAN) * E * SPAN + j % SPAN;
        for (int64_t e = 0; e < E; ++e) to[e * SPAN] = row[e];
    }

    // then(j, row . columns j to j + 15), for all blocks that hold some of first <= j < last.
    template <class Then>
    void product(int64_t head, const float* row, int64_t first, int64_t last, Then&& then) const {
        int64_t block = first / LANES, end = (last + LANES - 1) / LANES;
        // The next row of the batch is fetched meanwhile: stretches as short as these are over before the
        // processor has noticed that it reads one.
        const int64_t ahead = spans * E * SPAN;
        while (block < end) {
            int64_t inside = block % BLOCKS, count = std::min(BLOCKS - inside, end - block);
            const float* from = data + (head * spans + block / BLOCKS) * E * SPAN + inside * LANES;
            some<BLOCKS>(count, from, row, block * LANES, ahead, then);
            block += count;
        }
    }

   private:
    template <int N, class Then>
    void some(int64_t count, const float* from, const float* row, int64_t j, int64_t ahead, Then&& then) const {
        if constexpr (N > 1)
            if (count < N) return some<N - 1>(count, from, row, j, ahead, then);
        v16 c[N] = {};
        for (int64_t e = 0; e < E; ++e)
            for (int n = 0; n < N; ++n) {
                const float* at = from + e * SPAN + n * LANES;
                __builtin_prefetch(at + ahead, 0, 2);
                add_product(c[n], row[e], load(at));
            }
        for (int n = 0; n < N; ++n) then(j + n * LANES, c[n]);
    }
};

// out[e] = scale * sum_j weights[j] rows[j, e], for N times sixteen e. Four sums run side by side, because
// one addition waits for the one before it. What lies `ahead` is fetched meanwhile.
template <int N>
static inline void weighted_sum_of(const float* weights, const float* rows, int64_t stride, int64_t first,
                                   int64_t last, int64_t ahead, float scale, float* out) {
    v16 c[4][N] = {};
    int64_t j = first;
    for (; j + 4 <= last; j += 4)
        for (int i = 0; i < 4; ++i)
            for (int n = 0; n < N; ++n) {
                const float* at = rows + (j + i) * stride + n * LANES;
                __builtin_prefetch(at + ahead, 0, 2);
                add_product(c[i][n], weights[j + i], load(at));
            }
    for (; j < last; ++j)
        for (int n = 0; n < N; ++n) add_product(c[0][n], weights[j], load(rows + j * stride + n * LANES));
    for (int n = 0; n < N; ++n) store(out + n * LANES, ((c[0][n] + c[1][n]) + (c[2][n] + c[3][n])) * scale);
}

static inline void weighted_sum(const float* weights, const float* rows, int64_t stride, int64_t first,
                                int64_t last, int64_t E, int64_t ahead, float scale, float* out) {
    int64_t e = 0;
    for (; e + 2 * LANES <= E; e += 2 * LANES)
        weighted_sum_of<2>(weights, rows + e, stride, first, last, ahead, scale, out + e);
    if (e < E) weighted_sum_of<1>(weights, rows + e, stride, first, last, ahead, scale, out + e);
}

// The position tables, packed like other matrices; their last column is distance 1. Biases get a margin, so
// that sixteen may be read anywhere.
struct Distances {
    int64_t width;
    std::vector<Packed> tables;
    float* bias;

    Distances(Arena& arena, const Problem& p)
        : width((p.R + LANES - 1) / LANES * LANES), bias(arena.zeros(p.L * p.H * width)) {
        for (int64_t i = 0; i < p.L * p.H; ++i) {
            tables.emplace_back(arena, p.positions + i * p.R * p.E, p.E, p.R, 1, p.E);
            std::memcpy(bias + i * width, p.position_bias + i * p.R, 4 * p.R);
        }
    }
};

struct Attention {
    const Problem& p;
    const Distances& distances;
    const int64_t from, rows, padded;
    Columns keys;
    float *by_distance, *raw;

    Attention(Arena& arena, const Problem& p_, const Distances& distances_, int64_t from_, int64_t rows_)
        : p(p_), distances(distances_), from(from_), rows(rows_), padded(distances.width + 2 * LANES),
          keys(arena, p.G * p.H * rows, p.S(), p.E), by_distance(arena.zeros(rows * padded)),
          raw(arena.take(p.S() + 2 * LANES)) {}

    int64_t head(int64_t g, int64_t h, int64_t b) const { return (g * p.H + h) * rows + b; }

    void put(int64_t first, int64_t last) {
        for (int64_t g = 0; g < p.G; ++g)
            for (int64_t h = 0; h < p.H; ++h)
                for (int64_t b = 0; b < rows; ++b)
                    for (int64_t j = first; j < last; ++j)
                        keys.put(head(g, h, b), j, p.keys + p.memory(g, h, from + b) + j * p.E);
    }

    // then(h, b, weights, scale): scale * weights[j] is the probability of memory j. The queries are
    // `[rows, D]`, scaled and with u.
    template <class Then>
    void probabilities(int64_t t, int64_t l, const float* q, Then&& then) {
        const int64_t first = p.first(t), last = p.last(t);
        for (int64_t h = 0; h < p.H; ++h) {
            // Scores by distance: one product for all rows. Its columns end at distance 1, so that column
            // R - last + j belongs to memory j.
            const float* bias = distances.bias + (l * p.H + h) * distances.width;
            distances.tables[l * p.H + h].product(
                q + h * p.E, p.D, rows,
                [&](int64_t m, int64_t n, v16 c) {
                    store(by_distance + m * padded + LANES + n, c + load(bias + n));
                },
                p.R - (last - first));
            for (int64_t b = 0; b < rows; ++b) {
                const float* distance = by_distance + b * padded + LANES + p.R - last;
                keys.product(head(l % p.G, h, b), q + b * p.D + h * p.E, first, last,
                             [&](int64_t j, v16 c) { store(raw + j, c + load(distance + j)); });
                hide(t, b, first, last);
                then(h, b, raw, exponentials(first, last));
            }
        }
    }

   private:
    static constexpr float LOWEST = -3e38f;

    // What may not be read gets a score so low that its exponential is zero.
    void hide(int64_t t, int64_t b, int64_t first, int64_t last) {
        int64_t start = first / LANES * LANES, end = (last + LANES - 1) / LANES * LANES;
        for (int64_t j = start; j < first; ++j) raw[j] = LOWEST;
        for (int64_t j = last; j < end; ++j) raw[j] = LOWEST;
        for (int64_t j = first; p.allowed && j < last; ++j)
            if (!p.may_read(t, j, from + b)) raw[j] = LOWEST;
    }

    // Turns scores into exponentials and gives what makes them sum to one.
    float exponentials(int64_t first, int64_t last) {
        int64_t start = first / LANES * LANES, end = (last + LANES - 1) / LANES * LANES;
        v16 top = all(LOWEST), total = all(0);
        for (int64_t j = start; j < end; j += LANES) top = larger(top, load(raw + j));
        float highest = largest(top);
        // Nothing may be read: all zeros, not all equal.
        if (highest == LOWEST) {
            std::fill(raw + start, raw + end, 0.0f);
            return 0;
        }
        for (int64_t j = start; j < end; j += LANES) {
            v16 e = exponential(load(raw + j) - all(highest));
            store(raw + j, e);
            total = total + e;
        }
        return 1.0f / sum(total);
    }
};
