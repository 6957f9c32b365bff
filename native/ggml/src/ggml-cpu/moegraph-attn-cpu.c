#include "moegraph-cpu.h"
#include "ggml-impl.h"
#include "moegraph-attn.h"

#include <math.h>
#include <string.h>

// Positions of a split: a row's keys are summed so many at a time.
#define MOEGRAPH_ATTN_SPLIT 256

// What a thread needs for one row and head.
struct moegraph_attn_sums {
    float max;
    float sum;
    float scores[MOEGRAPH_ATTN_SPLIT];
    int   at[MOEGRAPH_ATTN_SPLIT];
    float x[MOEGRAPH_ATTN_HEAD];     // a key or a value
    float part[MOEGRAPH_ATTN_HEAD];  // of a split
    float total[MOEGRAPH_ATTN_HEAD];
};

static void moegraph_attn_get(const struct ggml_tensor * pool, int row, int head, int d, float * x) {
    const char * data = (const char *) pool->data + row*pool->nb[1] + ggml_row_size(pool->type, (int64_t) d*head);
    ggml_get_type_traits(pool->type)->to_float(data, x, d);
}

// Adds the n positions of a split, whose pool rows are in sums->at.
static void moegraph_attn_add_split(
        const struct ggml_tensor * dst, const float * q, int head, int n, struct moegraph_attn_sums * sums) {
    const int   d     = (int) dst->src[0]->ne[0];
    const float scale = ggml_get_op_params_f32(dst, 0);
    float max = -INFINITY;
    for (int i = 0; i < n; ++i) {
        moegraph_attn_get(dst->src[1], sums->at[i], head, d, sums->x);
        float score = 0.0f;
        for (int j = 0; j < d; ++j) {
            score += q[j]*sums->x[j];
        }
        sums->scores[i] = score*scale;
        max = fmaxf(max, sums->scores[i]);
    }
    float sum = 0.0f;
    memset(sums->part, 0, d*sizeof(float));
    for (int i = 0; i < n; ++i) {
        const float weight = expf(sums->scores[i] - max);
        moegraph_attn_get(dst->src[2], sums->at[i], head, d, sums->x);
        for (int j = 0; j < d; ++j) {
            sums->part[j] += weight*sums->x[j];
        }
        sum += weight;
    }
    const float most = fmaxf(sums->max, max);
    const float old  = expf(sums->max - most);
    const float new  = expf(max - most);
    for (int j = 0; j < d; ++j) {
        sums->total[j] = sums->total[j]*old + sums->part[j]*new;
    }
    sums->sum = sums->sum*old + sum*new;
    sums->max = most;
}

void moegraph_compute_forward_attn(const struct ggml_compute_params * params, struct ggml_tensor * dst) {
    const struct ggml_tensor *      q    = dst->src[0];
    const struct moegraph_attn_pool pool = moegraph_attn_pool_of(dst);
    const int d = (int) q->ne[0], n_head = (int) q->ne[1], n_rows = (int) q->ne[2];
    const int n_group = n_head/(int) (dst->src[1]->ne[0]/d);
    const float * sinks = dst->src[5] != NULL ? (const float *) dst->src[5]->data : NULL;

    struct moegraph_attn_sums sums;
    for (int i = params->ith; i < n_rows*n_head; i += params->nth) {
        const int r = i/n_head, head = i % n_head;
        const int32_t * row = (const int32_t *) dst->src[4]->data + r*MOEGRAPH_ATTN_WORDS;
        const float *   q_i = (const float *) ((const char *) q->data + r*q->nb[2] + head*q->nb[1]);
        float *         out = (float *) dst->data + (int64_t) i*d;

        const int n_keys = moegraph_attn_n_keys(pool, row);
        sums.max = -INFINITY;
        sums.sum = 0.0f;
        memset(sums.total, 0, d*sizeof(float));
        // splits begin at multiples of their size wherever a window does
        for (int begin = moegraph_attn_first(n_keys, dst->op_params[2]), end; begin < n_keys; begin = end) {
            end = MIN((begin/MOEGRAPH_ATTN_SPLIT + 1)*MOEGRAPH_ATTN_SPLIT, n_keys);
            for (int p = begin; p < end; ++p) {
                sums.at[p - begin] = moegraph_attn_pool_row(
                    pool, row, row[MOEGRAPH_ATTN_SEQ], row[MOEGRAPH_ATTN_N_PAST], p);
            }
            moegraph_attn_add_split(dst, q_i, head/n_group, end - begin, &sums);
        }
        const float most  = sinks != NULL ? fmaxf(sums.max, sinks[head]) : sums.max;
        const float scale = expf(sums.max - most);
        const float sum   = sums.sum*scale + (sinks != NULL ? expf(sinks[head] - most) : 0.0f);
        for (int j = 0; j < d; ++j) {
            out[j] = n_keys > 0 ? sums.total[j]*scale/sum : 0.0f;
        }
    }
}
