// The Feedback Transformer's recurrence, compiled: backward.
//
// The order of things is that of the plain form: chunks of 16 steps from the end; first what later steps owe
// the chunk's memories, then step by step, then the weight gradients of the chunk.
#pragma once
#include "problem.h"

// For gradients the same matrices are needed the other way round.
struct BackwardWeights {
    std::vector<Packed> query, output, layer1, layer2;
    Packed key_value;

    explicit BackwardWeights(const Problem& p) : key_value(p.key_value, 2 * p.G * p.D, p.D, p.D, 1) {
        for (int64_t l = 0; l < p.L; ++l) {
            query.emplace_back(p.query + l * p.D * p.D, p.D, p.D, p.D, 1);
            output.emplace_back(p.output + l * p.D * p.D, p.D, p.D, p.D, 1);
            layer1.emplace_back(p.layer1 + l * p.F * p.D, p.F, p.D, p.D, 1);
            layer2.emplace_back(p.layer2 + l * p.D * p.F, p.D, p.F, p.F, 1);
        }
    }
};

// Where a thread sums its weight gradients: the first one in the results, the others beside them.
struct Sums {
    float *query, *query_bias, *positions, *position_bias, *output, *output_bias;
    float *layer1, *layer1_bias, *layer2, *layer2_bias;
};

struct Backward {
    const Problem& p;
    const BackwardWeights& w;
    const Sums& to;
    const int64_t from, rows, D, F, E;
    Columns values;
    Outer outer;
    std::vector<float> first_normal, second_normal, d_query, d_attended, d_hidden, d_output;
    std::vector<float> dm, dh, grad, d_answer, d_probability;

    Backward(const Problem& p_, const BackwardWeights& w_, const Sums& to_, int64_t from_, int64_t end)
        : p(p_), w(w_), to(to_), from(from_), rows(end - from_), D(p.D), F(p.F), E(p.E),
          values(p.G * p.H * rows, p.S(), p.E) {
        const int64_t chunk = p.L * CHUNK * rows;
        for (auto* v : {&first_normal, &second_normal, &d_query, &d_attended, &d_output}) v->resize(chunk * D);
        d_hidden.resize(chunk * F);
        for (auto* v : {&dm, &dh, &grad, &d_answer}) v->resize(rows * D);
        d_probability.resize(p.S() + 2 * LANES);
        for (int64_t g = 0; g < p.G; ++g)
            for (int64_t h = 0; h < p.H; ++h)
                for (int64_t b = 0; b < rows; ++b)
                    for (int64_t j = 0; j < p.S(); ++j)
                        values.put(head(g, h, b), j, p.values + p.memory(g, h, from + b) + j * E);
    }

    int64_t head(int64_t g, int64_t h, int64_t b) const { return (g * p.H + h) * rows + b; }

    void run() {
        for (int64_t stop = p.T; stop > 0; stop -= std::min(stop, CHUNK)) {
            int64_t start = std::max<int64_t>(0, stop - CHUNK);
            collect(p.carried + start, p.carried + stop, stop);
            for (int64_t t = stop - 1; t >= start; --t) {
                step(t, start);
                pay(t, start);
            }
            weights(start, stop);
            positions(start, stop);
        }
        for (int64_t j = 0; j < p.carried; j += CHUNK) collect(j, std::min(j + CHUNK, p.carried), 0);
    }

    // What all steps from `start` on owe the memories first <= j < last: the sums of dS q and of P dA.
    void collect(int64_t first, int64_t last, int64_t start) {
        int64_t stop = std::min(p.T, std::max(start, last - p.carried + p.window));
        if (start >= stop) return;
        for (int64_t g = 0; g < p.G; ++g)
            for (int64_t h = 0; h < p.H; ++h)
                for (int64_t b = from; b < from + rows; ++b) {
                    int64_t to_row = p.memory(g, h, b) + first * E;
                    int64_t s = p.score_at(h, b, start, g) + first, q = p.query_at(h, b, start, g);
                    owe(p.scores + s, p.queries + q, p.dkeys + to_row, last - first, stop - start);
                    owe(p.probabilities + s, p.answers + q, p.dvalues + to_row, last - first, stop - start);
                }
    }

    void owe(const float* weights, const float* vectors, float* debt, int64_t count, int64_t steps) {
        const int64_t stride = p.G, terms = steps * p.L / p.G;
        for (int64_t e = 0; e < E; e += PANEL) {
            int64_t columns = std::min<int64_t>(E - e, PANEL);
            panel_product(weights, 1, stride * p.row(), count, vectors + e, stride * E, terms, e, columns,
                          [&](int64_t j, int64_t n, v16 c) {
                              store(debt + j * E + n, load(debt + j * E + n) + c);
                          });
        }
    }

    // Inside the chunk, a step pays the memories before it at once.
    void pay(int64_t t, int64_t start) {
        const int64_t first = std::max(p.carried + start, p.first(t)), last = p.last(t);
        if (first >= last) return;
        for (int64_t h = 0; h < p.H; ++h)
            for (int64_t b = from; b < from + rows; ++b)
                for (int64_t l = 0; l < p.L; ++l) {
                    const float *ds = p.scores + p.score_at(h, b, t, l), *q = p.queries + p.query_at(h, b, t, l);
                    const float* pr = p.probabilities + p.score_at(h, b, t, l);
                    const float* da = p.answers + p.query_at(h, b, t, l);
                    int64_t at = p.memory(l % p.G, h, b);
                    for (int64_t j = first; j < last; ++j)
                        for (int64_t e = 0; e < E; e += LANES) {
                            float *dk = p.dkeys + at + j * E + e, *dv = p.dvalues + at + j * E + e;
                            store(dk, load(dk) + load(q + e) * ds[j]);
                            store(dv, load(dv) + load(da + e) * pr[j]);
                        }
                }
    }

    void step(int64_t t, int64_t start) {
        const int64_t here = (t * p.B + from) * D;
        memory(t);
        add_scaled(dh.data(), p.dy + here, p.mixing[p.L], dm.data(), rows * D);
        for (int64_t l = p.L - 1; l >= 0; --l) {
            int64_t slot = (l * CHUNK + t - start) * rows;
            feed_forward(t, l, slot);
            if (p.last(t) > p.first(t)) {
                attend(t, l, slot);
            } else {
                for (auto* v : {&d_query, &d_attended, &first_normal})
                    std::fill_n(v->data() + slot * D, rows * D, 0.0f);
            }
            add_scaled(dh.data(), dh.data(), p.mixing[l], dm.data(), rows * D);
        }
        std::memcpy(p.dx + here, dh.data(), 4 * rows * D);
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
                            [&](int64_t m, int64_t n, v16 c) { store(&dm[m * D + n], c); });
        for (int64_t b = 0; p.norm_memory && b < rows; ++b) {
            int64_t row = t * p.B + from + b;
            normalise_backward(&dm[b * D], p.mixed + row * D, p.mixed_rstd[row], nullptr, &dm[b * D], D);
        }
        std::memcpy(p.dmixed + (t * p.B + from) * D, dm.data(), 4 * rows * D);
    }

    void feed_forward(int64_t t, int64_t l, int64_t slot) {
        const int64_t row = (l * p.T + t) * p.B + from;
        const float* hidden = p.hidden + row * F;
        float* df = &d_hidden[slot * F];
        std::memcpy(&d_output[slot * D], dh.data(), 4 * rows * D);
        w.layer2[l].product(dh.data(), D, rows, [&](int64_t m, int64_t n, v16 c) {
            store(df + m * F + n, gated(c, load(hidden + m * F + n)));
        });
        w.layer1[l].product(df, F, rows, [&](int64_t m, int64_t n, v16 c) { store(&grad[m * D + n], c); });
        for (int64_t b = 0; b < rows; ++b) {
            float* n = &second_normal[(slot + b) * D];
            float rstd = normalise(p.middles + (row + b) * D, n, D);
            normalise_backward(&grad[b * D], n, rstd, &dh[b * D], &dh[b * D], D);
        }
    }

    void attend(int64_t t, int64_t l, int64_t slot) {
        const int64_t first = p.first(t), last = p.last(t), row = (l * p.T + t) * p.B + from;
        float *gated_grad = &d_attended[slot * D], *dq = &d_query[slot * D];
        std::memcpy(gated_grad, dh.data(), 4 * rows * D);
        for (int64_t b = 0; p.allowed && b < rows; ++b)
            if (!p.reads(t, from + b)) std::fill_n(gated_grad + b * D, D, 0.0f);
        w.output[l].product(gated_grad, D, rows,
                            [&](int64_t m, int64_t n, v16 c) { store(&d_answer[m * D + n], c); });
        for (int64_t h = 0; h < p.H; ++h) {
            for (int64_t b = 0; b < rows; ++b) {
                const float* da = &d_answer[b * D + h * E];
                std::memcpy(p.answers + p.query_at(h, from + b, t, l), da, 4 * E);
                values.scores(head(l % p.G, h, b), da, first, last, d_probability.data());
                const float* pr = p.probabilities + p.score_at(h, from + b, t, l);
                float* ds = p.scores + p.score_at(h, from + b, t, l);
                softmax_backward(pr, d_probability.data(), ds, first, last);
                weighted_sum(ds, p.keys + p.memory(l % p.G, h, from + b), first, last, E, dq + b * D + h * E);
            }
            // The part of dq that came through the distances: a product over them, for all rows.
            const float* table = p.positions + ((l * p.H + h) * p.R + p.R - (last - first)) * E;
            const float* ds = p.scores + p.score_at(h, from, t, l) + first;
            for (int64_t e = 0; e < E; e += PANEL)
                panel_product(ds, p.T * p.L * p.row(), 1, rows, table + e, E, last - first, e,
                              std::min<int64_t>(E - e, PANEL), [&](int64_t m, int64_t n, v16 c) {
                                  float* at = dq + m * D + h * E + n;
                                  store(at, load(at) + c);
                              });
        }
        w.query[l].product(dq, D, rows, [&](int64_t m, int64_t n, v16 c) { store(&grad[m * D + n], c); });
        for (int64_t b = 0; b < rows; ++b) {
            float* n = &first_normal[(slot + b) * D];
            float rstd = normalise(p.inputs + (row + b) * D, n, D);
            normalise_backward(&grad[b * D], n, rstd, &dh[b * D], &dh[b * D], D);
        }
    }

    void weights(int64_t start, int64_t stop) {
        const int64_t count = (stop - start) * rows;
        for (int64_t l = 0; l < p.L; ++l) {
            const int64_t slot = l * CHUNK * rows;
            auto chunk = [&](const std::vector<float>& v, int64_t width) {
                return [&v, width, slot](int64_t r) { return &v[(slot + r) * width]; };
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
    void positions(int64_t start, int64_t stop) {
        const int64_t reach = std::min(p.window, p.carried + stop - 1), steps = stop - start;
        const int64_t stride = p.L * p.row() + 1;
        for (int64_t l = 0; l < p.L; ++l)
            for (int64_t h = 0; h < p.H; ++h)
                for (int64_t b = from; b < from + rows; ++b) {
                    const float* ds = p.scores + p.score_at(h, b, start, l) + p.carried + start - reach;
                    const float* q = p.queries + p.query_at(h, b, start, l);
                    float* table = to.positions + ((l * p.H + h) * p.R + p.R - reach) * E;
                    float* bias = to.position_bias + (l * p.H + h) * p.R + p.R - reach;
                    for (int64_t e = 0; e < E; e += PANEL)
                        panel_product(ds, 1, stride, reach, q + e, p.L * E, steps, e,
                                      std::min<int64_t>(E - e, PANEL), [&](int64_t i, int64_t n, v16 c) {
                                          store(table + i * E + n, load(table + i * E + n) + c);
                                      });
                    for (int64_t i = 0; i < steps; ++i) {
                        const float* step = ds + i * stride;
                        int64_t r = 0;
                        for (; r + LANES <= reach; r += LANES) store(bias + r, load(bias + r) + load(step + r));
                        for (; r < reach; ++r) bias[r] += step[r];
                    }
                }
    }
};

static void backward(const Problem& p) {
    BackwardWeights weights(p);
    const int64_t sizes[] = {p.L * p.D * p.D, p.L * p.D, p.L * p.H * p.R * p.E, p.L * p.H * p.R,
                             p.L * p.D * p.D, p.L * p.D, p.L * p.F * p.D,       p.L * p.F,
                             p.L * p.D * p.F, p.L * p.D};
    Sums results = {p.dquery,       p.dquery_bias, p.dpositions,    p.dposition_bias, p.doutput,
                    p.doutput_bias, p.dlayer1,     p.dlayer1_bias, p.dlayer2,        p.dlayer2_bias};
    int64_t total = 0;
    for (int64_t size : sizes) total += size;
    std::vector<std::vector<float>> beside(std::max<int64_t>(1, p.threads));
    split_batch(p, [&](int64_t thread, int64_t from, int64_t to) {
        Sums sums = results;
        if (thread > 0) {
            beside[thread].resize(total);
            float* at = beside[thread].data();
            float** parts = &sums.query;
            for (int i = 0; i < 10; at += sizes[i++]) parts[i] = at;
        }
        Backward(p, weights, sums, from, to).run();
    });
    for (auto& other : beside) {
        const float* at = other.data();
        float** parts = &results.query;
        for (int i = 0; !other.empty() && i < 10; at += sizes[i++])
            for (int64_t k = 0; k < sizes[i]; ++k) parts[i][k] += at[k];
    }
}
