/* A whole beam search: passes and trie steps without a return to Python.
 *
 * It computes what `recsys.decoding.beam.beam_search` does without noise. A beam that
 * does not exist is not run. Node i of a request is in the i-th slot behind its prompt's slots, and
 * levels begin where they would if all beams of the levels above existed.
 */
#include <math.h>
#include <string.h>

#include "internal.h"

/* Live beams of one request, ascending by state. */
typedef struct {
    int64_t count;
    int64_t *state;
    float *score, *log_prob; /* with and without boosts */
    int32_t *path;     /* (beams, levels) slots of the beam's tokens */
    const float **logits; /* of the last pass, or of an extra node */
} Beams;

typedef struct {
    float score, log_prob;
    int64_t beam, state;
} Candidate;

typedef struct {
    const Model *model;
    const Trie *trie;
    const Search *search;
    Pass pass;
    Tree tree;
    Work work;
    Row *rows;
    int64_t *token, *position, *write, *wanted;
    int32_t *path;
    float *logits;
    Beams *beams, *next;
    Candidate *heap;
    float *rest; /* best score of a prefix of each request that was pruned */
} Run;

static int64_t widest(const Trie *trie, const Search *search) {
    int64_t most = 1;
    for (int64_t d = 0; d < trie->levels; d++)
        if (search->width[d] > most) most = search->width[d];
    return most;
}

/* Rows of the largest pass. */
static int64_t most_rows(const Trie *trie, const Search *search) {
    int64_t prompts = 0;
    for (int64_t b = 0; b < search->batch; b++)
        prompts += search->length[b] - search->cached[b] + search->extra + 1;
    const int64_t nodes = search->batch * widest(trie, search);
    return prompts > nodes ? prompts : nodes;
}

/* Lay the arrays out; `from` may be NULL to count bytes. */
static int64_t lay_out(Run *run, char *from) {
    const Trie *trie = run->trie;
    const Search *search = run->search;
    const int64_t rows = most_rows(trie, search), beams = widest(trie, search);
    const int64_t batch = search->batch, levels = trie->levels, integer = sizeof(int64_t);
    const int64_t threads = search->threads > 1 ? search->threads : 1;
    run->pass = (Pass){.view = search->slots, .threads = search->threads};
    const int64_t scratch = chosen_variant()->scratch_bytes(run->model, &run->pass);
    const int64_t sizes[] = {rows * (int64_t)sizeof(Row),
                             rows * integer,
                             rows * integer,
                             rows * integer,
                             rows * integer,
                             rows * levels * (int64_t)sizeof(int32_t),
                             rows * padded(run->model->hidden) * (int64_t)sizeof(float),
                             batch * beams * run->model->vocabulary * (int64_t)sizeof(float),
                             threads * scratch,
                             (beams + 1) * (int64_t)sizeof(Candidate),
                             2 * batch * (int64_t)sizeof(Beams),
                             2 * batch * beams * integer,
                             2 * batch * beams * (int64_t)sizeof(float),
                             2 * batch * beams * levels * (int64_t)sizeof(int32_t),
                             2 * batch * beams * integer,
                             batch * (int64_t)sizeof(float),
                             2 * batch * beams * (int64_t)sizeof(float)};
    enum { ARRAYS = sizeof(sizes) / sizeof(sizes[0]) };
    char *at[ARRAYS];
    int64_t bytes = 0;
    for (int i = 0; i < ARRAYS; i++) {
        at[i] = from ? from + bytes : 0;
        bytes += aligned(sizes[i]);
    }
    if (!from) return bytes;
    run->rows = (Row *)at[0];
    run->token = (int64_t *)at[1];
    run->position = (int64_t *)at[2];
    run->write = (int64_t *)at[3];
    run->wanted = (int64_t *)at[4];
    run->path = (int32_t *)at[5];
    run->logits = (float *)at[7];
    run->heap = (Candidate *)at[9];
    run->beams = (Beams *)at[10];
    run->next = run->beams + batch;
    for (int64_t i = 0; i < 2 * batch; i++)
        run->beams[i] = (Beams){0, (int64_t *)at[11] + i * beams, (float *)at[12] + i * beams,
                                (float *)at[16] + i * beams, (int32_t *)at[13] + i * beams * levels,
                                (const float **)at[14] + i * beams};
    run->rest = (float *)at[15];
    run->tree = (Tree){search->length, search->window, run->path, levels};
    run->pass.slots = search->slots;
    run->pass.token = run->token;
    run->pass.position = run->position;
    run->pass.write = run->write;
    run->pass.cache = search->cache;
    run->pass.cache_layer = search->cache_layer;
    run->pass.cache_values = search->cache_values;
    run->pass.logits = run->logits;
    run->work = (Work){.model = run->model, .pass = &run->pass, .tree = &run->tree,
                       .rows = run->rows, .wanted = run->wanted, .hidden = (float *)at[6],
                       .scratch = at[8], .scratch_bytes = scratch};
    return bytes;
}

static void add_row(Run *run, int64_t request, int64_t token, int64_t position, int64_t slot) {
    const int64_t place = run->work.row_count++;
    run->rows[place] = (Row){request, place};
    run->token[place] = token;
    run->position[place] = position;
    run->write[place] = request * run->search->slots + slot;
}

/* The extra nodes of a request, behind the row of its prompt's last token. */
static void add_extra(Run *run, int64_t b, int64_t last) {
    const Search *search = run->search;
    const int64_t levels = run->trie->levels;
    for (int64_t i = b * search->extra; i < (b + 1) * search->extra; i++) {
        const int64_t depth = search->extra_depth[i], parent = search->extra_parent[i];
        const int64_t slot = search->prompt + i - b * search->extra;
        if (search->extra_token[i] < 0) {
            run->wanted[run->work.wanted_count++] = last;
            continue;
        }
        int32_t *path = run->path + run->work.row_count * levels;
        if (parent >= 0)
            memcpy(path, run->path + (last + 1 + parent) * levels,
                   (size_t)(depth - 1) * sizeof(int32_t));
        path[depth - 1] = (int32_t)slot;
        run->wanted[run->work.wanted_count++] = run->work.row_count;
        add_row(run, b, search->extra_token[i], search->length[b] + depth - 1, slot);
    }
}

/* The first pass: what is not cached of the prompts, with logits of their last tokens. */
static void add_prompts(Run *run) {
    const Search *search = run->search;
    for (int64_t b = 0; b < search->batch; b++) {
        for (int64_t p = search->cached[b]; p < search->length[b]; p++)
            add_row(run, b, search->token[b * search->longest + p], p, p);
        const int64_t last = run->work.row_count - 1;
        run->wanted[run->work.wanted_count] = last;
        Beams *root = &run->beams[b];
        root->count = 1;
        root->state[0] = 0;
        root->score[0] = root->log_prob[0] = 0;
        root->logits[0] = run->pass.logits + run->work.wanted_count++ * run->model->vocabulary;
        add_extra(run, b, last);
    }
}

static int64_t token_of(const Trie *trie, int64_t state) {
    const int64_t symbol = trie->wide_symbols ? ((const int32_t *)trie->symbol)[state]
                                      : ((const int16_t *)trie->symbol)[state];
    return trie->alphabet[symbol];
}

/* The place of an extra node that is the beam of `state` at `depth`; -1 if none is. */
static int64_t find_extra(const Search *search, int64_t b, int64_t state, int64_t depth) {
    if (search->extra_logits)
        for (int64_t i = 0; i < search->extra; i++) {
            const int64_t at = b * search->extra + i;
            if (search->extra_token[at] < 0) break;
            if (search->extra_state[at] == state && search->extra_depth[at] == depth) return i;
        }
    return -1;
}

/* The next pass: all live beams, nodes of `depth`, whose slots begin at `first`. Those that the first
 * pass ran as extra nodes are not run again: they would get the same bits. */
static void add_beams(Run *run, int64_t depth, int64_t first) {
    const int64_t levels = run->trie->levels;
    for (int64_t b = 0; b < run->search->batch; b++) {
        Beams *beams = &run->beams[b];
        if (run->search->nodes) run->search->nodes[b] += beams->count;
        for (int64_t i = 0; i < beams->count; i++) {
            int32_t *path = beams->path + i * levels;
            const int64_t extra = find_extra(run->search, b, beams->state[i], depth);
            if (extra >= 0) {
                const int64_t row = b * (1 + run->search->extra) + 1 + extra;
                path[depth - 1] = (int32_t)(run->search->prompt + extra);
                beams->logits[i] = run->search->extra_logits + row * run->model->vocabulary;
                continue;
            }
            path[depth - 1] = (int32_t)(first + i);
            memcpy(run->path + run->work.row_count * levels, path, (size_t)depth * sizeof(int32_t));
            run->wanted[run->work.wanted_count] = run->work.row_count;
            beams->logits[i] = run->logits + run->work.wanted_count++ * run->model->vocabulary;
            const int64_t position = run->search->length[b] + depth - 1;
            add_row(run, b, token_of(run->trie, beams->state[i]), position, first + i);
        }
    }
}

/* Whether a ranks behind b; of equal scores the higher state does. */
static int behind(const Candidate *a, const Candidate *b) {
    return a->score < b->score || (a->score == b->score && a->state > b->state);
}

static void sift_down(Candidate *heap, int64_t count, int64_t place) {
    for (;;) {
        int64_t worst = place;
        for (int64_t child = 2 * place + 1; child <= 2 * place + 2 && child < count; child++)
            if (behind(&heap[child], &heap[worst])) worst = child;
        if (worst == place) return;
        const Candidate moved = heap[place];
        heap[place] = heap[worst];
        heap[worst] = moved;
        place = worst;
    }
}

/* Keep the best `room` candidates; the worst of them is the first. Returns how many there are. */
static int64_t offer(Candidate *heap, int64_t count, int64_t room, Candidate found) {
    if (!(found.score > -INFINITY)) return count; /* -inf and NaN are never chosen */
    if (count == room) {
        if (!behind(&heap[0], &found)) return count;
        heap[0] = found;
        sift_down(heap, count, 0);
        return count;
    }
    int64_t place = count;
    heap[place] = found;
    while (place && behind(&heap[place], &heap[(place - 1) / 2])) {
        const Candidate moved = heap[place];
        heap[place] = heap[(place - 1) / 2];
        heap[(place - 1) / 2] = moved;
        place = (place - 1) / 2;
    }
    return count + 1;
}

/* Order candidates by state, or best first (Shell sort: few of them, no memory). */
static void order(Candidate *candidates, int64_t count, int best_first) {
    static const int64_t gaps[] = {57, 23, 10, 4, 1};
    for (int g = 0; g < 5; g++)
        for (int64_t i = gaps[g]; i < count; i++) {
            const Candidate moved = candidates[i];
            int64_t place = i;
            for (; place >= gaps[g]; place -= gaps[g]) {
                const Candidate *before = &candidates[place - gaps[g]];
                if (best_first ? !behind(before, &moved) : before->state <= moved.state) break;
                candidates[place] = *before;
            }
            candidates[place] = moved;
        }
}

/* Replace the beams of a request by the best of their children; `depth` is that of the beams. */
static void expand(Run *run, int64_t b, int64_t depth) {
    const Trie *trie = run->trie;
    const Search *search = run->search;
    const Beams *beams = &run->beams[b];
    const int64_t width = search->width[depth], vocabulary = run->model->vocabulary;
    const uint8_t *allowed = search->allowed ? search->allowed[b] : 0;
    const int64_t dead_count = search->dead ? search->dead_count[depth] : 0;
    const int64_t *dead = dead_count ? search->dead[depth] + b * dead_count : 0;
    const float *gains = search->gains ? search->gains[b] : 0;
    const float limit = search->limit ? search->limit[b] : -INFINITY;
    const int inner = depth + 1 < trie->levels; /* whether children are prefixes */
    int64_t found = 0, next_dead = 0;
    for (int64_t i = 0; i < beams->count; i++) {
        const float *logits = beams->logits[i];
        const float total = chosen_variant()->log_sum_exp(logits, vocabulary);
        if (!isfinite(total)) search->finite[b] = 0;
        const int32_t *children = trie->first_child + beams->state[i];
        for (int64_t child = children[0]; child < children[1]; child++) {
            if (allowed && !allowed[child]) continue;
            while (next_dead < dead_count && dead[next_dead] < child) next_dead++;
            if (next_dead < dead_count && dead[next_dead] == child) continue;
            const float sum = beams->log_prob[i] + (logits[token_of(trie, child)] - total);
            const Candidate candidate = {gains ? sum + gains[child] : sum, sum, i, child};
            if (candidate.score < limit) {
                if (inner && candidate.score > run->rest[b]) run->rest[b] = candidate.score;
                continue;
            }
            found = offer(run->heap, found, width + 1, candidate);
        }
    }
    if (found > width) { /* the worst is the best that is pruned */
        if (inner && run->heap[0].score > run->rest[b]) run->rest[b] = run->heap[0].score;
        run->heap[0] = run->heap[--found];
    }
    order(run->heap, found, 0);
    Beams *next = &run->next[b];
    next->count = found;
    for (int64_t i = 0; i < found; i++) {
        const Candidate *chosen = &run->heap[i];
        next->state[i] = chosen->state;
        next->score[i] = chosen->score;
        next->log_prob[i] = chosen->log_prob;
        memcpy(next->path + i * trie->levels, beams->path + chosen->beam * trie->levels,
               (size_t)depth * sizeof(int32_t));
    }
}

/* Write the answer of a request. */
static void answer(Run *run, int64_t b) {
    const Search *search = run->search;
    const Trie *trie = run->trie;
    const Beams *found = &run->beams[b];
    for (int64_t i = 0; i < found->count; i++)
        run->heap[i] = (Candidate){found->score[i], found->log_prob[i], i, found->state[i]};
    order(run->heap, found->count, 1);
    for (int64_t i = 0; i < search->beams; i++) {
        const int64_t at = b * search->beams + i;
        const int real = i < found->count;
        const int64_t row = real ? run->heap[i].state - trie->leaves : -1;
        search->row[at] = row;
        search->log_prob[at] = real ? run->heap[i].log_prob : -INFINITY;
        for (int64_t l = 0; l < trie->levels; l++) {
            int64_t token = -1;
            if (real && trie->wide_rows)
                token = ((const int32_t *)trie->rows)[row * trie->levels + l];
            else if (real)
                token = ((const int16_t *)trie->rows)[row * trie->levels + l];
            search->sequence[at * trie->levels + l] = token;
        }
    }
    /* No descendant of a pruned prefix scores more than the prefix: log-probabilities are <= 0. */
    const float rest = run->rest[b];
    const float last =
        found->count < search->beams ? -INFINITY : run->heap[search->beams - 1].score;
    search->complete[b] = last > rest || rest == -INFINITY;
}

/* Bytes of workspace of a search. */
int64_t recsys_search_workspace(const Model *model, const Trie *trie, const Search *search) {
    Run run = {.model = model, .trie = trie, .search = search};
    return lay_out(&run, 0);
}

/* Check what a search reads and writes; `place` gets the index of the first bad one. */
static int64_t check(const Model *model, const Trie *trie, const Search *search, int64_t *place) {
    int64_t nodes = 0;
    for (int64_t d = 0; d + 1 < trie->levels; d++) nodes += search->width[d];
    *place = 0;
    if (search->prompt + search->extra + nodes > search->slots) return BAD_SLOT;
    for (int64_t b = 0; b < search->batch; b++) {
        const int64_t length = search->length[b];
        *place = b;
        if (length < 1 || length > search->prompt || length > search->longest) return BAD_SLOT;
        if (search->cached[b] < 0 || search->cached[b] >= length) return BAD_ROW;
        if (length + trie->levels - 1 > model->positions) return BAD_POSITION;
        for (int64_t p = 0; p < length; p++) {
            const int64_t token = search->token[b * search->longest + p];
            if (token < 0 || token >= model->vocabulary) return BAD_TOKEN;
        }
        int64_t real = 0; /* nodes before the padding */
        for (int64_t i = 0; i < search->extra; i++) {
            const int64_t at = b * search->extra + i, parent = search->extra_parent[at];
            if (search->extra_token[at] < 0) continue;
            if (search->extra_token[at] >= model->vocabulary || real++ != i) return BAD_TOKEN;
            if (parent < -1 || parent >= i) return BAD_ROW;
            const int64_t above = parent < 0 ? 0 : search->extra_depth[at - i + parent];
            if (search->extra_depth[at] != above + 1) return BAD_ROW;
            if (search->extra_depth[at] >= trie->levels) return BAD_POSITION;
        }
    }
    return FINE;
}

/* Search. Returns FINE, or what is wrong and with which request; then nothing was written. The
 * trie's tokens must be in the vocabulary. */
int64_t recsys_search(const Model *model, const Trie *trie, const Search *search, int64_t *place) {
    const int64_t wrong = check(model, trie, search, place);
    if (wrong != FINE) return wrong;
    Run run = {.model = model, .trie = trie, .search = search};
    lay_out(&run, search->workspace);
    int64_t first = search->prompt + search->extra;
    for (int64_t b = 0; b < search->batch; b++) {
        run.rest[b] = -INFINITY;
        search->finite[b] = 1;
        if (search->nodes) search->nodes[b] = 0;
    }
    for (int64_t depth = 0; depth < trie->levels; depth++) {
        run.work.row_count = run.work.wanted_count = 0;
        run.pass.logits = depth == 0 && search->extra_logits ? search->extra_logits : run.logits;
        if (depth == 0) {
            add_prompts(&run);
        } else {
            add_beams(&run, depth, first);
            first += search->width[depth - 1];
        }
        run.pass.view = first;
        if (run.work.row_count) run_work(&run.work);
        for (int64_t b = 0; b < search->batch; b++) expand(&run, b, depth);
        Beams *before = run.beams;
        run.beams = run.next;
        run.next = before;
    }
    for (int64_t b = 0; b < search->batch; b++) answer(&run, b);
    return FINE;
}
