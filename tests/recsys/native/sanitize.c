/* Random models, passes, searches, blends and SASRecs for a build with sanitizers: every array has
 * exactly its size, so that any access outside is found, and some weights are NaN or infinite. Each
 * request is run in its batch, and alone: passes and searches with the first layer's projections kept,
 * passes and blends on every instruction set, passes with several threads. It must get the same bits.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

static uint64_t state;
static uint64_t draw(uint64_t below) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (state >> 33) % below;
}

static void *kept[16384];
static int kept_count;
static void *keep(void *memory) {
    if (!memory) abort();
    return kept[kept_count++] = memory;
}
static void release(void) {
    while (kept_count) free(kept[--kept_count]);
}

static int strange; /* one weight in so many is not finite; 0: none */
static float *floats(int64_t count, int64_t used) {
    float *values = keep(malloc((size_t)(count ? count : 1) * sizeof(float)));
    for (int64_t i = 0; i < count; i++)
        values[i] = i < used ? (float)draw(2001) / 1000.0f - 1.0f : 0.0f;
    if (strange && used)
        for (int64_t i = 0; i < used; i += 1 + (int64_t)draw((uint64_t)strange))
            values[i] = draw(2) ? NAN : draw(2) ? INFINITY : -1e38f;
    return values;
}

static Linear linear(int64_t inputs, int64_t outputs, int bias) {
    const int64_t count = padded(outputs) * inputs;
    Linear w = {.inputs = inputs, .outputs = outputs};
    w.panels = floats(count, count);
    w.bias = bias ? floats(padded(outputs), outputs) : 0;
    return w;
}

static Model make_model(void) {
    Model m = {0};
    m.layers = 1 + (int64_t)draw(3);
    m.kv_heads = 1 + (int64_t)draw(3);
    m.heads = m.kv_heads * (1 + (int64_t)draw(3));
    m.head_size = 2 * (1 + (int64_t)draw(12));
    m.rotary = 2 * (1 + (int64_t)draw((uint64_t)m.head_size / 2));
    m.hidden = 1 + (int64_t)draw(70);
    m.inner = 1 + (int64_t)draw(90);
    m.vocabulary = 2 + (int64_t)draw(70);
    m.positions = 40;
    m.epsilon = 1e-6f;
    m.scaling = 0.3f;
    m.embedding = floats(m.vocabulary * m.hidden, m.vocabulary * m.hidden);
    m.cosine = floats(m.positions * m.rotary, m.positions * m.rotary);
    m.sine = floats(m.positions * m.rotary, m.positions * m.rotary);
    m.norm = floats(padded(m.hidden), m.hidden);
    m.head = linear(m.hidden, m.vocabulary, 0);
    Layer *layers = keep(calloc((size_t)m.layers, sizeof(Layer)));
    for (int64_t i = 0; i < m.layers; i++) {
        const int bias = (int)draw(2);
        Layer *l = &layers[i];
        l->q = linear(m.hidden, m.heads * m.head_size, bias);
        l->kv = linear(m.hidden, 2 * m.kv_heads * m.head_size, bias);
        l->o = linear(m.heads * m.head_size, m.hidden, bias);
        l->gate_up = linear(m.hidden, 2 * padded(m.inner), bias);
        l->down = linear(m.inner, m.hidden, bias);
        l->norm = floats(padded(m.hidden), m.hidden);
        l->mlp_norm = floats(padded(m.hidden), m.hidden);
        if (draw(2)) {
            l->q_norm = floats(m.head_size, m.head_size);
            l->k_norm = floats(m.head_size, m.head_size);
        }
        l->mask = (int64_t)draw(2);
    }
    m.layer = layers;
    return m;
}

/* The model with the projections of its first layer, as this instruction set computes them. */
static Model projected(const Model *model) {
    Model m = *model;
    const int64_t row = padded(m.heads * m.head_size) + padded(2 * m.kv_heads * m.head_size);
    float *table = floats(m.vocabulary * row, 0);
    float *workspace = keep(malloc((size_t)recsys_project_workspace(&m)));
    recsys_project(&m, workspace, table);
    m.projected = table;
    return m;
}

static int64_t *integers(int64_t count, uint64_t below) {
    int64_t *values = keep(malloc((size_t)(count ? count : 1) * sizeof(int64_t)));
    for (int64_t i = 0; i < count; i++) values[i] = (int64_t)draw(below);
    return values;
}

static void run(const Model *model, Pass pass) {
    int64_t place = 0;
    void *workspace = 0;
    const size_t bytes = (size_t)recsys_workspace(model, &pass);
    if (posix_memalign(&workspace, 64, bytes)) abort();
    memset(workspace, 0xff, bytes);
    pass.workspace = workspace;
    if (recsys_forward(model, &pass, &place) != FINE) abort();
    free(workspace);
}

static int64_t cache_size(const Model *m, int64_t requests, int64_t slots) {
    return m->layers * 2 * requests * slots * m->kv_heads * m->head_size;
}

/* The floats of one request in a cache of several, in the order of a cache of one. */
static void copy_request(const Model *m, const Pass *pass, int64_t request, float *to) {
    const int64_t one = pass->slots * m->kv_heads * m->head_size;
    for (int64_t part = 0; part < 2 * m->layers; part++)
        memcpy(to + part * one, pass->cache + (part * pass->batch + request) * one,
               (size_t)one * sizeof(float));
}

static void one_case(void) {
    const Model m = make_model();
    Pass p = {0};
    p.batch = 1 + (int64_t)draw(4);
    p.tokens = 1 + (int64_t)draw(36);
    p.slots = 40 + (int64_t)draw(30);
    p.view = p.tokens + (int64_t)draw((uint64_t)(p.slots - p.tokens));
    p.rows = 1 + (int64_t)draw(6);
    p.threads = 1 + (int64_t)draw(3);
    const int64_t count = p.batch * p.tokens, row = m.kv_heads * m.head_size;
    p.token = integers(count, (uint64_t)m.vocabulary);
    p.position = integers(count, 40);
    int64_t *write = integers(count, 1);
    for (int64_t i = 0; i < count; i++) write[i] = i / p.tokens * p.slots + i % p.tokens;
    p.write = write;
    p.row = integers(p.batch * p.rows, (uint64_t)p.tokens);
    for (int kind = 0; kind < MOST_MASKS; kind++) {
        float *mask = floats(count * p.view, 0);
        for (int64_t i = 0; i < count; i++)
            for (int64_t j = 0; j < p.view; j++)
                mask[i * p.view + j] = j == i % p.tokens || draw(3) ? 0 : -INFINITY;
        p.mask[kind] = mask;
        p.mask_batch[kind] = p.tokens * p.view;
        p.mask_token[kind] = p.view;
    }
    p.cache = floats(cache_size(&m, p.batch, p.slots), 0);
    p.cache_values = p.batch * p.slots * row;
    p.cache_layer = 2 * p.cache_values;
    p.logits = floats(p.batch * p.rows * m.vocabulary, 0);
    float *before = floats(cache_size(&m, p.batch, p.slots), 0);
    memcpy(before, p.cache, (size_t)cache_size(&m, p.batch, p.slots) * sizeof(float));
    Pass original = p;
    original.cache = before;
    for (int64_t variant = 0; recsys_variant(variant); variant++) {
        recsys_choose(variant);
        const Model kept_model = projected(&m);
        run(&m, p);
        for (int64_t b = 0; b < p.batch; b++) {
            Pass alone = p;
            alone.batch = 1;
            alone.token += b * p.tokens;
            alone.position += b * p.tokens;
            alone.write = integers(p.tokens, 1);
            for (int64_t i = 0; i < p.tokens; i++) ((int64_t *)alone.write)[i] = i;
            alone.row += b * p.rows;
            for (int kind = 0; kind < MOST_MASKS; kind++)
                alone.mask[kind] += b * p.tokens * p.view;
            alone.cache = floats(cache_size(&m, 1, p.slots), 0);
            copy_request(&m, &original, b, alone.cache);
            alone.cache_values = p.slots * row;
            alone.cache_layer = 2 * alone.cache_values;
            alone.logits = floats(p.rows * m.vocabulary, 0);
            run(&kept_model, alone);
            const float *beside = p.logits + b * p.rows * m.vocabulary;
            for (int64_t i = 0; i < p.rows * m.vocabulary; i++)
                if (isnan(beside[i]) ? !isnan(alone.logits[i]) : beside[i] != alone.logits[i]) {
                    fprintf(stderr, "request %d: %g alone, %g in a batch\n", (int)b,
                            (double)alone.logits[i], (double)beside[i]);
                    exit(1);
                }
        }
    }
    release();
}

/* A trie whose states have up to four children, and symbols of both sizes. */
static Trie make_trie(const Model *m, int64_t *states, int64_t *starts) {
    enum { LEVELS = 3, MOST = 1 + 4 + 16 + 64 };
    int32_t *first = keep(malloc((MOST + 1) * sizeof(int32_t)));
    int64_t begin = 0, end = 1, next = 1;
    starts[0] = 0;
    for (int64_t depth = 0; depth < LEVELS; depth++) {
        for (int64_t s = begin; s < end; s++) {
            first[s] = (int32_t)next;
            next += 1 + (int64_t)draw(4);
        }
        begin = end;
        end = next;
        starts[depth + 1] = begin;
    }
    const int64_t inner = begin;
    first[inner] = (int32_t)next;
    Trie trie = {.levels = LEVELS, .leaves = inner};
    trie.wide_symbols = (int64_t)draw(2);
    trie.wide_rows = (int64_t)draw(2);
    trie.first_child = keep(malloc((size_t)(inner + 1) * sizeof(int32_t)));
    trie.alphabet = integers(4, (uint64_t)m->vocabulary);
    const size_t token_size = trie.wide_rows ? sizeof(int32_t) : sizeof(int16_t);
    trie.rows = keep(calloc((size_t)(next - inner) * LEVELS, token_size));
    memcpy((void *)trie.first_child, first, (size_t)(inner + 1) * sizeof(int32_t));
    int16_t *narrow = keep(calloc((size_t)next, sizeof(int16_t)));
    int32_t *wide = keep(calloc((size_t)next, sizeof(int32_t)));
    for (int64_t s = 0; s < inner; s++)
        for (int32_t c = first[s]; c < first[s + 1]; c++)
            narrow[c] = (int16_t)(wide[c] = c - first[s]);
    trie.symbol = trie.wide_symbols ? (const void *)wide : (const void *)narrow;
    *states = next;
    return trie;
}

static double *doubles(int64_t count) {
    double *values = keep(malloc((size_t)(count ? count : 1) * sizeof(double)));
    for (int64_t i = 0; i < count; i++) values[i] = (double)(1 + draw(9)) / 10;
    return values;
}

static int32_t *small_integers(int64_t count, uint64_t below) {
    int32_t *values = keep(malloc((size_t)(count ? count : 1) * sizeof(int32_t)));
    for (int64_t i = 0; i < count; i++) values[i] = (int32_t)draw(below);
    return values;
}

static Matrix make_matrix(int64_t rows, int64_t columns) {
    int64_t *start = integers(rows + 1, 1);
    for (int64_t i = 0; i < rows; i++) start[i + 1] = start[i] + (columns ? (int64_t)draw(6) : 0);
    return (Matrix){start, small_integers(start[rows], (uint64_t)(columns ? columns : 1)),
                    floats(start[rows], start[rows])};
}

static int64_t *permutation(int64_t count) {
    int64_t *order = integers(count, 1);
    for (int64_t i = 0; i < count; i++) {
        const int64_t other = (int64_t)draw((uint64_t)i + 1);
        order[i] = order[other];
        order[other] = i;
    }
    return order;
}

/* Random parts of a catalog; a blend has none of the parts that are NULL. */
static Fitted make_fitted(void) {
    const int64_t items = 1 + (int64_t)draw(150);
    Fitted f = {.items = items, .terms = (int64_t)draw(20), .smoothing = 0.1};
    f.vector_size = 1 + (int64_t)draw(40);
    f.state_size = 1 + (int64_t)draw(40);
    f.item_item = make_matrix(items, items);
    if (f.terms) {
        f.content = make_matrix(items, f.terms);
        f.postings = make_matrix(f.terms, items);
    }
    if (draw(2)) f.vectors = floats(items * f.vector_size, items * f.vector_size);
    if (draw(2)) f.states = floats(items * f.state_size, items * f.state_size);
    const int64_t lanes = ITEMS_OF_PANEL, size = f.states ? f.state_size : f.vector_size;
    const int64_t padded = (items + lanes - 1) / lanes * ((size + lanes - 1) / lanes) * lanes * lanes;
    if (f.states || f.vectors) f.panels = floats(padded, padded);
    f.popularity = doubles(items);
    f.order = permutation(items);
    f.log_counts = doubles(items);
    if (draw(2)) {
        f.log_recent = doubles(items);
    }
    uint8_t *eventless = keep(malloc((size_t)items));
    for (int64_t i = 0; i < items; i++) eventless[i] = (uint8_t)draw(2);
    f.eventless = eventless;
    return f;
}

/* Propose, rank and give reasons; `best`: (batch, k) items. The workspace has to be clean afterwards. */
static void blend(const Fitted *f, const Asked *asked, Ranking r, int32_t *best, int64_t *reasons) {
    const int64_t half = r.k / 2, quarter = r.k / 4;
    const int64_t width = r.k + half * 2 + quarter * 2, most = 2 * r.k + half + quarter;
    int64_t bytes = recsys_blend_workspace(f, asked->batch, most, 0);
    const int64_t ranked = recsys_blend_workspace(f, 1, r.k, width);
    if (ranked > bytes) bytes = ranked;
    char *workspace;
    if (posix_memalign((void **)&workspace, 64, (size_t)bytes)) abort();
    memset(workspace, 0, (size_t)bytes);
    Proposals p = {.k = r.k, .half = half, .quarter = quarter, .width = width};
    if (f->terms) {
        float *cosines = floats(asked->batch * f->items, 0);
        p.near = f->items < half ? f->items : half;
        int64_t *nearest = integers(asked->batch * p.near, 1);
        for (int64_t i = 0; i < asked->batch * p.near; i++) nearest[i] = i % p.near;
        recsys_cosines(f, asked, workspace, cosines);
        p.cosines = cosines;
        p.nearest = nearest;
    }
    p.items = small_integers(asked->batch * width, 1);
    p.supported = keep(malloc((size_t)(asked->batch * width)));
    p.best = floats(asked->batch * 2 * MOST_RANK, 0);
    recsys_propose(f, asked, &p, workspace);
    r.width = width;
    r.items = p.items;
    r.source = (const int8_t *)p.supported;
    r.model = keep(calloc((size_t)(asked->batch * width), sizeof(double)));
    double *again = doubles(asked->batch * width);
    for (int64_t i = 0; i < asked->batch * width; i++) again[i] = p.items[i] % 3 ? NAN : 0.125;
    r.again = again;
    r.top = p.best;
    r.best = best;
    r.score = floats(asked->batch * r.k, 0);
    r.best_source = keep(malloc((size_t)(asked->batch * r.k)));
    recsys_rank(f, asked, &r, workspace);
    recsys_because(f, asked, best, r.k, workspace, reasons);
    free(workspace);
}

static void one_blend(void) {
    const Fitted f = make_fitted();
    Asked asked = {.batch = 1 + (int64_t)draw(20)};
    int64_t *offset = integers(asked.batch + 1, 1);
    for (int64_t b = 0; b < asked.batch; b++) offset[b + 1] = offset[b] + (int64_t)draw(9);
    asked.offset = offset;
    int32_t *history = small_integers(offset[asked.batch], (uint64_t)f.items + 2);
    asked.history = history;
    asked.decay = doubles(9);
    uint8_t *blocked = keep(malloc((size_t)(asked.batch * f.items)));
    for (int64_t i = 0; i < asked.batch * f.items; i++) blocked[i] = draw(4) == 0;
    asked.blocked = blocked;
    asked.states = floats(asked.batch * f.state_size, asked.batch * f.state_size);
    Ranking r = {.k = 1 + (int64_t)draw(12), .weighs_new = (int64_t)draw(2)};
    for (int64_t s = 0; s <= RECENT; s++)
        if (draw(2)) {
            r.feature[r.features++] = (Feature){s, VALUE, 0, 1, -0.5, 0.25};
            if (s == VECTORS || s == CONTENT)
                r.feature[r.features++] = (Feature){s, ABOVE, 0.3, 0.5, 0, 0};
            if (s == ITEM_ITEM || s == SASREC) r.feature[r.features++] = (Feature){s, RANK, 0, -0.5, 0, 0};
        }
    if (r.features && draw(2)) {
        r.input_count = r.features;
        int64_t *input = integers(r.input_count, 1);
        for (int64_t i = 0; i < r.input_count; i++) input[i] = i;
        r.input = input;
        r.units = 1 + (int64_t)draw(MOST_UNITS);
        r.network = doubles((r.input_count + 2) * r.units);
    }
    const int64_t count = asked.batch * r.k;
    int32_t *best = small_integers(count, 1), *one = small_integers(r.k, 1);
    int64_t *reasons = integers(count, 1), *why = integers(r.k, 1);
    r.log_rank = doubles(MOST_RANK + 1);
    blend(&f, &asked, r, best, reasons);
    for (int64_t b = 0; b < asked.batch; b++) {
        Asked alone = asked;
        int64_t ends[2] = {0, offset[b + 1] - offset[b]};
        alone.batch = 1;
        alone.offset = ends;
        alone.history += offset[b];
        alone.blocked += b * f.items;
        alone.states += b * f.state_size;
        for (int variant = 0; recsys_variant(variant); variant++) {
            recsys_choose(variant);
            blend(&f, &alone, r, one, why);
            if (memcmp(one, best + b * r.k, (size_t)r.k * sizeof(int32_t)) ||
                memcmp(why, reasons + b * r.k, (size_t)r.k * sizeof(int64_t))) {
                fprintf(stderr, "blend %d differs alone\n", (int)b);
                exit(1);
            }
        }
        recsys_choose(0);
    }
    release();
}

static void states(const Sasrec *m, const Asked *asked, float *out) {
    const size_t bytes = (size_t)recsys_states_workspace(m);
    char *workspace;
    if (posix_memalign((void **)&workspace, 64, bytes)) abort();
    memset(workspace, 0xff, bytes);
    recsys_states(m, asked, workspace, out);
    free(workspace);
}

static void one_sasrec(void) {
    Sasrec m = {.items = 1 + (int64_t)draw(40), .layers = (int64_t)draw(3)};
    m.heads = 1 + (int64_t)draw(3);
    m.hidden = m.heads * (1 + (int64_t)draw(20));
    m.inner = 1 + (int64_t)draw(70);
    m.window = 1 + (int64_t)draw(9);
    m.block = 1 + (int64_t)draw((uint64_t)m.window);
    m.vectors = floats(m.items * m.hidden, m.items * m.hidden);
    m.positions = floats(m.window * m.hidden, m.window * m.hidden);
    for (int i = 0; i < 2; i++) m.norm[i] = floats(m.hidden, m.hidden);
    SasrecLayer *layers = keep(calloc(3, sizeof(SasrecLayer)));
    for (int l = 0; l < 3; l++) {
        layers[l] = (SasrecLayer){linear(m.hidden, 3 * m.hidden, 1), linear(m.hidden, m.hidden, 1),
                                  linear(m.hidden, m.inner, 1), linear(m.inner, m.hidden, 1), {0}};
        for (int i = 0; i < 4; i++) layers[l].norm[i] = floats(m.hidden, m.hidden);
    }
    m.layer = layers;
    int64_t offset[] = {0, 4, 4, 5, 25};
    int32_t *history = small_integers(25, (uint64_t)m.items + 2);
    const Asked asked = {.batch = 4, .offset = offset, .history = history};
    float *found = floats(4 * m.hidden, 0), *one = floats(m.hidden, 0);
    states(&m, &asked, found);
    for (int64_t b = 0; b < 4; b++) {
        const Asked alone = {.batch = 1, .offset = offset + b, .history = history};
        states(&m, &alone, one);
        if (memcmp(one, found + b * m.hidden, (size_t)m.hidden * sizeof(float))) {
            fprintf(stderr, "states %d differ alone\n", (int)b);
            exit(1);
        }
    }
    release();
}

static void search(const Model *m, const Trie *trie, Search s, int64_t *row, float *score) {
    int64_t place = 0;
    s.row = row;
    s.log_prob = score;
    s.sequence = integers(s.batch * s.beams * trie->levels, 1);
    s.complete = keep(malloc((size_t)s.batch));
    s.finite = keep(malloc((size_t)s.batch));
    s.extra_logits = floats(s.batch * (1 + s.extra) * m->vocabulary, 0);
    s.cache = floats(cache_size(m, s.batch, s.slots), 0);
    s.cache_values = s.batch * s.slots * m->kv_heads * m->head_size;
    s.cache_layer = 2 * s.cache_values;
    const size_t bytes = (size_t)recsys_search_workspace(m, trie, &s);
    if (posix_memalign(&s.workspace, 64, bytes)) abort();
    memset(s.workspace, 0xff, bytes);
    if (recsys_search(m, trie, &s, &place) != FINE) abort();
    free(s.workspace);
}

static void one_search(void) {
    const Model m = make_model();
    int64_t states, starts[4];
    const Trie trie = make_trie(&m, &states, starts);
    Search s = {.batch = 1 + (int64_t)draw(4), .longest = 30, .prompt = 32, .threads = 2};
    s.token = integers(s.batch * s.longest, (uint64_t)m.vocabulary);
    int64_t *length = integers(s.batch, 30), *width = integers(3, 12);
    for (int64_t b = 0; b < s.batch; b++) length[b]++;
    for (int i = 0; i < 3; i++) width[i]++;
    s.length = length;
    s.cached = integers(s.batch, 1);
    s.width = width;
    s.extra = (int64_t)draw(6);
    int64_t *extra_token = integers(s.batch * s.extra, (uint64_t)m.vocabulary);
    int64_t *extra_parent = integers(s.batch * s.extra, 1);
    int64_t *extra_depth = integers(s.batch * s.extra, 1);
    for (int64_t i = 0; i < s.batch * s.extra; i++) {
        const int64_t place = i % s.extra, above = place ? (int64_t)draw((uint64_t)place) : -1;
        const int below = above >= 0 && extra_depth[i - place + above] == 1 && draw(2);
        extra_parent[i] = below ? above : -1;
        extra_depth[i] = below ? 2 : 1;
        if (place > 2) extra_token[i] = -1;
    }
    int64_t *extra_state = integers(s.batch * s.extra, (uint64_t)states);
    s.extra_state = extra_state;
    s.extra_token = extra_token;
    s.extra_parent = extra_parent;
    s.extra_depth = extra_depth;
    s.slots = s.prompt + s.extra + width[0] + width[1];
    s.window[draw(2)] = (int64_t)draw(9);
    const uint8_t **allowed = keep(calloc((size_t)s.batch, sizeof(uint8_t *)));
    for (int64_t b = 0; b < s.batch; b++)
        if (draw(2)) {
            uint8_t *flags = keep(malloc((size_t)states));
            for (int64_t i = 0; i < states; i++) flags[i] = draw(4) > 0;
            allowed[b] = flags;
        }
    if (draw(2)) s.allowed = allowed;
    const int64_t *dead[3] = {0};
    int64_t dead_count[3] = {0};
    for (int d = 0; d < 3; d++) {
        int64_t *some = integers(s.batch * (dead_count[d] = (int64_t)draw(2)), 4);
        for (int64_t i = 0; i < s.batch * dead_count[d]; i++) some[i] += starts[d + 1];
        dead[d] = some;
    }
    s.dead = dead;
    s.dead_count = dead_count;
    const float **gains = keep(calloc((size_t)s.batch, sizeof(float *)));
    for (int64_t b = 0; b < s.batch; b++) gains[b] = draw(2) ? floats(states, states) : 0;
    if (draw(2)) s.gains = gains;
    s.beams = width[2] + (int64_t)draw(3);
    int64_t *row = integers(s.batch * s.beams, 1), *one = integers(s.beams, 1);
    float *score = floats(s.batch * s.beams, 0), *own = floats(s.beams, 0);
    search(&m, &trie, s, row, score);
    const Model kept_model = projected(&m);
    for (int64_t b = 0; b < s.batch; b++) {
        Search alone = s;
        const int64_t *its[3];
        alone.batch = 1;
        alone.token += b * s.longest;
        alone.length += b;
        alone.cached += b;
        alone.extra_token += b * s.extra;
        alone.extra_parent += b * s.extra;
        alone.extra_depth += b * s.extra;
        alone.extra_state += b * s.extra;
        if (s.allowed) alone.allowed += b;
        if (s.gains) alone.gains += b;
        for (int d = 0; d < 3; d++) its[d] = dead[d] + b * dead_count[d];
        alone.dead = its;
        search(&kept_model, &trie, alone, one, own);
        if (memcmp(one, row + b * s.beams, (size_t)s.beams * sizeof(int64_t)) ||
            memcmp(own, score + b * s.beams, (size_t)s.beams * sizeof(float))) {
            fprintf(stderr, "search %d differs alone\n", (int)b);
            exit(1);
        }
    }
    release();
}

int main(int count, char **arguments) {
    const int cases = count > 1 ? atoi(arguments[1]) : 100;
    for (int i = 0; i < cases; i++) {
        state = (uint64_t)i * 7919 + 1;
        strange = i % 4 == 3 ? 40 : 0;
        one_case();
        one_search();
        one_blend();
        one_sasrec();
    }
    printf("%d cases\n", cases);
    return 0;
}
