/* CPU kernels that torch does not have, for models that `decoder.c` does not run. */
#include "decode_attention.h"

/* One new token per sequence: stores its key and value, attends over all pages. */
void kvferry_attend_decode(const Attention *a) {
    const int tasks = a->num_sequences * a->num_heads * a->splits;
#pragma omp parallel
    {
        const unsigned mode = flush_denormals();
#pragma omp for schedule(dynamic)
        for (int task = 0; task < tasks; task++) attend_task(a, task);
#pragma omp for
        for (int task = 0; task < a->num_sequences * a->num_heads; task++)
            join_splits(a, task / a->num_heads, task % a->num_heads);
        restore_mode(mode);
    }
}

/* y = weight * x / sqrt(mean(x^2) + epsilon), rounded to bf16 before and after the weight, as transformers does. */
void kvferry_rms_norm(const bf16 *x, const bf16 *weight, bf16 *y, int64_t rows, int64_t width, float epsilon) {
#pragma omp parallel for if (rows >= 8)
    for (int64_t row = 0; row < rows; row++) {
        const bf16 *in = x + row * width;
        bf16 *out = y + row * width;
        float squares = 0.0f;
        for (int64_t i = 0; i < width; i++) squares += to_float(in[i]) * to_float(in[i]);
        const float scale = 1.0f / sqrtf(squares / (float)width + epsilon);
        for (int64_t i = 0; i < width; i++)
            out[i] = to_bf16(to_float(weight[i]) * to_float(to_bf16(to_float(in[i]) * scale)));
    }
}
