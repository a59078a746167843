/* What proposals and scores of a blended list share: the memory of a thread, the best of scored items,
 * sums over a history, and products of vectors. Only blend.c includes it. */
#ifndef RECSYS_BLEND_H
#define RECSYS_BLEND_H

#include <math.h>
#include <string.h>

#include "internal.h"

enum { LANES = ITEMS_OF_PANEL };
typedef float Lanes __attribute__((vector_size(LANES * 4)));
typedef int32_t Counts __attribute__((vector_size(LANES * 4)));
typedef float Loose __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

/* An item or a place with its score. */
typedef struct {
    double score;
    int64_t item;
} Entry;

/* A sparse row of sums: those of `touched` items, 0 for all others. What it stands for is each sum
 * rounded to float and divided by `total`. */
typedef struct {
    double *sum, total;
    uint64_t *touched;
    int64_t words;
} Sums;

/* Loop over the touched items, ascending. */
#define EACH_TOUCHED(sums, item)                                                  \
    for (int64_t word = 0, item; word < (sums)->words; word++)                    \
        for (uint64_t bits = (sums)->touched[word];                               \
             bits && (item = word * 64 + __builtin_ctzll(bits), 1); bits &= bits - 1)

/* What one thread needs; clean between calls: sums and marks are 0. */
typedef struct {
    Sums shares;
    uint8_t *mark;  /* (items,) */
    float *query;   /* (2, widest of vectors and terms) */
    double *whole;  /* (widest of vectors and terms,) */
    Entry *heap;    /* (batch, room) */
    float *queries; /* (batch, widest of vectors), in whole lanes */
    float *least;   /* (batch,) scores that do not count any more */
    int64_t *count; /* (batch,) */
    Entry *top;     /* (batch, MOST_RANK) the largest logits of SASRec */
    float *low;     /* (batch,) logits that are not among them */
    int64_t *most;  /* (batch,) how many there are */
    int64_t *live;  /* (width,) places with an item */
    double *column; /* (MOST_FEATURES, width) */
} Room;

static int64_t widest(const Fitted *f) {
    int64_t size = f->vector_size > f->state_size ? f->vector_size : f->state_size;
    return (size > f->terms ? size : f->terms) + LANES;
}

static void *take(char **memory, int64_t bytes) {
    char *here = *memory;
    *memory += aligned(bytes);
    return here;
}

/* Lay out the workspace of `batch` requests with heaps of `most` entries, and `width` places that are
 * ranked; returns its bytes. What has to be clean comes first, at places that the catalog decides. */
static int64_t lay_out(const Fitted *f, int64_t batch, int64_t most, int64_t width, char *memory,
                       Room *room) {
    char *at = memory;
    const int64_t words = (f->items + 63) / 64;
    room->shares.words = words;
    room->shares.sum = take(&at, f->items * (int64_t)sizeof(double));
    room->shares.touched = take(&at, words * (int64_t)sizeof(uint64_t));
    room->mark = take(&at, f->items);
    room->query = take(&at, 2 * widest(f) * (int64_t)sizeof(float));
    room->whole = take(&at, widest(f) * (int64_t)sizeof(double));
    room->heap = take(&at, (batch + 1) * most * (int64_t)sizeof(Entry));
    room->queries = take(&at, batch * widest(f) * (int64_t)sizeof(float));
    room->least = take(&at, batch * (int64_t)sizeof(float));
    room->count = take(&at, batch * (int64_t)sizeof(int64_t));
    room->top = take(&at, (batch + 1) * MOST_RANK * (int64_t)sizeof(Entry));
    room->low = take(&at, batch * (int64_t)sizeof(float));
    room->most = take(&at, batch * (int64_t)sizeof(int64_t));
    room->live = take(&at, width * (int64_t)sizeof(int64_t));
    room->column = take(&at, MOST_FEATURES * width * (int64_t)sizeof(double));
    return at - memory;
}

/* Whether a ranks behind b; of equal scores the higher item does. */
static int behind(const Entry *a, const Entry *b) {
    return a->score < b->score || (a->score == b->score && a->item > b->item);
}

static void sift_down(Entry *heap, int64_t count, int64_t place) {
    for (;;) {
        int64_t worst = place;
        for (int64_t child = 2 * place + 1; child <= 2 * place + 2 && child < count; child++)
            if (behind(&heap[child], &heap[worst])) worst = child;
        if (worst == place) return;
        const Entry moved = heap[place];
        heap[place] = heap[worst];
        heap[worst] = moved;
        place = worst;
    }
}

/* Keep the best `room` entries, the worst of them first; returns how many there are. */
static int64_t offer(Entry *heap, int64_t count, int64_t room, double score, int64_t item) {
    const Entry found = {score, item};
    if (count == room) {
        if (!room || !behind(&heap[0], &found)) return count;
        heap[0] = found;
        sift_down(heap, count, 0);
        return count;
    }
    int64_t place = count;
    for (; place && behind(&found, &heap[(place - 1) / 2]); place = (place - 1) / 2)
        heap[place] = heap[(place - 1) / 2];
    heap[place] = found;
    return count + 1;
}

/* Order a heap best first. */
static void order(Entry *heap, int64_t count) {
    while (count > 1) {
        const Entry worst = heap[0];
        heap[0] = heap[--count];
        heap[count] = worst;
        sift_down(heap, count, 0);
    }
}

/* Add the row of an item, times a weight. */
static void add_row(const Matrix *matrix, int64_t item, double weight, Sums *sums) {
    for (int64_t e = matrix->start[item]; e < matrix->start[item + 1]; e++) {
        const int64_t column = matrix->column[e];
        sums->sum[column] += weight * (double)matrix->value[e];
        sums->touched[column / 64] |= (uint64_t)1 << (column % 64);
    }
}

static void clear(Sums *sums) {
    EACH_TOUCHED(sums, item) sums->sum[item] = 0;
    memset(sums->touched, 0, (size_t)sums->words * sizeof(uint64_t));
}

/* The share of an item, or its sum; a row that adds up to 0 stays as it is. */
static double value_of(const Sums *sums, int64_t item) {
    return (double)(float)((double)(float)sums->sum[item] / sums->total);
}

/* The evidence of a history. Returns whether there is any. */
static int find_evidence(const Fitted *f, const Asked *asked, int64_t b, Sums *sums) {
    const int64_t end = asked->offset[b + 1];
    for (int64_t p = asked->offset[b]; p < end; p++)
        if (asked->history[p] >= 0 && asked->history[p] < f->items)
            add_row(&f->item_item, asked->history[p], asked->decay[end - 1 - p], sums);
    double total = 0;
    EACH_TOUCHED(sums, item) total += (double)(float)sums->sum[item];
    sums->total = total > 0 ? total : 1;
    return total > 0;
}

/* A unit vector of `size` sums; 0 for a sum of 0. */
static void make_unit(const double *whole, int64_t size, float *out) {
    double squares = 0;
    for (int64_t i = 0; i < size; i++) squares += whole[i] * whole[i];
    const double length = sqrt(squares);
    for (int64_t i = 0; i < size; i++) out[i] = length > 0 ? (float)(whole[i] / length) : 0;
}

/* The unit vector of a history by item vectors. */
static void find_vector(const Fitted *f, const Asked *asked, int64_t b, double *whole, float *out) {
    const int64_t end = asked->offset[b + 1];
    memset(whole, 0, (size_t)f->vector_size * sizeof(double));
    for (int64_t p = asked->offset[b]; p < end; p++) {
        if (asked->history[p] < 0 || asked->history[p] >= f->items) continue;
        const float *vector = f->vectors + asked->history[p] * f->vector_size;
        const double weight = asked->decay[end - 1 - p];
        for (int64_t d = 0; d < f->vector_size; d++) whole[d] += weight * (double)vector[d];
    }
    make_unit(whole, f->vector_size, out);
}

/* The unit vector of a history by content. */
static void find_content(const Fitted *f, const Asked *asked, int64_t b, double *whole, float *out) {
    const int64_t end = asked->offset[b + 1];
    memset(whole, 0, (size_t)f->terms * sizeof(double));
    for (int64_t p = asked->offset[b]; p < end; p++) {
        const int64_t item = asked->history[p];
        if (item < 0 || item >= f->items) continue;
        const double weight = asked->decay[end - 1 - p];
        for (int64_t e = f->content.start[item]; e < f->content.start[item + 1]; e++)
            whole[f->content.column[e]] += weight * (double)f->content.value[e];
    }
    make_unit(whole, f->terms, out);
}

/* The product of two vectors: LANES sums, then the sums of their halves. */
static float dot(const float *a, const float *b, int64_t size) {
    Lanes sum = {0};
    int64_t d = 0;
    for (; d + LANES <= size; d += LANES) sum += *(const Loose *)(a + d) * *(const Loose *)(b + d);
    if (d < size) {
        Lanes x = {0}, y = {0};
        memcpy(&x, a + d, (size_t)(size - d) * sizeof(float));
        memcpy(&y, b + d, (size_t)(size - d) * sizeof(float));
        sum += x * y;
    }
    float part[LANES];
    memcpy(part, &sum, sizeof(part));
    for (int step = LANES / 2; step; step /= 2)
        for (int i = 0; i < step; i++) part[i] += part[i + step];
    return part[0];
}

static int64_t whole_lanes(int64_t size) { return (size + LANES - 1) / LANES * LANES; }

/* `dot` of a query with each vector of a panel, with the same bits; `size` in whole lanes. */
static inline void dots(const float *query, const float *panel, int64_t size, float *out) {
    Lanes part[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) part[i] = (Lanes){0};
    for (int64_t d = 0; d < size; d += LANES) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            part[i] += query[d + i] * *(const Loose *)(panel + (d + i) * LANES);
    }
#pragma GCC unroll 4
    for (int step = LANES / 2; step; step /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < step; i++) part[i] += part[i + step];
    memcpy(out, &part[0], sizeof(part[0]));
}

/* Sparse product of an item's content with a dense query. */
static float content_of(const Fitted *f, int64_t item, const float *query) {
    float sum = 0;
    for (int64_t e = f->content.start[item]; e < f->content.start[item + 1]; e++)
        sum += f->content.value[e] * query[f->content.column[e]];
    return sum;
}

#endif
