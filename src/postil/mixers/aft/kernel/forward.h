// Up: from keys to queries, chunk by chunk, as `push` of `walk.py`.
//
// Row i of a column's buffer is key i - left of the chunk; `results` are denominators and means. Row by row the
// sums run in the order of time, whether eight rows are computed together or one: so nothing that follows a row
// can move a bit of it.
#pragma once
#include "problem.h"

static inline v16 reciprocal(v16 a) {
    EACH a.part[i] = 1.0f / a.part[i];
    return a;
}
static inline bool any_above(v16 a, float limit) {
    int found = 0;
    EACH for (int j = 0; j < WIDTH; ++j) found |= a.part[i][j] > limit;
    return found;
}
// A reference near to zero is taken as zero.
static inline v16 calm(v16 m) {
    EACH m.part[i] = (m.part[i] >= -CALM) & (m.part[i] <= CALM) ? vec{} : m.part[i];
    return m;
}
// 1 / (1 + e^-q) is `above` / `below`, and 1 less it `rest` / `below`, with no power larger than 1.
struct Gate {
    v16 above, rest, below;

    explicit Gate(v16 q) {
        v16 e = q;
        EACH e.part[i] = q.part[i] > 0 ? -q.part[i] : q.part[i];
        e = exponential(e);
        below = e + all(1);
        EACH {
            above.part[i] = q.part[i] < 0 ? e.part[i] : vec{} + 1.0f;
            rest.part[i] = q.part[i] < 0 ? vec{} + 1.0f : e.part[i];
        }
    }
};

class Up {
    struct Column {
        std::vector<float> buffer, results;
        v16 seen, m, peak;
        Pair base;
    };

    const Problem& p;
    const int64_t first;
    std::vector<Column> state;

    // ## What a chunk begins with
    v16 largest_before(const Columns& c) const {
        v16 seen = all(-INFINITY);
        for (int64_t t = -p.start; t < 0 && p.has_key(t); ++t) seen = larger(c.read(p.k, t + p.start), seen);
        return seen;
    }

    // Where nothing was seen yet, the first real key serves: rows before it read nothing anyway.
    v16 reference(const Columns& c, v16 seen, int64_t from, int64_t to) const {
        for (int64_t t = from; t < to && p.has_key(t); ++t) {
            bool all_seen = true;
            EACH for (int j = 0; j < WIDTH; ++j) all_seen &= seen.part[i][j] != -INFINITY;
            if (all_seen) break;
            v16 k = c.read(p.k, t + p.start);
            EACH seen.part[i] = seen.part[i] == -INFINITY ? k.part[i] : seen.part[i];
        }
        EACH seen.part[i] = seen.part[i] == -INFINITY ? vec{} : seen.part[i];
        return calm(seen);
    }

    Pair weighed(const Columns& c, int64_t t, v16 m) const {
        v16 e = exponential(c.read(p.k, t + p.start) - m);
        return {e, e * c.read(p.v, t + p.start)};
    }

    void open(const Columns& c, Column& column) const {
        Pair some{all(0), all(0)};
        for (int64_t t = -p.start; t < -p.left && p.has_key(t); ++t) {
            some = some + weighed(c, t, column.m);
            if ((t + p.start) % CHUNK == CHUNK - 1) {
                column.base = column.base + some;
                some = {all(0), all(0)};
            }
        }
        column.base = column.base + some;
        for (int64_t t = std::max(-p.start, -p.left); t < 0 && p.has_key(t); ++t)
            store_pair(column.buffer.data() + (p.left + t) * ROW, weighed(c, t, column.m));
    }

    void raise(Column& column, v16 m, Pair& inside, int64_t rows) const {
        v16 factor = column.m - m;
        EACH factor.part[i] = factor.part[i] < 0 ? factor.part[i] : vec{};
        factor = exponential(factor);
        scale(column.buffer.data(), rows, factor);
        column.base = column.base * factor;
        inside = inside * factor;
        column.m = m;
    }

    // ## A chunk
    //
    // Row by row, all columns of the tile: memory is read in stretches, not a cache line here and there.
    void begin(const Columns& c, Column& column, int64_t from) const {
        v16 m = reference(c, column.seen, from, std::min(from + CHUNK, p.length));
        Pair nothing{all(0), all(0)};
        if (from == 0) {
            column.m = m;
            open(c, column);
        } else if (any_above(m - column.m, 0)) {
            raise(column, m, nothing, p.left);
        }
        column.peak = all(-INFINITY);
    }

    void fill(int64_t from) {
        for (int64_t t = from; t < from + CHUNK; ++t)
            for (size_t j = 0; j < state.size(); ++j) fill_row(Columns(p, first + j), state[j], from, t);
    }

    void fill_row(const Columns& c, Column& column, int64_t from, int64_t t) const {
        float* row = column.buffer.data() + (p.left + t - from) * ROW;
        if (t >= p.length || !p.has_key(t)) return store_pair(row, {all(0), all(0)});
        column.peak = larger(c.read(p.k, t + p.start), column.peak);
        store_pair(row, weighed(c, t, column.m));
    }

    void chunk(const Columns& c, const Lists& lists, Column& column, int64_t from) const {
        const int64_t count = std::min(CHUNK, p.length - from), to = from + count;
        float* rows = column.buffer.data();
        Pair inside{all(0), all(0)};
        column.seen = larger(column.peak, column.seen);
        int64_t begin = 0, i = 0;
        while (true) {
            const bool high = any_above(column.peak - column.m, HEADROOM);
            const int64_t end = high ? rises(c, column.m, from + begin, to) - from : count;
            for (; i < end; i += ROWS) {
                Pair further = block(lists, column, from, i, inside, begin, end);
                if (i + ROWS > end) break;
                inside = further;
            }
            if (end == count) break;
            // The rows before such a key are done. It is in the past of all others, which begin again.
            v16 key = c.read(p.k, from + end + p.start), raised = calm(key);
            EACH raised.part[i] = key.part[i] - column.m.part[i] > HEADROOM ? raised.part[i] : column.m.part[i];
            lower_denominators(column, column.m - raised, end);
            raise(column, raised, inside, p.left + end);
            for (int64_t t = from + end; t < from + CHUNK; ++t) fill_row(c, column, from, t);
            begin = end;
        }
        c.write(p.references, from / CHUNK, column.m);
        column.base = column.base + inside;
        std::memmove(rows, rows + CHUNK * ROW, 4 * p.left * ROW);
    }

    void write(int64_t from) const {
        for (int64_t i = 0; i < std::min(CHUNK, p.length - from); ++i)
            for (size_t j = 0; j < state.size(); ++j) {
                const Columns c(p, first + j);
                const Pair result = load_pair(state[j].results.data() + i * ROW);
                const Gate gate(c.read(p.q, from + i));
                c.write(p.den, from + i, result.den);
                c.write(p.y, from + i, gate.above * reciprocal(gate.below) * result.num);
            }
    }

    int64_t rises(const Columns& c, v16 m, int64_t from, int64_t to) const {
        for (int64_t t = from; t < to && p.has_key(t); ++t)
            if (any_above(c.read(p.k, t + p.start) - m, HEADROOM)) return t;
        return to;
    }

    // What a rising reference flushes is marked: the mean is good, its gradients must be computed elsewhere.
    void lower_denominators(Column& column, v16 rise, int64_t count) const {
        v16 factor = exponential(rise);
        for (int64_t i = 0; i < count; ++i) {
            float* row = column.results.data() + i * ROW;
            v16 den = load(row), lower = den * factor;
            EACH {
                auto lost = ((den.part[i] >= TINY) & (lower.part[i] < TINY)) | (den.part[i] < 0);
                lower.part[i] = lost ? vec{} - 1.0f : lower.part[i];
            }
            store(row, lower);
        }
    }

    // ## Some rows
    //
    // `inside` sums the rows of the buffer before row i: with `base` they are the far keys of query i.
    Pair block(const Lists& lists, Column& column, int64_t from, int64_t i, Pair inside, int64_t begin,
               int64_t end) const {
        const float* rows = column.buffer.data() + i * ROW;
        const float* weight[ROWS];
        Pair sum[ROWS];
#pragma GCC unroll 8
        for (int64_t r = 0; r < ROWS; ++r) {
            weight[r] = p.near + lists.listing[i + r] + from + i - p.left;
            sum[r] = (column.base + inside) * lists.far[i + r];
            inside = inside + load_pair(rows + r * ROW);
        }
        if (p.left < ROWS) {
            for (int64_t r = 0; r < ROWS; ++r)
                for (int64_t j = r; j <= r + p.left; ++j)
                    add_product(sum[r], weight[r][j], load_pair(rows + j * ROW));
        } else {
            // Row r reads the rows from r to r + left: a triangle, what all have in common, another triangle.
#pragma GCC unroll 8
            for (int64_t j = 0; j < ROWS - 1; ++j) {
                Pair key = load_pair(rows + j * ROW);
#pragma GCC unroll 8
                for (int64_t r = 0; r < ROWS - 1; ++r)
                    if (r <= j) add_product(sum[r], weight[r][j], key);
            }
            for (int64_t j = ROWS - 1; j <= p.left; ++j) {
                Pair key = load_pair(rows + j * ROW);
#pragma GCC unroll 8
                for (int64_t r = 0; r < ROWS; ++r) add_product(sum[r], weight[r][j], key);
            }
#pragma GCC unroll 8
            for (int64_t j = 1; j < ROWS; ++j) {
                Pair key = load_pair(rows + (p.left + j) * ROW);
#pragma GCC unroll 8
                for (int64_t r = 1; r < ROWS; ++r)
                    if (r >= j) add_product(sum[r], weight[r][p.left + j], key);
            }
        }
        float* result = column.results.data() + i * ROW;
        for (int64_t r = 0; r < ROWS; ++r)
            if (i + r >= begin && i + r < end)
                store_pair(result + r * ROW, {sum[r].den, sum[r].num * reciprocal(sum[r].den)});
        return inside;
    }

   public:
    Up(const Problem& problem, int64_t from, int64_t to) : p(problem), first(from) {
        for (int64_t vector = from; vector < to; ++vector)
            state.push_back({std::vector<float>((p.left + CHUNK) * ROW), std::vector<float>(CHUNK * ROW),
                             largest_before(Columns(p, vector)), all(0), all(0), {all(0), all(0)}});
    }

    void run() {
        for (int64_t from = 0; from < p.length; from += CHUNK) {
            Lists lists(p, from, CHUNK);
            for (size_t i = 0; i < state.size(); ++i) begin(Columns(p, first + i), state[i], from);
            fill(from);
            for (size_t i = 0; i < state.size(); ++i) chunk(Columns(p, first + i), lists, state[i], from);
            write(from);
        }
    }
};
