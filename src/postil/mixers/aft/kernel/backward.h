// Down: from the gradients of queries to those of keys, as `pull` of `walk_back.py`.
//
// Row j of a column's `readers` is query j of the chunk and of the `left` queries after it: the derivatives of
// its denominator and numerator. Rows of `sources` are the chunk's keys.
#pragma once
#include "forward.h"

class Down {
    struct Column {
        std::vector<float> readers, sources;
        v16 m;
        Pair base;
    };

    const Problem& p;
    const int64_t first;
    float* const dnear;
    std::vector<Column> state;

    // ## The chunk's rows
    //
    // Row by row, all columns of the tile: memory is read in stretches, not a cache line here and there.
    void turn(const Columns& c, Column& column, int64_t from) const {
        float* rows = column.readers.data();
        std::memmove(rows + CHUNK * ROW, rows, 4 * p.left * ROW);
        const int64_t number = std::min(std::max<int64_t>(from / CHUNK, 0), p.chunks() - 1);
        v16 m = c.read(p.references, number), factor = m - column.m;
        if (any_above(all(0) - factor, 0)) {
            factor = exponential(factor);
            scale(rows + CHUNK * ROW, p.left, factor);
            column.base = column.base * factor;
        }
        column.m = m;
    }

    Pair reader(const Columns& c, int64_t t) const {
        v16 g = c.read(p.g, t), flow = g * c.read(p.y, t), over = reciprocal(c.read(p.den, t, 1));
        Gate gate(c.read(p.q, t));
        v16 below = reciprocal(gate.below);
        c.write(p.dq, t, flow * gate.rest * below);
        return {all(0) - flow * over, g * gate.above * below * over};
    }

    Pair source(const Columns& c, int64_t t, v16 m) const {
        v16 e = exponential(c.read(p.k, t + p.start) - m);
        return {e, e * c.read(p.v, t + p.start)};
    }

    void fill(int64_t from) {
        const Pair nothing{all(0), all(0)};
        for (int64_t i = 0; i < CHUNK; ++i)
            for (size_t j = 0; j < state.size(); ++j) {
                const Columns c(p, first + j);
                Column& column = state[j];
                const int64_t t = from + i;
                store_pair(column.readers.data() + i * ROW, p.has_query(t) ? reader(c, t) : nothing);
                store_pair(column.sources.data() + i * ROW, p.has_key(t) ? source(c, t, column.m) : nothing);
            }
    }

    // ## The gradients of keys and values
    //
    // They take the place of the sources, of which nobody has need any more.
    void write(int64_t from) const {
        for (int64_t i = 0; i < CHUNK; ++i)
            for (size_t j = 0; j < state.size() && p.has_key(from + i); ++j) {
                const Columns c(p, first + j);
                const Pair gradient = load_pair(state[j].sources.data() + i * ROW);
                c.write(p.dk, from + i + p.start, gradient.den);
                c.write(p.dv, from + i + p.start, gradient.num);
            }
    }

    void chunk(const Lists& lists, Column& column, int64_t from) const {
        Pair inside{all(0), all(0)};
        for (int64_t i = CHUNK - ROWS; i >= 0; i -= ROWS) inside = block(lists, column, from, i, inside);
        column.base = column.base + inside;
    }

    // `inside` sums the readers of the buffer from row i + ROWS + left on, each as far as it reads far keys.
    Pair block(const Lists& lists, Column& column, int64_t from, int64_t i, Pair inside) const {
        const float* rows = column.readers.data();
        Pair sum[ROWS];
#pragma GCC unroll 8
        for (int64_t r = ROWS - 1; r >= 0; --r) {
            sum[r] = column.base + inside;
            int64_t j = i + r + p.left;
            if (p.has_query(from + j)) add_product(inside, lists.far[j], load_pair(rows + j * ROW));
        }
        // Key i + r is read by the queries from i + r to i + r + left.
        const int64_t low = std::max(i, -from), high = std::min(i + ROWS + p.left, p.length - from);
        const int64_t common = std::min(std::max(i + ROWS - 1, low), high);
        const int64_t apart = std::max(std::min(i + p.left + 1, high), common);
        auto some = [&](int64_t j) {
            const float* weight = p.near + lists.listing[j] + from + i;
            for (int64_t r = std::max<int64_t>(0, j - p.left - i); r < std::min(ROWS, j - i + 1); ++r)
                add_product(sum[r], weight[r], load_pair(rows + j * ROW));
        };
        for (int64_t j = low; j < common; ++j) some(j);
        for (int64_t j = common; j < apart; ++j) {
            const float* weight = p.near + lists.listing[j] + from + i;
            Pair reader = load_pair(rows + j * ROW);
#pragma GCC unroll 8
            for (int64_t r = 0; r < ROWS; ++r) add_product(sum[r], weight[r], reader);
        }
        for (int64_t j = apart; j < high; ++j) some(j);
        for (int64_t r = 0; r < ROWS; ++r) {
            float* row = column.sources.data() + (i + r) * ROW;
            Pair key = load_pair(row);
            store_pair(row, {key.den * sum[r].den + key.num * sum[r].num, key.den * sum[r].num});
        }
        return inside;
    }

    // ## The gradients of the near weights
    //
    // They are sums over columns, four keys times four queries at a time.
    void weights(const Lists& lists, int64_t from) const {
        const int64_t last = std::min(CHUNK + p.left, p.length - from);
        for (int64_t i = 0; i < CHUNK; i += SIDE)
            for (int64_t j = i; j < std::min(i + SIDE + p.left, last); j += SIDE)
                if (from + j + SIDE > 0) pairs(lists, from, i, j);
    }

    void pairs(const Lists& lists, int64_t from, int64_t i, int64_t j) const {
        v16 sum[SIDE][SIDE];
        for (auto& row : sum)
            for (v16& each : row) each = all(0);
        for (const Column& column : state) {
            const float *keys = column.sources.data() + i * ROW, *queries = column.readers.data() + j * ROW;
            Pair key[SIDE];
#pragma GCC unroll 8
            for (int64_t s = 0; s < SIDE; ++s) key[s] = load_pair(keys + s * ROW);
#pragma GCC unroll 8
            for (int64_t t = 0; t < SIDE; ++t) {
                Pair query = load_pair(queries + t * ROW);
#pragma GCC unroll 8
                for (int64_t s = 0; s < SIDE; ++s) {
                    add_product(sum[t][s], query.den, key[s].den);
                    add_product(sum[t][s], query.num, key[s].num);
                }
            }
        }
        for (int64_t t = 0; t < SIDE; ++t)
            for (int64_t s = 0; s < SIDE; ++s)
                if (p.has_query(from + j + t) && j + t >= i + s && j + t <= i + s + p.left)
                    dnear[lists.listing[j + t] + from + i + s] += ::sum(sum[t][s]);
    }

   public:
    Down(const Problem& problem, int64_t from, int64_t to, float* gradient)
        : p(problem), first(from), dnear(gradient) {
        for (int64_t vector = from; vector < to; ++vector)
            state.push_back({std::vector<float>((p.left + CHUNK + SIDE) * ROW), std::vector<float>(CHUNK * ROW),
                             Columns(p, vector).read(p.references, p.chunks() - 1), {all(0), all(0)}});
    }

    void run() {
        const int64_t before = (p.start + CHUNK - 1) / CHUNK * CHUNK;
        for (int64_t from = (p.chunks() - 1) * CHUNK; from >= -before; from -= CHUNK) {
            Lists lists(p, from, CHUNK + p.left + SIDE);
            for (size_t i = 0; i < state.size(); ++i) turn(Columns(p, first + i), state[i], from);
            fill(from);
            weights(lists, from);
            for (Column& column : state) chunk(lists, column, from);
            write(from);
        }
    }
};
