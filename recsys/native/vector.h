/* Vectors of the instruction set that a source is compiled for (`recsys/native/build.py`). */
#ifndef RECSYS_VECTOR_H
#define RECSYS_VECTOR_H

#include <math.h>
#include <stdint.h>

#if defined(__AVX512F__)
enum { WIDTH = 16, TILE_ROWS = 12, TILE_VECTORS = 2 };
#elif defined(__AVX2__)
enum { WIDTH = 8, TILE_ROWS = 6, TILE_VECTORS = 2 };
#elif defined(__aarch64__)
enum { WIDTH = 4, TILE_ROWS = 6, TILE_VECTORS = 4 };
#else
enum { WIDTH = 4, TILE_ROWS = 4, TILE_VECTORS = 2 };
#endif

typedef float Vector __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Integers __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t Bits __attribute__((vector_size(WIDTH * 4)));
typedef float Unaligned __attribute__((vector_size(WIDTH * 4), aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))

INLINE Vector load(const float *from) { return *(const Unaligned *)from; }
INLINE void store(float *to, Vector value) { *(Unaligned *)to = value; }
INLINE Vector all(float value) { return value - (Vector){0}; }

/* `yes` where the mask is set, else `no`. */
INLINE Vector pick(Integers mask, Vector yes, Vector no) {
    return (Vector)(((Integers)yes & mask) | ((Integers)no & ~mask));
}

/* e^x to about two units in the last place; 0 below the smallest normal number, infinity above 88.3,
 * NaN for NaN. The polynomial is that of Cephes' expf. */
INLINE Vector exponential(Vector x) {
    const Vector low = all(-87.3f), high = all(88.3f), round = all(12582912.0f); /* 1.5 * 2^23 */
    Vector y = pick(x > low, x, low); /* of a NaN, `low` */
    y = pick(y < high, y, high);
    const Vector shifted = y * 1.44269504f + round;
    const Vector n = shifted - round;
    y = y - n * 0.693359375f;
    y = y + n * 2.12194440e-4f;
    Vector p = y * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * y + 8.3334519073e-3f;
    p = p * y + 4.1665795894e-2f;
    p = p * y + 1.6666665459e-1f;
    p = p * y + 5.0000001201e-1f;
    p = p * (y * y) + y + 1.0f;
    const Bits power = ((Bits)shifted - (Bits)round + 127u) << 23;
    p = p * (Vector)power;
    p = pick(x < low, (Vector){0}, p);
    p = pick(x > high, all(INFINITY), p);
    return pick(x == x, p, x);
}

#endif
