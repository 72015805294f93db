// The Feedback Transformer's recurrence, compiled: forward.
//
// The plain form spends half its time between the products, and its products at a third of what the
// processor can do, because a library meets each of them as a stranger. Here the same loop runs without
// Python: weights are packed once, rows stay in the cache from one layer to the next, and bias, ReLU and
// residual are added while a tile of results is still in registers.
#include "problem.h"

#include "backward.h"
#include "step.h"

// All weights, packed for rows from the left. Position tables are matrices like the others, one a head; their
// last column is distance 1.
struct ForwardWeights {
    std::vector<Packed> query, output, layer1, layer2, positions;
    Packed key_value;

    explicit ForwardWeights(const Problem& p)
        : key_value(p.key_value, p.D, 2 * p.G * p.D, 1, p.D) {
        for (int64_t l = 0; l < p.L; ++l) {
            query.emplace_back(p.query + l * p.D * p.D, p.D, p.D, 1, p.D);
            output.emplace_back(p.output + l * p.D * p.D, p.D, p.D, 1, p.D);
            layer1.emplace_back(p.layer1 + l * p.F * p.D, p.D, p.F, 1, p.D);
            layer2.emplace_back(p.layer2 + l * p.D * p.F, p.F, p.D, 1, p.F);
            for (int64_t h = 0; h < p.H; ++h)
                positions.emplace_back(p.positions + (l * p.H + h) * p.R * p.E, p.E, p.R, 1, p.E);
        }
    }
};

struct Forward {
    const Problem& p;
    const ForwardWeights& w;
    int64_t from, rows;
    Columns keys;
    std::vector<float> normal, q, by_distance, raw, kv;

    Forward(const Problem& p_, const ForwardWeights& w_, int64_t from_, int64_t to)
        : p(p_), w(w_), from(from_), rows(to - from_), keys(p_.G * p_.H * rows, p_.S(), p_.E),
          normal(rows * p.D), q(rows * p.D), by_distance(rows * (p.R + LANES)),
          raw(p.S() + 2 * LANES), kv(rows * 2 * p.G * p.D) {
        for (int64_t g = 0; g < p.G; ++g)
            for (int64_t h = 0; h < p.H; ++h)
                for (int64_t b = 0; b < rows; ++b)
                    for (int64_t j = 0; j < p.carried; ++j)
                        keys.put(head(g, h, b), j, p.keys + p.memory(g, h, from + b) + j * p.E);
    }

    int64_t head(int64_t g, int64_t h, int64_t b) const { return (g * p.H + h) * rows + b; }

    void run() {
        for (int64_t t = 0; t < p.T; ++t) step(t);
    }

    void step(int64_t t) {
        const int64_t D = p.D, here = (t * p.B + from) * D, layer = p.T * p.B * D;
        float* memory = p.mixed + here;
        std::memcpy(p.inputs + here, p.x + here, 4 * rows * D);
        std::memset(memory, 0, 4 * rows * D);
        add_scaled(memory, memory, p.mixing[0], p.x + here, rows * D);
        for (int64_t l = 0; l < p.L; ++l) {
            float* h = p.inputs + l * layer + here;
            float* middle = p.middles + l * layer + here;
            float* next = l + 1 < p.L ? h + layer : p.y + here;
            if (p.last(t) > p.first(t)) attend(t, l, h, middle);
            else std::memcpy(middle, h, 4 * rows * D);
            feed_forward(t, l, middle, next);
            add_scaled(memory, memory, p.mixing[l + 1], next, rows * D);
        }
        if (p.norm_memory)
            for (int64_t b = 0; b < rows; ++b)
                p.mixed_rstd[t * p.B + from + b] = normalise(memory + b * D, memory + b * D, D);
        remember(t, memory);
    }

    void attend(int64_t t, int64_t l, const float* h, float* middle) {
        const int64_t D = p.D, E = p.E, first = p.first(t), last = p.last(t);
        for (int64_t b = 0; b < rows; ++b) normalise(h + b * D, &normal[b * D], D);
        w.query[l].product(normal.data(), D, rows, [&](int64_t m, int64_t n, v16 c) {
            store(&q[m * D + n], c + load(p.query_bias + l * D + n));
        });
        float* attended = p.attended + ((l * p.T + t) * p.B + from) * D;
        const int64_t padded = p.R + LANES;
        for (int64_t head_ = 0; head_ < p.H; ++head_) {
            // Scores by distance: one product for all rows. Its columns end at distance 1, so that column
            // R - last + j belongs to memory j.
            w.positions[l * p.H + head_].product(
                &q[head_ * E], D, rows,
                [&](int64_t m, int64_t n, v16 c) { store(&by_distance[m * padded + n], c); },
                p.R - (last - first));
            for (int64_t b = 0; b < rows; ++b) {
                const float* query = &q[b * D + head_ * E];
                std::memcpy(p.queries + p.query_at(head_, from + b, t, l), query, 4 * E);
                keys.scores(head(l % p.G, head_, b), query, first, last, raw.data());
                const float* distance = by_distance.data() + b * padded + p.R - last;
                const float* bias = p.position_bias + (l * p.H + head_) * p.R + p.R - last;
                softmax(t, b, first, last, distance, bias);
                float* probabilities = p.probabilities + p.score_at(head_, from + b, t, l);
                std::memcpy(probabilities + first, &raw[first], 4 * (last - first));
                weighted_sum(raw.data(), p.values + p.memory(l % p.G, head_, from + b), first, last, E,
                             attended + b * D + head_ * E);
            }
        }
        w.output[l].product(attended, D, rows, [&](int64_t m, int64_t n, v16 c) {
            c = p.allowed && !p.reads(t, from + m) ? all(0) : c + load(p.output_bias + l * D + n);
            store(middle + m * D + n, c + load(h + m * D + n));
        });
    }

    // Lanes outside the memory that may be read get a score so low that its exponential is zero.
    void softmax(int64_t t, int64_t b, int64_t first, int64_t last, const float* distance, const float* bias) {
        const float lowest = -3e38f;
        int64_t start = first / LANES * LANES, end = (last + LANES - 1) / LANES * LANES;
        for (int64_t j = first; j < last; ++j) raw[j] += distance[j] + bias[j];
        for (int64_t j = start; j < first; ++j) raw[j] = lowest;
        for (int64_t j = last; j < end; ++j) raw[j] = lowest;
        if (p.allowed)
            for (int64_t j = first; j < last; ++j)
                if (!p.may_read(t, j, from + b)) raw[j] = lowest;
        v16 top = all(lowest), total = all(0);
        for (int64_t j = start; j < end; j += LANES) top = larger(top, load(&raw[j]));
        float highest = largest(top);
        // Nothing may be read: all zeros, not all equal.
        if (highest == lowest) {
            std::fill(&raw[start], &raw[end], 0.0f);
            return;
        }
        for (int64_t j = start; j < end; j += LANES) {
            v16 e = exponential(load(&raw[j]) - all(highest));
            store(&raw[j], e);
            total = total + e;
        }
        float scale = 1.0f / sum(total);
        for (int64_t j = start; j < end; j += LANES) store(&raw[j], load(&raw[j]) * scale);
    }

    void feed_forward(int64_t t, int64_t l, const float* middle, float* next) {
        const int64_t D = p.D, F = p.F;
        float* hidden = p.hidden + ((l * p.T + t) * p.B + from) * F;
        for (int64_t b = 0; b < rows; ++b) normalise(middle + b * D, &normal[b * D], D);
        w.layer1[l].product(normal.data(), D, rows, [&](int64_t m, int64_t n, v16 c) {
            store(hidden + m * F + n, larger(c + load(p.layer1_bias + l * F + n), all(0)));
        });
        w.layer2[l].product(hidden, F, rows, [&](int64_t m, int64_t n, v16 c) {
            store(next + m * D + n, c + load(p.layer2_bias + l * D + n) + load(middle + m * D + n));
        });
    }

    void remember(int64_t t, const float* memory) {
        const int64_t width = 2 * p.G * p.D, now = p.last(t);
        w.key_value.product(memory, p.D, rows, [&](int64_t m, int64_t n, v16 c) {
            store(&kv[m * width + n], c + load(p.key_value_bias + n));
        });
        for (int64_t g = 0; g < p.G; ++g)
            for (int64_t h = 0; h < p.H; ++h)
                for (int64_t b = 0; b < rows; ++b) {
                    const float* key = &kv[b * width + (2 * g * p.H + h) * p.E];
                    int64_t at = p.memory(g, h, from + b) + now * p.E;
                    std::memcpy(p.keys + at, key, 4 * p.E);
                    std::memcpy(p.values + at, key + p.D, 4 * p.E);
                    keys.put(head(g, h, b), now, key);
                }
    }
};

extern "C" void feedback_forward(const Problem* p) {
    ForwardWeights weights(*p);
    split_batch(*p, [&](int64_t, int64_t from, int64_t to) { Forward(*p, weights, from, to).run(); });
}

extern "C" void feedback_backward(const Problem* p) { backward(*p); }

extern "C" void feedback_step(const Step* p) { step(*p); }
