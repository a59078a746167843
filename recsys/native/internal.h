/* What the sources share among themselves. */
#ifndef RECSYS_INTERNAL_H
#define RECSYS_INTERNAL_H

#include "native.h"

/* The blend: the same source, compiled for each instruction set. */
typedef struct {
    int64_t (*bytes)(const Fitted *fitted, int64_t batch, int64_t most, int64_t width);
    void (*cosines)(const Fitted *fitted, const Asked *asked, char *workspace, float *out);
    void (*propose)(const Fitted *fitted, const Asked *asked, const Proposals *p, char *workspace);
    void (*rank)(const Fitted *fitted, const Asked *asked, const Ranking *r, char *workspace);
    void (*because)(const Fitted *fitted, const Asked *asked, const int32_t *items, int64_t count,
                    char *workspace, int64_t *out);
} Blend;

/* c = a W^T + bias, or c += it, of `rows` rows; those of c have `width` floats. */
typedef void (*Multiply)(const Linear *w, const float *a, int64_t a_row, int64_t rows, float *c,
                         int64_t c_row, int64_t width, int add);

typedef struct {
    int64_t (*bytes)(const Sasrec *model);
    void (*run)(const Sasrec *model, const Asked *asked, Multiply multiply, char *workspace,
                float *out);
} States;

/* Trees of a search: each has `levels` ancestors per token, slots of its path, its own the last. */
typedef struct {
    const int64_t *length;
    const int64_t *window;
    const int32_t *path;
    int64_t levels;
} Tree;

/* A request's token that is run. Padding by repetition is left out. */
typedef struct {
    int64_t request, place; /* place: index into the (batch, tokens) arrays */
} Row;

/* What the threads of a pass share. */
typedef struct Team Team;
typedef struct {
    const Model *model;
    const Pass *pass;
    const Tree *tree; /* NULL: attention follows the masks of the pass */
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
    float (*log_sum_exp)(const float *logits, int64_t count);
    void (*project)(const Model *model, int64_t first, int64_t count, float *workspace, float *out);
    Multiply multiply;
    const Blend *blend;
    const States *states;
} Variant;

/* The chosen instruction set, and a pass of several threads where that pays (entry.c). */
const Variant *chosen_variant(void);
void run_work(Work *work);
static inline int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

static inline int64_t padded(int64_t count) { return (count + PANEL - 1) / PANEL * PANEL; }

#endif
