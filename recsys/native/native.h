/* The tree forward pass of Llama-family decoders in float32: types and entry points.
 *
 * `recsys/native/decoder.py` mirrors these structures with ctypes. All arrays are row-major.
 */
#ifndef RECSYS_NATIVE_H
#define RECSYS_NATIVE_H

#include <stdint.h>

enum { ABI = 1 };        /* raise it with every change of these structures */
enum { PANEL = 32 };     /* columns of a panel of packed weights */
enum { MOST_MASKS = 2 }; /* kinds of attention masks: full and sliding */

/* y = x W^T + bias. `panels` holds W, (outputs, inputs), as panels of PANEL outputs:
 * (panel, input, output of the panel), zeros behind the last output. `bias` has as many zeros, or is
 * NULL. */
typedef struct {
    const float *panels, *bias;
    int64_t inputs, outputs;
} Linear;

/* Norms are padded with zeros to a multiple of PANEL. `q_norm` and `k_norm` may be NULL. */
typedef struct {
    Linear q, kv, o, gate_up, down;
    const float *norm, *mlp_norm, *q_norm, *k_norm;
    int64_t mask;
} Layer;

typedef struct {
    int64_t layers, hidden, inner, heads, kv_heads, head_size, rotary, vocabulary, positions;
    float epsilon, scaling;
    const float *embedding;     /* (vocabulary, hidden) */
    const float *cosine, *sine; /* (positions, rotary) */
    const float *norm;
    Linear head;
    const Layer *layer;
} Model;

/* One pass over `batch` requests of `tokens` tokens each. */
typedef struct {
    int64_t batch, tokens, rows, slots, view, threads;
    const int64_t *token, *position;   /* (batch, tokens) */
    const int64_t *write;              /* (batch, tokens) slots, those of request b from b * slots */
    const int64_t *row;                /* (batch, rows) tokens whose logits are wanted; NULL: all */
    const float *mask[MOST_MASKS];     /* (batch, tokens, view): 0 where a token attends, else -inf */
    int64_t mask_batch[MOST_MASKS], mask_token[MOST_MASKS]; /* strides in floats */
    float *cache;                      /* keys of layer 0; (batch * slots, kv_heads, head_size) */
    int64_t cache_layer, cache_values; /* from a layer to the next, from its keys to its values */
    float *logits;                     /* (batch, rows, vocabulary) */
    void *workspace;                   /* aligned to 64 bytes */
} Pass;

/* What is wrong with a pass; `recsys_forward` returns one of these. */
enum { FINE = 0, BAD_TOKEN = 1, BAD_POSITION = 2, BAD_SLOT = 3, BAD_ROW = 4 };

/* A request's token that is run. Padding by repetition is left out. */
typedef struct {
    int64_t request, place; /* place: index into the (batch, tokens) arrays */
} Row;

/* What the threads of a pass share. */
typedef struct Team Team;
typedef struct {
    const Model *model;
    const Pass *pass;
    const Row *rows;       /* distinct tokens */
    const int64_t *wanted; /* which of them each wanted row is */
    int64_t row_count, wanted_count;
    float *hidden; /* (row_count, padded hidden) */
    char *scratch; /* of all threads */
    int64_t scratch_bytes;
    Team *team;
} Work;

void wait_for_team(Team *team);

/* The instruction sets: the same source, compiled for each. */
typedef struct {
    const char *name;
    void (*forward)(const Work *work, int64_t thread, int64_t threads);
    int64_t (*scratch_bytes)(const Model *model, const Pass *pass);
} Variant;

static inline int64_t padded(int64_t count) { return (count + PANEL - 1) / PANEL * PANEL; }

#endif
