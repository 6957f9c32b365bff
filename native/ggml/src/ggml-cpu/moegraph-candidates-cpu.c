#include "moegraph-cpu.h"
#include "ggml-impl.h"
#include "moegraph-candidates.h"
#include "vec.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define COLUMNS MOEGRAPH_CANDIDATES_COLUMNS
#define PARTS   MOEGRAPH_CANDIDATES_PARTS

struct token {
    float   value;
    int32_t id;
};

// Tokens that reach a floor, in any order; n counts also those that have no room.
struct found {
    float        floor;
    int          n;
    struct token tokens[MOEGRAPH_CANDIDATES];
};

// The work buffer; behind it, each thread has maxima of its own, of logits and of scores, and all have the scores.
struct work {
    struct found likely;
    struct found early;
    double       sums[PARTS];
};

size_t moegraph_candidates_work_size(const struct ggml_tensor * op, int n_tasks) {
    return sizeof(struct work) + ((size_t) n_tasks*2*COLUMNS + op->src[0]->ne[0])*sizeof(float);
}

// The logarithm of a normal number, to 1e-6: its mantissa m is in [0.7, 1.4], and log(m) is a series of
// (m - 1)/(m + 1). A function of its own, because loops over it become vector code.
static inline float log_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    const uint32_t shifted = bits - 0x3F3504F3u; // sqrt(1/2) becomes 0
    const float    power   = (float) ((int32_t) shifted >> 23);
    bits = (shifted & 0x007FFFFFu) + 0x3F3504F3u;
    memcpy(&x, &bits, sizeof(bits));
    const float s = (x - 1.0f)/(x + 1.0f), z = s*s;
    return power*0.69314718f + 2.0f*s*(1.0f + z*(1.0f/3 + z*(1.0f/5 + z*(1.0f/7 + z*(1.0f/9)))));
}

// The scores of up to COLUMNS tokens. In float, as on the device: the host computes those of the listed tokens again.
static void score(const struct moegraph_draw * draw, const float * logits, int first, int n, float * scores) {
    const uint64_t key = (uint64_t) draw->key[1] << 32 | draw->key[0];
    float v[COLUMNS];
    for (int i = 0; i < n; ++i) {
        v[i] = ((float) (int64_t) (moegraph_random(key, (uint32_t) (first + i)) >> 11) + 0.5f)*0x1p-53f;
    }
    for (int i = 0; i < n; ++i) {
        // -log(1 - v), exact also where 1 - v is rounded
        const float rest = 1.0f - MIN(v[i], 0x1.fffffep-1f), lost = 1.0f - rest;
        const float e    = lost > 0.0f ? -log_of(rest)*(v[i]/lost) : v[i];
        scores[i] = logits[i]*draw->inv_temperature - log_of(e);
    }
}

static int by_value(const void * a, const void * b) {
    const struct token * x = (const struct token *) a, * y = (const struct token *) b;
    return moegraph_is_before(x->value, x->id, y->value, y->id) ? -1 : 1;
}

static void raise_to(float * maxima, const float * values, int n) {
    for (int c = 0; c < n; ++c) {
        maxima[c] = values[c] > maxima[c] ? values[c] : maxima[c];
    }
}

// The n-th largest of the columns' maxima over all threads; changes their order.
static float nth_maximum(float * maxima, int n_threads, int n) {
    for (int t = 1; t < n_threads; ++t) {
        raise_to(maxima, maxima + t*2*COLUMNS, COLUMNS);
    }
    int low = 0, high = COLUMNS - 1;
    while (low < high) { // the n-th is in [low, high]; larger ones are before it
        const float pivot = maxima[(low + high)/2];
        int i = low, j = high;
        while (i <= j) {
            for (; maxima[i] > pivot; ++i) {}
            for (; maxima[j] < pivot; --j) {}
            if (i <= j) {
                const float swapped = maxima[i];
                maxima[i++] = maxima[j];
                maxima[j--] = swapped;
            }
        }
        if (n - 1 <= j) {
            high = j;
        } else if (n - 1 >= i) {
            low = i;
        } else {
            break;
        }
    }
    return maxima[n - 1];
}

// The sum of exp(logit - largest) of up to COLUMNS tokens; NaN if a logit is not finite.
static double sum_weights(const float * logits, int n, float largest) {
    float    weights[COLUMNS];
    uint32_t bad = 0;
    for (int i = 0; i < n; ++i) {
        uint32_t bits;
        memcpy(&bits, logits + i, sizeof(bits));
        bad |= (bits & 0x7F800000u) == 0x7F800000u;
    }
    return bad ? NAN : ggml_vec_soft_max_f32(n, weights, logits, largest);
}

static void add(struct found * found, float value, int32_t id) {
    const int at = __atomic_fetch_add(&found->n, 1, __ATOMIC_RELAXED);
    if (at < MOEGRAPH_CANDIDATES) {
        found->tokens[at] = (struct token) { value, id };
    }
}

static void sort_found(struct found * found) {
    if (found->n <= MOEGRAPH_CANDIDATES) {
        qsort(found->tokens, found->n, sizeof(struct token), by_value);
    }
}

static void finish(const struct work * work, const float * logits, int n, const struct moegraph_draw * draw,
        struct moegraph_listed * out) {
    double total = 0.0;
    for (int p = 0; p < PARTS; ++p) {
        total += work->sums[p];
    }
    out->total    = (float) total;
    out->floor    = work->likely.floor;
    out->n_likely = work->likely.n;
    for (int i = 0; i < out->n_likely && out->n_likely <= MOEGRAPH_CANDIDATES; ++i) {
        out->ids[i]    = work->likely.tokens[i].id;
        out->logits[i] = work->likely.tokens[i].value;
    }
    out->early_floor = work->early.floor;
    out->n_early     = work->early.n;
    for (int i = 0; i < out->n_early && out->n_early <= MOEGRAPH_EARLY; ++i) {
        out->early_ids[i]    = work->early.tokens[i].id;
        out->early_logits[i] = logits[out->early_ids[i]];
    }
    for (int i = 0; i < MOEGRAPH_DRAW_IDS; ++i) {
        const int32_t id = draw->wanted[i];
        out->wanted[i] = id >= 0 && id < n ? logits[id] : NAN;
    }
}

static void sum_above(const float * logits, int begin, int end, int part, struct moegraph_listed * out) {
    float   sums[MOEGRAPH_CANDIDATES_MASSES] = { 0.0f };
    int32_t counts[MOEGRAPH_CANDIDATES_MASSES] = { 0 };
    const int n = out->n_early > MOEGRAPH_EARLY ? 0 : out->n_early < MOEGRAPH_CANDIDATES_MASSES ? out->n_early :
        MOEGRAPH_CANDIDATES_MASSES;
    for (int k = 0; k < n; ++k) {
        const float   logit = out->early_logits[k];
        const int32_t id    = out->early_ids[k];
        for (int i = begin; i < end; ++i) {
            if (moegraph_is_before(logits[i], i, logit, id)) {
                sums[k] += expf(logits[i] - out->largest);
                ++counts[k];
            }
        }
    }
    memcpy(out->above[part], sums, sizeof(sums));
    memcpy(out->n_above[part], counts, sizeof(counts));
}

void moegraph_compute_forward_candidates(const struct ggml_compute_params * params, struct ggml_tensor * dst) {
    const int ith = params->ith, nth = params->nth, n = (int) dst->src[0]->ne[0];
    const int per_part = GGML_PAD((n + PARTS - 1)/PARTS, COLUMNS); // so a column's tokens are COLUMNS apart
    struct work * work   = (struct work *) params->wdata;
    float       * maxima = (float *) (work + 1), * own = maxima + ith*2*COLUMNS, * scores = maxima + nth*2*COLUMNS;

    for (int row = 0; row < dst->ne[1]; ++row) {
        const float * logits = (const float *) dst->src[0]->data + (int64_t) row*n;
        const struct moegraph_draw * draw = (const struct moegraph_draw *) dst->src[1]->data + row;
        struct moegraph_listed * out  = (struct moegraph_listed *) dst->data + row;
        const bool has_scores = draw->inv_temperature > 0.0f;

        for (int c = 0; c < 2*COLUMNS; ++c) {
            own[c] = -INFINITY;
        }
        for (int p = ith; p < PARTS; p += nth) {
            for (int first = p*per_part; first < n && first < (p + 1)*per_part; first += COLUMNS) {
                const int m = MIN(COLUMNS, n - first);
                raise_to(own, logits + first, m);
                if (has_scores) {
                    score(draw, logits + first, first, m, scores + first);
                    raise_to(own + COLUMNS, scores + first, m);
                }
            }
        }
        ggml_barrier(params->threadpool);
        if (ith == 0) {
            work->likely.n = work->early.n = 0;
            out->largest = -INFINITY;
            for (int c = 0; c < nth*2*COLUMNS; ++c) {
                out->largest = MAX(out->largest, c/COLUMNS % 2 == 0 ? maxima[c] : -INFINITY);
            }
            work->likely.floor = nth_maximum(maxima, nth, MOEGRAPH_LIKELY);
            work->early.floor  = nth_maximum(maxima + COLUMNS, nth, MOEGRAPH_CANDIDATES_EARLY);
            if (n <= MOEGRAPH_CANDIDATES) {
                work->likely.floor = -INFINITY;
            }
        }
        ggml_barrier(params->threadpool);
        for (int p = ith; p < PARTS; p += nth) {
            work->sums[p] = 0.0;
            for (int first = p*per_part; first < n && first < (p + 1)*per_part; first += COLUMNS) {
                const int m = MIN(COLUMNS, n - first);
                work->sums[p] += sum_weights(logits + first, m, out->largest);
                for (int i = first; i < first + m; ++i) {
                    if (logits[i] >= work->likely.floor) {
                        add(&work->likely, logits[i], i);
                    }
                    if (has_scores && scores[i] >= work->early.floor) {
                        add(&work->early, scores[i], i);
                    }
                }
            }
        }
        ggml_barrier(params->threadpool);
        if (ith == 0) {
            sort_found(&work->likely);
            sort_found(&work->early);
            finish(work, logits, n, draw, out);
        }
        ggml_barrier(params->threadpool);
        for (int p = ith; p < PARTS; p += nth) {
            sum_above(logits, MIN(n, p*per_part), MIN(n, (p + 1)*per_part), p, out);
        }
    }
}
