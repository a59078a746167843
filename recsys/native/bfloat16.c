/* Products of bfloat16 numbers, summed in float32, with the instructions of AVX512-BF16.
 *
 * Inputs are rounded to bfloat16, to the nearest, and multiplied in pairs. As in forward.c, a row's
 * sum runs in an order that depends on that row alone. The file is compiled for processors that have
 * the instructions, and is called on these only (`recsys_bfloat16`).
 */
#include "internal.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>

enum { ROWS = 12, BLOCK = 96, CHUNK = 512, LANES = 16 }; /* CHUNK: inputs at a time */

#define INLINE static inline __attribute__((always_inline))

/* Round `count` inputs to bfloat16, two to a pair; an odd one is followed by zero. */
static void round_inputs(const float *from, int64_t count, uint32_t *pairs) {
    for (int64_t i = 0; i < count; i += 2 * LANES) {
        const int64_t left = count - i;
        const __mmask16 low = left < LANES ? (__mmask16)((1u << left) - 1) : 0xffff;
        const int64_t more = left - LANES;
        const __mmask16 high = more >= LANES ? 0xffff
                               : more > 0    ? (__mmask16)((1u << more) - 1)
                                             : (__mmask16)0;
        const __m512 first = _mm512_maskz_loadu_ps(low, from + i);
        const __m512 second = _mm512_maskz_loadu_ps(high, from + i + LANES);
        _mm512_storeu_si512(pairs + i / 2, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }
}

typedef struct {
    const float *bias; /* NULL: none */
    float *out;
    int64_t row;     /* floats from a row to the next */
    __mmask16 store[2];
    int add;
} Output;

/* `rows` (a constant) rows of pairs times the PANEL outputs of a panel. */
INLINE void tile(int rows, const uint32_t *restrict a, const uint32_t *restrict panel,
                 int64_t pairs, Output to) {
    __m512 sum[ROWS][2];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; k++) {
        const __m512bh first = (__m512bh)_mm512_loadu_si512(panel + k * PANEL);
        const __m512bh second = (__m512bh)_mm512_loadu_si512(panel + k * PANEL + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const __m512bh x = (__m512bh)_mm512_set1_epi32((int)a[r * (CHUNK / 2) + k]);
            sum[r][0] = _mm512_dpbf16_ps(sum[r][0], x, first);
            sum[r][1] = _mm512_dpbf16_ps(sum[r][1], x, second);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < 2; v++) {
            float *out = to.out + r * to.row + v * LANES;
            __m512 value = sum[r][v];
            if (to.bias) value = _mm512_add_ps(value, _mm512_loadu_ps(to.bias + v * LANES));
            if (to.add)
                value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(to.store[v], out));
            _mm512_mask_storeu_ps(out, to.store[v], value);
        }
}

#define TILE(n) \
    case n: tile(n, a, panel, pairs, to); break;

static void any_tile(int64_t rows, const uint32_t *a, const uint32_t *panel, int64_t pairs,
                     Output to) {
    switch (rows) {
        TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
        TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
    }
}

static __mmask16 stored(int64_t columns) {
    return columns >= LANES ? 0xffff : columns > 0 ? (__mmask16)((1u << columns) - 1) : (__mmask16)0;
}

/* One chunk of the inputs of at most BLOCK rows. */
static void multiply_chunk(const Linear *w, const uint32_t *a, int64_t first_pair, int64_t pairs,
                           int64_t rows, float *c, int64_t c_row, int64_t width, int add) {
    const int64_t all = (w->inputs + 1) / 2, tiles = (rows + ROWS - 1) / ROWS;
    for (int64_t column = 0; column < width; column += PANEL) {
        const uint32_t *panel = w->pairs + (column / PANEL * all + first_pair) * PANEL;
        const int64_t left = width - column;
        const Output to = {.bias = w->bias && !first_pair ? w->bias + column : 0,
                           .row = c_row,
                           .store = {stored(left), stored(left - LANES)},
                           .add = add || first_pair};
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t first = rows * t / tiles, end = rows * (t + 1) / tiles;
            Output here = to;
            here.out = c + first * c_row + column;
            any_tile(end - first, a + first * (CHUNK / 2), panel, pairs, here);
        }
    }
}

void multiply_bfloat16(const Linear *w, const float *a, int64_t a_row, int64_t rows, float *c,
                       int64_t c_row, int64_t width, int add) {
    uint32_t pairs[BLOCK * CHUNK / 2] __attribute__((aligned(64)));
    for (int64_t first = 0; first < rows; first += BLOCK) {
        const int64_t count = rows - first < BLOCK ? rows - first : BLOCK;
        for (int64_t input = 0; input < w->inputs; input += CHUNK) {
            const int64_t some = w->inputs - input < CHUNK ? w->inputs - input : CHUNK;
            for (int64_t r = 0; r < count; r++)
                round_inputs(a + (first + r) * a_row + input, some, pairs + r * (CHUNK / 2));
            multiply_chunk(w, pairs, input / 2, (some + 1) / 2, count, c + first * c_row, c_row,
                           width, add);
        }
    }
}

const int compiled_bfloat16 = 1;
#else
void multiply_bfloat16(const Linear *w, const float *a, int64_t a_row, int64_t rows, float *c,
                       int64_t c_row, int64_t width, int add) {
    (void)w, (void)a, (void)a_row, (void)rows, (void)c, (void)c_row, (void)width, (void)add;
}

const int compiled_bfloat16 = 0;
#endif
