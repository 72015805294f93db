// Sixteen numbers at a time.
//
// The compiler's own vector types stand for whatever the processor has: one AVX-512 register, two of AVX,
// four of SSE or NEON. Everything else in these files is written in terms of sixteen lanes.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
constexpr int LANES = 16, PARTS = LANES / WIDTH;

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef float loose __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * WIDTH)));

struct v16 {
    vec part[PARTS];
};

#define EACH for (int i = 0; i < PARTS; ++i)

static inline v16 load(const float* p) {
    v16 r;
    EACH r.part[i] = *(const loose*)(p + i * WIDTH);
    return r;
}
static inline void store(float* p, v16 a) { EACH *(loose*)(p + i * WIDTH) = a.part[i]; }
static inline v16 all(float s) {
    v16 r;
    EACH r.part[i] = vec{} + s;
    return r;
}
static inline v16 operator+(v16 a, v16 b) { EACH a.part[i] += b.part[i]; return a; }
static inline v16 operator-(v16 a, v16 b) { EACH a.part[i] -= b.part[i]; return a; }
static inline v16 operator*(v16 a, v16 b) { EACH a.part[i] *= b.part[i]; return a; }
static inline v16 operator*(v16 a, float s) { EACH a.part[i] *= s; return a; }
static inline v16 larger(v16 a, v16 b) {
    EACH a.part[i] = a.part[i] > b.part[i] ? a.part[i] : b.part[i];
    return a;
}
// a where the gate is above zero, else zero.
static inline v16 gated(v16 a, v16 gate) {
    EACH a.part[i] = gate.part[i] > vec{} ? a.part[i] : vec{};
    return a;
}
// The multiplication and the addition of `c + a * b` become one instruction.
static inline void add_product(v16& c, v16 a, v16 b) { EACH c.part[i] += a.part[i] * b.part[i]; }
static inline void add_product(v16& c, float a, v16 b) { EACH c.part[i] += a * b.part[i]; }

// y = x + s * z, over whole rows; x and y may be the same.
static inline void add_scaled(float* y, const float* x, float s, const float* z, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
        v16 c = load(x + i);
        add_product(c, s, load(z + i));
        store(y + i, c);
    }
}

// Four lanes are added to four: as few additions as possible wait for each other.
typedef float quad __attribute__((vector_size(16), aligned(4), may_alias));

static inline float sum(v16 a) {
    float lanes[LANES];
    store(lanes, a);
    const quad* q = (const quad*)lanes;
    quad s = (q[0] + q[1]) + (q[2] + q[3]);
    return (s[0] + s[1]) + (s[2] + s[3]);
}
static inline float largest(v16 a) {
    float lanes[LANES];
    store(lanes, a);
    const quad* q = (const quad*)lanes;
    quad left = q[0] > q[1] ? q[0] : q[1], right = q[2] > q[3] ? q[2] : q[3];
    quad s = left > right ? left : right;
    float first = s[0] > s[1] ? s[0] : s[1], second = s[2] > s[3] ? s[2] : s[3];
    return first > second ? first : second;
}

// exp(x) = 2^n exp(r) with n the nearest whole number to x / ln 2, so |r| <= 0.35, where eight terms of the
// series are exact to the last bit or two. Adding 1.5 * 2^23 rounds to a whole number and leaves it in the
// low bits. Arguments here are never positive; below -87 the result is zero, not a denormal, so that a
// masked probability is exactly nothing.
static inline v16 exponential(v16 x) {
    const float magic = 12582912.0f;
    v16 result;
    EACH {
        vec a = x.part[i] < -87.0f ? vec{} - 87.0f : x.part[i];
        vec t = a * 1.44269504f + magic;
        vec n = t - magic;
        vec r = (a - n * 0.693359375f) + n * 2.12194440e-4f;
        vec p = vec{} + 1.0f / 5040;
        p = p * r + 1.0f / 720;
        p = p * r + 1.0f / 120;
        p = p * r + 1.0f / 24;
        p = p * r + 1.0f / 6;
        p = p * r + 0.5f;
        p = p * r + 1.0f;
        p = p * r + 1.0f;
        ivec exponent = (((ivec)t - (ivec)(vec{} + magic)) + 127) << 23;
        result.part[i] = x.part[i] < -87.0f ? vec{} : p * (vec)exponent;
    }
    return result;
}
