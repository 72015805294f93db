// The Feedback Transformer's recurrence, compiled: forward.
//
// The plain form spends half its time between the products, and its products at a third of what the
// processor can do, because a library meets each of them as a stranger. Here the same loop runs without
// Python: weights are packed once, rows stay in the cache from one layer to the next, and bias, ReLU and
// residual are added while a tile of results is still in registers.
#include "attention.h"

#include "backward.h"
#include "step.h"

// All weights, packed for rows from the left.
struct ForwardWeights {
    std::vector<Packed> query, output, layer1, layer2;
    Packed key_value;
    Distances distances;

    ForwardWeights(Arena& arena, const Problem& p)
        : key_value(arena, p.key_value, p.D, 2 * p.G * p.D, 1, p.D), distances(arena, p) {
        for (int64_t l = 0; l < p.L; ++l) {
            query.emplace_back(arena, p.query + l * p.D * p.D, p.D, p.D, 1, p.D);
            output.emplace_back(arena, p.output + l * p.D * p.D, p.D, p.D, 1, p.D);
            layer1.emplace_back(arena, p.layer1 + l * p.F * p.D, p.D, p.F, 1, p.D);
            layer2.emplace_back(arena, p.layer2 + l * p.D * p.F, p.F, p.D, 1, p.F);
        }
    }
};

struct Forward {
    const Problem& p;
    const ForwardWeights& w;
    const Table& table;
    const int64_t from, rows;
    Attention attention;
    float *normal, *q, *kv;

    Forward(Arena& arena, const Problem& p_, const ForwardWeights& w_, const Table& table_, int64_t from_,
            int64_t to)
        : p(p_), w(w_), table(table_), from(from_), rows(to - from_),
          attention(arena, p, w.distances, from, rows), normal(arena.take(rows * p.D)),
          q(arena.take(rows * p.D)), kv(arena.take(rows * 2 * p.G * p.D)) {}

    void run() {
        attention.put(0, p.carried);
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
            else skip(t, l, h, middle);
            feed_forward(t, l, middle, next);
            add_scaled(memory, memory, p.mixing[l + 1], next, rows * D);
        }
        if (p.norm_memory)
            for (int64_t b = 0; b < rows; ++b)
                p.mixed_rstd[t * p.B + from + b] = normalise(memory + b * D, memory + b * D, D);
        remember(t, memory);
    }

    // A step that reads nothing has no query and no answer, but its place in later products holds zeros.
    void skip(int64_t t, int64_t l, const float* h, float* middle) {
        const Rows row(p, t);
        std::memcpy(middle, h, 4 * rows * p.D);
        std::memset(p.attended + ((l * p.T + t) * p.B + from) * p.D, 0, 4 * rows * p.D);
        for (int64_t head = 0; head < p.H; ++head)
            for (int64_t b = from; b < from + rows; ++b) {
                std::memset(p.queries + p.query_at(head, b, t, l), 0, 4 * p.E);
                if (p.probabilities)
                    std::memset(p.probabilities + table.at(p, row, head, b, t, l), 0, 4 * row.width);
            }
    }

    void attend(int64_t t, int64_t l, const float* h, float* middle) {
        const int64_t D = p.D, E = p.E;
        const Rows row(p, t);
        for (int64_t b = 0; b < rows; ++b) normalise(h + b * D, normal + b * D, D);
        w.query[l].product(normal, D, rows, [&](int64_t m, int64_t n, v16 c) {
            store(q + m * D + n, c + load(p.query_bias + l * D + n));
        });
        float* attended = p.attended + ((l * p.T + t) * p.B + from) * D;
        attention.probabilities(t, l, q, [&](int64_t head, int64_t b, const float* weights, float scale) {
            std::memcpy(p.queries + p.query_at(head, from + b, t, l), q + b * D + head * E, 4 * E);
            if (p.probabilities)
                row.put(p, t, weights, scale, p.probabilities + table.at(p, row, head, from + b, t, l));
            weighted_sum(weights, p.values + p.memory(l % p.G, head, from + b), E, p.first(t), p.last(t), E,
                         p.S() * E, scale, attended + b * D + head * E);
        });
        w.output[l].product(attended, D, rows, [&](int64_t m, int64_t n, v16 c) {
            c = p.allowed && !p.reads(t, from + m) ? all(0) : c + load(p.output_bias + l * D + n);
            store(middle + m * D + n, c + load(h + m * D + n));
        });
    }

    void feed_forward(int64_t t, int64_t l, const float* middle, float* next) {
        const int64_t D = p.D, F = p.F;
        float* hidden = p.hidden + ((l * p.T + t) * p.B + from) * F;
        for (int64_t b = 0; b < rows; ++b) normalise(middle + b * D, normal + b * D, D);
        w.layer1[l].product(normal, D, rows, [&](int64_t m, int64_t n, v16 c) {
            store(hidden + m * F + n, larger(c + load(p.layer1_bias + l * F + n), all(0)));
        });
        w.layer2[l].product(hidden, F, rows, [&](int64_t m, int64_t n, v16 c) {
            store(next + m * D + n, c + load(p.layer2_bias + l * D + n) + load(middle + m * D + n));
        });
    }

    void remember(int64_t t, const float* memory) {
        const int64_t width = 2 * p.G * p.D, now = p.last(t);
        w.key_value.product(memory, p.D, rows, [&](int64_t m, int64_t n, v16 c) {
            store(kv + m * width + n, c + load(p.key_value_bias + n));
        });
        for (int64_t g = 0; g < p.G; ++g)
            for (int64_t h = 0; h < p.H; ++h)
                for (int64_t b = 0; b < rows; ++b) {
                    const float* key = kv + b * width + (2 * g * p.H + h) * p.E;
                    int64_t at = p.memory(g, h, from + b) + now * p.E;
                    std::memcpy(p.keys + at, key, 4 * p.E);
                    std::memcpy(p.values + at, key + p.D, 4 * p.E);
                    attention.keys.put(attention.head(g, h, b), now, key);
                }
    }
};

extern "C" void feedback_forward(const Problem* p) {
    Arena shared;
    ForwardWeights weights(shared, *p);
    Table table(*p);
    split_batch(*p, [&](int64_t, int64_t from, int64_t to) {
        Arena own;
        Forward(own, *p, weights, table, from, to).run();
    });
}

extern "C" void feedback_backward(const Problem* p) { backward(*p); }

extern "C" void feedback_step(const Step* p) { step(*p); }

extern "C" void* feedback_take(int64_t floats) {
    try {
        return pages().take(floats);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

extern "C" void feedback_give(void* at) { pages().give(at); }
