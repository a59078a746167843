/* Entry points: check a pass, choose the instruction set, share the rows out to threads. */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "native.h"

#if defined(__x86_64__)
extern const Variant variant_v4, variant_v3, variant_v2;
#else
extern const Variant variant_base;
#endif

/* The instruction sets that this processor has, best first, then NULL. */
static const Variant *available(int64_t place) {
    const Variant *found[4] = {0};
    int count = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const int v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    if (v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        found[count++] = &variant_v4;
    if (v3) found[count++] = &variant_v3;
    found[count++] = &variant_v2;
#else
    found[count++] = &variant_base;
#endif
    return place >= 0 && place < count ? found[place] : 0;
}

static _Atomic int64_t chosen; /* 0: the best */

const Variant *chosen_variant(void) { return available(chosen); }

int64_t recsys_abi(void) { return ABI; }

/* Name of the instruction set at a place of the list, NULL behind its end. */
const char *recsys_variant(int64_t place) {
    const Variant *variant = available(place);
    return variant ? variant->name : 0;
}

/* Use another instruction set than the best; only tests and benchmarks do. */
void recsys_choose(int64_t place) {
    if (available(place)) chosen = place;
}

/* Threads meet in `wait_for_team`. They sleep while they wait, so that they take no processor time
 * from others. */
struct Team {
    pthread_mutex_t lock;
    pthread_cond_t met;
    int64_t size, waiting, round; /* size 0: not all threads have been started yet */
};

void wait_for_team(Team *team) {
    if (!team) return;
    pthread_mutex_lock(&team->lock);
    const int64_t round = team->round;
    if (++team->waiting == team->size) {
        team->waiting = 0;
        team->round++;
        pthread_cond_broadcast(&team->met);
    } else {
        while (team->round == round) pthread_cond_wait(&team->met, &team->lock);
    }
    pthread_mutex_unlock(&team->lock);
}

typedef struct {
    const Work *work;
    const Variant *variant;
    Team *team;
    int64_t thread;
} Share;

static void *run_share(void *given) {
    const Share *share = given;
    pthread_mutex_lock(&share->team->lock);
    while (!share->team->size) pthread_cond_wait(&share->team->met, &share->team->lock);
    const int64_t size = share->team->size;
    pthread_mutex_unlock(&share->team->lock);
    share->variant->forward(share->work, share->thread, size);
    return 0;
}

enum { MOST_THREADS = 64 };

/* A thread takes some 50 microseconds to start and to join, so each needs more work than that. */
#ifndef LEAST_PRODUCTS
#define LEAST_PRODUCTS 4e7
#endif

static int64_t useful_threads(const Work *work) {
    const Model *m = work->model;
    const double width = (double)m->heads * m->head_size * 2 + (double)m->kv_heads * m->head_size * 2;
    const double products = (double)work->row_count * (double)m->layers * (double)m->hidden *
                            (width + 3.0 * (double)m->inner);
    int64_t threads = work->pass->threads < MOST_THREADS ? work->pass->threads : MOST_THREADS;
    if ((double)threads > products / LEAST_PRODUCTS) threads = (int64_t)(products / LEAST_PRODUCTS);
    return threads > 1 ? threads : 1;
}

static void run_team(Work *work, const Variant *variant, int64_t threads) {
    Team team = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, 0, 0};
    pthread_t others[MOST_THREADS];
    Share shares[MOST_THREADS];
    int64_t started = 1;
    work->team = &team;
    for (; started < threads; started++) {
        shares[started] = (Share){work, variant, &team, started};
        if (pthread_create(&others[started], 0, run_share, &shares[started])) break;
    }
    pthread_mutex_lock(&team.lock);
    team.size = started;
    pthread_cond_broadcast(&team.met);
    pthread_mutex_unlock(&team.lock);
    variant->forward(work, 0, started);
    for (int64_t i = 1; i < started; i++) pthread_join(others[i], 0);
    pthread_cond_destroy(&team.met);
    pthread_mutex_destroy(&team.lock);
}

/* Bytes of workspace of a pass. */
int64_t recsys_workspace(const Model *model, const Pass *pass) {
    const int64_t rows = pass->batch * pass->tokens, wanted = pass->batch * pass->rows;
    const int64_t threads = pass->threads > 1 ? pass->threads : 1;
    return aligned(rows * (int64_t)sizeof(Row)) + aligned(wanted * (int64_t)sizeof(int64_t)) +
           aligned(rows * (int64_t)sizeof(int64_t)) +
           aligned(rows * padded(model->hidden) * (int64_t)sizeof(float)) +
           threads * chosen_variant()->scratch_bytes(model, pass);
}

/* Check every index; `place` gets that of the first bad one. */
static int64_t check(const Model *model, const Pass *pass, int64_t *place) {
    for (int64_t i = 0; i < pass->batch * pass->tokens; i++) {
        const int64_t request = i / pass->tokens, slot = pass->write[i] - request * pass->slots;
        *place = i;
        if (pass->token[i] < 0 || pass->token[i] >= model->vocabulary) return BAD_TOKEN;
        if (pass->position[i] < 0 || pass->position[i] >= model->positions) return BAD_POSITION;
        if (slot < 0 || slot >= pass->slots) return BAD_SLOT;
    }
    if (pass->row)
        for (int64_t i = 0; i < pass->batch * pass->rows; i++) {
            *place = i;
            if (pass->row[i] < 0 || pass->row[i] >= pass->tokens) return BAD_ROW;
        }
    return FINE;
}

/* List the distinct tokens, and which of them each wanted row is. */
static void list_rows(Work *work, Row *rows, int64_t *which, int64_t *wanted) {
    const Pass *pass = work->pass;
    for (int64_t i = 0; i < pass->batch * pass->tokens; i++) {
        const int again = i % pass->tokens && pass->write[i] == pass->write[i - 1] &&
                          pass->token[i] == pass->token[i - 1] &&
                          pass->position[i] == pass->position[i - 1];
        if (!again) rows[work->row_count++] = (Row){i / pass->tokens, i};
        which[i] = work->row_count - 1;
    }
    work->wanted_count = pass->batch * pass->rows;
    for (int64_t i = 0; i < work->wanted_count; i++) {
        const int64_t request = i / pass->rows;
        const int64_t token = pass->row ? pass->row[i] : i % pass->rows;
        wanted[i] = which[request * pass->tokens + token];
    }
}

static _Atomic int64_t running; /* passes of this process */

void run_work(Work *work) {
    /* Beside other passes, each gets its part of the processor. */
    const int64_t beside = atomic_fetch_add(&running, 1) + 1;
    int64_t threads = useful_threads(work);
    if (threads > work->pass->threads / beside) threads = work->pass->threads / beside;
    work->team = 0;
    if (threads > 1)
        run_team(work, chosen_variant(), threads);
    else
        chosen_variant()->forward(work, 0, 1);
    atomic_fetch_sub(&running, 1);
}

/* Run a pass. Returns FINE, or what is wrong with it and where; then nothing was written. */
int64_t recsys_forward(const Model *model, const Pass *pass, int64_t *place) {
    const int64_t wrong = check(model, pass, place);
    if (wrong != FINE) return wrong;
    const int64_t count = pass->batch * pass->tokens, wanted_count = pass->batch * pass->rows;
    char *memory = pass->workspace;
    Row *rows = (Row *)memory;
    memory += aligned(count * (int64_t)sizeof(Row));
    int64_t *wanted = (int64_t *)memory;
    memory += aligned(wanted_count * (int64_t)sizeof(int64_t));
    int64_t *which = (int64_t *)memory;
    memory += aligned(count * (int64_t)sizeof(int64_t));
    Work work = {.model = model, .pass = pass, .rows = rows, .wanted = wanted};
    work.hidden = (float *)memory;
    work.scratch = memory + aligned(count * padded(model->hidden) * (int64_t)sizeof(float));
    work.scratch_bytes = chosen_variant()->scratch_bytes(model, pass);
    list_rows(&work, rows, which, wanted);
    run_work(&work);
    return FINE;
}

/* log(sum(exp(logits))) of each of (rows, count) logits. */
void recsys_log_sum_exp(const float *logits, int64_t rows, int64_t count, float *out) {
    for (int64_t r = 0; r < rows; r++) out[r] = chosen_variant()->log_sum_exp(logits + r * count, count);
}
