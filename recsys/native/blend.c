/* Candidates of a blended list and their scores, compiled once per instruction set.
 *
 * The reference is `recsys.retrieval.Retrieval.propose`, `recsys.listing.Union` and
 * `recsys.retrieval.reranker.Reranker.score`. Sums run in the order of the reference where that is
 * defined: evidence adds up events from the oldest, in double precision. Products of vectors add up
 * in 16 lanes on every instruction set, so a request gets the same bits in any batch and on any
 * processor. This file is compiled without contraction of products and sums.
 */
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

/* (batch, items) cosines of the histories' contents with those of the items; -inf for items that are
 * blocked or have none in common. Each cosine adds up its terms in ascending order. */
static void cosines(const Fitted *f, const Asked *asked, char *memory, float *out) {
    Room room;
    lay_out(f, asked->batch, 0, 0, memory, &room);
    for (int64_t b = 0; b < asked->batch; b++, out += f->items) {
        const uint8_t *blocked = asked->blocked + b * f->items;
        find_content(f, asked, b, room.whole, room.query);
        memset(out, 0, (size_t)f->items * sizeof(float));
        for (int64_t t = 0; t < f->terms; t++) {
            const float weight = room.query[t];
            if (weight == 0) continue;
            for (int64_t e = f->postings.start[t]; e < f->postings.start[t + 1]; e++)
                out[f->postings.column[e]] += f->postings.value[e] * weight;
        }
        for (int64_t item = 0; item < f->items; item++)
            out[item] = out[item] > 0 && !blocked[item] ? out[item] : -INFINITY;
    }
}

/* Add items to the proposals of a request, each once. */
static int64_t add(const Entry *entries, int64_t count, uint8_t *mark, int32_t *items, int64_t found) {
    for (int64_t i = 0; i < count; i++) {
        if (mark[entries[i].item]) continue;
        mark[entries[i].item] = 1;
        items[found++] = (int32_t)entries[i].item;
    }
    return found;
}

/* The most popular items that are not blocked, at most `room`. */
static int64_t first_free(const Fitted *f, const uint8_t *blocked, Entry *out, int64_t room) {
    int64_t count = 0;
    for (int64_t i = 0; i < f->items && count < room; i++)
        if (!blocked[f->order[i]]) out[count++] = (Entry){0, f->order[i]};
    return count;
}

/* The most probable items by shares and popularity, as `Retrieval.candidates`. */
static int64_t most_probable(const Fitted *f, const Sums *shares, int filled, const uint8_t *blocked,
                             int64_t k, uint8_t *mark, Entry *likely, Entry *heap) {
    const double s = f->smoothing;
    int64_t count = 0;
    EACH_TOUCHED(shares, item) {
        const float p = (float)((1 - s) * value_of(shares, item) + s * f->popularity[item]);
        if (p > 0 && !blocked[item]) count = offer(likely, count, k, (double)p, item);
    }
    order(likely, count);
    for (int64_t i = 0; i < count; i++) mark[likely[i].item] = 1;
    const int64_t popular = first_free(f, blocked, likely + count, k);
    int64_t kept = count;
    for (int64_t i = count; i < count + popular; i++)
        if (!mark[likely[i].item]) likely[kept++] = likely[i];
    for (int64_t i = 0; i < count; i++) mark[likely[i].item] = 0;
    const double weight = filled ? s : 1;
    int64_t best = 0;
    for (int64_t i = 0; i < kept; i++) {
        const int64_t item = likely[i].item;
        const double p = (1 - weight) * value_of(shares, item) + weight * f->popularity[item];
        best = offer(heap, best, k, p, i);
    }
    order(heap, best);
    for (int64_t i = 0; i < best; i++) heap[i].item = likely[heap[i].item].item;
    return best;
}

static int in_history(const Asked *asked, int64_t b, int64_t item) {
    for (int64_t p = asked->offset[b]; p < asked->offset[b + 1]; p++)
        if (asked->history[p] == item) return 1;
    return 0;
}

/* Offer an item to the nearest ones of request `b`, and to the largest logits. */
static void offer_nearest(const Fitted *f, const Asked *asked, Room *room, int64_t most, int64_t half,
                          int64_t b, int64_t item, float score) {
    if (score > room->least[b] && !asked->blocked[b * f->items + item]) {
        Entry *heap = room->heap + b * most;
        room->count[b] = offer(heap, room->count[b], half, (double)score, item);
        if (room->count[b] == half) room->least[b] = (float)heap[0].score;
    }
    if (score > room->low[b] && !in_history(asked, b, item)) {
        Entry *heap = room->top + b * MOST_RANK;
        room->most[b] = offer(heap, room->most[b], MOST_RANK, (double)score, item);
        if (room->most[b] == MOST_RANK) room->low[b] = (float)heap[0].score;
    }
}

/* The items with the largest products of SASRec's states, or of vectors without one: heaps of
 * `most` entries per request, of which `half` are used. With SASRec, also its largest logits. */
static void find_nearest(const Fitted *f, const Asked *asked, Room *room, int64_t most, int64_t half) {
    const int by_state = f->states != 0;
    const int64_t size = by_state ? f->state_size : f->vector_size, whole = whole_lanes(size);
    for (int64_t b = 0; b < asked->batch; b++) {
        float *query = room->queries + b * whole;
        int some = 0;
        memset(query, 0, (size_t)whole * sizeof(float));
        if (by_state)
            memcpy(query, asked->states + b * size, (size_t)size * sizeof(float));
        else
            find_vector(f, asked, b, room->whole, query);
        for (int64_t d = 0; d < size; d++) some |= query[d] != 0;
        room->count[b] = room->most[b] = 0;
        room->least[b] = !some || !half ? INFINITY : by_state ? -INFINITY : 0;
        room->low[b] = some && by_state ? -INFINITY : INFINITY;
    }
    for (int64_t first = 0; first < f->items; first += LANES) {
        const int64_t left = f->items - first, count = left < LANES ? left : LANES;
        for (int64_t b = 0; b < asked->batch; b++) {
            float score[LANES];
            dots(room->queries + b * whole, f->panels + first * whole, whole, score);
            const float least = room->least[b] < room->low[b] ? room->least[b] : room->low[b];
            const Counts above = *(const Loose *)score > least - (Lanes){0};
            int some = 0;
            for (int i = 0; i < LANES; i++) some |= above[i];
            for (int64_t i = 0; some && i < count; i++)
                offer_nearest(f, asked, room, most, half, b, first + i, score[i]);
        }
    }
    for (int64_t b = 0; b < asked->batch; b++) {
        order(room->heap + b * most, room->count[b]);
        order(room->top + b * MOST_RANK, room->most[b]);
    }
}

/* The largest shares of items that are not in the history, and its largest logits. */
static void find_best(const Asked *asked, const Sums *shares, int64_t b, Room *room, float *out) {
    Entry *heap = room->top + b * MOST_RANK;
    for (int64_t i = 0; i < room->most[b]; i++) out[MOST_RANK + i] = (float)heap[i].score;
    int64_t count = 0;
    EACH_TOUCHED(shares, item) {
        const double share = value_of(shares, item);
        if ((count < MOST_RANK || share > heap[0].score) && !in_history(asked, b, item))
            count = offer(heap, count, MOST_RANK, share, item);
    }
    order(heap, count);
    for (int64_t i = 0; i < count; i++) out[i] = (float)heap[i].score;
}

static void propose(const Fitted *f, const Asked *asked, const Proposals *p, char *memory) {
    Room room;
    const int64_t most = 2 * p->k + p->half + p->quarter;
    lay_out(f, asked->batch, most, 0, memory, &room);
    Entry *likely = room.heap + asked->batch * most, *heap = likely;
    const int nearest = f->states || f->vectors;
    for (int64_t b = 0; b < asked->batch; b++) room.most[b] = 0;
    if (nearest) find_nearest(f, asked, &room, most, p->half);
    for (int64_t b = 0; b < asked->batch; b++) {
        const uint8_t *blocked = asked->blocked + b * f->items;
        int32_t *items = p->items + b * p->width;
        /* The heap of the request's nearest items ends where the other one begins. */
        Entry *probable = room.heap + b * most + p->half;
        const int filled = find_evidence(f, asked, b, &room.shares);
        find_best(asked, &room.shares, b, &room, p->best + b * 2 * MOST_RANK);
        const int64_t first =
            most_probable(f, &room.shares, filled, blocked, p->k, room.mark, likely, probable);
        int64_t found = add(probable, first, room.mark, items, 0);
        if (p->cosines) {
            int64_t count = 0;
            for (int64_t i = 0; i < p->near; i++) {
                const int64_t item = p->nearest[b * p->near + i];
                const float cosine = p->cosines[b * f->items + item];
                if (cosine > -INFINITY) count = offer(heap, count, p->half, (double)cosine, item);
            }
            order(heap, count);
            found = add(heap, count, room.mark, items, found);
        }
        if (nearest)
            found = add(room.heap + b * most, room.count[b], room.mark, items, found);
        const int64_t popular = first_free(f, blocked, heap, p->quarter);
        found = add(heap, popular, room.mark, items, found);
        for (int64_t i = 0; i < popular; i++) room.mark[heap[i].item] = 2; /* popular */
        for (int64_t i = 0; i < found; i++) {
            const int64_t item = items[i];
            p->supported[b * p->width + i] = value_of(&room.shares, item) > 0 || room.mark[item] != 2;
            room.mark[item] = 0;
        }
        for (int64_t i = found; i < p->width; i++) {
            items[i] = -1;
            p->supported[b * p->width + i] = 0;
        }
        clear(&room.shares);
    }
}

/* The values that a source gives to the live items of a request; 0 where it gives none. */
static void find_values(const Fitted *f, const Asked *asked, const Ranking *r, int64_t b, int64_t source,
                        Room *room, int64_t live, double *out) {
    const int32_t *items = r->items + b * r->width;
    const float *query = room->query;
    const double *table = source == RECENT ? f->log_recent : f->log_counts;
    if (source == ITEM_ITEM) find_evidence(f, asked, b, &room->shares);
    if (source == VECTORS && f->vectors) find_vector(f, asked, b, room->whole, room->query);
    if (source == CONTENT && f->content.start)
        find_content(f, asked, b, room->whole, room->query);
    for (int64_t i = 0; i < live; i++) {
        const int64_t place = room->live[i], item = items[place];
        double value = 0;
        if (source == MODEL) {
            value = r->model[b * r->width + place];
        } else if (source == ITEM_ITEM) {
            value = value_of(&room->shares, item);
        } else if (source == VECTORS) {
            if (f->vectors)
                value = (double)dot(query, f->vectors + item * f->vector_size, f->vector_size);
        } else if (source == CONTENT) {
            if (f->content.start) value = (double)content_of(f, item, query);
        } else if (source == SASREC) {
            if (f->states)
                value = (double)dot(asked->states + b * f->state_size, f->states + item * f->state_size,
                                    f->state_size);
        } else if (table) {
            value = table[item];
        }
        out[i] = value;
    }
    if (source == ITEM_ITEM) clear(&room->shares);
}

/* All features of the live items of a request, a column each. */
static void find_features(const Fitted *f, const Asked *asked, const Ranking *r, int64_t b, Room *room,
                          int64_t live) {
    const double *values = room->column;
    for (int64_t t = 0; t < r->features; t++) {
        const Feature *feature = &r->feature[t];
        double *out = room->column + t * r->width;
        if (feature->form == VALUE) {
            find_values(f, asked, r, b, feature->source, room, live, out);
            values = out;
        } else if (feature->form == ABOVE) {
            for (int64_t i = 0; i < live; i++) {
                const double above = values[i] - feature->knee;
                out[i] = above > 0 ? above : 0;
            }
        } else {
            const float *top = r->top + (2 * b + (feature->source == SASREC)) * MOST_RANK;
            for (int64_t i = 0; i < live; i++) {
                int64_t larger = 0;
                while (larger < MOST_RANK && (double)top[larger] > values[i]) larger++;
                out[i] = r->log_rank[larger];
            }
        }
    }
}

/* What the network adds to the score of a live item, in the reference's order. */
static double run_network(const Ranking *r, const Room *room, int64_t i) {
    double hidden[MOST_UNITS], total = 0;
    const double *weight = r->network, *bias = weight + r->input_count * r->units;
    memcpy(hidden, bias, (size_t)r->units * sizeof(double));
    for (int64_t t = 0; t < r->input_count; t++, weight += r->units) {
        const double value = room->column[r->input[t] * r->width + i];
        for (int64_t u = 0; u < r->units; u++) hidden[u] += weight[u] * value;
    }
    for (int64_t u = 0; u < r->units; u++)
        total += bias[r->units + u] * (hidden[u] > 0 ? hidden[u] : 0);
    return total;
}

/* The score of a live item of request `b`, added up in the reference's order. */
static double weigh(const Fitted *f, const Ranking *r, const Room *room, int64_t b, int64_t i) {
    const int64_t place = b * r->width + room->live[i], item = r->items[place];
    double total = 0;
    for (int64_t t = 0; t < r->features; t++)
        total += r->feature[t].weight * room->column[t * r->width + i];
    if (r->weighs_new && f->eventless[item]) {
        total += r->is_new;
        for (int64_t t = 0; t < r->features; t++)
            if (r->feature[t].form == VALUE) total += r->feature[t].of_new * room->column[t * r->width + i];
    }
    if (r->again && !isnan(r->again[place])) {
        total += r->again[place];
        for (int64_t t = 0; t < r->features; t++)
            if (r->feature[t].form == VALUE)
                total += r->feature[t].of_again * room->column[t * r->width + i];
    }
    return r->units ? total + run_network(r, room, i) : total;
}

static void rank(const Fitted *f, const Asked *asked, const Ranking *r, char *memory) {
    Room room;
    lay_out(f, 1, r->k, r->width, memory, &room);
    for (int64_t b = 0; b < asked->batch; b++) {
        const int32_t *items = r->items + b * r->width;
        int64_t live = 0;
        for (int64_t i = 0; i < r->width; i++)
            if (items[i] >= 0 && items[i] < f->items && !room.mark[items[i]]) {
                room.mark[items[i]] = 1;
                room.live[live++] = i;
            }
        for (int64_t i = 0; i < live; i++) room.mark[items[room.live[i]]] = 0;
        find_features(f, asked, r, b, &room, live);
        int64_t count = 0;
        for (int64_t i = 0; i < live; i++) {
            double score = weigh(f, r, &room, b, i);
            if (r->gains) score += r->gains[b * r->width + room.live[i]];
            count = offer(room.heap, count, r->k, score, room.live[i]);
        }
        order(room.heap, count);
        for (int64_t i = 0; i < r->k; i++) {
            const int real = i < count;
            const int64_t place = real ? room.heap[i].item : 0;
            r->best[b * r->k + i] = real ? items[place] : -1;
            r->score[b * r->k + i] = real ? (float)room.heap[i].score : -INFINITY;
            r->best_source[b * r->k + i] = real ? r->source[b * r->width + place] : 0;
        }
    }
}

/* The item of each history with the most evidence for each of (batch, count) items; -1 for none. */
static void because(const Fitted *f, const Asked *asked, const int32_t *items, int64_t count,
                    char *memory, int64_t *out) {
    Room room;
    lay_out(f, 0, 0, 0, memory, &room);
    for (int64_t b = 0; b < asked->batch; b++) {
        const int64_t end = asked->offset[b + 1];
        for (int64_t i = 0; i < count; i++) out[b * count + i] = -1;
        for (int64_t i = 0; i < count; i++)
            if (items[b * count + i] >= 0 && items[b * count + i] < f->items)
                room.mark[items[b * count + i]] = 1;
        for (int64_t p = asked->offset[b]; p < end; p++) {
            const int64_t seen = asked->history[p];
            if (seen < 0 || seen >= f->items) continue;
            for (int64_t e = f->item_item.start[seen]; e < f->item_item.start[seen + 1]; e++) {
                const int64_t item = f->item_item.column[e];
                if (!room.mark[item]) continue;
                const float found = (float)((double)f->item_item.value[e] * asked->decay[end - 1 - p]);
                if ((double)found <= room.shares.sum[item]) continue;
                room.shares.sum[item] = (double)found;
                for (int64_t i = 0; i < count; i++)
                    if (items[b * count + i] == item) out[b * count + i] = seen;
            }
        }
        for (int64_t i = 0; i < count; i++)
            if (items[b * count + i] >= 0 && items[b * count + i] < f->items) {
                room.mark[items[b * count + i]] = 0;
                room.shares.sum[items[b * count + i]] = 0;
            }
    }
}

/* Bytes of workspace for a batch; `most` and `width` as in `lay_out`. */
static int64_t blend_bytes(const Fitted *f, int64_t batch, int64_t most, int64_t width) {
    Room room;
    return lay_out(f, batch, most, width, 0, &room);
}

#define JOIN(a, b) a##b
#define NAMED(name) JOIN(blend_, name)
const Blend NAMED(VARIANT) = {blend_bytes, cosines, propose, rank, because};
