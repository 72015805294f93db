// One position, compiled: decoding.
//
// With one row, or a few, every weight is used once: a step is as fast as the weights come from memory. So
// they are read where they are, in the layout of the model, neither packed nor folded.
#pragma once
#include "attention.h"

struct Layer {
    const float *norm1, *shift1, *query, *u, *embeddings, *bias, *output, *output_bias;
    const float *norm2, *shift2, *layer1, *layer1_bias, *layer2, *layer2_bias;
};

struct Projection {
    const float *key, *value, *value_bias;
};

struct Step {
    int64_t B, D, F, L, H, E, G, S, positions;
    int64_t at_position, at_row, at_group, at_head;
    const Layer* layers;
    const Projection* projections;
    const uint8_t* real;
    const float *x, *keys, *values, *mixing, *memory_gain, *memory_shift, *final_gain, *final_shift;
    float *y, *new_keys, *new_values;
};

// out[n] = w[n, :] . a for some n at a time; the sums across lanes are left to the end. The next rows are
// asked for meanwhile: nothing is waited for but memory.
static void apply(const float* w, const float* bias, const float* a, int64_t outs, int64_t ins, float* out) {
    for (int64_t n0 = 0; n0 < outs; n0 += ROWS) {
        v16 c[ROWS] = {};
        for (int64_t k = 0; k < ins; k += LANES) {
            v16 right = load(a + k);
            for (int n = 0; n < ROWS; ++n) {
                const float* at = w + (n0 + n) * ins + k;
                __builtin_prefetch(at + ROWS * ins, 0, 2);
                add_product(c[n], load(at), right);
            }
        }
        for (int n = 0; n < ROWS; ++n) out[n0 + n] = sum(c[n]) + (bias ? bias[n0 + n] : 0.0f);
    }
}

static void normalise(const float* x, float* out, const float* gain, const float* shift, int64_t width) {
    normalise(x, out, width);
    for (int64_t d = 0; d < width; d += LANES) store(out + d, load(out + d) * load(gain + d) + load(shift + d));
}

struct OneStep {
    const Step& p;
    std::vector<float> h, n, q, with_u, answer, f, m, scores;

    explicit OneStep(const Step& p_)
        : p(p_), h(p.D), n(p.D), q(p.D), with_u(p.E), answer(p.D), f(p.F), m(p.D), scores(p.H * stride()) {}

    void row(int64_t b) {
        const int64_t D = p.D;
        std::memcpy(h.data(), p.x + b * D, 4 * D);
        std::fill(m.begin(), m.end(), 0.0f);
        add_scaled(m.data(), m.data(), p.mixing[0], h.data(), D);
        for (int64_t l = 0; l < p.L; ++l) {
            const Layer& w = p.layers[l];
            if (reads(b)) {
                normalise(h.data(), n.data(), w.norm1, w.shift1, D);
                apply(w.query, nullptr, n.data(), D, D, q.data());
                look_up_distances(w);
                for (int64_t head = 0; head < p.H; ++head) attend(w, b, l % p.G, head);
                apply(w.output, w.output_bias, answer.data(), D, D, n.data());
                add_scaled(h.data(), h.data(), 1.0f, n.data(), D);
            }
            normalise(h.data(), n.data(), w.norm2, w.shift2, D);
            apply(w.layer1, w.layer1_bias, n.data(), p.F, D, f.data());
            for (int64_t i = 0; i < p.F; i += LANES) store(&f[i], larger(load(&f[i]), all(0)));
            apply(w.layer2, w.layer2_bias, f.data(), D, p.F, n.data());
            add_scaled(h.data(), h.data(), 1.0f, n.data(), D);
            add_scaled(m.data(), m.data(), p.mixing[l + 1], h.data(), D);
        }
        if (p.memory_gain) normalise(m.data(), m.data(), p.memory_gain, p.memory_shift, D);
        for (int64_t g = 0; g < p.G; ++g) {
            const Projection& w = p.projections[g];
            apply(w.key, nullptr, m.data(), D, D, q.data());
            apply(w.value, w.value_bias, m.data(), D, D, n.data());
            for (int64_t head = 0; head < p.H; ++head) {
                int64_t at = b * p.at_row + g * p.at_group + head * p.at_head;
                std::memcpy(p.new_keys + at, &q[head * p.E], 4 * p.E);
                std::memcpy(p.new_values + at, &n[head * p.E], 4 * p.E);
            }
        }
        normalise(h.data(), p.y + b * D, p.final_gain, p.final_shift, D);
    }

    bool reads(int64_t b) const {
        for (int64_t j = 0; j < p.S; ++j)
            if (!p.real || p.real[j * p.B + b]) return true;
        return false;
    }

    int64_t stride() const { return (p.S / LANES + 2) * LANES; }

    // The scores of the distances, for all heads at once: a row of the table is that of all heads, and a table
    // is as large as the memory itself, so it should be read from one end to the other. Distances that it does
    // not reach share its first row.
    void look_up_distances(const Layer& w) {
        for (int64_t j = 0; j < p.S; ++j) {
            const int64_t r = std::max<int64_t>(0, p.positions - p.S + j);
            const float *row = w.embeddings + r * p.D, *bias = w.bias + r * p.H;
            for (int64_t head = 0; head < p.H; ++head) {
                v16 c = all(0);
                for (int64_t e = head * p.E; e < (head + 1) * p.E; e += LANES)
                    add_product(c, load(&q[e]), load(row + e));
                scores[head * stride() + j] = sum(c) + bias[head];
            }
        }
    }

    void attend(const Layer& w, int64_t b, int64_t g, int64_t head) {
        const int64_t E = p.E, base = b * p.at_row + g * p.at_group + head * p.at_head;
        const float *query = &q[head * E], *u = w.u + head * E, scale = 1.0f / std::sqrt((float)E);
        float* score = &scores[head * stride()];
        for (int64_t e = 0; e < E; e += LANES) store(&with_u[e], load(query + e) + load(u + e));
        float highest = -INFINITY, total = 0;
        for (int64_t j = 0; j < p.S; ++j) {
            const float* key = p.keys + base + j * p.at_position;
            v16 content = all(0);
            for (int64_t e = 0; e < E; e += LANES) add_product(content, load(&with_u[e]), load(key + e));
            score[j] = !p.real || p.real[j * p.B + b] ? (sum(content) + score[j]) * scale : -INFINITY;
            highest = std::max(highest, score[j]);
        }
        for (int64_t j = 0; j < LANES; ++j) score[p.S + j] = -INFINITY;
        for (int64_t j = 0; j < p.S; j += LANES) {
            v16 weight = exponential(load(score + j) - all(highest));
            store(score + j, weight);
            total += sum(weight);
        }
        weighted_sum(score, p.values + base, p.at_position, 0, p.S, E, p.at_head, 1.0f / total,
                     &answer[head * E]);
    }
};

static void step(const Step& p) {
    OneStep one(p);
    for (int64_t b = 0; b < p.B; ++b) one.row(b);
}
