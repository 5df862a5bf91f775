/* Attention of single tokens (decode steps): each page is read once, where it lies.
 *
 * Loops are written so that the compiler vectorizes them.
 */
#ifndef KVFERRY_DECODE_ATTENTION_H
#define KVFERRY_DECODE_ATTENTION_H

#include "vectors.h"

#define MAX_GROUP 16     /* query heads per KV head */
#define MAX_HEAD_DIM 256

typedef struct {
    bf16 *cache;            /* this layer's first element; layout [page, kv, head, token, dim] */
    int64_t page_stride;    /* elements from one page to the next */
    const bf16 *query, *key, *value; /* key NULL: the new tokens' keys and values are in their pages already */
    int64_t query_token, query_head, key_token, key_head, value_token, value_head; /* strides in elements */
    bf16 *output;           /* [tokens, query heads, head_dim], contiguous */
    const int32_t *page_tables; /* [sequences, max_pages] */
    const int32_t *lengths;     /* [sequences] tokens to attend to, the new token included */
    const int32_t *token_indices; /* [sequences] index of the token in query, key, value, output */
    float *partial;         /* [sequences, heads, splits, group, head_dim + 2] */
    int32_t num_sequences, max_pages, num_heads, group, head_dim, page_size, splits, window;
    float scaling, softcap; /* softcap 0: off */
} Attention;

#ifdef __AVX512BF16__
#include <immintrin.h>
/* From now on this thread takes denormal numbers for 0, as operands and as results: weights of far keys are such numbers,
 * and microcode that computes them took 40 % of a chunk's time. Returns the mode before, for `restore_mode`. */
static inline unsigned flush_denormals(void) {
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    return before;
}
static inline void restore_mode(unsigned mode) { _mm_setcsr(mode); }

/* 2^x, relative error about 3e-6; 0 for minus infinity. */
static inline __m512 exp2_vector(__m512 x) {
    const __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); /* x less its floor */
    __m512 p = _mm512_fmadd_ps(f, _mm512_set1_ps(1.35341456e-2f), _mm512_set1_ps(5.20114920e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.41442746e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.93003834e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.00000259f));
    return _mm512_scalef_ps(p, x);
}

/* A query head stays in bf16: one instruction multiplies 32 pairs. */
typedef __m512bh query_part;
#define QUERY_LANES 32
static inline query_part load_query(const bf16 *source) { return (query_part)_mm512_loadu_si512(source); }
static inline floats multiply_add(floats sum, query_part query, const bf16 *key) {
    return (floats)_mm512_dpbf16_ps((__m512)sum, query, (query_part)_mm512_loadu_si512(key));
}
static inline int any_above(floats v, float limit) {
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
}
/* e^x for x <= 0; 0 for minus infinity. */
static inline floats exp_weight(floats x) { return (floats)exp2_vector((__m512)(x * LOG2_E)); }

/* Adds values [16 tokens, D] times weights [G, 16] to sums [G, D], for tokens [first, end), two by two: one instruction
 * multiplies and adds 16 pairs. Values of other tokens may be anything, even not a number. Of each 32 dims a sum has first those with (dim % 8) < 4, then the others; see `in_order`. */
typedef uint32_t weight_pairs[LANES / 2];
static inline void keep_weights(weight_pairs pairs, floats weight) {
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)weight);
    memcpy(pairs, &rounded, sizeof rounded);
}
static inline __attribute__((always_inline)) void add_values(
    floats sum[][MAX_HEAD_DIM / LANES], const weight_pairs *pairs, const bf16 *block, int first, int end,
    int64_t to_next, const int D, const int G) {
    const __m512i zeros = _mm512_setzero_si512();
    for (int t = first & ~1; t < end; t += 2) {
        const bf16 *values = block + (int64_t)t * D;
        for (int i = 0; i < D; i += QUERY_LANES) {
            __builtin_prefetch(values + to_next + i);
            __builtin_prefetch(values + to_next + D + i);
            const __m512i even = t >= first ? _mm512_loadu_si512(values + i) : zeros;
            const __m512i odd = t + 1 < end ? _mm512_loadu_si512(values + D + i) : zeros;
            const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(even, odd);
            const __m512bh high = (__m512bh)_mm512_unpackhi_epi16(even, odd);
            for (int g = 0; g < G; g++) {
                const __m512bh weight = (__m512bh)_mm512_set1_epi32((int)pairs[g][t / 2]);
                floats *both = sum[g] + i / LANES;
                both[0] = (floats)_mm512_dpbf16_ps((__m512)both[0], low, weight);
                both[1] = (floats)_mm512_dpbf16_ps((__m512)both[1], high, weight);
            }
        }
    }
}
static inline void in_order(const floats *sum, float *out, const int D) {
    for (int i = 0; i < D; i += QUERY_LANES)
        for (int part = 0; part < QUERY_LANES; part += 4)
            memcpy(out + i + part, (const float *)(sum + i / LANES + part / 4 % 2) + part / 8 * 4, 4 * sizeof(float));
}
#else
static inline unsigned flush_denormals(void) { return 0; }
static inline void restore_mode(unsigned mode) { (void)mode; }
typedef floats query_part;
#define QUERY_LANES 16
static inline query_part load_query(const bf16 *source) { return load_floats(source); }
static inline floats multiply_add(floats sum, query_part query, const bf16 *key) {
    return sum + query * load_floats(key);
}
static inline int any_above(floats v, float limit) { return largest_lane(v) > limit; }
static inline floats exp_weight(floats x) { return exp_negative(x); }
typedef float weight_pairs[LANES];
static inline void keep_weights(weight_pairs weights, floats weight) { memcpy(weights, &weight, sizeof weight); }
static inline __attribute__((always_inline)) void add_values(
    floats sum[][MAX_HEAD_DIM / LANES], const weight_pairs *weights, const bf16 *block, int first, int end,
    int64_t to_next, const int D, const int G) {
    for (int t = first; t < end; t++)
        for (int i = 0; i < D; i += LANES) {
            const bf16 *values = block + (int64_t)t * D;
            __builtin_prefetch(values + to_next + i);
            const floats v = load_floats(values + i);
            for (int g = 0; g < G; g++) sum[g][i / LANES] += weights[g][t] * v;
        }
}
static inline void in_order(const floats *sum, float *out, const int D) { memcpy(out, sum, D * sizeof(float)); }
#endif

/* One split of one KV head of one sequence: online softmax over its pages, each page read once.
 * D (head_dim) and G (query heads) are constants in the calls for common models, so that data stays in registers. */
static inline __attribute__((always_inline)) void attend_split(
    const Attention *a, int sequence, int head, int split, const int D, const int G, const int whole_blocks) {
    const int S = a->page_size;
    const int length = a->lengths[sequence];
    const int first_token = a->window > 0 && length > a->window ? length - a->window : 0;
    const int first_page = first_token / S, num_pages = (length + S - 1) / S;
    const int per_split = (num_pages - first_page + a->splits - 1) / a->splits;
    const int begin = first_page + split * per_split;
    const int end = begin + per_split < num_pages ? begin + per_split : num_pages;
    const int64_t token = a->token_indices[sequence];
    query_part query[MAX_GROUP][MAX_HEAD_DIM / QUERY_LANES];
    floats sum[MAX_GROUP][MAX_HEAD_DIM / LANES];
    floats total[MAX_GROUP];
    float largest[MAX_GROUP];
    ints lanes;

    for (int lane = 0; lane < LANES; lane++) lanes[lane] = lane;
    for (int g = 0; g < G; g++) {
        const bf16 *source = a->query + token * a->query_token + (int64_t)(head * G + g) * a->query_head;
        for (int i = 0; i < D / QUERY_LANES; i++) query[g][i] = load_query(source + i * QUERY_LANES);
        for (int i = 0; i < D / LANES; i++) sum[g][i] = (floats){0};
        largest[g] = -INFINITY;
        total[g] = (floats){0};
    }
    for (int page = begin; page < end; page++) {
        bf16 *keys = a->cache + a->page_tables[(int64_t)sequence * a->max_pages + page] * a->page_stride
                     + (int64_t)head * S * D;
        bf16 *values = keys + (int64_t)a->num_heads * S * D;
        const int high = length - page * S < S ? length - page * S : S;
        const int32_t *entry = a->page_tables + (int64_t)sequence * a->max_pages + page;
        const int64_t to_next = ((int64_t)entry[page + 1 < end] - entry[0]) * a->page_stride;
        if (a->key && page == num_pages - 1) { /* first store the new token's key and value */
            memcpy(keys + (int64_t)(high - 1) * D,
                   a->key + token * a->key_token + head * a->key_head, D * sizeof(bf16));
            memcpy(values + (int64_t)(high - 1) * D,
                   a->value + token * a->value_token + head * a->value_head, D * sizeof(bf16));
        }
        for (int block = 0; block < high; block += LANES) { /* tokens of the page, sixteen at a time */
            const int count = high - block < LANES ? high - block : LANES;
            const int hidden = page * S + block < first_token ? first_token - page * S - block : 0;
            /* With whole blocks, rows after `count` are read too: they belong to the page and are masked below. */
            const int rows = whole_blocks ? LANES : count;
            const ints seen = (lanes >= hidden) & (lanes < count);
            weight_pairs weights[MAX_GROUP];
            for (int g = 0; g < G; g++) {
                floats dots[LANES];
                for (int t = 0; t < LANES; t++) {
                    dots[t] = (floats){0};
                    if (g == 0)
                        for (int d = 0; d < D; d += 32)
                            __builtin_prefetch(keys + to_next + (int64_t)(block + t) * D + d);
                    if (t < rows) {
                        const bf16 *key = keys + (int64_t)(block + t) * D;
                        for (int i = 0; i < D / QUERY_LANES; i++)
                            dots[t] = multiply_add(dots[t], query[g][i], key + i * QUERY_LANES);
                    }
                }
                floats scores = sums_of_lanes(dots) * a->scaling;
                if (a->softcap > 0.0f)
                    for (int t = 0; t < LANES; t++) scores[t] = a->softcap * tanhf(scores[t] / a->softcap);
                scores = choose(seen, scores, (floats){0} - INFINITY);
                if (any_above(scores, largest[g])) {
                    const float peak = largest_lane(scores);
                    const float shrink = largest[g] == -INFINITY ? 0.0f : exp_negative_one(largest[g] - peak);
                    total[g] *= shrink;
                    for (int i = 0; i < D / LANES; i++) sum[g][i] *= shrink;
                    largest[g] = peak;
                }
                const floats weight = choose(seen, exp_weight(scores - largest[g]), (floats){0});
                total[g] += weight;
                keep_weights(weights[g], weight);
            }
            add_values(sum, weights, values + (int64_t)block * D, hidden, count, to_next, D, G);
        }
    }
    float *out = a->partial
                 + (((int64_t)sequence * a->num_heads + head) * a->splits + split) * G * (D + 2);
    for (int g = 0; g < G; g++, out += D + 2) {
        out[0] = largest[g];
        out[1] = sum_of_lanes(total[g]);
        in_order(sum[g], out + 2, D);
    }
}

#define CASE(D, G) \
    case (D) * 100 + (G): attend_split(a, sequence, head, split, D, G, 1); return;

static void attend_task(const Attention *a, int task) {
    const int split = task % a->splits, head = task / a->splits % a->num_heads;
    const int sequence = task / a->splits / a->num_heads;
    if (a->page_size % LANES == 0) /* specialized code for the sizes of common models */
        switch (a->head_dim * 100 + a->group) {
            CASE(64, 1) CASE(64, 2) CASE(64, 3) CASE(64, 4) CASE(64, 7) CASE(64, 8)
            CASE(128, 1) CASE(128, 2) CASE(128, 4) CASE(128, 8)
        }
    attend_split(a, sequence, head, split, a->head_dim, a->group, 0);
}

/* Combines the splits of one KV head of one sequence. */
static void join_splits(const Attention *a, int sequence, int head) {
    const int G = a->group, D = a->head_dim, splits = a->splits;
    const float *partial = a->partial + ((int64_t)sequence * a->num_heads + head) * splits * G * (D + 2);
    for (int g = 0; g < G; g++) {
        float peak = -INFINITY, total = 0.0f, sum[MAX_HEAD_DIM] = {0};
        for (int s = 0; s < splits; s++) {
            const float *part = partial + ((int64_t)s * G + g) * (D + 2);
            peak = part[0] > peak ? part[0] : peak;
        }
        for (int s = 0; s < splits; s++) {
            const float *part = partial + ((int64_t)s * G + g) * (D + 2);
            if (part[0] == -INFINITY) continue;
            const float weight = exp_negative_one(part[0] - peak);
            total += weight * part[1];
            for (int d = 0; d < D; d++) sum[d] += weight * part[2 + d];
        }
        bf16 *out = a->output
                    + ((int64_t)a->token_indices[sequence] * a->num_heads * G + (int64_t)head * G + g) * D;
        for (int d = 0; d < D; d++) out[d] = to_bf16(sum[d] / total);
    }
}

#endif
