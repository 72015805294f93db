// What a call is given, and how its tables are read.
//
// Time is counted in queries: query t stands at the position of key `start` + t, which is called key t here, so
// keys before the first query have negative numbers. Columns do not know of each other.
#pragma once
#include "vectors.h"

#include <algorithm>
#include <cmath>
#include <thread>
#include <vector>

// Rows that share a reference, as in `walk.py`.
constexpr int64_t CHUNK = 64;
// Columns that are taken together, sixteen times this number: rows of a page of memory.
constexpr int64_t TILE = 64;
// So many rows before a number is read, it is asked for from memory.
constexpr int64_t AHEAD = 4;
// Rows that are computed together, so many that their sums just fit into the registers.
constexpr int64_t ROWS = PARTS == 1 ? 8 : PARTS == 2 ? 2 : 1, SIDE = PARTS == 1 ? 4 : 2;
constexpr float HEADROOM = 20, CALM = 8, TINY = 1e-25f;

// The order is that of the fields in `__init__.py`.
struct Problem {
    int64_t length, keys, start, columns, left, rows, listed, blocks, threads;
    const float *q, *k, *v, *near, *beyond;
    float *y, *den, *references;
    const float* g;
    float *dq, *dk, *dv, *dnear;

    int64_t chunks() const { return (length + CHUNK - 1) / CHUNK; }
    bool has_query(int64_t t) const { return t >= 0 && t < length; }
    bool has_key(int64_t t) const { return t >= -start && t + start < keys; }
};

// The weights of some queries in a row. Blocks of queries list the keys around them: the weight of key s for
// query t is `near[listing[t - from] + s]`, that of its far keys `far[t - from]`.
struct Lists {
    std::vector<int64_t> listing;
    std::vector<float> far;

    Lists(const Problem& p, int64_t from, int64_t count) {
        for (int64_t t = from; t < from + count; ++t) {
            int64_t row = (t % p.rows + p.rows) % p.rows, block = p.blocks == 1 ? 0 : t / p.rows;
            bool listed = t >= 0 && (p.blocks == 1 || block < p.blocks);
            listing.push_back(listed ? (block * p.rows + row) * p.listed + p.left - (t - row) : 0);
            far.push_back(listed ? p.beyond[block * p.rows + row] : 0);
        }
    }
};

// Sixteen columns of a table with a row for every position, or the few that are left at its end.
struct Columns {
    const int64_t stride, at, count;

    Columns(const Problem& p, int64_t vector)
        : stride(p.columns), at(vector * LANES), count(std::min<int64_t>(LANES, p.columns - at)) {}

    // Columns that are missing read as `missing`.
    v16 read(const float* table, int64_t row, float missing = 0) const {
        const float* from = table + row * stride + at;
        __builtin_prefetch(from + AHEAD * stride);
        if (count == LANES) return load(from);
        float some[LANES];
        store(some, all(missing));
        std::memcpy(some, from, 4 * count);
        return load(some);
    }
    void write(float* table, int64_t row, v16 value) const {
        float* to = table + row * stride + at;
        if (count == LANES) return store(to, value);
        float some[LANES];
        store(some, value);
        std::memcpy(to, some, 4 * count);
    }
};

// Two numbers a position and column, that of the denominator and that of the numerator.
struct Pair {
    v16 den, num;
};
static inline Pair load_pair(const float* p) { return {load(p), load(p + LANES)}; }
static inline void store_pair(float* p, Pair a) {
    store(p, a.den);
    store(p + LANES, a.num);
}
static inline Pair operator+(Pair a, Pair b) { return {a.den + b.den, a.num + b.num}; }
static inline Pair operator*(Pair a, v16 b) { return {a.den * b, a.num * b}; }
static inline Pair operator*(Pair a, float b) { return {a.den * b, a.num * b}; }
static inline void add_product(Pair& c, float a, Pair b) {
    add_product(c.den, a, b.den);
    add_product(c.num, a, b.num);
}
static inline void scale(float* rows, int64_t count, v16 factor) {
    for (int64_t i = 0; i < 2 * count; ++i) store(rows + i * LANES, load(rows + i * LANES) * factor);
}
constexpr int64_t ROW = 2 * LANES;

// Columns are shared out among threads; nobody waits for anybody until the end.
template <class Work>
static void split_columns(const Problem& p, Work&& work) {
    int64_t vectors = (p.columns + LANES - 1) / LANES;
    int64_t threads = std::max<int64_t>(1, std::min(p.threads, vectors));
    std::vector<std::thread> others;
    for (int64_t i = 1; i < threads; ++i)
        others.emplace_back([&, i] { work(i, vectors * i / threads, vectors * (i + 1) / threads); });
    work(0, 0, vectors / threads);
    for (auto& other : others) other.join();
}
