/* The last states of SASRec, compiled once per instruction set; `recsys.retrieval.sasrec` is the
 * reference. A request is computed by itself, so it has the same bits in any batch. The last layer
 * computes the last position only: no other state is read.
 */
#include <math.h>
#include <string.h>

#include "internal.h"

enum { LANES = 16 };
typedef float Lanes __attribute__((vector_size(LANES * 4)));
typedef float Loose __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

typedef struct {
    int64_t *item;
    float *x, *normed, *mixed, *inner, *weight;
} Room;

static void *take(char **memory, int64_t bytes) {
    char *here = *memory;
    *memory += aligned(bytes);
    return here;
}

static int64_t lay_out(const Sasrec *m, char *memory, Room *room) {
    char *at = memory;
    const int64_t row = m->window * (int64_t)sizeof(float);
    room->item = take(&at, m->window * (int64_t)sizeof(int64_t));
    room->x = take(&at, row * padded(m->hidden));
    room->normed = take(&at, row * padded(m->hidden));
    room->mixed = take(&at, row * padded(3 * m->hidden));
    room->inner = take(&at, row * padded(m->inner));
    room->weight = take(&at, row);
    return at - memory;
}

static float sum_of(Lanes lanes) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += lanes[i];
    return sum;
}

/* Sum of (x - shift) * (y - shift). */
static float product(const float *x, const float *y, float shift, int64_t size) {
    Lanes lanes = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES)
        lanes += (*(const Loose *)(x + i) - shift) * (*(const Loose *)(y + i) - shift);
    float sum = sum_of(lanes);
    for (; i < size; i++) sum += (x[i] - shift) * (y[i] - shift);
    return sum;
}

static void normalize(const float *x, int64_t size, const float *weight, const float *bias,
                      float *out) {
    Lanes lanes = {0};
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) lanes += *(const Loose *)(x + i);
    float mean = sum_of(lanes);
    for (; i < size; i++) mean += x[i];
    mean /= (float)size;
    const float spread = sqrtf(product(x, x, mean, size) / (float)size + 1e-5f);
    for (i = 0; i < size; i++) out[i] = (x[i] - mean) / spread * weight[i] + bias[i];
}

/* What position `t` attends to, all heads: in place of its normed state. */
static void attend(const Sasrec *m, const Room *room, int64_t t) {
    const int64_t size = m->hidden / m->heads, row = padded(3 * m->hidden);
    const float scale = sqrtf((float)size);
    float *out = room->normed + t * padded(m->hidden);
    for (int64_t h = 0; h < m->heads; h++, out += size) {
        const float *query = room->mixed + t * row + h * size, *key = room->mixed + m->hidden + h * size;
        const float *value = key + m->hidden;
        float most = -INFINITY, total = 0;
        for (int64_t s = 0; s <= t; s++) {
            room->weight[s] = product(query, key + s * row, 0, size) / scale;
            if (room->weight[s] > most) most = room->weight[s];
        }
        for (int64_t s = 0; s <= t; s++) total += room->weight[s] = expf(room->weight[s] - most);
        memset(out, 0, (size_t)size * sizeof(float));
        for (int64_t s = 0; s <= t; s++) {
            const float weight = room->weight[s] / total;
            for (int64_t d = 0; d < size; d++) out[d] += weight * value[s * row + d];
        }
    }
}

/* One layer over `count` positions, of which those from `first` on are needed behind it. */
static void run_layer(const Sasrec *m, const SasrecLayer *layer, const Room *room, int64_t count,
                      int64_t first, Multiply multiply) {
    const int64_t row = padded(m->hidden), inner = padded(m->inner), needed = count - first;
    float *x = room->x + first * row, *normed = room->normed + first * row;
    for (int64_t t = 0; t < count; t++)
        normalize(room->x + t * row, m->hidden, layer->norm[0], layer->norm[1], room->normed + t * row);
    multiply(&layer->mixed, room->normed, row, count, room->mixed, padded(3 * m->hidden),
             padded(3 * m->hidden), 0);
    for (int64_t t = first; t < count; t++) attend(m, room, t);
    multiply(&layer->out, normed, row, needed, x, row, row, 1);
    for (int64_t t = first; t < count; t++)
        normalize(room->x + t * row, m->hidden, layer->norm[2], layer->norm[3], room->normed + t * row);
    multiply(&layer->inner, normed, row, needed, room->inner, inner, inner, 0);
    for (int64_t i = 0; i < needed * inner; i++)
        room->inner[i] = room->inner[i] > 0 ? room->inner[i] : 0;
    multiply(&layer->outer, room->inner, inner, needed, x, row, row, 1);
}

/* The events of a history that are read; returns their number. */
static int64_t window(const Sasrec *m, const Asked *asked, int64_t b, int64_t *item) {
    int64_t known = 0, skipped = 0, count = 0;
    for (int64_t p = asked->offset[b]; p < asked->offset[b + 1]; p++)
        known += asked->history[p] >= 0 && asked->history[p] < m->items;
    if (known > m->window) skipped = (known - m->window + m->block - 1) / m->block * m->block;
    for (int64_t p = asked->offset[b]; p < asked->offset[b + 1]; p++)
        if (asked->history[p] >= 0 && asked->history[p] < m->items && skipped-- <= 0)
            item[count++] = asked->history[p];
    return count;
}

static void run(const Sasrec *m, const Asked *asked, Multiply multiply, char *memory, float *out) {
    Room room;
    memset(memory, 0, (size_t)lay_out(m, memory, &room)); /* what lies behind the end of a row */
    const int64_t row = padded(m->hidden);
    for (int64_t b = 0; b < asked->batch; b++) {
        const int64_t count = window(m, asked, b, room.item);
        for (int64_t t = 0; t < count; t++)
            for (int64_t d = 0; d < m->hidden; d++)
                room.x[t * row + d] =
                    m->vectors[room.item[t] * m->hidden + d] + m->positions[t * m->hidden + d];
        for (int64_t l = 0; l < m->layers; l++)
            run_layer(m, &m->layer[l], &room, count, l + 1 < m->layers || !count ? 0 : count - 1,
                      multiply);
        float *state = out + b * m->hidden;
        if (count)
            normalize(room.x + (count - 1) * row, m->hidden, m->norm[0], m->norm[1], state);
        else
            memset(state, 0, (size_t)m->hidden * sizeof(float));
    }
}

static int64_t bytes(const Sasrec *m) {
    Room room;
    return lay_out(m, 0, &room);
}

#define JOIN(a, b) a##b
#define NAMED(name) JOIN(states_, name)
const States NAMED(VARIANT) = {bytes, run};
