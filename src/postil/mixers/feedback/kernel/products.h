// Matrix products with few rows, and the two layer norms.
//
// A step multiplies as many rows as a thread has sequences, often 8 to 32, with every weight matrix of the
// model. General libraries repack the matrix on each call. Here it is packed once for the whole sequence.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "pages.h"
#include "vectors.h"

// A tile of ROWS x (16 * COLUMNS) results stays in registers while the sum runs. AVX-512 and NEON have 32
// registers, SSE and AVX only 16.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int ROWS = 8;
#else
constexpr int ROWS = 4;
#endif
constexpr int COLUMNS = WIDTH == 16 ? 2 : 1;
constexpr int PANEL = COLUMNS * LANES;

// What is fetched meanwhile, because it comes next: `stride` further for each term.
struct Next {
    const float* at;
    int64_t stride;
};

// c[m] += sum_k a[m, k] b[k]; the strides of a say which way round it lies. Both are asked for some terms
// before they are needed.
template <int M, int N>
static inline void tile(v16 (&c)[M][N], const float* a, int64_t row, int64_t step, const float* b,
                        int64_t next, int64_t depth, Next after) {
    for (int64_t k = 0; k < depth; ++k, a += step, b += next, after.at += after.stride) {
        v16 right[N];
        for (int n = 0; n < N; ++n) right[n] = load(b + n * LANES);
        for (int n = 0; n < N; ++n) __builtin_prefetch(b + 32 * next + n * LANES);
        for (int n = 0; n < N; ++n) __builtin_prefetch(after.at + n * LANES, 0, 2);
        __builtin_prefetch(a + 2 * LANES);
        for (int m = 0; m < M; ++m)
            for (int n = 0; n < N; ++n) add_product(c[m][n], a[m * row], right[n]);
    }
}

template <int M, int N, class Then>
static inline void tile_then(const float* a, int64_t row, int64_t step, const float* b, int64_t next,
                             int64_t depth, Next after, int64_t m0, int64_t n0, Then&& then) {
    v16 c[M][N] = {};
    tile<M, N>(c, a, row, step, b, next, depth, after);
    for (int m = 0; m < M; ++m)
        for (int n = 0; n < N; ++n) then(m0 + m, n0 + n * LANES, c[m][n]);
}

// The number of rows must be known when compiling, or the tile would not stay in registers.
template <int M, int N, class Then>
static inline void up_to(int64_t rows, const float* a, int64_t row, int64_t step, const float* b,
                         int64_t next, int64_t depth, Next after, int64_t m0, int64_t n0, Then&& then) {
    if (rows == M) return tile_then<M, N>(a, row, step, b, next, depth, after, m0, n0, then);
    if constexpr (M > 1) up_to<M - 1, N>(rows, a, row, step, b, next, depth, after, m0, n0, then);
}

// c[m, n] = sum_k a[m, k] b[k, n] for one panel of columns; `then` gets each sixteen results. If another panel
// follows, each block of rows fetches a part of it: memory is then never idle while the arithmetic goes on.
template <class Then>
static void panel_product(const float* a, int64_t row, int64_t step, int64_t rows, const float* b,
                          int64_t next, int64_t depth, int64_t n0, int64_t columns, Then&& then,
                          const float* following = nullptr) {
    const int64_t share = columns / std::max<int64_t>(1, (rows + ROWS - 1) / ROWS);
    for (int64_t m = 0; m < rows; m += ROWS) {
        int64_t count = rows - m < ROWS ? rows - m : ROWS;
        const Next after = following ? Next{following + m / ROWS * depth * share, share} : Next{b, next};
        if (columns == PANEL)
            up_to<ROWS, COLUMNS>(count, a + m * row, row, step, b, next, depth, after, m, n0, then);
        else
            up_to<ROWS, 1>(count, a + m * row, row, step, b, next, depth, after, m, n0, then);
    }
}

// A matrix b[k, n], cut into panels of columns that lie one after the other, each row by row.
struct Packed {
    int64_t depth = 0, width = 0;
    float* data;

    // `across` and `down` are the strides of n and k in the source. A square of it at a time: otherwise one of
    // the two, source or panel, would be gone through across all its cache lines again and again.
    Packed(Arena& arena, const float* source, int64_t depth_, int64_t width_, int64_t down, int64_t across)
        : depth(depth_), width((width_ + LANES - 1) / LANES * LANES), data(arena.take(depth * width)) {
        float* to = data;
        for (int64_t n0 = 0; n0 < width; n0 += PANEL, to += depth * PANEL) {
            const int64_t columns = std::min<int64_t>(PANEL, width - n0), real = std::min(columns, width_ - n0);
            for (int64_t k0 = 0; k0 < depth; k0 += LANES)
                for (int64_t n = 0; n < columns; ++n)
                    for (int64_t k = k0; k < std::min<int64_t>(depth, k0 + LANES); ++k)
                        to[k * columns + n] = n < real ? source[k * down + (n0 + n) * across] : 0.0f;
        }
    }

    // Columns from `first` on are enough for some callers; it is rounded down to a whole panel.
    template <class Then>
    void product(const float* a, int64_t row, int64_t rows, Then&& then, int64_t first = 0) const {
        for (int64_t n0 = first / PANEL * PANEL; n0 < width; n0 += PANEL) {
            const int64_t columns = std::min<int64_t>(PANEL, width - n0);
            panel_product(a, row, 1, rows, data + n0 * depth, columns, depth, n0, columns, then,
                          data + (n0 + columns) * depth);
        }
    }
};

// ## Weight gradients
//
// dW[n, k] += sum over rows of dy[row, n] x[row, k]. Both factors are brought into the order in which the
// tile wants them; each is used so often that the copy does not matter.
struct Outer {
    std::vector<float> left, right;

    template <class Left, class Right>
    void add(float* dw, float* db, int64_t outs, int64_t ins, int64_t rows, Left&& dy, Right&& x) {
        left.resize(rows * outs);
        right.resize(rows * PANEL);
        for (int64_t r = 0; r < rows; ++r) {
            const float* from = dy(r);
            for (int64_t n = 0; n < outs; n += ROWS)
                std::memcpy(&left[(n / ROWS * rows + r) * ROWS], from + n, 4 * ROWS);
            for (int64_t n = 0; n < outs; n += LANES) store(db + n, load(db + n) + load(from + n));
        }
        for (int64_t k0 = 0; k0 < ins; k0 += PANEL) {
            int64_t columns = ins - k0 < PANEL ? ins - k0 : PANEL;
            for (int64_t r = 0; r < rows; ++r) std::memcpy(&right[r * columns], x(r) + k0, 4 * columns);
            for (int64_t n0 = 0; n0 < outs; n0 += ROWS) {
                for (int64_t m = ROWS; m < 2 * ROWS; ++m)
                    for (int64_t k = k0; k < k0 + columns; k += LANES)
                        __builtin_prefetch(dw + (n0 + m) * ins + k, 1);
                panel_product(&left[n0 * rows], 1, ROWS, ROWS, right.data(), columns, rows, k0, columns,
                              [&](int64_t m, int64_t k, v16 c) {
                                  float* to = dw + (n0 + m) * ins + k;
                                  store(to, load(to) + c);
                              });
            }
        }
    }
};

// ## Layer norms
static inline float normalise(const float* x, float* n, int64_t width) {
    v16 total = all(0), squares = all(0);
    for (int64_t d = 0; d < width; d += LANES) total = total + load(x + d);
    v16 mean = all(sum(total) / width);
    for (int64_t d = 0; d < width; d += LANES) {
        v16 c = load(x + d) - mean;
        add_product(squares, c, c);
    }
    float rstd = 1.0f / std::sqrt(sum(squares) / width + 1e-5f);
    for (int64_t d = 0; d < width; d += LANES) store(n + d, (load(x + d) - mean) * rstd);
    return rstd;
}

// out = base + rstd (g - mean(g) - n mean(g n))
static inline void normalise_backward(const float* g, const float* n, float rstd, const float* base,
                                      float* out, int64_t width) {
    v16 total = all(0), along = all(0);
    for (int64_t d = 0; d < width; d += LANES) {
        total = total + load(g + d);
        add_product(along, load(g + d), load(n + d));
    }
    v16 mean = all(sum(total) / width), slope = all(sum(along) / width);
    for (int64_t d = 0; d < width; d += LANES) {
        v16 r = (load(g + d) - mean - load(n + d) * slope) * rstd;
        store(out + d, base ? load(base + d) + r : r);
    }
}
