// The Feedback Transformer's recurrence, compiled: backward.
//
// The order of things is that of the plain form: chunks of 16 steps from the end, inside a chunk step by
// step, then the chunk's share of everything that could wait: what it owes to the memories before it, and the
// weight gradients.
#pragma once
#include "attention.h"

// For gradients the same matrices are needed the other way round. Probabilities that were not kept are
// computed again, which takes the position tables.
struct BackwardWeights {
    std::vector<Packed> query, output, layer1, layer2;
    Packed key_value;
    std::vector<Distances> distances;

    BackwardWeights(Arena& arena, const Problem& p)
        : key_value(arena, p.key_value, 2 * p.G * p.D, p.D, p.D, 1) {
        for (int64_t l = 0; l < p.L; ++l) {
            query.emplace_back(arena, p.query + l * p.D * p.D, p.D, p.D, p.D, 1);
            output.emplace_back(arena, p.output + l * p.D * p.D, p.D, p.D, p.D, 1);
            layer1.emplace_back(arena, p.layer1 + l * p.F * p.D, p.F, p.D, p.D, 1);
            layer2.emplace_back(arena, p.layer2 + l * p.D * p.F, p.D, p.F, p.F, 1);
        }
        if (!p.probabilities) distances.emplace_back(arena, p);
    }
};

// Where a thread sums its weight gradients: the first one in the results, the others beside them.
struct Sums {
    float *query, *query_bias, *positions, *position_bias, *output, *output_bias;
    float *layer1, *layer1_bias, *layer2, *layer2_bias;
};

// The chunk's own tables of dS, dA and, if they were not kept, probabilities. A row of dS has 16 zeros on its
// left.
struct ChunkTables {
    int64_t heads, L, E;
    float *scores, *answers, *probabilities = nullptr;

    ChunkTables(Arena& arena, const Problem& p, int64_t rows) : heads(p.H * rows), L(p.L), E(p.E) {
        int64_t longest = 0, count = heads * CHUNK * L;
        for (int64_t t = 0; t < p.T; t += CHUNK) longest = std::max(longest, Rows(p, t).stride);
        scores = arena.take(count * (longest + 2 * LANES) + LANES);
        answers = arena.take(count * E);
        if (!p.probabilities) probabilities = arena.take(count * longest);
    }

    float* row(float* table, int64_t stride, int64_t head, int64_t i, int64_t l) const {
        return table + ((head * CHUNK + i) * L + l) * stride;
    }
};

struct Backward {
    const Problem& p;
    const BackwardWeights& w;
    const Table& table;
    const Sums& to;
    const int64_t from, rows, D, F, E;
    Columns values;
    ChunkTables own;
    std::vector<Attention> again;
    Outer outer;
    float *first_normal, *second_normal, *d_query, *d_attended, *d_hidden, *d_output, *dm, *dh, *grad, *d_answer;

    Backward(Arena& arena, const Problem& p_, const BackwardWeights& w_, const Table& table_, const Sums& to_,
             int64_t from_, int64_t end)
        : p(p_), w(w_), table(table_), to(to_), from(from_), rows(end - from_), D(p.D), F(p.F), E(p.E),
          values(arena, p.G * p.H * rows, p.S(), E), own(arena, p, rows) {
        const int64_t chunk = p.L * CHUNK * rows;
        for (float** v : {&first_normal, &second_normal, &d_query, &d_attended, &d_output})
            *v = arena.take(chunk * D);
        d_hidden = arena.take(chunk * F);
        for (float** v : {&dm, &dh, &grad, &d_answer}) *v = arena.take(rows * D);
        for (int64_t g = 0; g < p.G; ++g)
            for (int64_t h = 0; h < p.H; ++h)
                for (int64_t b = 0; b < rows; ++b)
                    for (int64_t j = 0; j < p.S(); ++j)
                        values.put((g * p.H + h) * rows + b, j, p.values + p.memory(g, h, from + b) + j * E);
        if (w.distances.size()) {
            again.emplace_back(arena, p, w.distances[0], from, rows);
            again[0].put(0, p.S());
        }
    }

    // ## The chunk at hand
    Rows row{p, 0};
    int64_t score_stride() const { return row.stride + 2 * LANES; }
    // Column j of a row is at j - origin.
    float* scores(int64_t h, int64_t b, int64_t t, int64_t l) const {
        return own.row(own.scores, score_stride(), h * rows + b, t - row.start, l) + LANES - row.origin;
    }
    float* answers(int64_t h, int64_t b, int64_t t, int64_t l) const {
        return own.row(own.answers, E, h * rows + b, t - row.start, l);
    }
    const float* queries(int64_t h, int64_t b, int64_t t, int64_t l) const {
        return p.queries + p.query_at(h, from + b, t, l);
    }
    const float* probabilities(int64_t h, int64_t b, int64_t t, int64_t l) const {
        return (p.probabilities
                    ? p.probabilities + table.at(p, row, h, from + b, t, l)
                    : own.row(own.probabilities, row.stride, h * rows + b, t - row.start, l)) - row.origin;
    }

    void run() {
        for (int64_t stop = p.T; stop > 0; stop = row.start) {
            row = Rows(p, stop - 1);
            begin();
            for (int64_t t = stop - 1; t >= row.start; --t) {
                step(t, row.start);
                pay(t);
            }
            pay_earlier();
            weights(row.start, stop);
            positions();
        }
    }

    void begin() {
        for (int64_t i = 0; i < own.heads * CHUNK * p.L; ++i)
            std::memset(own.scores + i * score_stride(), 0, 4 * LANES);
        if (again.empty()) return;
        for (int64_t t = row.start; t < row.stop; ++t)
            for (int64_t l = 0; l < p.L; ++l) {
                float* q = dh;
                for (int64_t h = 0; h < p.H; ++h)
                    for (int64_t b = 0; b < rows; ++b)
                        std::memcpy(q + b * D + h * E, queries(h, b, t, l), 4 * E);
                again[0].probabilities(t, l, q, [&](int64_t h, int64_t b, const float* weights, float scale) {
                    float* to = own.row(own.probabilities, row.stride, h * rows + b, t - row.start, l);
                    row.put(p, t, weights, scale, to);
                });
            }
    }

    // What the chunk owes to the memories before it: the sums of dS q and of P dA over its steps and layers.
    void pay_earlier() {
        const int64_t first = p.first(row.start), last = p.last(row.start), t = row.start;
        for (int64_t g = 0; first < last && g < p.G; ++g)
            for (int64_t h = 0; h < p.H; ++h)
                for (int64_t b = 0; b < rows; ++b) {
                    int64_t at = p.memory(g, h, from + b) + first * E;
                    owe(scores(h, b, t, g) + first, score_stride(), queries(h, b, t, g), p.dkeys + at, last - first);
                    owe(probabilities(h, b, t, g) + first, row.stride, answers(h, b, t, g), p.dvalues + at,
                        last - first);
                }
    }

    void owe(const float* weights, int64_t stride, const float* vectors, float* debt, int64_t count) {
        const int64_t terms = (row.stop - row.start) * p.L / p.G;
        for (int64_t e = 0; e < E; e += PANEL)
            panel_product(weights, 1, p.G * stride, count, vectors + e, p.G * E, terms, e,
                          std::min<int64_t>(E - e, PANEL), [&](int64_t j, int64_t n, v16 c) {
                              store(debt + j * E + n, load(debt + j * E + n) + c);
                          });
    }

    // Inside the chunk, a step pays the memories before it at once.
    void pay(int64_t t) {
        const int64_t first = std::max(p.last(row.start), p.first(t)), last = p.last(t);
        for (int64_t g = 0; g < p.G; ++g)
            for (int64_t h = 0; h < p.H; ++h)
                for (int64_t b = 0; b < rows; ++b)
                    for (int64_t j = first; j < last; ++j)
                        for (int64_t e = 0; e < E; e += LANES) {
                            float* dk = p.dkeys + p.memory(g, h, from + b) + j * E + e;
                            float* dv = p.dvalues + p.memory(g, h, from + b) + j * E + e;
                            v16 key = load(dk), value = load(dv);
                            for (int64_t l = g; l < p.L; l += p.G) {
                                add_product(key, scores(h, b, t, l)[j], load(queries(h, b, t, l) + e));
                                add_product(value, probabilities(h, b, t, l)[j], load(answers(h, b, t, l) + e));
                            }
                            store(dk, key);
                            store(dv, value);
                        }
    }

    void step(int64_t t, int64_t start) {
        const int64_t here = (t * p.B + from) * D;
        memory(t);
        add_scaled(dh, p.dy + here, p.mixing[p.L], dm, rows * D);
        for (int64_t l = p.L - 1; l >= 0; --l) {
            int64_t slot = (l * CHUNK + t - start) * rows;
            feed_forward(t, l, slot);
            if (p.last(t) > p.first(t)) attend(t, l, slot);
            else skip(t, l, slot);
            add_scaled(dh, dh, p.mixing[l], dm, rows * D);
        }
        std::memcpy(p.dx + here, dh, 4 * rows * D);
    }

    void skip(int64_t t, int64_t l, int64_t slot) {
        for (float* v : {d_query, d_attended, first_normal}) std::fill_n(v + slot * D, rows * D, 0.0f);
        for (int64_t h = 0; h < p.H; ++h)
            for (int64_t b = 0; b < rows; ++b) {
                std::fill_n(answers(h, b, t, l), E, 0.0f);
                std::fill_n(scores(h, b, t, l) + row.origin, row.width, 0.0f);
            }
    }

    void memory(int64_t t) {
        const int64_t width = 2 * p.G * D, now = p.last(t);
        float* dkv = p.dkey_value + (t * p.B + from) * width;
        for (int64_t g = 0; g < p.G; ++g)
            for (int64_t h = 0; h < p.H; ++h)
                for (int64_t b = 0; b < rows; ++b) {
                    float* key = dkv + b * width + (2 * g * p.H + h) * E;
                    int64_t at = p.memory(g, h, from + b) + now * E;
                    std::memcpy(key, p.dkeys + at, 4 * E);
                    std::memcpy(key + D, p.dvalues + at, 4 * E);
                }
        w.key_value.product(dkv, width, rows,
                            [&](int64_t m, int64_t n, v16 c) { store(dm + m * D + n, c); });
        for (int64_t b = 0; p.norm_memory && b < rows; ++b) {
            int64_t at = t * p.B + from + b;
            normalise_backward(dm + b * D, p.mixed + at * D, p.mixed_rstd[at], nullptr, dm + b * D, D);
        }
        std::memcpy(p.dmixed + (t * p.B + from) * D, dm, 4 * rows * D);
    }

    void feed_forward(int64_t t, int64_t l, int64_t slot) {
        const int64_t at = (l * p.T + t) * p.B + from;
        const float* hidden = p.hidden + at * F;
        float* df = d_hidden + slot * F;
        std::memcpy(d_output + slot * D, dh, 4 * rows * D);
        w.layer2[l].product(dh, D, rows, [&](int64_t m, int64_t n, v16 c) {
            store(df + m * F + n, gated(c, load(hidden + m * F + n)));
        });
        w.layer1[l].product(df, F, rows, [&](int64_t m, int64_t n, v16 c) { store(grad + m * D + n, c); });
        through_norm(p.middles + at * D, second_normal + slot * D);
    }

    // dh += the gradient through a layer norm of x, whose normalised rows are wanted later.
    void through_norm(const float* x, float* normal) {
        for (int64_t b = 0; b < rows; ++b) {
            float rstd = normalise(x + b * D, normal + b * D, D);
            normalise_backward(grad + b * D, normal + b * D, rstd, dh + b * D, dh + b * D, D);
        }
    }

    void attend(int64_t t, int64_t l, int64_t slot) {
        const int64_t first = p.first(t), last = p.last(t), at = (l * p.T + t) * p.B + from;
        float *gated_grad = d_attended + slot * D, *dq = d_query + slot * D;
        std::memcpy(gated_grad, dh, 4 * rows * D);
        for (int64_t b = 0; p.allowed && b < rows; ++b)
            if (!p.reads(t, from + b)) std::fill_n(gated_grad + b * D, D, 0.0f);
        w.output[l].product(gated_grad, D, rows,
                            [&](int64_t m, int64_t n, v16 c) { store(d_answer + m * D + n, c); });
        for (int64_t h = 0; h < p.H; ++h) {
            for (int64_t b = 0; b < rows; ++b) {
                const float* da = d_answer + b * D + h * E;
                std::memcpy(answers(h, b, t, l), da, 4 * E);
                softmax_backward(t, l, h, b, da, dot(da, p.attended + (at + b) * D + h * E, E));
                weighted_sum(scores(h, b, t, l), p.keys + p.memory(l % p.G, h, from + b), E, first, last, E,
                             p.S() * E, 1.0f, dq + b * D + h * E);
            }
            // The part of dq that came through the distances: a product over them, for all rows.
            const float* distances = p.positions + ((l * p.H + h) * p.R + p.R - (last - first)) * E;
            for (int64_t e = 0; e < E; e += PANEL)
                panel_product(scores(h, 0, t, l) + first, CHUNK * p.L * score_stride(), 1, rows, distances + e, E,
                              last - first, e, std::min<int64_t>(E - e, PANEL),
                              [&](int64_t m, int64_t n, v16 c) {
                                  float* to = dq + m * D + h * E + n;
                                  store(to, load(to) + c);
                              });
        }
        w.query[l].product(dq, D, rows, [&](int64_t m, int64_t n, v16 c) { store(grad + m * D + n, c); });
        through_norm(p.inputs + at * D, first_normal + slot * D);
    }

    // dS = P (dP - sum P dP), where dP_j = dA . V_j and therefore sum P dP = dA . A, known beforehand.
    void softmax_backward(int64_t t, int64_t l, int64_t h, int64_t b, const float* da, float mean) {
        const float* from_p = probabilities(h, b, t, l);
        float* to_ds = scores(h, b, t, l);
        for (int64_t j = row.origin; j < p.first(t) / LANES * LANES; j += LANES) store(to_ds + j, all(0));
        values.product((l % p.G * p.H + h) * rows + b, da, p.first(t), p.last(t), [&](int64_t j, v16 c) {
            __builtin_prefetch(from_p + table.size + j, 0, 2);
            store(to_ds + j, load(from_p + j) * (c - all(mean)));
        });
    }

    static float dot(const float* a, const float* b, int64_t count) {
        v16 c = all(0);
        for (int64_t i = 0; i < count; i += LANES) add_product(c, load(a + i), load(b + i));
        return sum(c);
    }

    void weights(int64_t start, int64_t stop) {
        const int64_t count = (stop - start) * rows;
        for (int64_t l = 0; l < p.L; ++l) {
            const int64_t slot = l * CHUNK * rows;
            auto chunk = [&](const float* v, int64_t width) {
                return [v, width, slot](int64_t r) { return v + (slot + r) * width; };
            };
            auto taped = [&](const float* v, int64_t width) {
                return [this, v, width, l, start](int64_t r) {
                    return v + ((l * p.T + start + r / rows) * p.B + from + r % rows) * width;
                };
            };
            outer.add(to.query + l * D * D, to.query_bias + l * D, D, D, count, chunk(d_query, D),
                      chunk(first_normal, D));
            outer.add(to.output + l * D * D, to.output_bias + l * D, D, D, count, chunk(d_attended, D),
                      taped(p.attended, D));
            outer.add(to.layer1 + l * F * D, to.layer1_bias + l * F, F, D, count, chunk(d_hidden, F),
                      chunk(second_normal, D));
            outer.add(to.layer2 + l * D * F, to.layer2_bias + l * D, D, F, count, chunk(d_output, D),
                      taped(p.hidden, F));
        }
    }

    // By distance, the scores of a step lie one column further right than those of the step before: the
    // stride from step to step is a row and one. On the left this runs into the columns of zeros.
    void positions() {
        const int64_t reach = std::min(p.window, p.last(row.stop - 1));
        for (int64_t l = 0; l < p.L; ++l)
            for (int64_t h = 0; h < p.H; ++h) {
                const float* ds = scores(h, 0, row.start, l) + p.last(row.start) - reach;
                const int64_t at = (l * p.H + h) * p.R + p.R - reach;
                for (int64_t e = 0; e < E; e += PANEL) {
                    const float* q = queries(h, 0, row.start, l) + e;
                    if (E - e < PANEL) position_tables<1>(ds, q, to.positions + at * E + e, reach);
                    else position_tables<COLUMNS>(ds, q, to.positions + at * E + e, reach);
                }
                position_biases(ds, to.position_bias + at, reach);
            }
    }

    int64_t skew() const { return p.L * score_stride() + 1; }

    // All rows of the batch add to the same sums, so these stay in registers for all of them.
    template <int N>
    void position_tables(const float* ds, const float* q, float* sums, int64_t reach) {
        for (int64_t i = 0; i < reach; i += ROWS) {
            v16 c[ROWS][N] = {};
            for (int64_t b = 0; b < rows; ++b)
                tile<ROWS, N>(c, ds + b * CHUNK * p.L * score_stride() + i, 1, skew(), q + b * p.T * p.L * E,
                              p.L * E, row.stop - row.start, {q + (b + 1) * p.T * p.L * E, p.L * E});
            for (int64_t m = 0; m < std::min<int64_t>(ROWS, reach - i); ++m)
                for (int n = 0; n < N; ++n) {
                    float* at = sums + (i + m) * E + n * LANES;
                    store(at, load(at) + c[m][n]);
                }
        }
    }

    void position_biases(const float* ds, float* sums, int64_t reach) {
        for (int64_t b = 0; b < rows; ++b)
            for (int64_t k = 0; k < row.stop - row.start; ++k) {
                const float* from = ds + b * CHUNK * p.L * score_stride() + k * skew();
                int64_t i = 0;
                for (; i + LANES <= reach; i += LANES) store(sums + i, load(sums + i) + load(from + i));
                for (; i < reach; ++i) sums[i] += from[i];
            }
    }
};

static void backward(const Problem& p) {
    Arena shared;
    BackwardWeights weights(shared, p);
    Table table(p);
    const int64_t sizes[] = {p.L * p.D * p.D, p.L * p.D, p.L * p.H * p.R * p.E, p.L * p.H * p.R,
                             p.L * p.D * p.D, p.L * p.D, p.L * p.F * p.D,       p.L * p.F,
                             p.L * p.D * p.F, p.L * p.D};
    Sums results = {p.dquery,       p.dquery_bias, p.dpositions,    p.dposition_bias, p.doutput,
                    p.doutput_bias, p.dlayer1,     p.dlayer1_bias, p.dlayer2,        p.dlayer2_bias};
    int64_t total = 0;
    for (int64_t size : sizes) total += size;
    std::vector<float*> beside;
    for (int64_t i = 1; i < std::min(p.threads, p.B); ++i) beside.push_back(shared.zeros(total));
    split_batch(p, [&](int64_t thread, int64_t from, int64_t to) {
        Sums sums = results;
        float** parts = &sums.query;
        float* at = thread > 0 ? beside[thread - 1] : nullptr;
        for (int i = 0; thread > 0 && i < 10; at += sizes[i++]) parts[i] = at;
        Arena own;
        Backward(own, p, weights, table, sums, from, to).run();
    });
    for (const float* other : beside) {
        float** parts = &results.query;
        for (int i = 0; i < 10; other += sizes[i++])
            for (int64_t k = 0; k < sizes[i]; ++k) parts[i][k] += other[k];
    }
}
