/* Entry points: check a pass, choose the instruction set, share the rows out to threads. */
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "internal.h"

#if defined(__x86_64__)
#include <cpuid.h>

extern const Variant variant_v4, variant_v3, variant_v2;
#else
extern const Variant variant_base;
#endif

#if defined(__x86_64__)
/* The level of x86-64 that processor and operating system have: 4, 3 or 2. The compilers' own test
 * (__builtin_cpu_supports) does not work with every one of them. */
static int find_level(void) {
    unsigned a, b, c, d, low, high;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 2;
    const int fma = c >> 12 & 1, saves = c >> 27 & 1, f16 = c >> 29 & 1;
    if (!fma || !saves || !f16 || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 2;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    const unsigned v3 = 1u << 3 | 1u << 5 | 1u << 8;                           /* BMI, AVX2, BMI2 */
    const unsigned v4 = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31; /* F DQ CD BW VL */
    if ((low & 0x6) != 0x6 || (b & v3) != v3) return 2;
    return (low & 0xe6) == 0xe6 && (b & v4) == v4 ? 4 : 3;
}

static int level(void) {
    static _Atomic int known; /* asking the processor takes long in a virtual machine */
    if (!known) known = find_level();
    return known;
}
#endif

/* The instruction sets that this processor has, best first, then NULL. */
static const Variant *available(int64_t place) {
    if (place < 0) return 0;
#if defined(__x86_64__)
    const Variant *all[] = {&variant_v4, &variant_v3, &variant_v2};
    place += 4 - level();
#else
    const Variant *all[] = {&variant_base};
#endif
    const int64_t count = sizeof(all) / sizeof(all[0]);
    return place < count ? all[place] : 0;
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
    const double width = 2.0 * (double)((m->heads + m->kv_heads) * m->head_size);
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

enum { PROJECTED = 64 }; /* tokens at a time */

/* Bytes of workspace of `recsys_project`. */
int64_t recsys_project_workspace(const Model *model) {
    return 2 * PROJECTED * padded(model->hidden) * (int64_t)sizeof(float);
}

/* Compute what `Model.projected` has of the whole vocabulary. */
void recsys_project(const Model *model, float *workspace, float *out) {
    for (int64_t first = 0; first < model->vocabulary; first += PROJECTED) {
        const int64_t left = model->vocabulary - first;
        chosen_variant()->project(model, first, left < PROJECTED ? left : PROJECTED, workspace,
                                  out);
    }
}

/* log(sum(exp(logits))) of each of (rows, count) logits. */
void recsys_log_sum_exp(const float *logits, int64_t rows, int64_t count, float *out) {
    const Variant *variant = chosen_variant();
    for (int64_t r = 0; r < rows; r++) out[r] = variant->log_sum_exp(logits + r * count, count);
}

/* The blend (blend.c). The workspace is all zeros before the first call, and belongs to one catalog and
 * one call at a time; calls leave what has to be zero as zeros. */
int64_t recsys_blend_workspace(const Fitted *fitted, int64_t batch, int64_t most, int64_t width) {
    return chosen_variant()->blend->bytes(fitted, batch, most, width);
}

void recsys_cosines(const Fitted *fitted, const Asked *asked, char *workspace, float *out) {
    chosen_variant()->blend->cosines(fitted, asked, workspace, out);
}

void recsys_propose(const Fitted *fitted, const Asked *asked, const Proposals *p, char *workspace) {
    chosen_variant()->blend->propose(fitted, asked, p, workspace);
}

void recsys_rank(const Fitted *fitted, const Asked *asked, const Ranking *r, char *workspace) {
    chosen_variant()->blend->rank(fitted, asked, r, workspace);
}

void recsys_because(const Fitted *fitted, const Asked *asked, const int32_t *items, int64_t count,
                    char *workspace, int64_t *out) {
    chosen_variant()->blend->because(fitted, asked, items, count, workspace, out);
}

/* SASRec (sasrec.c). `asked` has no more than the histories; `out` is (batch, hidden). */
int64_t recsys_states_workspace(const Sasrec *model) {
    return chosen_variant()->states->bytes(model);
}

void recsys_states(const Sasrec *model, const Asked *asked, char *workspace, float *out) {
    chosen_variant()->states->run(model, asked, chosen_variant()->multiply, workspace, out);
}
