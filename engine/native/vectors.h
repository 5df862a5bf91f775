/* Numbers and vectors that all kernels share.
 *
 * bf16 numbers are uint16_t; sums are fp32. Sixteen lanes are GCC vector types, which the compiler maps to wide
 * registers, or to several narrow ones.
 */
#ifndef KVFERRY_VECTORS_H
#define KVFERRY_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;

static inline float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* Round to nearest, ties to even, as torch does. */
static inline bf16 to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return (bf16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#define LANES 16
#define LOG2_E 1.44269504f
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));

static inline floats load_floats(const bf16 *source) {
    return (floats)(__builtin_convertvector(*(const halves *)source, words) << 16);
}

static inline floats choose(ints condition, floats yes, floats no) {
    return (floats)((condition & (ints)yes) | (~condition & (ints)no));
}

/* e^x for x <= 0, relative error about 2e-7: 2^n * 2^f with a polynomial for f in [-1, 0]. */
static inline floats exp_negative(floats x) {
    floats y = x * LOG2_E;
    y = choose(y < -126.0f, (floats){0} - 126.0f, y);
    const ints n = __builtin_convertvector(y, ints); /* towards zero */
    const floats f = y - __builtin_convertvector(n, floats);
    floats p = f * 1.52527338e-5f + 1.54035303e-4f;
    p = p * f + 1.33335581e-3f;
    p = p * f + 9.61812910e-3f;
    p = p * f + 5.55041086e-2f;
    p = p * f + 2.40226507e-1f;
    p = p * f + 6.93147182e-1f;
    p = p * f + 1.0f;
    return p * (floats)((n + 127) << 23);
}

static inline float exp_negative_one(float x) { return exp_negative((floats){x})[0]; }

static inline float largest_lane(floats v) {
    for (int distance = LANES / 2; distance; distance /= 2) {
        ints other;
        for (int lane = 0; lane < LANES; lane++) other[lane] = lane ^ distance;
        const floats w = __builtin_shuffle(v, other);
        v = choose(w > v, w, v);
    }
    return v[0];
}

static inline float sum_of_lanes(floats v) {
    float sum = 0.0f;
    for (int lane = 0; lane < LANES; lane++) sum += v[lane];
    return sum;
}

/* Splits each of two vectors into groups of `distance` lanes, and packs the even and the odd ones. */
static inline void separate(floats a, floats b, int distance, floats *even, floats *odd) {
    ints low, high;
    for (int lane = 0; lane < LANES; lane++) {
        const int group = lane / distance, offset = lane % distance;
        const int from = group % 2 ? LANES : 0;
        low[lane] = from + group / 2 * 2 * distance + offset;
        high[lane] = low[lane] + distance;
    }
    *even = __builtin_shuffle(a, b, low);
    *odd = __builtin_shuffle(a, b, high);
}

static inline floats add_lanes(floats a, floats b, int distance) {
    floats even, odd;
    separate(a, b, distance, &even, &odd);
    return even + odd;
}

static inline floats largest_lanes(floats a, floats b, int distance) {
    floats even, odd;
    separate(a, b, distance, &even, &odd);
    return choose(even > odd, even, odd);
}

/* Four rounds reduce sixteen vectors to one: lane t of the result is that of all lanes of v[t]. */
#define REDUCE_LANES(name, fold)                                     \
    static inline floats name(floats v[LANES]) {                     \
        for (int i = 0; i < 8; i++) v[i] = fold(v[i], v[i + 8], 8);  \
        for (int i = 0; i < 4; i++) v[i] = fold(v[i], v[i + 4], 4);  \
        for (int i = 0; i < 2; i++) v[i] = fold(v[i], v[i + 2], 2);  \
        return fold(v[0], v[1], 1);                                  \
    }
REDUCE_LANES(sums_of_lanes, add_lanes)
REDUCE_LANES(largest_of_lanes, largest_lanes)

#endif
