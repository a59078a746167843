/* The forward pass, compiled once per instruction set (`recsys/native/build.py`).
 *
 * Every sum that belongs to one token runs in an order that depends on that token alone: products
 * add up one input after the other, attention adds up the slots that the token sees in ascending
 * order, with one lane of a vector for each token. So a token gets the same bits whatever else is in
 * the pass, and however rows are cut into tiles, blocks and threads.
 *
 * A thread runs a share of the rows from the embedding to the logits. Threads wait for each other
 * once per layer, between writing keys and values and reading them.
 */
#include <string.h>

#include "internal.h"
#include "vector.h"

enum { TILE_COLUMNS = WIDTH * TILE_VECTORS, BLOCK = 96, GROUP = 8 };

/* One tile: `rows` rows of a product with TILE_COLUMNS columns of a panel, of which `columns` are
 * stored. */
INLINE void tile(int rows, const float *restrict a, int64_t a_row, const float *restrict panel,
                 int64_t inputs, const float *bias, float *restrict c, int64_t c_row,
                 int64_t columns, int add) {
    Vector sum[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) sum[r][v] = (Vector){0};
    for (int64_t k = 0; k < inputs; k++) {
        Vector b[TILE_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) b[v] = load(panel + k * PANEL + v * WIDTH);
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const Vector x = all(a[r * a_row + k]);
#pragma GCC unroll 4
            for (int v = 0; v < TILE_VECTORS; v++) sum[r][v] += x * b[v];
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++) {
        float *out = c + r * c_row;
        float part[TILE_COLUMNS];
        if (columns < TILE_COLUMNS) out = part;
#pragma GCC unroll 4
        for (int v = 0; v < TILE_VECTORS; v++) {
            Vector value = sum[r][v];
            if (bias) value += load(bias + v * WIDTH);
            if (add) value += load(out + v * WIDTH);
            store(out + v * WIDTH, value);
        }
        if (columns < TILE_COLUMNS) memcpy(c + r * c_row, part, (size_t)columns * sizeof(float));
    }
}

#define TILE(n) \
    case n: tile(n, a, a_row, panel, w->inputs, bias, c, c_row, columns, add); break;

static void any_tile(int64_t rows, const Linear *w, const float *a, int64_t a_row,
                     const float *panel, const float *bias, float *c, int64_t c_row,
                     int64_t columns, int add) {
    switch (rows) {
        TILE(1) TILE(2) TILE(3) TILE(4)
#if !defined(__x86_64__) || defined(__AVX2__)
        TILE(5) TILE(6)
#endif
#if defined(__AVX512F__)
        TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
#endif
    }
}

/* c = a W^T + bias, or c += it. Rows of c have `width` floats that may be written; with `add`, it
 * is a multiple of PANEL. */
static void multiply(const Linear *w, const float *a, int64_t a_row, int64_t rows, float *c,
                     int64_t c_row, int64_t width, int add) {
    const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t column = 0; column < width; column += TILE_COLUMNS) {
        const float *panel = w->panels + column / PANEL * PANEL * w->inputs + column % PANEL;
        const float *bias = w->bias ? w->bias + column : 0;
        const int64_t left = width - column;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t first = rows * t / tiles, end = rows * (t + 1) / tiles;
            any_tile(end - first, w, a + first * a_row, a_row, panel, bias,
                     c + first * c_row + column, c_row, left < TILE_COLUMNS ? left : TILE_COLUMNS,
                     add);
        }
    }
}

/* 1 / root mean square of `count` floats. */
INLINE float inverse_rms(const float *x, int64_t count, float epsilon) {
    Vector squares = {0};
    int64_t i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
        const Vector value = load(x + i);
        squares += value * value;
    }
    float sum = 0;
    for (int lane = 0; lane < WIDTH; lane++) sum += squares[lane];
    for (; i < count; i++) sum += x[i] * x[i];
    return 1.0f / sqrtf(sum / (float)count + epsilon);
}

static void normalize(const Model *model, const float *weight, const float *x, int64_t rows,
                      float *out) {
    const int64_t width = padded(model->hidden);
    for (int64_t r = 0; r < rows; r++, x += width, out += width) {
        const float scale = inverse_rms(x, model->hidden, model->epsilon);
        for (int64_t i = 0; i < width; i += WIDTH)
            store(out + i, load(weight + i) * (load(x + i) * scale));
    }
}

/* Normalise each head where the model does, then rotate it to its position (RoPE). */
static void place_heads(const Model *model, const float *norm, int64_t heads, int64_t position,
                        float *x) {
    const int64_t half = model->rotary / 2, size = model->head_size;
    const float *cosine = model->cosine + position * model->rotary;
    const float *sine = model->sine + position * model->rotary;
    for (int64_t h = 0; h < heads; h++, x += size) {
        if (norm) {
            const float scale = inverse_rms(x, size, model->epsilon);
            for (int64_t i = 0; i < size; i++) x[i] = norm[i] * (x[i] * scale);
        }
        for (int64_t i = 0; i < half; i++) {
            const float a = x[i], b = x[i + half];
            x[i] = a * cosine[i] - b * sine[i];
            x[i + half] = b * cosine[i + half] + a * sine[i + half];
        }
    }
}

static void gate(int64_t inner, int64_t rows, float *x, int64_t row) {
    for (int64_t r = 0; r < rows; r++, x += row)
        for (int64_t i = 0; i < inner; i += WIDTH) {
            const Vector g = load(x + i), up = load(x + inner + i);
            store(x + i, g / (1.0f + exponential(-g)) * up);
        }
}

/* Memory of one thread. */
typedef struct {
    float *x, *normed, *wide, *heads; /* BLOCK rows each */
    float *queries, *scores, *mixed;  /* of one group of lanes */
    uint32_t *bits;
    int32_t *slots;
} Scratch;

static int64_t wide_row(const Model *model) {
    const int64_t kv = padded(2 * model->kv_heads * model->head_size);
    const int64_t mlp = 2 * padded(model->inner);
    return kv > mlp ? kv : mlp;
}

static int64_t carve(const Model *model, const Pass *pass, char *from, Scratch *scratch) {
    const int64_t hidden = padded(model->hidden), heads = padded(model->heads * model->head_size);
    const int64_t counts[] = {BLOCK * hidden,
                              BLOCK * hidden,
                              BLOCK * wide_row(model),
                              BLOCK * heads,
                              model->head_size * WIDTH,
                              pass->view * WIDTH,
                              model->head_size * WIDTH,
                              pass->view,
                              pass->view};
    int64_t at[9], bytes = 0;
    for (int i = 0; i < 9; i++) {
        at[i] = bytes;
        bytes += (counts[i] * 4 + 63) / 64 * 64;
    }
    if (scratch)
        *scratch = (Scratch){
            (float *)(from + at[0]), (float *)(from + at[1]),   (float *)(from + at[2]),
            (float *)(from + at[3]), (float *)(from + at[4]),   (float *)(from + at[5]),
            (float *)(from + at[6]), (uint32_t *)(from + at[7]), (int32_t *)(from + at[8])};
    return bytes;
}

static int64_t scratch_bytes(const Model *model, const Pass *pass) {
    return carve(model, pass, 0, 0);
}

/* Lane l of a group is head l % G of token l / G, where G query heads share a key/value head. */
typedef struct {
    int64_t first, lanes; /* first lane of the request's lanes, and how many */
} Lanes;

/* Mark the slots that a token of a tree sees: the prompt up to it, then its path. */
static void mark_path(const Work *work, int64_t kind, Row row, uint32_t lane, uint32_t *bits) {
    const Tree *tree = work->tree;
    const int64_t position = work->pass->position[row.place], length = tree->length[row.request];
    const int64_t window = tree->window[kind];
    const int64_t end = position < length ? position + 1 : length;
    const int64_t first = window && position + 1 > window ? position + 1 - window : 0;
    for (int64_t i = first; i < end; i++) bits[i] |= lane;
    for (int64_t p = length; p <= position; p++)
        if (p >= first) bits[tree->path[row.place * tree->levels + p - length]] |= lane;
}

static void mark_masked(const Work *work, int64_t kind, Row row, uint32_t lane, uint32_t *bits) {
    const Pass *pass = work->pass;
    const float *mask = pass->mask[kind] + row.request * pass->mask_batch[kind] +
                        row.place % pass->tokens * pass->mask_token[kind];
    for (int64_t i = 0; i < pass->view; i++) bits[i] |= mask[i] == 0 ? lane : 0;
}

/* List the slots that any lane sees; the bits of a slot are the lanes that see it. */
static int64_t visible(const Work *work, int64_t kind, const int64_t *rows, Lanes lanes,
                       Scratch *s) {
    const int64_t group = work->model->heads / work->model->kv_heads, view = work->pass->view;
    memset(s->bits, 0, (size_t)view * sizeof(uint32_t));
    for (int64_t lane = 0; lane < lanes.lanes; lane++) {
        const Row row = work->rows[rows[(lanes.first + lane) / group]];
        if (work->tree)
            mark_path(work, kind, row, 1u << lane, s->bits);
        else
            mark_masked(work, kind, row, 1u << lane, s->bits);
    }
    int64_t count = 0;
    for (int64_t i = 0; i < view; i++) {
        s->slots[count] = (int32_t)i;
        s->bits[count] = s->bits[i];
        count += s->bits[i] != 0;
    }
    return count;
}

INLINE Integers seeing(uint32_t bits) {
    Bits lane;
    for (int i = 0; i < WIDTH; i++) lane[i] = 1u << i;
    return (((Bits){0} + bits) & lane) != (Bits){0};
}

/* Scores of `count` (a constant) slots of the list, -inf where a lane does not see the slot. */
INLINE Vector score(int count, int64_t size, const float *keys, int64_t slot_row,
                    const Scratch *s, int64_t at, Vector most) {
    Vector sum[GROUP];
    const float *key[GROUP];
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) {
        sum[i] = (Vector){0};
        key[i] = keys + s->slots[at + i] * slot_row;
    }
    for (int64_t d = 0; d < size; d++) {
        const Vector query = load(s->queries + d * WIDTH);
#pragma GCC unroll 8
        for (int i = 0; i < count; i++) sum[i] += query * key[i][d];
    }
    for (int i = 0; i < count; i++) {
        const Vector value = pick(seeing(s->bits[at + i]), sum[i], all(-INFINITY));
        store(s->scores + (at + i) * WIDTH, value);
        most = pick(value > most, value, most);
    }
    return most;
}

/* Weighted sums of `count` (a constant) places of the values, over all listed slots. */
INLINE void mix(int count, const float *values, int64_t slot_row, const Scratch *s, int64_t seen,
                int64_t d, Vector inverse) {
    Vector sum[GROUP];
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) sum[i] = (Vector){0};
    for (int64_t j = 0; j < seen; j++) {
        const float *value = values + s->slots[j] * slot_row + d;
        const Vector weight = load(s->scores + j * WIDTH);
#pragma GCC unroll 8
        for (int i = 0; i < count; i++) sum[i] += weight * value[i];
    }
#pragma GCC unroll 8
    for (int i = 0; i < count; i++) store(s->mixed + (d + i) * WIDTH, sum[i] * inverse);
}

/* Attention of a group of lanes to one key/value head; `heads` has the queries and gets the result. */
static void attend(const Work *work, const float *keys, int64_t kv_head, int64_t seen, Lanes lanes,
                   float *heads, Scratch *s) {
    const Model *model = work->model;
    const int64_t size = model->head_size, slot_row = model->kv_heads * size;
    const int64_t group = model->heads / model->kv_heads, row = padded(model->heads * size);
    const float *values = keys + work->pass->cache_values;
    float *own[WIDTH];
    for (int64_t lane = 0; lane < WIDTH; lane++) {
        const int64_t l = lanes.first + (lane < lanes.lanes ? lane : 0);
        own[lane] = heads + l / group * row + (kv_head * group + l % group) * size;
        for (int64_t d = 0; d < size; d++)
            s->queries[d * WIDTH + lane] = lane < lanes.lanes ? own[lane][d] * model->scaling : 0;
    }
    Vector most = all(-INFINITY), total = {0};
    int64_t j = 0, d = 0;
    for (; j + GROUP <= seen; j += GROUP) most = score(GROUP, size, keys, slot_row, s, j, most);
    for (; j < seen; j++) most = score(1, size, keys, slot_row, s, j, most);
    most = pick(most == -INFINITY, (Vector){0}, most); /* lanes that see nothing */
    for (j = 0; j < seen; j++) {
        const Vector weight = exponential(load(s->scores + j * WIDTH) - most);
        total += weight;
        store(s->scores + j * WIDTH, weight);
    }
    const Vector inverse = 1.0f / total;
    for (; d + GROUP <= size; d += GROUP) mix(GROUP, values, slot_row, s, seen, d, inverse);
    for (; d < size; d++) mix(1, values, slot_row, s, seen, d, inverse);
    for (int64_t lane = 0; lane < lanes.lanes; lane++)
        for (d = 0; d < size; d++) own[lane][d] = s->mixed[d * WIDTH + lane];
}

/* Replace the queries of a block of rows by what attention mixes for them. */
static void attention(const Work *work, int64_t index, const int64_t *rows, int64_t count,
                      Scratch *s) {
    const Model *model = work->model;
    const Pass *pass = work->pass;
    const int64_t group = model->heads / model->kv_heads;
    const int64_t row = padded(model->heads * model->head_size);
    for (int64_t first = 0, end; first < count; first = end) {
        const int64_t request = work->rows[rows[first]].request;
        for (end = first; end < count && work->rows[rows[end]].request == request;) end++;
        const float *keys = pass->cache + index * pass->cache_layer +
                            request * pass->slots * model->kv_heads * model->head_size;
        const int64_t lanes = (end - first) * group;
        for (int64_t lane = 0; lane < lanes; lane += WIDTH) {
            const Lanes here = {lane, lanes - lane < WIDTH ? lanes - lane : WIDTH};
            const int64_t seen = visible(work, model->layer[index].mask, rows + first, here, s);
            for (int64_t h = 0; h < model->kv_heads; h++)
                attend(work, keys + h * model->head_size, h, seen, here, s->heads + first * row, s);
        }
    }
}

static int64_t query_width(const Model *model) { return padded(model->heads * model->head_size); }

static int64_t pair_width(const Model *model) {
    return padded(2 * model->kv_heads * model->head_size);
}

/* What `Model.projected` has of a row's token, from the queries on. */
static const float *projected_of(const Work *work, int64_t row) {
    const Model *model = work->model;
    const int64_t token = work->pass->token[work->rows[row].place];
    return model->projected + token * (query_width(model) + pair_width(model));
}

/* Rows of `Model.projected`, of `count` tokens; the workspace holds twice so many hidden rows. */
static void project(const Model *model, int64_t first, int64_t count, float *workspace,
                    float *out) {
    const Layer *layer = &model->layer[0];
    const int64_t size = model->hidden, hidden = padded(size), queries = query_width(model);
    const int64_t row = queries + pair_width(model);
    float *normed = workspace + count * hidden;
    for (int64_t r = 0; r < count; r++) {
        memcpy(workspace + r * hidden, model->embedding + (first + r) * size,
               (size_t)size * sizeof(float));
        memset(workspace + r * hidden + size, 0, (size_t)(hidden - size) * sizeof(float));
    }
    normalize(model, layer->norm, workspace, count, normed);
    out += first * row;
    multiply(&layer->q, normed, hidden, count, out, row, queries, 0);
    multiply(&layer->kv, normed, hidden, count, out + queries, row, row - queries, 0);
}

/* Write keys and values of the rows `first .. end`. */
static void write_cache(const Work *work, int64_t index, int64_t first, int64_t end, Scratch *s) {
    const Model *model = work->model;
    const Layer *layer = &model->layer[index];
    const int64_t hidden = padded(model->hidden), half = model->kv_heads * model->head_size;
    const int64_t width = pair_width(model);
    float *cache = work->pass->cache + index * work->pass->cache_layer;
    for (int64_t at = first; at < end; at += BLOCK) {
        const int64_t count = end - at < BLOCK ? end - at : BLOCK;
        if (index || !model->projected) {
            normalize(model, layer->norm, work->hidden + at * hidden, count, s->normed);
            multiply(&layer->kv, s->normed, hidden, count, s->wide, width, width, 0);
        } else {
            for (int64_t r = 0; r < count; r++)
                memcpy(s->wide + r * width, projected_of(work, at + r) + query_width(model),
                       (size_t)width * sizeof(float));
        }
        for (int64_t r = 0; r < count; r++) {
            float *keys = s->wide + r * width;
            const int64_t place = work->rows[at + r].place;
            place_heads(model, layer->k_norm, model->kv_heads, work->pass->position[place], keys);
            float *to = cache + work->pass->write[place] * half;
            memcpy(to, keys, (size_t)half * sizeof(float));
            memcpy(to + work->pass->cache_values, keys + half, (size_t)half * sizeof(float));
        }
    }
}

/* The rest of a layer for a block of rows: attention and feed-forward, added to x. */
static void run_layer(const Work *work, int64_t index, const int64_t *rows, int64_t count, float *x,
                      Scratch *s) {
    const Model *model = work->model;
    const Layer *layer = &model->layer[index];
    const int64_t hidden = padded(model->hidden), inner = padded(model->inner);
    const int64_t heads = query_width(model);
    if (index || !model->projected) {
        normalize(model, layer->norm, x, count, s->normed);
        multiply(&layer->q, s->normed, hidden, count, s->heads, heads, heads, 0);
    } else {
        for (int64_t r = 0; r < count; r++)
            memcpy(s->heads + r * heads, projected_of(work, rows[r]),
                   (size_t)heads * sizeof(float));
    }
    for (int64_t r = 0; r < count; r++)
        place_heads(model, layer->q_norm, model->heads,
                    work->pass->position[work->rows[rows[r]].place], s->heads + r * heads);
    attention(work, index, rows, count, s);
    multiply(&layer->o, s->heads, heads, count, x, hidden, hidden, 1);
    normalize(model, layer->mlp_norm, x, count, s->normed);
    multiply(&layer->gate_up, s->normed, hidden, count, s->wide, wide_row(model), 2 * inner, 0);
    gate(inner, count, s->wide, wide_row(model));
    multiply(&layer->down, s->wide, wide_row(model), count, x, hidden, hidden, 1);
}

static void embed(const Work *work, int64_t first, int64_t end) {
    const int64_t size = work->model->hidden, hidden = padded(size);
    for (int64_t r = first; r < end; r++) {
        float *x = work->hidden + r * hidden;
        const int64_t token = work->pass->token[work->rows[r].place];
        memcpy(x, work->model->embedding + token * size, (size_t)size * sizeof(float));
        memset(x + size, 0, (size_t)(hidden - size) * sizeof(float));
    }
}

/* The last layer and the head, for the wanted rows only. */
static void finish(const Work *work, int64_t first, int64_t end, Scratch *s) {
    const Model *model = work->model;
    const int64_t hidden = padded(model->hidden);
    for (int64_t at = first; at < end; at += BLOCK) {
        const int64_t count = end - at < BLOCK ? end - at : BLOCK;
        for (int64_t r = 0; r < count; r++)
            memcpy(s->x + r * hidden, work->hidden + work->wanted[at + r] * hidden,
                   (size_t)hidden * sizeof(float));
        run_layer(work, model->layers - 1, work->wanted + at, count, s->x, s);
        normalize(model, model->norm, s->x, count, s->normed);
        float *logits = work->pass->logits + at * model->vocabulary;
        multiply(&model->head, s->normed, hidden, count, logits, model->vocabulary,
                 model->vocabulary, 0);
    }
}

static void forward(const Work *work, int64_t thread, int64_t threads) {
    const Model *model = work->model;
    const int64_t hidden = padded(model->hidden);
    const int64_t first = work->row_count * thread / threads;
    const int64_t end = work->row_count * (thread + 1) / threads;
    Scratch s;
    carve(model, work->pass, work->scratch + thread * work->scratch_bytes, &s);
    embed(work, first, end);
    for (int64_t index = 0; index < model->layers; index++) {
        write_cache(work, index, first, end, &s);
        wait_for_team(work->team);
        if (index + 1 == model->layers) break;
        int64_t rows[BLOCK];
        for (int64_t at = first; at < end; at += BLOCK) {
            const int64_t count = end - at < BLOCK ? end - at : BLOCK;
            for (int64_t r = 0; r < count; r++) rows[r] = at + r;
            run_layer(work, index, rows, count, work->hidden + at * hidden, &s);
        }
    }
    finish(work, work->wanted_count * thread / threads, work->wanted_count * (thread + 1) / threads,
           &s);
}

/* log(sum(exp(logits))); NaN if any is NaN. */
static float log_sum_exp(const float *logits, int64_t count) {
    float most = -INFINITY, sum = 0;
    Vector highest = all(-INFINITY);
    int64_t place = 0;
    for (; place + WIDTH <= count; place += WIDTH) {
        const Vector part = load(logits + place);
        highest = pick(part > highest, part, highest);
    }
    for (int lane = 0; lane < WIDTH; lane++) most = highest[lane] > most ? highest[lane] : most;
    for (; place < count; place++) most = logits[place] > most ? logits[place] : most;
    const float shift = most > -INFINITY ? most : 0;
    Vector sums = {0};
    for (int64_t i = 0; i < count; i += WIDTH) {
        Vector part = all(-INFINITY);
        if (i + WIDTH <= count)
            part = load(logits + i);
        else
            for (int64_t lane = 0; i + lane < count; lane++) part[lane] = logits[i + lane];
        sums += exponential(part - shift);
    }
    for (int lane = 0; lane < WIDTH; lane++) sum += sums[lane];
    return logf(sum) + shift;
}

#define JOIN(a, b) a##b
#define NAMED(name) JOIN(variant_, name)
#define TEXT(name) #name
#define QUOTED(name) TEXT(name)
#define BLEND(name) JOIN(blend_, name)
#define STATES(name) JOIN(states_, name)
extern const Blend BLEND(VARIANT);
extern const States STATES(VARIANT);
const Variant NAMED(VARIANT) = {QUOTED(VARIANT), forward, scratch_bytes,
                                log_sum_exp, project, multiply, &BLEND(VARIANT),
                                &STATES(VARIANT)};
