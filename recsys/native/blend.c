/* Candidates of a blended list and their scores, compiled once per instruction set.
 *
 * The reference is `recsys.retrieval.Retrieval.propose`, `recsys.listing.Union` and
 * `recsys.retrieval.reranker.Reranker.score`. Sums run in the order of the reference where that is
 * defined: evidence adds up events from the oldest, in double precision. Products of vectors add up
 * in 16 lanes on every instruction set, so a request gets the same bits in any batch and on any
 * processor. This file is compiled without contraction of products and sums.
 */
#include "blend.h"

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
    if (r->again && !isnan(r->again[place])) {
        total = r->again[place];
        for (int64_t t = 0; t < r->features; t++)
            if (r->feature[t].form == VALUE)
                total += r->feature[t].of_again * room->column[t * r->width + i];
        return total;
    }
    for (int64_t t = 0; t < r->features; t++)
        total += r->feature[t].weight * room->column[t * r->width + i];
    if (r->weighs_new && f->eventless[item]) {
        total += r->is_new;
        for (int64_t t = 0; t < r->features; t++)
            if (r->feature[t].form == VALUE) total += r->feature[t].of_new * room->column[t * r->width + i];
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
