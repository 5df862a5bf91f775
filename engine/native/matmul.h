/* Matrix products on bf16 with weights that are packed once.
 *
 * Packed weights [outputs / 16][inputs / 2][16 outputs][2 inputs]: 64 bytes are one operand of vdpbf16ps, 1024 bytes one
 * tile of AMX, and the blocks of 16 outputs can be shared among threads.
 */
#ifndef KVFERRY_MATMUL_H
#define KVFERRY_MATMUL_H

#include <immintrin.h>

#include "vectors.h"

#define BLOCK 16          /* outputs in a block of packed weights */
#define MAX_BLOCKS 4      /* blocks that are computed together */
#define TILE_COLUMNS (BLOCK * MAX_BLOCKS)
#define TILE_ROWS 96      /* rows that are computed together: their sums stay in the first cache */
#define MAX_INPUTS 2048   /* inputs that are multiplied before the next ones: a block of them stays in the second cache */
#define AMX_ROWS 16
#define FEWEST_AMX_ROWS 5 /* fewer are as fast without */

/* c[R][NB * 16] (+)= a[R][K] * b. b: NB blocks, `b_block` elements apart. K: even. */
static inline __attribute__((always_inline)) void multiply_rows(
    const bf16 *a, int64_t a_row, const bf16 *b, int64_t b_block, int K, float *c, int64_t c_row, int adds,
    const int R, const int NB) {
    __m512 sum[6][MAX_BLOCKS];
    for (int r = 0; r < R; r++)
        for (int n = 0; n < NB; n++) sum[r][n] = adds ? _mm512_loadu_ps(c + r * c_row + n * BLOCK) : _mm512_setzero_ps();
    for (int k = 0; k < K; k += 2, b += 2 * BLOCK) {
        __m512bh w[MAX_BLOCKS];
        for (int n = 0; n < NB; n++) w[n] = (__m512bh)_mm512_loadu_si512(b + n * b_block);
        for (int r = 0; r < R; r++) {
            int32_t pair;
            memcpy(&pair, a + r * a_row + k, sizeof pair);
            const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
            for (int n = 0; n < NB; n++) sum[r][n] = _mm512_dpbf16_ps(sum[r][n], w[n], x);
        }
    }
    for (int r = 0; r < R; r++)
        for (int n = 0; n < NB; n++) _mm512_storeu_ps(c + r * c_row + n * BLOCK, sum[r][n]);
}

#define ROWS_CASE(R)                                                                    \
    case R:                                                                             \
        switch (blocks) {                                                               \
            case 1: multiply_rows(a, a_row, b, b_block, K, c, c_row, adds, R, 1); break; \
            case 2: multiply_rows(a, a_row, b, b_block, K, c, c_row, adds, R, 2); break; \
            case 3: multiply_rows(a, a_row, b, b_block, K, c, c_row, adds, R, 3); break; \
            default: multiply_rows(a, a_row, b, b_block, K, c, c_row, adds, R, 4);       \
        }                                                                               \
        break;

static void multiply_with_vectors(
    const bf16 *a, int64_t a_row, int rows, const bf16 *b, int64_t b_block, int blocks, int K, float *c, int64_t c_row,
    int adds) {
    for (int r = 0; r < rows; r += 6, a += 6 * a_row, c += 6 * c_row)
        switch (rows - r) {
            ROWS_CASE(1) ROWS_CASE(2) ROWS_CASE(3) ROWS_CASE(4) ROWS_CASE(5)
            default:
                switch (6) { ROWS_CASE(6) }
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

/* Eight tiles of 16 rows of 64 bytes. For each thread; other users of AMX load a configuration of their own. */
static void begin_amx(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } __attribute__((packed)) config = {.palette = 1};
    if (!may_use_amx()) return;
    for (int tile = 0; tile < 8; tile++) config.bytes[tile] = 64, config.rows[tile] = 16;
    _tile_loadconfig(&config);
}

static void end_amx(void) {
    if (may_use_amx()) _tile_release();
}

/* 16 or 32 rows by one or two blocks. K: a multiple of 32. Reads 16 or 32 rows of `a`. */
static inline __attribute__((always_inline)) void multiply_tiles(
    const bf16 *a, int64_t a_row, const bf16 *b, int64_t b_block, int K, float *c, int64_t c_row, int adds,
    const int two_rows, const int two_blocks) {
    float *c1 = c + AMX_ROWS * c_row;
    const int64_t c_bytes = c_row * sizeof(float), a_bytes = a_row * sizeof(bf16);
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
    for (int k = 0; k < K; k += 32, a += 32, b += 32 * BLOCK) {
        _tile_loadd(4, a, a_bytes);
        _tile_loadd(6, b, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (two_blocks) {
            _tile_loadd(7, b + b_block, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (two_rows) {
            _tile_loadd(5, a + AMX_ROWS * a_row, a_bytes);
            _tile_dpbf16ps(2, 5, 6);
            if (two_blocks) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, c_bytes);
    if (two_blocks) _tile_stored(1, c + BLOCK, c_bytes);
    if (two_rows) _tile_stored(2, c1, c_bytes);
    if (two_rows && two_blocks) _tile_stored(3, c1 + BLOCK, c_bytes);
}

static void multiply_with_amx(
    const bf16 *a, int64_t a_row, int rows, const bf16 *b, int64_t b_block, int blocks, int K, float *c, int64_t c_row,
    int adds) {
    for (int n = 0; n < blocks; n += 2, b += 2 * b_block, c += 2 * BLOCK) {
        const bf16 *rows_a = a;
        float *rows_c = c;
        for (int r = 0; r < rows; r += 2 * AMX_ROWS, rows_a += 2 * AMX_ROWS * a_row, rows_c += 2 * AMX_ROWS * c_row) {
            if (rows - r > AMX_ROWS && blocks - n > 1)
                multiply_tiles(rows_a, a_row, b, b_block, K, rows_c, c_row, adds, 1, 1);
            else if (rows - r > AMX_ROWS)
                multiply_tiles(rows_a, a_row, b, b_block, K, rows_c, c_row, adds, 1, 0);
            else if (blocks - n > 1)
                multiply_tiles(rows_a, a_row, b, b_block, K, rows_c, c_row, adds, 0, 1);
            else
                multiply_tiles(rows_a, a_row, b, b_block, K, rows_c, c_row, adds, 0, 0);
        }
    }
}
#else
static int may_use_amx(void) { return 0; }
static void begin_amx(void) {}
static void end_amx(void) {}
#endif

/* c[rows][blocks * 16] (+)= a[rows][K] * b, for at most TILE_ROWS rows and MAX_BLOCKS blocks.
 * `a` and `c` have room for rows up to the next multiple of AMX_ROWS, which may hold anything. */
static void multiply(
    const bf16 *a, int64_t a_row, int rows, const bf16 *b, int64_t b_block, int blocks, int K, float *c, int64_t c_row,
    int adds) {
#ifdef __AMX_BF16__
    if (rows >= FEWEST_AMX_ROWS && K % 32 == 0 && may_use_amx()) {
        multiply_with_amx(a, a_row, rows, b, b_block, blocks, K, c, c_row, adds);
        return;
    }
#endif
    multiply_with_vectors(a, a_row, rows, b, b_block, blocks, K, c, c_row, adds);
}

#endif
