/* The layers of a decoder-only transformer for one step, in one call: products on packed weights with what surrounds
 * them (norms, rotary embedding, the store of K and V, attention over pages, gated activations, residuals).
 *
 * The threads of a step go from phase to phase together (`team.h`). A thread owns outputs of a product, so it can
 * finish them (bias, activation, residual) while they are in its cache. The residual stream is fp32. Sums of a row are
 * added in an order that does not depend on other rows.
 */
#ifdef __AVX512BF16__

#include <omp.h>

#include "decode_attention.h"
#include "matmul.h"
#include "team.h"

#define CHUNK_KEYS 64       /* keys that a block of queries attends to at once */
#define SOFTMAX_ROWS 16      /* rows whose weights are computed together */
#define LEAST_SCORE -1e30f  /* before any key */
#define INPUT_BYTES (1 << 20) /* inputs of a product that should stay in the second cache */
#define FEW_ROWS 8          /* so few rows are normed by each thread for itself, which saves a phase */

typedef struct {
    const word *packed;     /* see matmul.h; outputs are padded to whole blocks */
    const float *bias;      /* [outputs]; NULL: none */
    const float *scales;    /* [outputs]: weights are integers times this; NULL: weights are bf16 */
    const int32_t *offsets; /* [outputs]: what a sum has too much because first rows have 128 added */
    int32_t inputs, outputs;
} Linear;

typedef struct {
    /* Weights of RMS norms; NULL: there is none. After attention and MLP: before the residual is added. */
    const float *attention_norm, *after_attention_norm, *mlp_norm, *after_mlp_norm;
    const float *query_norm, *key_norm; /* [head_dim] */
    Linear qkv;             /* query heads, key heads, value heads */
    Linear output;
    Linear gate_up;         /* blocks of gate and up in turns */
    Linear down;
    int32_t window, rotates; /* window 0: none */
    float scaling, softcap;  /* of attention scores; softcap 0: none */
} Layer;

enum { SILU, GELU_TANH };

typedef struct {
    const Layer *layers;
    bf16 *cache;
    int64_t page_stride, layer_stride; /* elements */
    int32_t hidden, num_heads, num_kv_heads, head_dim, intermediate, rotary_dim, page_size, activation;
    float epsilon, residual_scale;
} Decoder;

typedef struct {
    int32_t num_tokens, num_sequences, max_pages, first_layer, last_layer, num_threads, num_splits, num_chunks;
    float *hidden;            /* [tokens, hidden]: the residual stream, in and out */
    const float *cos, *sin;   /* [tokens, rotary_dim / 2] */
    const int32_t *page_tables; /* [sequences, max_pages] */
    const int32_t *first_token, *num_new, *num_computed, *lengths; /* [sequences]; lengths: new tokens included */
    const int64_t *pack_offset; /* [sequences] where a chunk's packed K and V begin in `packed_kv` */
    int64_t *slots;           /* [tokens]: where in a layer of the cache a token's first K head goes */
    /* Scratch. Rows are padded to a multiple of AMX_ROWS. */
    void *inputs;             /* of a product: [tokens, its inputs] or [threads, FEW_ROWS padded, its inputs] */
    float *input_scales;      /* of inputs that are integers */
    bf16 *qkv;                /* [tokens, (heads + 2 kv heads) * head_dim] */
    bf16 *attended;           /* [tokens, heads * head_dim] */
    bf16 *activated;          /* [tokens, intermediate] */
    float *branch;            /* [tokens, hidden]: outputs that are normed before they are added */
    bf16 *packed_kv;          /* of all chunks */
    float *partial;           /* see Attention */
} Step;

typedef struct {
    const Decoder *d;
    const Step *s;
    Team *team;
    int thread;
} Worker;

static inline int padded(int rows) { return (rows + AMX_ROWS - 1) / AMX_ROWS * AMX_ROWS; }

/* Inputs of products. */

typedef struct {
    const word *rows;
    const float *scales; /* of inputs that are integers */
} Inputs;

static inline Kind kind_of(const Linear *l) { return l->scales ? INT8 : BF16; }

static inline int words_of(const Linear *l) { return l->inputs / (l->scales ? 4 : 2); }

/* With integer weights an input is rounded to 16 bits: 256 times a number of a first row, plus one of a second row. */
static inline int rows_per_token(const Linear *l) { return l->scales ? 2 : 1; }

static inline void store_bf16(bf16 *target, floats values) {
    const __m256bh half = _mm512_cvtneps_pbh((__m512)values);
    memcpy(target, &half, sizeof half);
}

/* Row `index` of the inputs of a product, from fp32. width: a multiple of LANES. */
static void store_row(const Linear *l, const float *x, void *rows, float *scales, int64_t index) {
    const int width = l->inputs;
    if (kind_of(l) == BF16) {
        bf16 *y = (bf16 *)rows + index * width;
        for (int i = 0; i < width; i += LANES) store_bf16(y + i, (floats)_mm512_loadu_ps(x + i));
        return;
    }
    uint8_t *high = (uint8_t *)rows + 2 * index * width, *low = high + width;
    __m512 most = _mm512_setzero_ps();
    for (int i = 0; i < width; i += LANES) most = _mm512_max_ps(most, _mm512_abs_ps(_mm512_loadu_ps(x + i)));
    const float largest = _mm512_reduce_max_ps(most), scale = largest / 32767.0f;
    const __m512 inverse = _mm512_set1_ps(largest > 0.0f ? 32767.0f / largest : 0.0f);
    for (int i = 0; i < width; i += LANES) {
        const __m512i value = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + i), inverse));
        const __m512i upper = _mm512_add_epi32(_mm512_srai_epi32(value, 8), _mm512_set1_epi32(128));
        _mm_storeu_si128((__m128i *)(high + i), _mm512_cvtepi32_epi8(upper));
        _mm_storeu_si128((__m128i *)(low + i), _mm512_cvtepi32_epi8(value));
    }
    scales[index] = scale;
}

static void rms_norm(const float *x, const float *weight, float *y, int width, float epsilon) {
    floats squares = {0};
    for (int i = 0; i < width; i += LANES) {
        floats v;
        memcpy(&v, x + i, sizeof v);
        squares += v * v;
    }
    const float scale = 1.0f / sqrtf(sum_of_lanes(squares) / (float)width + epsilon);
    for (int i = 0; i < width; i++) y[i] = x[i] * scale * weight[i];
}

/* The rows that this thread prepares, and where they go: all rows to a place of its own if they are few. */
static void own_rows(const Worker *w, int *first, int *last, int64_t *place) {
    if (w->s->num_tokens <= FEW_ROWS) {
        *first = 0;
        *last = w->s->num_tokens;
        *place = (int64_t)w->thread * padded(FEW_ROWS);
    } else {
        share(w->s->num_tokens, 1, w->thread, w->team->num_threads, first, last);
        *place = 0;
    }
}

static Inputs prepared(const Worker *w, const Linear *l, int64_t place) {
    if (w->s->num_tokens > FEW_ROWS) meet(w->team);
    const word *rows = (const word *)w->s->inputs + place * rows_per_token(l) * words_of(l);
    return (Inputs){rows, w->s->input_scales + place};
}

/* The normed residual stream, as inputs of a product. */
static Inputs normed_rows(const Worker *w, const Linear *l, const float *weight) {
    const Step *s = w->s;
    float normed[l->inputs];
    int first, last;
    int64_t place;
    own_rows(w, &first, &last, &place);
    for (int64_t row = first; row < last; row++) {
        rms_norm(s->hidden + row * l->inputs, weight, normed, l->inputs, w->d->epsilon);
        store_row(l, normed, s->inputs, s->input_scales, place + row);
    }
    return prepared(w, l, place);
}

/* Rows of bf16 as inputs of a product. */
static Inputs rows_of(const Worker *w, const Linear *l, const bf16 *x) {
    if (kind_of(l) == BF16) return (Inputs){(const word *)x, NULL};
    float row_of_floats[l->inputs];
    int first, last;
    int64_t place;
    own_rows(w, &first, &last, &place);
    for (int64_t row = first; row < last; row++) {
        for (int i = 0; i < l->inputs; i++) row_of_floats[i] = to_float(x[row * l->inputs + i]);
        store_row(l, row_of_floats, w->s->inputs, w->s->input_scales, place + row);
    }
    return prepared(w, l, place);
}

/* Adds normed outputs of a branch to the residual stream, where the model norms them. */
static void add_normed_branch(const Worker *w, const float *weight) {
    const Step *s = w->s;
    const int width = w->d->hidden;
    int first, last;
    meet(w->team);
    share(s->num_tokens, 1, w->thread, w->team->num_threads, &first, &last);
    for (int64_t row = first; row < last; row++) {
        const float *x = s->branch + row * width;
        float *y = s->hidden + row * width, squares = 0.0f;
        for (int i = 0; i < width; i++) squares += x[i] * x[i];
        const float scale = w->d->residual_scale / sqrtf(squares / (float)width + w->d->epsilon);
        for (int i = 0; i < width; i++) y[i] += x[i] * scale * weight[i];
    }
}

/* Products. */

static inline floats activate(floats x, int activation) {
    /* x / (1 + e^-z), with z = x for SILU. For GELU 0.5 (1 + tanh(z / 2)) is 1 / (1 + e^-z). */
    const floats z = activation == SILU ? x : (x + x * x * x * 0.044715f) * 1.5957691216f;
    return x / ((floats)exp2_vector((__m512)(z * -LOG2_E)) + 1.0f);
}

typedef enum { TO_BF16, TO_FP32, ADD_TO_FP32, GATED } Finish;

typedef struct {
    Finish finish;
    void *output;          /* bf16 or fp32, as `finish` says */
    int64_t row;           /* elements from one row to the next */
    float scale;           /* for ADD_TO_FP32 */
    int activation;        /* for GATED */
} Target;

static void finish_tile(
    const Linear *l, const Target *t, const float *row_scales, float *tile, int row, int rows, int block, int blocks) {
    const int column = block * BLOCK, width = blocks * BLOCK;
    for (int r = 0; r < rows; r++) {
        float *sums = tile + r * rows_per_token(l) * TILE_COLUMNS;
        const int64_t at = (row + r) * t->row;
        if (l->scales) {
            int32_t parts[2 * TILE_COLUMNS];
            memcpy(parts, sums, sizeof parts);
            for (int n = 0; n < width; n++) {
                const float high = (float)(parts[n] - l->offsets[column + n]), low = (float)parts[TILE_COLUMNS + n];
                sums[n] = (high * 256.0f + low) * (row_scales[row + r] * l->scales[column + n]);
            }
        }
        for (int n = 0; l->bias && n < width; n++) sums[n] += l->bias[column + n];
        for (int n = 0; n < blocks; n++) {
            floats values;
            memcpy(&values, sums + n * BLOCK, sizeof values);
            const int64_t to = at + column + n * BLOCK;
            switch (t->finish) {
                case TO_BF16: store_bf16((bf16 *)t->output + to, values); break;
                case TO_FP32: memcpy((float *)t->output + to, &values, sizeof values); break;
                case ADD_TO_FP32: {
                    floats before;
                    memcpy(&before, (float *)t->output + to, sizeof before);
                    before += values * t->scale;
                    memcpy((float *)t->output + to, &before, sizeof before);
                    break;
                }
                case GATED: {
                    floats up;
                    memcpy(&up, sums + ++n * BLOCK, sizeof up);
                    store_bf16((bf16 *)t->output + at + (int64_t)(block + n - 1) / 2 * BLOCK,
                               activate(values, t->activation) * up);
                    break;
                }
            }
        }
    }
}

/* This thread's outputs of a product, for rows [first_row, last_row). */
static void linear_rows(
    const Worker *w, const Linear *l, Inputs x, int first_row, int last_row, const Target *target) {
    const int num_blocks = (l->outputs + BLOCK - 1) / BLOCK, num_words = words_of(l), each = rows_per_token(l);
    const int64_t block_size = (int64_t)num_words * BLOCK;
    /* A tile of weights is 16 lines, and is multiplied by two tiles of rows at once. */
    const int lines = AMX_WORDS * 2 / ((last_row - first_row) * each / (2 * AMX_ROWS) + 1) + 1;
    float tile[TILE_ROWS * TILE_COLUMNS] __attribute__((aligned(64)));
    int first, last;
    share(num_blocks, target->finish == GATED ? 2 : 1, w->thread, w->team->num_threads, &first, &last);
    for (int block = first; block < last; block += MAX_BLOCKS) {
        const int blocks = last - block < MAX_BLOCKS ? last - block : MAX_BLOCKS;
        const int after = last - block - blocks, next = after < MAX_BLOCKS ? after : MAX_BLOCKS;
        const char *next_weights = (const char *)(l->packed + (block + blocks) * block_size);
        Ahead ahead = {next_weights, next_weights + next * block_size * (int64_t)sizeof(word), lines};
        for (int row = first_row; row < last_row; row += TILE_ROWS / each) {
            const int rows = last_row - row < TILE_ROWS / each ? last_row - row : TILE_ROWS / each;
            for (int k = 0; k < num_words; k += MAX_WORDS) {
                const int words = num_words - k < MAX_WORDS ? num_words - k : MAX_WORDS;
                const word *a = x.rows + (int64_t)row * each * num_words + k;
                const word *b = l->packed + block * block_size + (int64_t)k * BLOCK;
                if (kind_of(l) == BF16)
                    multiply_bf16(a, num_words, rows, b, block_size, blocks, words, tile, TILE_COLUMNS, k > 0, &ahead);
                else
                    multiply_int8(a, num_words, rows * each, b, block_size, blocks, words, tile, TILE_COLUMNS, k > 0,
                                  &ahead);
            }
            finish_tile(l, target, x.scales, tile, row, rows, block, blocks);
        }
    }
}

/* This thread's outputs of a product. Inputs are read for each few outputs, from the second cache if they fit. */
static void linear(const Worker *w, const Linear *l, Inputs x, int num_rows, const Target *target) {
    const int64_t row_bytes = (int64_t)sizeof(word) * rows_per_token(l) * words_of(l);
    const int most = (int)(INPUT_BYTES / row_bytes) / TILE_ROWS * TILE_ROWS, step = most ? most : TILE_ROWS;
    for (int row = 0; row < num_rows; row += step)
        linear_rows(w, l, x, row, num_rows - row < step ? num_rows : row + step, target);
}

/* Rotary embedding, and the store of K and V. */

/* Norms and rotates a head in place, as in transformers: element i with element i + rotary_dim / 2. */
static void prepare_head(const Decoder *d, bf16 *head, const float *norm, const float *cos, const float *sin) {
    float x[MAX_HEAD_DIM];
    const int half = d->rotary_dim / 2;
    for (int i = 0; i < d->head_dim; i++) x[i] = to_float(head[i]);
    if (norm) {
        float squares = 0.0f;
        for (int i = 0; i < d->head_dim; i++) squares += x[i] * x[i];
        const float scale = 1.0f / sqrtf(squares / (float)d->head_dim + d->epsilon);
        for (int i = 0; i < d->head_dim; i++) x[i] *= scale * norm[i];
    }
    if (cos)
        for (int i = 0; i < half; i++) {
            const float a = x[i], b = x[i + half];
            x[i] = a * cos[i] - b * sin[i];
            x[i + half] = b * cos[i] + a * sin[i];
        }
    for (int i = 0; i < d->head_dim; i++) head[i] = to_bf16(x[i]);
}

static void rotate_and_store(const Worker *w, const Layer *layer, int index) {
    const Decoder *d = w->d;
    const Step *s = w->s;
    const int D = d->head_dim, num_heads = d->num_heads + 2 * d->num_kv_heads, half = d->rotary_dim / 2;
    const int64_t row = (int64_t)num_heads * D, head_stride = (int64_t)d->page_size * D;
    int first, last;
    share(s->num_tokens * num_heads, 1, w->thread, w->team->num_threads, &first, &last);
    for (int task = first; task < last; task++) {
        const int64_t token = task / num_heads;
        const int head = task % num_heads, kv_head = (head - d->num_heads) % d->num_kv_heads;
        bf16 *x = s->qkv + token * row + (int64_t)head * D;
        const float *cos = layer->rotates ? s->cos + token * half : NULL;
        bf16 *slot = d->cache + index * d->layer_stride + s->slots[token] + kv_head * head_stride;
        if (head < d->num_heads) {
            prepare_head(d, x, layer->query_norm, cos, s->sin + token * half);
        } else if (head < d->num_heads + d->num_kv_heads) {
            prepare_head(d, x, layer->key_norm, cos, s->sin + token * half);
            memcpy(slot, x, D * sizeof(bf16));
        } else {
            memcpy(slot + d->num_kv_heads * head_stride, x, D * sizeof(bf16));
        }
    }
}

/* Attention of chunks (Dao et al. 2022, arXiv 2205.14135: online softmax, no score leaves the cache). */

static inline int num_key_blocks(const Step *s, int sequence) {
    return (s->lengths[sequence] + CHUNK_KEYS - 1) / CHUNK_KEYS;
}

/* First of a chunk's packed keys of a head; its values follow. Keys: [blocks of 16 keys][dims / 2][16][2]. Values:
 * [dims / 16][keys / 2][16][2]. */
static inline bf16 *packed_head(const Worker *w, int sequence, int head) {
    const int64_t size = (int64_t)num_key_blocks(w->s, sequence) * CHUNK_KEYS * w->d->head_dim;
    return w->s->packed_kv + w->s->pack_offset[sequence] + 2 * head * size;
}

/* Sixteen rows of sixteen words, from element `i` on, to sixteen columns. */
static inline void transpose_words(const bf16 *const *rows, int i, bf16 *to) {
    __m512i a[16], b[16];
    for (int r = 0; r < 16; r++) a[r] = _mm512_loadu_si512(rows[r] + i);
    for (int r = 0; r < 16; r += 2) {
        b[r] = _mm512_unpacklo_epi32(a[r], a[r + 1]);
        b[r + 1] = _mm512_unpackhi_epi32(a[r], a[r + 1]);
    }
    for (int r = 0; r < 16; r += 4) {
        a[r] = _mm512_unpacklo_epi64(b[r], b[r + 2]);
        a[r + 1] = _mm512_unpackhi_epi64(b[r], b[r + 2]);
        a[r + 2] = _mm512_unpacklo_epi64(b[r + 1], b[r + 3]);
        a[r + 3] = _mm512_unpackhi_epi64(b[r + 1], b[r + 3]);
    }
    /* a[4 q + c]: in each 128-bit lane l, column 4 l + c of rows 4 q to 4 q + 3 */
    for (int c = 0; c < 4; c++) {
        const __m512i low = _mm512_shuffle_i32x4(a[c], a[4 + c], 0x88);
        const __m512i low_odd = _mm512_shuffle_i32x4(a[c], a[4 + c], 0xdd);
        const __m512i high = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0x88);
        const __m512i high_odd = _mm512_shuffle_i32x4(a[8 + c], a[12 + c], 0xdd);
        b[c] = _mm512_shuffle_i32x4(low, high, 0x88);
        b[8 + c] = _mm512_shuffle_i32x4(low, high, 0xdd);
        b[4 + c] = _mm512_shuffle_i32x4(low_odd, high_odd, 0x88);
        b[12 + c] = _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd);
    }
    for (int column = 0; column < 16; column++) _mm512_storeu_si512(to + column * 2 * BLOCK, b[column]);
}

/* Packs CHUNK_KEYS keys and values of a head. */
static void pack_keys(const Worker *w, int index, int sequence, int head, int key_block) {
    const Decoder *d = w->d;
    const Step *s = w->s;
    const int D = d->head_dim, S = d->page_size, first = key_block * CHUNK_KEYS;
    const int num_keys = s->lengths[sequence];
    const int64_t padded_keys = (int64_t)num_key_blocks(s, sequence) * CHUNK_KEYS;
    const int32_t *table = s->page_tables + (int64_t)sequence * s->max_pages;
    bf16 *keys = packed_head(w, sequence, head), *values = keys + padded_keys * D;
    static const bf16 zeros[MAX_HEAD_DIM];
    const bf16 *rows[CHUNK_KEYS], *value_rows[CHUNK_KEYS];
    for (int t = 0; t < CHUNK_KEYS; t++) {
        const int position = first + t;
        rows[t] = value_rows[t] = zeros;
        if (position < num_keys) {
            rows[t] = d->cache + index * d->layer_stride + table[position / S] * d->page_stride
                      + ((int64_t)head * S + position % S) * D;
            value_rows[t] = rows[t] + (int64_t)d->num_kv_heads * S * D;
        }
    }
    for (int group = 0; group < CHUNK_KEYS; group += BLOCK)
        for (int i = 0; i < D; i += 2 * BLOCK)
            transpose_words(rows + group, i, keys + (int64_t)(first + group) * D + i * BLOCK);
    for (int t = 0; t < CHUNK_KEYS; t += 2)
        for (int i = 0; i < D; i += BLOCK) {
            const __m512i even = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(value_rows[t] + i)));
            const __m512i odd = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(value_rows[t + 1] + i)));
            _mm512_storeu_si512(values + i * padded_keys + (int64_t)(first + t) * BLOCK,
                                _mm512_or_si512(even, _mm512_slli_epi32(odd, 16)));
        }
}

static inline int tokens_per_block(const Decoder *d) {
    const int group = d->num_heads / d->num_kv_heads;
    return TILE_ROWS / group;
}

/* cap * tanh(x / cap), from e^-2|x / cap|. */
static inline __m512 cap(__m512 x, float most) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 e = exp2_vector(_mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-2.0f * LOG2_E / most)));
    const __m512 tanh = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
    const __m512 size = _mm512_mul_ps(tanh, _mm512_set1_ps(most));
    return _mm512_mask_sub_ps(size, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_LT_OQ), _mm512_setzero_ps(), size);
}

/* Lanes [begin, last] of sixteen. */
static inline __mmask16 seen(int begin, int last) {
    const uint32_t up_to_last = last < 0 ? 0 : last >= LANES - 1 ? 0xffff : (2u << last) - 1;
    const uint32_t before = begin <= 0 ? 0 : begin >= LANES ? 0xffff : (1u << begin) - 1;
    return (__mmask16)(up_to_last & ~before);
}

/* Online softmax over some keys for up to SOFTMAX_ROWS rows. */
typedef struct {
    float largest[SOFTMAX_ROWS] __attribute__((aligned(64))); /* score so far, times log2(e) */
    float total[SOFTMAX_ROWS] __attribute__((aligned(64)));
} Softmax;

static const Softmax no_softmax = {
    .largest = {[0 ... SOFTMAX_ROWS - 1] = LEAST_SCORE},
};

/* Turns scores of CHUNK_KEYS keys into weights, and scales `sums` [rows, width] of weighted values of the keys before,
 * where a score is larger than all before. log2_scale: from scores to powers of two. Scores of hidden keys: -inf. */
static void weigh(
    Softmax *softmax, const float *scores, bf16 *weights, float *sums, int width, float log2_scale) {
    const __m512 scale = _mm512_set1_ps(log2_scale);
    floats most[SOFTMAX_ROWS], totals[SOFTMAX_ROWS];
    for (int r = 0; r < SOFTMAX_ROWS; r++) {
        const float *score = scores + r * CHUNK_KEYS;
        const __m512 a = _mm512_max_ps(_mm512_load_ps(score), _mm512_load_ps(score + LANES));
        const __m512 b = _mm512_max_ps(_mm512_load_ps(score + 2 * LANES), _mm512_load_ps(score + 3 * LANES));
        most[r] = (floats)_mm512_max_ps(a, b);
    }
    const __m512 before = _mm512_load_ps(softmax->largest);
    const __m512 largest = _mm512_max_ps(before, _mm512_mul_ps((__m512)largest_of_lanes(most), scale));
    _mm512_store_ps(softmax->largest, largest);
    const __mmask16 grew = _mm512_cmp_ps_mask(largest, before, _CMP_GT_OQ);
    if (grew) {
        float shrink[SOFTMAX_ROWS] __attribute__((aligned(64)));
        const __m512 factors = exp2_vector(_mm512_sub_ps(before, largest));
        _mm512_store_ps(shrink, factors);
        _mm512_store_ps(softmax->total, _mm512_mul_ps(_mm512_load_ps(softmax->total), factors));
        for (int r = 0; r < SOFTMAX_ROWS; r++)
            for (int i = 0; i < width; i += LANES) {
                float *sum = sums + r * width + i;
                _mm512_store_ps(sum, _mm512_mul_ps(_mm512_load_ps(sum), _mm512_set1_ps(shrink[r])));
            }
    }
    for (int r = 0; r < SOFTMAX_ROWS; r++) {
        const __m512 shift = _mm512_set1_ps(softmax->largest[r]);
        totals[r] = (floats){0};
        for (int i = 0; i < CHUNK_KEYS; i += 2 * LANES) {
            const float *score = scores + r * CHUNK_KEYS + i;
            const __m512 a = exp2_vector(_mm512_fmsub_ps(_mm512_load_ps(score), scale, shift));
            const __m512 b = exp2_vector(_mm512_fmsub_ps(_mm512_load_ps(score + LANES), scale, shift));
            const __m512bh both = _mm512_cvtne2ps_pbh(b, a);
            totals[r] += (floats)_mm512_add_ps(a, b);
            memcpy(weights + r * CHUNK_KEYS + i, &both, sizeof both); /* as it is read: else the read waits for it */
        }
    }
    const floats total = sums_of_lanes(totals) + (floats)_mm512_load_ps(softmax->total);
    _mm512_store_ps(softmax->total, (__m512)total);
}

/* Hides the scores of keys [key, key + CHUNK_KEYS) that come after a row's query, or before its window. Rows are query
 * heads, `group` for each position. */
static void hide(float *scores, int num_rows, int group, int first_row, int position, int key, int window) {
    for (int r = 0; r < num_rows; r++) {
        const int at = position + (first_row + r) / group; /* of the query */
        const int last = at - key, begin = window > 0 ? at - window + 1 - key : 0;
        for (int i = 0; i < CHUNK_KEYS && (last < CHUNK_KEYS - 1 || begin > 0); i += LANES)
            _mm512_mask_store_ps(scores + r * CHUNK_KEYS + i, (__mmask16)~seen(begin - i, last - i),
                                 _mm512_set1_ps(-INFINITY));
    }
}

/* Some consecutive queries of one KV head. A row is one query head of one token. */
static void attend_block(const Worker *w, const Layer *layer, int sequence, int head, int block) {
    const Decoder *d = w->d;
    const Step *s = w->s;
    const int D = d->head_dim, G = d->num_heads / d->num_kv_heads, size = tokens_per_block(d);
    const int first = block * size, left = s->num_new[sequence] - first, tokens = left < size ? left : size;
    const int num_rows = tokens * G, position = s->num_computed[sequence] + first;
    const int64_t row = (int64_t)(d->num_heads + 2 * d->num_kv_heads) * D;
    const int64_t padded_keys = (int64_t)num_key_blocks(s, sequence) * CHUNK_KEYS;
    const bf16 *keys = packed_head(w, sequence, head), *values = keys + padded_keys * D;
    const float log2_scale = LOG2_E * (layer->softcap > 0.0f ? 1.0f : layer->scaling);
    bf16 query[TILE_ROWS * MAX_HEAD_DIM] __attribute__((aligned(64)));
    bf16 weights[2 * SOFTMAX_ROWS * CHUNK_KEYS] __attribute__((aligned(64)));
    float scores[2 * SOFTMAX_ROWS * CHUNK_KEYS] __attribute__((aligned(64)));
    float sums[TILE_ROWS * MAX_HEAD_DIM] __attribute__((aligned(64)));
    Softmax softmax[TILE_ROWS / SOFTMAX_ROWS];

    for (int r = 0; r < num_rows; r++) {
        const int64_t token = s->first_token[sequence] + first + r / G;
        memcpy(query + r * D, s->qkv + token * row + (int64_t)(head * G + r % G) * D, D * sizeof(bf16));
    }
    memset(query + num_rows * D, 0, sizeof(bf16) * (padded(num_rows) - num_rows) * D);
    memset(sums, 0, sizeof(float) * padded(num_rows) * D);
    for (int i = 0; i < TILE_ROWS / SOFTMAX_ROWS; i++) softmax[i] = no_softmax;
    const int low = layer->window > 0 && position - layer->window + 1 > 0 ? position - layer->window + 1 : 0;
    for (int key = low / CHUNK_KEYS * CHUNK_KEYS; key < position + tokens; key += CHUNK_KEYS) {
        /* Rows of which the first sees no key, and so all before it, are left out. */
        const int unseen = key > position ? (key - position) * G / (2 * SOFTMAX_ROWS) * (2 * SOFTMAX_ROWS) : 0;
        for (int r = unseen; r < num_rows; r += 2 * SOFTMAX_ROWS) {
            const int rows = num_rows - r < 2 * SOFTMAX_ROWS ? num_rows - r : 2 * SOFTMAX_ROWS;
            multiply_bf16(query + r * D, D / 2, rows, keys + (int64_t)key * D, (int64_t)BLOCK * D / 2,
                          CHUNK_KEYS / BLOCK, D / 2, scores, CHUNK_KEYS, 0, NULL);
            if (layer->softcap > 0.0f)
                for (int i = 0; i < rows * CHUNK_KEYS; i += LANES) {
                    const __m512 score = _mm512_mul_ps(_mm512_load_ps(scores + i), _mm512_set1_ps(layer->scaling));
                    _mm512_store_ps(scores + i, cap(score, layer->softcap));
                }
            if (key + CHUNK_KEYS > position + r / G || layer->window > 0)
                hide(scores, rows, G, r, position, key, layer->window);
            for (int part = 0; part < rows; part += SOFTMAX_ROWS)
                weigh(softmax + (r + part) / SOFTMAX_ROWS, scores + part * CHUNK_KEYS, weights + part * CHUNK_KEYS,
                      sums + (r + part) * D, D, log2_scale);
            for (int i = 0; i < D; i += TILE_COLUMNS) {
                const int blocks = D - i < TILE_COLUMNS ? (D - i) / BLOCK : MAX_BLOCKS;
                multiply_bf16(weights, CHUNK_KEYS / 2, rows, values + i * padded_keys + (int64_t)key * BLOCK,
                              padded_keys * BLOCK / 2, blocks, CHUNK_KEYS / 2, sums + r * D + i, D, 1, NULL);
            }
        }
    }
    for (int r = 0; r < num_rows; r++) {
        const int64_t token = s->first_token[sequence] + first + r / G;
        bf16 *out = s->attended + (token * d->num_heads + head * G + r % G) * D;
        const __m512 inverse = _mm512_set1_ps(1.0f / softmax[r / SOFTMAX_ROWS].total[r % SOFTMAX_ROWS]);
        for (int i = 0; i < D; i += LANES)
            store_bf16(out + i, (floats)_mm512_mul_ps(_mm512_load_ps(sums + r * D + i), inverse));
    }
}

/* Chunks come first in a step's sequences, then single tokens. */
static void attend(const Worker *w, const Layer *layer, int index) {
    const Decoder *d = w->d;
    const Step *s = w->s;
    const int num_kv_heads = d->num_kv_heads, num_decodes = s->num_sequences - s->num_chunks;
    int task;
    if (s->num_chunks) {
        int next = take_task(w->team);
        for (int sequence = 0, begin = 0; sequence < s->num_chunks; sequence++) {
            const int key_blocks = num_key_blocks(s, sequence), count = key_blocks * num_kv_heads;
            for (; next < begin + count; next = take_task(w->team))
                pack_keys(w, index, sequence, (next - begin) / key_blocks, (next - begin) % key_blocks);
            begin += count;
        }
        meet(w->team);
    }
    const Attention decode = {
        .cache = d->cache + index * d->layer_stride,
        .page_stride = d->page_stride,
        .query = s->qkv,
        .query_token = (int64_t)(d->num_heads + 2 * num_kv_heads) * d->head_dim,
        .query_head = d->head_dim,
        .output = s->attended,
        .page_tables = s->page_tables + (int64_t)s->num_chunks * s->max_pages,
        .lengths = s->lengths + s->num_chunks,
        .token_indices = s->first_token + s->num_chunks,
        .partial = s->partial,
        .num_sequences = num_decodes,
        .max_pages = s->max_pages,
        .num_heads = num_kv_heads,
        .group = d->num_heads / num_kv_heads,
        .head_dim = d->head_dim,
        .page_size = d->page_size,
        .splits = s->num_splits,
        .window = layer->window,
        .scaling = layer->scaling,
        .softcap = layer->softcap};
    task = take_task(w->team);
    int begin = 0;
    for (int sequence = 0; sequence < s->num_chunks; sequence++) {
        const int size = tokens_per_block(d), blocks = (s->num_new[sequence] + size - 1) / size;
        const int count = blocks * num_kv_heads;
        for (; task < begin + count; task = take_task(w->team)) /* the longest rows first */
            attend_block(w, layer, sequence, (task - begin) % num_kv_heads, blocks - 1 - (task - begin) / num_kv_heads);
        begin += count;
    }
    for (; task < begin + num_decodes * num_kv_heads * s->num_splits; task = take_task(w->team)) {
        attend_task(&decode, task - begin);
        if (s->num_splits == 1) join_splits(&decode, (task - begin) / num_kv_heads, (task - begin) % num_kv_heads);
    }
    meet(w->team);
    if (s->num_splits > 1) {
        for (task = take_task(w->team); task < num_decodes * num_kv_heads; task = take_task(w->team))
            join_splits(&decode, task / num_kv_heads, task % num_kv_heads);
        meet(w->team);
    }
}

/* One layer. Each comment names what the threads wait for. */
static void run_layer(const Worker *w, int index) {
    const Decoder *d = w->d;
    const Step *s = w->s;
    const Layer *layer = d->layers + index;
    const int rows = s->num_tokens, D = d->head_dim;

    const Target qkv = {TO_BF16, s->qkv, (int64_t)(d->num_heads + 2 * d->num_kv_heads) * D, 0, 0};
    linear(w, &layer->qkv, normed_rows(w, &layer->qkv, layer->attention_norm), rows, &qkv);
    meet(w->team);
    rotate_and_store(w, layer, index);
    meet(w->team);
    attend(w, layer, index);

    const Target add = {ADD_TO_FP32, s->hidden, d->hidden, d->residual_scale, 0};
    const Target branch = {TO_FP32, s->branch, d->hidden, 0, 0};
    const Inputs attended = rows_of(w, &layer->output, s->attended);
    linear(w, &layer->output, attended, rows, layer->after_attention_norm ? &branch : &add);
    if (layer->after_attention_norm) add_normed_branch(w, layer->after_attention_norm);
    meet(w->team);

    const Target gated = {GATED, s->activated, d->intermediate, 0, d->activation};
    linear(w, &layer->gate_up, normed_rows(w, &layer->gate_up, layer->mlp_norm), rows, &gated);
    meet(w->team);
    linear(w, &layer->down, rows_of(w, &layer->down, s->activated), rows, layer->after_mlp_norm ? &branch : &add);
    if (layer->after_mlp_norm) add_normed_branch(w, layer->after_mlp_norm);
    meet(w->team);
}

/* Where the K and V of new tokens go, and the tables of single tokens. */
static void lay_out(const Decoder *d, const Step *s) {
    for (int sequence = 0; sequence < s->num_sequences; sequence++) {
        const int32_t *table = s->page_tables + (int64_t)sequence * s->max_pages;
        for (int n = 0; n < s->num_new[sequence]; n++) {
            const int position = s->num_computed[sequence] + n;
            s->slots[s->first_token[sequence] + n] =
                table[position / d->page_size] * d->page_stride + (int64_t)(position % d->page_size) * d->head_dim;
        }
    }
}

/* Computes layers [first_layer, last_layer) of a step. */
void kvferry_run_layers(const Decoder *d, const Step *s) {
    Team team = {0};
    lay_out(d, s);
#pragma omp parallel num_threads(s->num_threads)
    {
        const Worker worker = {d, s, &team, omp_get_thread_num()};
        const TileConfig before = begin_amx();
        const unsigned mode = flush_denormals();
#pragma omp single
        team.num_threads = omp_get_num_threads(); /* may be fewer than asked for */
        for (int index = s->first_layer; index < s->last_layer; index++) run_layer(&worker, index);
        restore_mode(mode);
        end_amx(before);
    }
}

/* The norm at the end, then the LM head. rows: [num_rows] indices into hidden [tokens, width]. inputs, input_scales:
 * scratch for num_rows padded rows. logits: [num_rows padded, outputs padded]. */
void kvferry_run_head(
    const Linear *head, const float *norm, float epsilon, const float *hidden, const int64_t *rows, int num_rows,
    void *inputs, float *input_scales, float *logits, int num_threads) {
    const int width = head->inputs;
    float normed[width];
    Team team = {0};
    for (int64_t row = 0; row < num_rows; row++) {
        rms_norm(hidden + rows[row] * width, norm, normed, width, epsilon);
        store_row(head, normed, inputs, input_scales, row);
    }
#pragma omp parallel num_threads(num_threads)
    {
        const Worker worker = {NULL, NULL, &team, omp_get_thread_num()};
        const Target target = {TO_FP32, logits, (int64_t)(head->outputs + BLOCK - 1) / BLOCK * BLOCK, 0, 0};
        const TileConfig before = begin_amx();
#pragma omp single
        team.num_threads = omp_get_num_threads();
        linear(&worker, head, (Inputs){inputs, input_scales}, num_rows, &target);
        end_amx(before);
    }
}

/* Packs a weight [outputs, inputs] into blocks first_block, first_block + block_step, ... */
void kvferry_pack(const bf16 *weight, int outputs, int inputs, word *packed, int first_block, int block_step) {
    const int words = inputs / 2;
#pragma omp parallel for
    for (int block = 0; block < (outputs + BLOCK - 1) / BLOCK; block++) {
        word *to = packed + (int64_t)(first_block + block * block_step) * words * BLOCK;
        for (int n = 0; n < BLOCK && block * BLOCK + n < outputs; n++)
            for (int k = 0; k < words; k++)
                memcpy(to + k * BLOCK + n, weight + (int64_t)(block * BLOCK + n) * inputs + 2 * k, sizeof(word));
    }
}

#ifdef __AVX512VNNI__
/* The same, as integers of 8 bits with a scale for each output. Rounds to the nearest. */
void kvferry_pack_int8(
    const bf16 *weight, int outputs, int inputs, word *packed, int first_block, int block_step, float *scales,
    int32_t *offsets) {
    const int words = inputs / 4;
#pragma omp parallel for
    for (int output = 0; output < outputs; output++) {
        const bf16 *row = weight + (int64_t)output * inputs;
        const int64_t block = first_block + output / BLOCK * block_step, n = output % BLOCK;
        float largest = 0.0f;
        int32_t sum = 0;
        for (int k = 0; k < inputs; k++) largest = fmaxf(largest, fabsf(to_float(row[k])));
        for (int k = 0; k < words; k++) {
            int8_t four[4];
            for (int i = 0; i < 4; i++) {
                four[i] = largest > 0.0f ? (int8_t)rintf(to_float(row[4 * k + i]) * (127.0f / largest)) : 0;
                sum += four[i];
            }
            memcpy(packed + block * words * BLOCK + (int64_t)k * BLOCK + n, four, sizeof four);
        }
        scales[block * BLOCK + n] = largest / 127.0f;
        offsets[block * BLOCK + n] = 128 * sum;
    }
}
#endif

#endif
