// What SSM_CONV and GATED_DELTA_NET in ops.cpp do, with the same calls in the same order, so that each row has the
// bits that a run over its path alone gives.

#include "moegraph-tree.h"
#include "ggml-impl.h"
#include "moegraph.h"
#include "ops.h"
#include "vec.h"

#include <algorithm>
#include <cmath>
#include <cstring>

static constexpr int N_ROWS = MOEGRAPH_TREE_ROWS;

// States that wait while a subtree is visited. A child's subtree is visited before those of larger siblings, so each
// waiting state doubles the rows that a tree must have: 2^(n + 1) - 1 for n, the committed state counted as a row.
static constexpr int N_SAVED = 5;
static_assert((2 << (N_SAVED + 1)) - 1 > N_ROWS + 1, "a tree of N_ROWS could need one more state");

// Row indices in the order of visits, and where states come from and go to.
struct tree_plan {
    struct step {
        int row;
        int from; // saved state to continue, -1: the one of the step before
        int to;   // where the state is kept for other children, -1: nowhere
    };
    int  n_tokens = 0;
    int  parent[N_ROWS];
    step steps[N_ROWS];
};

static void read_parents(tree_plan & plan, const ggml_tensor * parents, const int64_t sequence) {
    plan.n_tokens = (int) parents->ne[0];
    const int32_t * data = (const int32_t *) ((const char *) parents->data + sequence*parents->nb[1]);
    for (int i = 0; i < plan.n_tokens; ++i) {
        plan.parent[i] = data[i] >= 0 && data[i] < i ? data[i] : -1;
    }
}

// Depth first, smaller subtrees first. State 0 starts as the committed one.
static void order_rows(tree_plan & plan) {
    const int n = plan.n_tokens;
    int size[N_ROWS], position[N_ROWS], level[N_ROWS];
    std::fill(size, size + n, 1);
    for (int i = n - 1; i >= 0; --i) {
        if (plan.parent[i] >= 0) {
            size[plan.parent[i]] += size[i];
        }
    }
    for (int i = 0; i < n; ++i) {
        const int p = plan.parent[i];
        int  before = 0;
        bool last   = true;
        for (int j = 0; j < n; ++j) {
            if (j == i || plan.parent[j] != p) {
                continue;
            }
            if (size[j] < size[i] || (size[j] == size[i] && j < i)) {
                before += size[j];
            } else {
                last = false;
            }
        }
        const int level_p = p < 0 ? 0 : level[p];
        position[i] = (p < 0 ? 0 : position[p] + 1) + before;
        level[i]    = level_p + (last ? 0 : 1);
        plan.steps[position[i]] = { i, before == 0 ? -1 : level_p, -1 };
        if (!last && p >= 0) {
            GGML_ASSERT(level_p < N_SAVED);
            plan.steps[position[p]].to = level_p;
        }
    }
}

size_t moegraph_tree_work_size(const ggml_tensor * dst, int n_tasks) {
    if (dst->op == GGML_OP_MOEGRAPH_CONV) {
        return ggml_nelements(dst->src[1])*sizeof(float);
    }
    return (1 + N_SAVED)*dst->src[2]->ne[0]*sizeof(float)*n_tasks;
}

// One column of the state along all rows of one head. Columns do not depend on each other.
struct tree_column {
    int64_t       n;        // S_v
    const char  * q;
    const char  * k;
    const char  * v;        // element of this column
    const char  * beta;
    const float * decay;
    const float * state;
    float       * out;      // element of this column
    size_t        stride_q, stride_k, stride_v, stride_beta;
    int64_t       stride_out;
    float         scale;
};

static void compute_column(const tree_column & c, const tree_plan & plan, float * work) {
    float * cur   = work;
    float * saved = work + c.n;
    const size_t size = c.n*sizeof(float);
    memcpy(cur,   c.state, size);
    memcpy(saved, c.state, size);
    for (int s = 0; s < plan.n_tokens; ++s) {
        const tree_plan::step & step = plan.steps[s];
        const float * q = (const float *) (c.q + step.row*c.stride_q);
        const float * k = (const float *) (c.k + step.row*c.stride_k);
        const float   v    = *(const float *) (c.v    + step.row*c.stride_v);
        const float   beta = *(const float *) (c.beta + step.row*c.stride_beta);
        if (step.from >= 0) {
            memcpy(cur, saved + step.from*c.n, size);
        }
        float sum = 0.0f;
        ggml_vec_scale_f32(c.n, cur, c.decay[step.row]);
        ggml_vec_dot_f32(c.n, &sum, 0, cur, 0, k, 0, 1);
        const float delta = (v - sum) * beta;
        ggml_vec_mad_f32(c.n, cur, k, delta);
        ggml_vec_dot_f32(c.n, &sum, 0, cur, 0, q, 0, 1);
        c.out[step.row*c.stride_out] = sum * c.scale;
        if (step.to >= 0) {
            memcpy(saved + step.to*c.n, cur, size);
        }
    }
}

void moegraph_compute_forward_gated_delta_net_tree(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * q     = dst->src[0];
    const ggml_tensor * k     = dst->src[1];
    const ggml_tensor * v     = dst->src[2];
    const ggml_tensor * g     = dst->src[3];
    const ggml_tensor * beta  = dst->src[4];
    const ggml_tensor * state = dst->src[5];

    const int64_t S = v->ne[0], H = v->ne[1], T = v->ne[2], n_seqs = v->ne[3];
    const int64_t per_thread = (n_seqs*H*S + params->nth - 1)/params->nth;
    const int64_t begin      = per_thread*params->ith;
    const int64_t end        = std::min(begin + per_thread, n_seqs*H*S);

    float * work = (float *) params->wdata + params->ith*(1 + N_SAVED)*S;
    tree_plan   plan;
    float       decay[N_ROWS];
    tree_column c = {};
    c.n           = S;
    c.decay       = decay;
    c.stride_q    = q->nb[2];
    c.stride_k    = k->nb[2];
    c.stride_v    = v->nb[2];
    c.stride_beta = beta->nb[2];
    c.stride_out  = S*H;
    c.scale       = 1.0f / sqrtf((float) S);

    int64_t planned = -1;
    for (int64_t ir = begin; ir < end; ++ir) {
        const int64_t column = ir % S, head = ir/S % H, sequence = ir/S/H;
        if (planned != sequence) {
            read_parents(plan, dst->src[6], sequence);
            order_rows(plan);
            planned = sequence;
        }
        if (column == 0 || ir == begin) {
            for (int64_t t = 0; t < T; ++t) {
                const size_t offset = sequence*g->nb[3] + t*g->nb[2] + head*g->nb[1];
                decay[t] = expf(*(const float *) ((const char *) g->data + offset));
            }
        }
        const int64_t ratio = n_seqs/q->ne[3]; // sequences that share q and k
        c.q     = (const char *) q->data + sequence/ratio*q->nb[3] + head % q->ne[1]*q->nb[1];
        c.k     = (const char *) k->data + sequence/ratio*k->nb[3] + head % k->ne[1]*k->nb[1];
        c.v     = (const char *) v->data + sequence*v->nb[3] + head*v->nb[1] + column*sizeof(float);
        c.beta  = (const char *) beta->data + sequence*beta->nb[3] + head*beta->nb[1];
        c.state = (const float *) state->data + ((sequence*H + head)*S + column)*S;
        c.out   = (float *) dst->data + (sequence*T*H + head)*S + column;
        compute_column(c, plan, work);
    }
}

// Copies the window of each row and hands it to the plain operation as a sequence of one token: a sum of our own
// could be vectorized, and rounded, in another way.
void moegraph_compute_forward_ssm_conv_tree(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * sx = dst->src[0];

    const int nc  = (int) dst->src[1]->ne[0];
    const int ncs = (int) sx->ne[0];
    const int nr  = (int) sx->ne[1];
    GGML_ASSERT(sx->nb[0] == sizeof(float) && sx->nb[1] == ncs*sizeof(float));
    GGML_ASSERT(nc <= N_ROWS);

    // the channels that the plain operation computes in this thread
    const int dr  = (nr + params->nth - 1)/params->nth;
    const int ir0 = std::min(dr*params->ith, nr);
    const int ir1 = std::min(ir0 + dr, nr);

    float * windows = (float *) params->wdata; // [nc, nr]
    ggml_tensor one_x = *sx;
    one_x.ne[0] = nc;
    one_x.ne[2] = 1;
    one_x.nb[1] = nc*sizeof(float);
    one_x.data  = windows;
    ggml_tensor one = *dst;
    one.ne[1]  = one.ne[2] = 1;
    one.src[0] = &one_x;

    tree_plan plan;
    for (int64_t sequence = 0; sequence < sx->ne[2]; ++sequence) {
        read_parents(plan, dst->src[2], sequence);
        const float * s = (const float *) ((const char *) sx->data + sequence*sx->nb[2]);
        for (int t = 0; t < plan.n_tokens; ++t) {
            // columns of the window, newest first: ancestors, then what is in front of the rows
            int column[N_ROWS];
            int row   = t;
            int front = nc - 1;
            for (int i0 = nc - 1; i0 >= 0; --i0) {
                column[i0] = row >= 0 ? nc - 1 + row : --front;
                row        = row >= 0 ? plan.parent[row] : -1;
            }
            for (int ir = ir0; ir < ir1; ++ir) {
                for (int i0 = 0; i0 < nc; ++i0) {
                    windows[(int64_t) ir*nc + i0] = s[(int64_t) ir*ncs + column[i0]];
                }
            }
            one.data = (char *) dst->data + sequence*dst->nb[2] + t*dst->nb[1];
            ggml_compute_forward_ssm_conv(params, &one);
        }
    }
}
