#include "cpu_ffn.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

// ggml-cpu/vec.h: y = silu(x) * g. Exported, but its header needs ggml-cpu's own compiler flags.
void ggml_vec_swiglu_f32(const int n, float * y, const float * x, const float * g);

#define CACHE_LINE 64
// Units of work. Small units keep threads of different speed busy to the end; each costs one atomic add.
#define QUANT_ELEMENTS 256 // whole blocks of every type
#define GATE_UP_ROWS   8
#define DOWN_ROWS      16
// Bytes prefetched ahead of the current rows: more than memory latency times one core's share of the bandwidth.
#define AHEAD_BYTES    8192
// Bytes of down that a thread prefetches before it waits for the activations.
#define DOWN_FIRST     32768
// While a model decodes, jobs come a few milliseconds apart; threads sleep after this long without one.
#define SPIN_NS        5000000

enum { QUANT, GATE_UP, DOWN, N_PHASES };

// A thread's share of each phase is a contiguous range of units, so that it reads memory in order. A thread that has
// finished its own share claims the remaining units of other shares from their front.
struct worker {
    _Alignas(CACHE_LINE) atomic_int next[N_PHASES];
    int          end[N_PHASES];
    _Alignas(CACHE_LINE) atomic_int active;  // whether it takes part in a job
    int          done_of, n_done;            // expert, and its gate and up units that are done but not reported
    float      * rows;                       // [n_jobs][DOWN_ROWS]
    pthread_t    thread;
    struct mg_cpu_ffn * ffn;
};

// One distinct expert of the current job.
struct chosen {
    const char * gate, * up, * down;
    int          first, last;                // first and last of its (row, k), linked by `following`
    atomic_int   n_left;                     // gate and up units that are not done
    atomic_int   ready;                      // whether the activations are computed
};

struct matrix {
    ggml_vec_dot_t    dot;
    ggml_from_float_t from_float;            // converts to the type that dot takes
    enum ggml_type    dot_type;
    size_t            row_size, input_size;  // bytes of a weight row and of an input row
};

struct mg_cpu_ffn {
    int n_threads, n_embd, n_ff, n_used, max_rows;
    int n_slices, n_gate_up, n_down;         // units per row of x, per expert, and of down
    struct worker * workers;

    // the job
    struct matrix   gate, up, down;
    const float   * x, * weights;
    float         * y;
    int             n_rows, n_chosen;
    struct chosen * chosen;
    int           * job_of, * following;     // [n_rows * n_used]: index into chosen or -1; next of the same expert
    char          * x_gate, * x_up;          // x in the types that gate and up take; one buffer if these are equal
    float         * gate_out, * up_out;      // [n_rows * n_used][n_ff]
    char          * act;                     // the activations in the type that down takes
    float         * rows;                    // rows of all workers
    _Alignas(CACHE_LINE) atomic_int n_quant_left;

    _Alignas(CACHE_LINE) atomic_uint open;   // number of the job that threads may enter, 0: none; the futex
    unsigned        n_jobs;
    _Alignas(CACHE_LINE) atomic_int n_sleeping;
    atomic_int      stop;
};

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield" ::: "memory");
#endif
}

// Into the second-level cache: the first is too small for this distance.
static inline void prefetch(const char * at, size_t n) {
    for (size_t i = 0; i < n; i += CACHE_LINE) {
        __builtin_prefetch(at + i, 0, 2);
    }
}

// Wait for a result that another thread is computing now. If it takes long, that thread has lost its core, so yield.
static void wait_for(atomic_int * word, int value) {
    for (unsigned n = 1; atomic_load(word) != value; n++) {
        relax();
        if (n % 256 == 0) {
            sched_yield();
        }
    }
}

static void convert(const struct matrix * m, const float * x, char * out, int from, int n) {
    m->from_float(x + from, out + ggml_row_size(m->dot_type, from), n);
}

static void quant_unit(struct mg_cpu_ffn * c, int unit) {
    const int row = unit / c->n_slices, from = unit % c->n_slices * QUANT_ELEMENTS;
    const int n = c->n_embd - from < QUANT_ELEMENTS ? c->n_embd - from : QUANT_ELEMENTS;
    const float * x = c->x + (size_t) row * c->n_embd;
    convert(&c->gate, x, c->x_gate + row * c->gate.input_size, from, n);
    if (c->x_up != c->x_gate) {
        convert(&c->up, x, c->x_up + row * c->up.input_size, from, n);
    }
    atomic_fetch_sub_explicit(&c->n_quant_left, 1, memory_order_acq_rel);
}

// The thread that finishes the last unit of an expert's gate and up computes its activations.
static void report_gate_up(struct mg_cpu_ffn * c, struct worker * w) {
    struct chosen * e = &c->chosen[w->done_of];
    const int n = w->n_done;
    w->n_done = 0;
    if (n == 0 || atomic_fetch_sub_explicit(&e->n_left, n, memory_order_acq_rel) != n) {
        return;
    }
    for (int job = e->first; job >= 0; job = c->following[job]) {
        float * g = c->gate_out + (size_t) job * c->n_ff;
        ggml_vec_swiglu_f32(c->n_ff, g, g, c->up_out + (size_t) job * c->n_ff);
        c->down.from_float(g, c->act + job * c->down.input_size, c->n_ff);
    }
    atomic_store_explicit(&e->ready, 1, memory_order_release);
}

static void gate_up_unit(struct mg_cpu_ffn * c, struct worker * w, int unit, int end) {
    const int at = unit / c->n_gate_up, from = unit % c->n_gate_up * GATE_UP_ROWS;
    const int to = c->n_ff - from < GATE_UP_ROWS ? c->n_ff : from + GATE_UP_ROWS;
    struct chosen * e = &c->chosen[at];
    const size_t gate_size = c->gate.row_size, up_size = c->up.row_size;
    const int distance = 1 + AHEAD_BYTES / (gate_size + up_size);
    // rows of this expert that belong to the same share
    const int last_at = (end - 1) / c->n_gate_up;
    const int known = last_at > at ? c->n_ff : (end - 1) % c->n_gate_up * GATE_UP_ROWS + GATE_UP_ROWS;
    if (w->done_of != at) {
        report_gate_up(c, w);
        w->done_of = at;
    }
    for (int r = from; r < to; r++) {
        const char * gate = e->gate + r * gate_size, * up = e->up + r * up_size;
        const struct chosen * then = r + distance < known ? e : last_at > at ? e + 1 : NULL;
        if (then) {
            const int row = r + distance - (then == e ? 0 : known);
            prefetch(then->gate + row * gate_size, gate_size);
            prefetch(then->up + row * up_size, up_size);
        }
        for (int job = e->first; job >= 0; job = c->following[job]) {
            const int row = job / c->n_used;
            const size_t out = (size_t) job * c->n_ff + r;
            c->gate.dot(c->n_embd, c->gate_out + out, 0, gate, 0, c->x_gate + row * c->gate.input_size, 0, 1);
            c->up.dot(c->n_embd, c->up_out + out, 0, up, 0, c->x_up + row * c->up.input_size, 0, 1);
        }
    }
    w->n_done++;
}

static void sum_rows(const struct mg_cpu_ffn * c, const float * rows, int from, int n) {
    for (int row = 0; row < c->n_rows; row++) {
        float * y = c->y + (size_t) row * c->n_embd + from;
        memset(y, 0, n * sizeof(float));
        for (int job = row * c->n_used; job < (row + 1) * c->n_used; job++) {
            if (c->job_of[job] < 0) {
                continue;
            }
            for (int r = 0; r < n; r++) {
                y[r] += rows[job * DOWN_ROWS + r] * c->weights[job];
            }
        }
    }
}

static void down_unit(struct mg_cpu_ffn * c, struct worker * w, int unit, int end) {
    const int from = unit * DOWN_ROWS;
    const int n = c->n_embd - from < DOWN_ROWS ? c->n_embd - from : DOWN_ROWS;
    const size_t size = c->down.row_size;
    for (int at = 0; at < c->n_chosen; at++) {
        struct chosen * e = &c->chosen[at];
        const char * rows = e->down + from * size, * then = NULL;
        if (at + 1 < c->n_chosen) {
            then = e[1].down + from * size;
        } else if (unit + 1 < end) {
            then = c->chosen[0].down + (from + DOWN_ROWS) * size;
        }
        wait_for(&e->ready, 1);
        for (int r = 0; r < n; r++) {
            if (then) {
                prefetch(then + r * size, size);
            }
            for (int job = e->first; job >= 0; job = c->following[job]) {
                c->down.dot(c->n_ff, &w->rows[job * DOWN_ROWS + r], 0, rows + r * size, 0,
                        c->act + job * c->down.input_size, 0, 1);
            }
        }
    }
    sum_rows(c, w->rows, from, n);
}

static int claim(struct worker * w, int phase) {
    // load first: an atomic add takes the cache line away from its owner
    if (atomic_load_explicit(&w->next[phase], memory_order_relaxed) >= w->end[phase]) {
        return -1;
    }
    const int unit = atomic_fetch_add_explicit(&w->next[phase], 1, memory_order_relaxed);
    return unit < w->end[phase] ? unit : -1;
}

static void first_weights(struct mg_cpu_ffn * c, struct worker * w) {
    const int unit = atomic_load_explicit(&w->next[GATE_UP], memory_order_relaxed);
    if (unit < w->end[GATE_UP]) {
        const struct chosen * e = &c->chosen[unit / c->n_gate_up];
        const int row = unit % c->n_gate_up * GATE_UP_ROWS;
        prefetch(e->gate + row * c->gate.row_size, AHEAD_BYTES / 2);
        prefetch(e->up + row * c->up.row_size, AHEAD_BYTES / 2);
    }
}

// Prefetch the thread's share of down in the order of use, until the first expert's activations are ready.
static void first_down(struct mg_cpu_ffn * c, struct worker * w) {
    const size_t size = DOWN_ROWS * c->down.row_size;
    const int first = atomic_load_explicit(&w->next[DOWN], memory_order_relaxed);
    size_t asked = 0;
    for (int unit = first; unit < w->end[DOWN]; unit++) {
        for (int at = 0; at < c->n_chosen; at++, asked += size) {
            if (asked >= DOWN_FIRST || atomic_load_explicit(&c->chosen[0].ready, memory_order_relaxed)) {
                return;
            }
            prefetch(c->chosen[at].down + unit * size, size);
        }
    }
}

static void take_part(struct mg_cpu_ffn * c, int t) {
    struct worker * w = &c->workers[t];
    int unit;
    first_weights(c, w);
    for (int i = 0; i < c->n_threads; i++) {
        while ((unit = claim(&c->workers[(t + i) % c->n_threads], QUANT)) >= 0) {
            quant_unit(c, unit);
        }
    }
    wait_for(&c->n_quant_left, 0);
    for (int i = 0; i < c->n_threads; i++) {
        struct worker * from = &c->workers[(t + i) % c->n_threads];
        while ((unit = claim(from, GATE_UP)) >= 0) {
            gate_up_unit(c, w, unit, from->end[GATE_UP]);
        }
        report_gate_up(c, w);
        if (i == 0) {
            first_down(c, w);
        }
    }
    for (int i = 0; i < c->n_threads; i++) {
        struct worker * from = &c->workers[(t + i) % c->n_threads];
        while ((unit = claim(from, DOWN)) >= 0) {
            down_unit(c, w, unit, from->end[DOWN]);
        }
    }
}

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t) t.tv_sec * 1000000000u + t.tv_nsec;
}

// Spin until there is a job other than `seen`, or until stop; false when the time is up.
static bool spin(struct mg_cpu_ffn * c, unsigned seen) {
    const uint64_t start = now_ns();
    for (unsigned n = 1;; n++) {
        const unsigned open = atomic_load_explicit(&c->open, memory_order_relaxed);
        if ((open && open != seen) || atomic_load_explicit(&c->stop, memory_order_relaxed)) {
            return true;
        }
        relax();
        if (n % 64 == 0 && now_ns() - start > SPIN_NS) {
            return false;
        }
        if (n % 1024 == 0) {
            sched_yield(); // for machines with fewer cores than runnable threads
        }
    }
}

static void wake(struct mg_cpu_ffn * c, int n) {
    if (atomic_load(&c->n_sleeping)) {
        syscall(SYS_futex, &c->open, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0);
    }
}

// Sleep while no job is open. The caller of mg_cpu_ffn_begin wakes only one thread, because it has work to do, and
// that thread wakes the others.
static void sleep_until_open(struct mg_cpu_ffn * c) {
    atomic_fetch_add(&c->n_sleeping, 1);
    syscall(SYS_futex, &c->open, FUTEX_WAIT_PRIVATE, 0, NULL, NULL, 0);
    atomic_fetch_sub(&c->n_sleeping, 1);
    wake(c, INT_MAX);
}

static void * run_worker(void * argument) {
    struct worker * w = argument;
    struct mg_cpu_ffn * c = w->ffn;
    unsigned seen = 0;
    while (!atomic_load(&c->stop)) {
        if (!spin(c, seen)) {
            sleep_until_open(c);
            continue;
        }
        const unsigned open = atomic_load(&c->open);
        if (!open || open == seen || atomic_load(&c->stop)) {
            continue;
        }
        // either the caller sees that this thread is active, or this thread sees that the job is closed
        atomic_store(&w->active, 1);
        if (atomic_load(&c->open) == open) {
            take_part(c, (int) (w - c->workers));
        }
        atomic_store_explicit(&w->active, 0, memory_order_release);
        seen = open;
    }
    return NULL;
}

static struct matrix matrix_of(enum ggml_type type, int n_in) {
    const struct ggml_type_traits_cpu * traits = ggml_get_type_traits_cpu(type);
    const enum ggml_type dot_type = traits->vec_dot_type;
    return (struct matrix) {
        traits->vec_dot, ggml_get_type_traits_cpu(dot_type)->from_float, dot_type,
        ggml_row_size(type, n_in), ggml_row_size(dot_type, n_in),
    };
}

// Group the (row, k) by expert, in order of first appearance.
static void group(struct mg_cpu_ffn * c, const struct mg_cpu_ffn_layer * layer, const int32_t * ids) {
    c->n_chosen = 0;
    for (int job = 0; job < c->n_rows * c->n_used; job++) {
        const int32_t id = ids[job];
        c->job_of[job] = c->following[job] = -1;
        if (id < 0 || id >= layer->n_expert) {
            continue;
        }
        const char * gate = (const char *) layer->gate + id * layer->gate_stride;
        int at = 0;
        while (at < c->n_chosen && c->chosen[at].gate != gate) {
            at++;
        }
        struct chosen * e = &c->chosen[at];
        c->job_of[job] = at;
        if (at < c->n_chosen) {
            c->following[e->last] = job;
            e->last = job;
            continue;
        }
        c->n_chosen++;
        e->gate = gate;
        e->up   = (const char *) layer->up   + id * layer->up_stride;
        e->down = (const char *) layer->down + id * layer->down_stride;
        e->first = e->last = job;
        atomic_init(&e->n_left, c->n_gate_up);
        atomic_init(&e->ready, 0);
    }
}

static void share_out(struct mg_cpu_ffn * c) {
    const int n_units[N_PHASES] = { c->n_rows * c->n_slices, c->n_chosen * c->n_gate_up, c->n_down };
    for (int t = 0; t < c->n_threads; t++) {
        for (int phase = 0; phase < N_PHASES; phase++) {
            const int64_t n = n_units[phase];
            atomic_init(&c->workers[t].next[phase], (int) (n * t / c->n_threads));
            c->workers[t].end[phase] = (int) (n * (t + 1) / c->n_threads);
        }
    }
    atomic_init(&c->n_quant_left, n_units[QUANT]);
}

void mg_cpu_ffn_begin(struct mg_cpu_ffn * c, const struct mg_cpu_ffn_layer * layer, const float * x,
        const int32_t * ids, const float * weights, int n_rows, float * y) {
    mg_cpu_ffn_end(c); // a job that an interrupt kept the caller from ending
    c->x = x;
    c->weights = weights;
    c->y = y;
    c->n_rows = n_rows;
    c->gate = matrix_of(layer->gate_type, c->n_embd);
    c->up   = matrix_of(layer->up_type, c->n_embd);
    c->down = matrix_of(layer->down_type, c->n_ff);
    c->x_up = c->x_gate + (c->up.dot_type == c->gate.dot_type ? 0 : (size_t) 4 * c->n_embd * c->max_rows);
    group(c, layer, ids);
    if (c->n_chosen == 0) {
        memset(y, 0, sizeof(float) * c->n_embd * n_rows);
        return;
    }
    share_out(c);
    c->n_jobs += c->n_jobs + 1 ? 1 : 2; // never 0
    atomic_store(&c->open, c->n_jobs);
    wake(c, 1);
}

void mg_cpu_ffn_end(struct mg_cpu_ffn * c) {
    if (!atomic_load(&c->open)) {
        return;
    }
    take_part(c, 0);
    // All units are claimed. A thread that still holds one is active; a thread that comes now finds the job closed.
    atomic_store(&c->open, 0);
    for (int t = 1; t < c->n_threads; t++) {
        wait_for(&c->workers[t].active, 0);
    }
}

static void * room(size_t n_bytes) {
    const size_t size = (n_bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    void * at = aligned_alloc(CACHE_LINE, size);
    return at ? memset(at, 0, size) : NULL;
}

static bool allocate(struct mg_cpu_ffn * c) {
    const size_t n_jobs = (size_t) c->max_rows * c->n_used, n_threads = c->n_threads;
    // no input type of a dot product is wider than 4 bytes per element
    const size_t x_size = (size_t) 4 * c->n_embd * c->max_rows, act_size = 4 * n_jobs * c->n_ff;
    return (c->workers = room(n_threads * sizeof(struct worker))) &&
        (c->chosen    = room(n_jobs * sizeof(struct chosen))) &&
        (c->job_of    = room(n_jobs * sizeof(int))) &&
        (c->following = room(n_jobs * sizeof(int))) &&
        (c->x_gate    = room(2 * x_size)) &&
        (c->gate_out  = room(act_size)) &&
        (c->up_out    = room(act_size)) &&
        (c->act       = room(act_size)) &&
        (c->rows      = room(n_threads * n_jobs * DOWN_ROWS * sizeof(float)));
}

static void release(struct mg_cpu_ffn * c) {
    void * all[] = {
        c->workers, c->chosen, c->job_of, c->following, c->x_gate, c->gate_out, c->up_out, c->act, c->rows, c,
    };
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        free(all[i]);
    }
}

// These threads block signals from outside, because Ctrl-C must reach the interpreter's thread. Signals that a thread's
// own instruction raises stay unblocked: a blocked one ends the process before a handler can run (sigbus.c).
static int start(struct mg_cpu_ffn * c) {
    sigset_t all, before;
    sigfillset(&all);
    static const int faults[] = { SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGTRAP };
    for (size_t i = 0; i < sizeof(faults)/sizeof(faults[0]); i++) {
        sigdelset(&all, faults[i]);
    }
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int n = 1;
    while (n < c->n_threads && !pthread_create(&c->workers[n].thread, NULL, run_worker, &c->workers[n])) {
        n++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return n;
}

static void stop(struct mg_cpu_ffn * c, int n_started) {
    atomic_store(&c->stop, 1);
    atomic_store(&c->open, 1); // from now on no thread goes to sleep
    wake(c, INT_MAX);
    for (int t = 1; t < n_started; t++) {
        pthread_join(c->workers[t].thread, NULL);
    }
    release(c);
}

struct mg_cpu_ffn * mg_cpu_ffn_new(int n_threads, int n_embd, int n_ff, int n_expert_used, int max_rows) {
    struct mg_cpu_ffn * c = room(sizeof(struct mg_cpu_ffn));
    if (!c) {
        return NULL;
    }
    c->n_threads = n_threads;
    c->n_embd    = n_embd;
    c->n_ff      = n_ff;
    c->n_used    = n_expert_used;
    c->max_rows  = max_rows;
    c->n_slices  = (n_embd + QUANT_ELEMENTS - 1) / QUANT_ELEMENTS;
    c->n_gate_up = (n_ff + GATE_UP_ROWS - 1) / GATE_UP_ROWS;
    c->n_down    = (n_embd + DOWN_ROWS - 1) / DOWN_ROWS;
    if (!allocate(c)) {
        release(c);
        return NULL;
    }
    for (int t = 0; t < n_threads; t++) {
        c->workers[t].ffn = c;
        c->workers[t].rows = c->rows + (size_t) t * max_rows * n_expert_used * DOWN_ROWS;
    }
    ggml_cpu_init(); // initializes tables that some dot products read
    const int n_started = start(c);
    if (n_started < n_threads) {
        stop(c, n_started);
        return NULL;
    }
    return c;
}

void mg_cpu_ffn_free(struct mg_cpu_ffn * c) {
    stop(c, c->n_threads);
}
