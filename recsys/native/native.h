/* What Python calls: structures and functions. Everything is float32. All arrays are row-major.
 *
 * cffi reads this file (`recsys.native.library`): declarations without function types and macros.
 */
#ifndef RECSYS_NATIVE_H
#define RECSYS_NATIVE_H

#include <stdint.h>

enum { ABI = 13 };       /* raise it with every change of these structures */
enum { PANEL = 32 };     /* columns of a panel of packed weights */
enum { ITEMS_OF_PANEL = 16 }; /* whose vectors the blend multiplies together */
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
    /* (vocabulary, padded queries + padded keys and values) of layer 0 before norms of heads and
     * rotation, which depend on the token alone (`recsys_project`); NULL: every pass computes them. */
    const float *projected;
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

/* A trie as `recsys.constraint.trie.ItemTrie` has it. */
typedef struct {
    int64_t levels, leaves;          /* the first leaf, which is row 0 */
    int64_t wide_symbols, wide_rows; /* int32, otherwise int16 */
    const int32_t *first_child;
    const void *symbol, *rows; /* rows: (rows, levels) tokens */
    const int64_t *alphabet;
} Trie;

/* A whole beam search over a batch, by log-probabilities over the vocabulary, plus boosts. */
typedef struct {
    int64_t batch, longest, slots, prompt, beams, threads;
    const int64_t *token;          /* (batch, longest) */
    const int64_t *length, *cached; /* (batch,) tokens, and how many of them are in the cache */
    const int64_t *width;          /* (levels,) beams to keep */
    int64_t window[MOST_MASKS];    /* positions that a token attends to; 0: all before it */
    const uint8_t *const *allowed; /* (batch,) flags of states, each NULL for all; NULL: all */
    const int64_t *const *dead;    /* (levels,) states that are excluded, ascending, or NULL */
    const int64_t *dead_count;     /* (levels,) how many per request */
    const float *const *gains;     /* (batch,) boosts of states, each NULL for none; NULL: none */
    const float *limit;            /* (batch,) prefixes that score less are pruned; NULL: none */
    /* Nodes that the first pass runs besides the prompts, in the slots before those of beams:
     * (batch, extra) tokens, -1 for padding behind the last; their places among these nodes, -1 for
     * the prompt; depths from 1. `extra_logits` gets (batch, 1 + extra, vocabulary) logits of the
     * prompt and the nodes (padding: the prompt's), unless it is NULL. Beams at the states of these
     * nodes are then not run again. */
    int64_t extra;
    const int64_t *extra_token, *extra_parent, *extra_depth, *extra_state;
    float *extra_logits;
    float *cache; /* as in Pass */
    int64_t cache_layer, cache_values;
    void *workspace;
    /* The result, best first, of equal scores the lower row: rows and log-probabilities, without
     * boosts, of (batch, beams), -1 and -inf behind the last one, and their (batch, beams, levels)
     * tokens. */
    int64_t *row, *sequence;
    float *log_prob;
    /* (batch,) whether no other row scores more, and whether all logits were finite */
    uint8_t *complete, *finite;
    int64_t *nodes; /* (batch,) beams that were run or were extra nodes; may be NULL */
} Search;

/* A sparse matrix by rows; `start` is NULL where there is none. Rows may be in any order. */
typedef struct {
    const int64_t *start;
    const int32_t *column;
    const float *value;
} Matrix;

/* What `recsys.retrieval.Retrieval` has fitted on a catalog; parts that it lacks are NULL. */
typedef struct {
    int64_t items, terms, vector_size, state_size;
    Matrix item_item, content;
    Matrix postings; /* `content` transposed: the items of each term */
    const float *vectors, *states;           /* (items, vector_size); of SASRec, (items, state_size) */
    /* The states, or without SASRec the vectors, with zeros up to a multiple of ITEMS_OF_PANEL items
     * and dimensions: (panels, dimensions, ITEMS_OF_PANEL). */
    const float *panels;
    const double *popularity;                /* (items,) probabilities */
    const int64_t *order;                    /* items by descending popularity */
    const double *log_counts, *log_recent;   /* (items,) values of plain sources */
    const uint8_t *eventless;                /* (items,) whether an item has no events */
    double smoothing;
} Fitted;

/* Histories of a batch, oldest event first; items outside the catalog only age the others. */
typedef struct {
    int64_t batch;
    const int64_t *offset;                /* (batch + 1,) */
    const int32_t *history;
    const double *decay;                  /* weights by age, from 0 to the longest history */
    const uint8_t *blocked;               /* (batch, items) */
    const float *states;                  /* (batch, state_size) last states of SASRec */
} Asked;

typedef struct {
    int64_t k, half, quarter; /* items by evidence, of further sources, of popular ones */
    int64_t near, width;
    const float *cosines;   /* (batch, items) of `recsys_cosines`; NULL without content */
    const int64_t *nearest; /* (batch, near) items with the largest of them, in any order */
    int32_t *items;         /* (batch, width) the proposals, then -1 */
    uint8_t *supported;     /* (batch, width) whether it is not proposed for popularity alone */
    /* (batch, 2, MOST_RANK) the largest shares of evidence and logits of SASRec of all items that are
     * not in the history, descending; written as far as there are any. */
    float *best;
} Proposals;

/* Sources of the reranker, and forms of a source's features: its value, how far that is above a knee,
 * and log(1 + rank) among the items that are not in the history. */
enum { ITEM_ITEM, VECTORS, CONTENT, SASREC, MODEL, POPULARITY, RECENT };
enum { VALUE, ABOVE, RANK };
enum { MOST_FEATURES = 16, MOST_UNITS = 256, MOST_RANK = 50 };

/* `of_new` is a further weight for items without events, `of_again` the only one for items of the
 * history. */
typedef struct {
    int64_t source, form;
    double knee, weight, of_new, of_again;
} Feature;

typedef struct {
    int64_t width, k, features, weighs_new;
    int64_t units, input_count; /* of the network; 0 for none */
    /* In the order of the reranker's sources; of a source, its value comes first. */
    Feature feature[MOST_FEATURES];
    double is_new;
    const int64_t *input;    /* (input_count,) places of features */
    const double *network;   /* (input_count + 2, units): weights of each input, biases, outputs */
    const double *log_rank;  /* (MOST_RANK + 1,) log(1 + rank) */
    const float *top;        /* (batch, 2, MOST_RANK) `best` of the proposals */
    const int32_t *items;    /* (batch, width), -1 for none; of equal items the first counts */
    const double *model;     /* (batch, width) the model's feature */
    const int8_t *source;    /* (batch, width) */
    const double *gains;     /* (batch, width) of boosts; NULL for none */
    /* (batch, width) the rest of the score of an item of the history; NaN for other items, NULL
     * where there are none */
    const double *again;
    int32_t *best;           /* (batch, k), best first, then -1 */
    float *score;
    int8_t *best_source;
} Ranking;

/* A layer of SASRec. `mixed` makes queries, keys and values; norms: weight and bias of each. */
typedef struct {
    Linear mixed, out, inner, outer;
    const float *norm[4];
} SasrecLayer;

typedef struct {
    int64_t items, layers, hidden, inner, heads, window, block;
    const float *vectors, *positions; /* (items, hidden), (window, hidden) */
    const float *norm[2];
    const SasrecLayer *layer;
} Sasrec;

int64_t recsys_abi(void);
const char *recsys_variant(int64_t place); /* instruction sets, best first; NULL behind the last */
void recsys_choose(int64_t place);         /* use this one */

/* Bytes of the workspace of a call, and the call. Passes and searches return what is wrong, and its
 * place. */
int64_t recsys_workspace(const Model *model, const Pass *pass);
int64_t recsys_forward(const Model *model, const Pass *pass, int64_t *place);
int64_t recsys_search_workspace(const Model *model, const Trie *trie, const Search *search);
int64_t recsys_search(const Model *model, const Trie *trie, const Search *search, int64_t *place);
int64_t recsys_project_workspace(const Model *model);
void recsys_project(const Model *model, float *workspace, float *out);
void recsys_log_sum_exp(const float *logits, int64_t rows, int64_t count, float *out);
int64_t recsys_blend_workspace(const Fitted *fitted, int64_t batch, int64_t most, int64_t width);
void recsys_cosines(const Fitted *fitted, const Asked *asked, char *workspace, float *out);
void recsys_propose(const Fitted *fitted, const Asked *asked, const Proposals *p, char *workspace);
void recsys_rank(const Fitted *fitted, const Asked *asked, const Ranking *r, char *workspace);
void recsys_because(const Fitted *fitted, const Asked *asked, const int32_t *items, int64_t count,
                    char *workspace, int64_t *out);
int64_t recsys_states_workspace(const Sasrec *model);
void recsys_states(const Sasrec *model, const Asked *asked, char *workspace, float *out);

#endif
