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
/* A query head stays in bf16: one instruction multiplies 32 pairs. */
typedef __m512bh query_part;
#define QUERY_LANES 32
static inline query_part load_query(const bf16 *source) { return (query_part)_mm512_loadu_si512(source); }
static inline floats multiply_add(floats sum, query_part query, const bf16 *key) {
    return (floats)_mm512_dpbf16_ps((__m512)sum, query, (query_part)_mm512_loadu_si512(key));
}
#else
typedef floats query_part;
#define QUERY_LANES 16
static inline query_part load_query(const bf16 *source) { return load_floats(source); }
static inline floats multiply_add(floats sum, query_part query, const bf16 *key) {
    return sum + query * load_floats(key);
}
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
            float weights[MAX_GROUP][LANES];
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
                const float peak = largest_lane(scores);
                if (peak > largest[g]) {
                    const float shrink = largest[g] == -INFINITY ? 0.0f : exp_negative_one(largest[g] - peak);
                    total[g] *= shrink;
                    for (int i = 0; i < D / LANES; i++) sum[g][i] *= shrink;
                    largest[g] = peak;
                }
                const floats weight = choose(seen, exp_negative(scores - largest[g]), (floats){0});
                total[g] += weight;
                memcpy(weights[g], &weight, sizeof weight);
            }
            for (int t = hidden; t < count; t++) {
                for (int d = 0; d < D; d += 32) __builtin_prefetch(values + to_next + (int64_t)(block + t) * D + d);
                const bf16 *value = values + (int64_t)(block + t) * D;
                for (int i = 0; i < D / LANES; i++) {
                    const floats v = load_floats(value + i * LANES);
                    for (int g = 0; g < G; g++) sum[g][i] += weights[g][t] * v;
                }
            }
        }
    }
    float *out = a->partial
                 + (((int64_t)sequence * a->num_heads + head) * a->splits + split) * G * (D + 2);
    for (int g = 0; g < G; g++, out += D + 2) {
        out[0] = largest[g];
        out[1] = sum_of_lanes(total[g]);
        memcpy(out + 2, sum[g], D * sizeof(float));
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
