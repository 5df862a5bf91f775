/* Matrix products with weights that are packed once, on bf16 or on 8-bit integers.
 *
 * Both are seen as 32-bit words: two bf16 numbers or four integers, which one instruction multiplies and adds. Packed
 * weights are [outputs / 16][words][16 outputs]: 64 bytes are one operand of vdpbf16ps or vpdpbusd, 1024 bytes one tile
 * of AMX, and the blocks of 16 outputs can be shared among threads. Sums are fp32, or int32.
 *
 * Integers of rows are unsigned, those of weights signed, as vpdpbusd wants them.
 */
#ifndef KVFERRY_MATMUL_H
#define KVFERRY_MATMUL_H

#include <immintrin.h>

#include "vectors.h"

#define BLOCK 16          /* outputs in a block of packed weights */
#define MAX_BLOCKS 4      /* blocks that are computed together */
#define TILE_COLUMNS (BLOCK * MAX_BLOCKS)
#define TILE_ROWS 96      /* rows that are computed together: their sums stay in the first cache */
#define MAX_WORDS 1024    /* words that are multiplied before the next: a block of them stays in the second cache */
#define AMX_ROWS 16
#define AMX_WORDS 16

typedef uint32_t word;
typedef enum { BF16, INT8 } Kind;

/* Memory that is brought to the second cache while something else is multiplied: some lines with each step. The
 * processor's own prefetch stops at each page and is too late for products of few rows. */
typedef struct {
    const char *at, *end;
    int lines;
} Ahead;

static inline __attribute__((always_inline)) void fetch(Ahead *ahead) {
    for (int i = 0; i < ahead->lines && ahead->at < ahead->end; i++, ahead->at += 64)
        __builtin_prefetch(ahead->at, 0, 2);
}

static inline __attribute__((always_inline)) __m512i multiply_add_words(
    __m512i sum, __m512i row, __m512i weights, const Kind kind) {
#ifdef __AVX512VNNI__
    if (kind == INT8) return _mm512_dpbusd_epi32(sum, row, weights);
#endif
    return (__m512i)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weights, (__m512bh)row);
}

/* c[R][NB * 16] (+)= a[R][words] * b. b: NB blocks, `b_block` words apart. c: fp32 or int32. */
static inline __attribute__((always_inline)) void multiply_rows(
    const word *a, int64_t a_row, const word *b, int64_t b_block, int words, word *c, int64_t c_row, int adds,
    const Kind kind, const int R, const int NB) {
    __m512i sum[6][MAX_BLOCKS];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < NB; n++)
            sum[r][n] = adds ? _mm512_loadu_si512(c + r * c_row + n * BLOCK) : _mm512_setzero_si512();
    for (int k = 0; k < words; k++, b += BLOCK) {
        __m512i w[MAX_BLOCKS];
        for (int n = 0; n < NB; n++) w[n] = _mm512_loadu_si512(b + n * b_block);
        for (int r = 0; r < R; r++) {
            const __m512i x = _mm512_set1_epi32((int)a[r * a_row + k]);
            for (int n = 0; n < NB; n++) sum[r][n] = multiply_add_words(sum[r][n], x, w[n], kind);
        }
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < NB; n++) _mm512_storeu_si512(c + r * c_row + n * BLOCK, sum[r][n]);
}

#define ROWS_CASE(R)                                                                                        \
    case R:                                                                                                 \
        switch (blocks) {                                                                                   \
            case 1: multiply_rows(a, a_row, b, b_block, words, c, c_row, adds, kind, R, 1); break;           \
            case 2: multiply_rows(a, a_row, b, b_block, words, c, c_row, adds, kind, R, 2); break;           \
            case 3: multiply_rows(a, a_row, b, b_block, words, c, c_row, adds, kind, R, 3); break;           \
            default: multiply_rows(a, a_row, b, b_block, words, c, c_row, adds, kind, R, 4);                 \
        }                                                                                                   \
        break;

static inline __attribute__((always_inline)) void multiply_with_vectors(
    const word *a, int64_t a_row, int rows, const word *b, int64_t b_block, int blocks, int words, word *c,
    int64_t c_row, int adds, const Kind kind) {
    for (int r = 0; r < rows; r += 6, a += 6 * a_row, c += 6 * c_row) {
        const int some = rows - r < 6 ? rows - r : 6;
        switch (some) { ROWS_CASE(1) ROWS_CASE(2) ROWS_CASE(3) ROWS_CASE(4) ROWS_CASE(5) ROWS_CASE(6) }
    }
}

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

static int may_use_amx(void) {
    static int allowed = -1;
    if (allowed < 0) allowed = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
    return allowed;
}

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} __attribute__((packed)) TileConfig;

/* Eight tiles of 16 rows of 64 bytes, for this thread. Returns what was configured before: other libraries in this
 * process may rely on theirs. */
static TileConfig begin_amx(void) {
    TileConfig before = {0}, config = {.palette = 1};
    if (!may_use_amx()) return before;
    _tile_storeconfig(&before);
    for (int tile = 0; tile < 8; tile++) config.bytes[tile] = 64, config.rows[tile] = 16;
    _tile_loadconfig(&config);
    return before;
}

static void end_amx(TileConfig before) {
    if (!may_use_amx()) return;
    if (before.palette)
        _tile_loadconfig(&before);
    else
        _tile_release();
}

#define DOT_TILES(sum, row, weights)                                             \
    do {                                                                         \
        if (kind == INT8) _tile_dpbusd(sum, row, weights);                       \
        else _tile_dpbf16ps(sum, row, weights);                                  \
    } while (0)

/* 16 or 32 rows by one or two blocks. words: a multiple of AMX_WORDS. Reads 16 or 32 rows of `a`. */
static inline __attribute__((always_inline)) void multiply_tiles(
    const word *a, int64_t a_row, const word *b, int64_t b_block, int words, word *c, int64_t c_row, int adds,
    const Kind kind, const int two_rows, const int two_blocks, Ahead *ahead) {
    word *c1 = c + AMX_ROWS * c_row;
    const int64_t c_bytes = c_row * sizeof(word), a_bytes = a_row * sizeof(word);
    if (adds) {
        _tile_loadd(0, c, c_bytes);
        if (two_blocks) _tile_loadd(1, c + BLOCK, c_bytes);
        if (two_rows) _tile_loadd(2, c1, c_bytes);
        if (two_rows && two_blocks) _tile_loadd(3, c1 + BLOCK, c_bytes);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int k = 0; k < words; k += AMX_WORDS, a += AMX_WORDS, b += AMX_WORDS * BLOCK) {
        _tile_loadd(4, a, a_bytes);
        _tile_loadd(6, b, 64);
        if (ahead && two_rows) fetch(ahead);
        DOT_TILES(0, 4, 6);
        if (two_blocks) {
            _tile_loadd(7, b + b_block, 64);
            DOT_TILES(1, 4, 7);
        }
        if (two_rows) {
            _tile_loadd(5, a + AMX_ROWS * a_row, a_bytes);
            DOT_TILES(2, 5, 6);
            if (two_blocks) DOT_TILES(3, 5, 7);
        }
    }
    _tile_stored(0, c, c_bytes);
    if (two_blocks) _tile_stored(1, c + BLOCK, c_bytes);
    if (two_rows) _tile_stored(2, c1, c_bytes);
    if (two_rows && two_blocks) _tile_stored(3, c1 + BLOCK, c_bytes);
}

static inline __attribute__((always_inline)) void multiply_with_amx(
    const word *a, int64_t a_row, int rows, const word *b, int64_t b_block, int blocks, int words, word *c,
    int64_t c_row, int adds, const Kind kind, Ahead *ahead) {
    for (int n = 0; n < blocks; n += 2, b += 2 * b_block, c += 2 * BLOCK) {
        const word *from = a;
        word *to = c;
        for (int r = 0; r < rows; r += 2 * AMX_ROWS, from += 2 * AMX_ROWS * a_row, to += 2 * AMX_ROWS * c_row) {
            const int two_rows = rows - r > AMX_ROWS, two_blocks = blocks - n > 1;
            if (two_rows && two_blocks)
                multiply_tiles(from, a_row, b, b_block, words, to, c_row, adds, kind, 1, 1, ahead);
            else if (two_rows) multiply_tiles(from, a_row, b, b_block, words, to, c_row, adds, kind, 1, 0, ahead);
            else if (two_blocks) multiply_tiles(from, a_row, b, b_block, words, to, c_row, adds, kind, 0, 1, ahead);
            else multiply_tiles(from, a_row, b, b_block, words, to, c_row, adds, kind, 0, 0, ahead);
        }
    }
}
#else
static int may_use_amx(void) { return 0; }
typedef struct {
    char unused;
} TileConfig;
static TileConfig begin_amx(void) { return (TileConfig){0}; }
static void end_amx(TileConfig before) { (void)before; }
#endif

/* c[rows][blocks * 16] (+)= a[rows][words] * b, for at most TILE_ROWS rows and MAX_BLOCKS blocks.
 * `a` and `c` have room for rows up to the next multiple of AMX_ROWS, which may hold anything. ahead: may be NULL. */
static inline __attribute__((always_inline)) void multiply_kind(
    const word *a, int64_t a_row, int rows, const word *b, int64_t b_block, int blocks, int words, word *c,
    int64_t c_row, int adds, const Kind kind, Ahead *ahead) {
#ifdef __AMX_BF16__
    if (words % AMX_WORDS == 0 && may_use_amx()) {
        multiply_with_amx(a, a_row, rows, b, b_block, blocks, words, c, c_row, adds, kind, ahead);
        return;
    }
#endif
    multiply_with_vectors(a, a_row, rows, b, b_block, blocks, words, c, c_row, adds, kind);
}

static void multiply_bf16(
    const void *a, int64_t a_row, int rows, const void *b, int64_t b_block, int blocks, int words, void *c,
    int64_t c_row, int adds, Ahead *ahead) {
    multiply_kind(a, a_row, rows, b, b_block, blocks, words, c, c_row, adds, BF16, ahead);
}

static void multiply_int8(
    const void *a, int64_t a_row, int rows, const void *b, int64_t b_block, int blocks, int words, void *c,
    int64_t c_row, int adds, Ahead *ahead) {
    multiply_kind(a, a_row, rows, b, b_block, blocks, words, c, c_row, adds, INT8, ahead);
}

#endif
