// What SSM_CONV and GATED_DELTA_NET in ops.cpp do, with the same calls in the same order, so that results have the
// same bits. States are updated where they are.

#include "moegraph-cpu.h"
#include "ggml-impl.h"
#include "moegraph.h"
#include "ops.h"
#include "vec.h"

#include <algorithm>
#include <cmath>
#include <cstring>

static constexpr int N_ROWS  = MOEGRAPH_TREE_ROWS;
static constexpr int PADDING = -2; // as the parent of a row

// Parents of one sequence's rows: an earlier row that is not padding, -1 or PADDING.
static void read_parents(int * parent, const ggml_tensor * parents, const int64_t sequence) {
    const int32_t * data = (const int32_t *) ((const char *) parents->data + sequence*parents->nb[1]);
    for (int i = 0; i < (int) parents->ne[0]; ++i) {
        const int32_t p = data[i];
        parent[i] = p == PADDING || (p >= 0 && p < i && parent[p] != PADDING) ? p : -1;
    }
}

// The state of a sequence, nullptr if the sequence is padding.
static char * state_of(const ggml_tensor * pool, const ggml_tensor * slots, const int64_t sequence) {
    const int32_t slot = ((const int32_t *) slots->data)[sequence];
    return slot >= 0 && slot < pool->ne[1] ? (char *) pool->data + slot*pool->nb[1] : nullptr;
}

// How many of its n_tokens rows a sequence has.
static int64_t n_rows_of(const ggml_tensor * lengths, const int64_t sequence, const int64_t n_tokens) {
    const int64_t n = lengths ? ((const int32_t *) lengths->data)[sequence] : n_tokens;
    return std::max<int64_t>(0, std::min(n, n_tokens));
}

// States that wait while a subtree is visited. A child's subtree is visited before those of larger siblings, so each
// waiting state doubles the rows that a tree must have: 2^(n + 1) - 1 for n, the committed state counted as a row.
static constexpr int N_SAVED = 5;
static_assert((2 << (N_SAVED + 1)) - 1 > N_ROWS + 1, "a tree of N_ROWS could need one more state");

// The order in which the rows of a tree are computed, and where states come from and go to.
struct tree_plan {
    struct step {
        int row;
        int from; // saved state to continue, -1: the one of the step before
        int to;   // where the state is kept for other children, -1: nowhere
    };
    int  n_steps = 0;
    int  parent[N_ROWS];
    step steps[N_ROWS];
};

// Depth first, smaller subtrees first. State 0 starts as the committed one.
static void order_rows(tree_plan & plan, const int n) {
    int size[N_ROWS], position[N_ROWS], level[N_ROWS];
    std::fill(size, size + n, 1);
    for (int i = n - 1; i >= 0; --i) {
        if (plan.parent[i] >= 0) {
            size[plan.parent[i]] += size[i];
        }
    }
    plan.n_steps = 0;
    for (int i = 0; i < n; ++i) {
        const int p = plan.parent[i];
        if (p == PADDING) {
            continue;
        }
        plan.n_steps++;
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

size_t moegraph_delta_net_work_size(const ggml_tensor * dst, int n_tasks) {
    return dst->src[7] ? (1 + N_SAVED)*dst->ne[0]*sizeof(float)*n_tasks : 0;
}

// Rows of one head from some row on. A column of the state depends on no other, so each goes through all rows while it
// is in the cache.
struct delta_rows {
    int64_t      S;
    const char * q;
    const char * k;
    const char * v;
    const char * beta;
    float      * out;
    size_t       stride_q, stride_k, stride_v, stride_beta;
    int64_t      stride_out;
    float        scale;
    float        decay[N_ROWS];
};

static inline void advance_column(const delta_rows & r, const int row, const int64_t column, float * state) {
    const float * q    = (const float *) (r.q + row*r.stride_q);
    const float * k    = (const float *) (r.k + row*r.stride_k);
    const float   v    = ((const float *) (r.v + row*r.stride_v))[column];
    const float   beta = *(const float *) (r.beta + row*r.stride_beta);
    float sum = 0.0f;
    ggml_vec_scale_f32(r.S, state, r.decay[row]);
    ggml_vec_dot_f32(r.S, &sum, 0, state, 0, k, 0, 1);
    const float delta = (v - sum) * beta;
    ggml_vec_mad_f32(r.S, state, k, delta);
    ggml_vec_dot_f32(r.S, &sum, 0, state, 0, q, 0, 1);
    r.out[row*r.stride_out + column] = sum * r.scale;
}

static void walk_tree(const delta_rows & r, const tree_plan & plan, const int64_t column, const float * state,
        float * work) {
    float * cur   = work;
    float * saved = work + r.S;
    const size_t size = r.S*sizeof(float);
    memcpy(cur,   state, size);
    memcpy(saved, state, size);
    for (int s = 0; s < plan.n_steps; ++s) {
        const tree_plan::step & step = plan.steps[s];
        if (step.from >= 0) {
            memcpy(cur, saved + step.from*r.S, size);
        }
        advance_column(r, step.row, column, cur);
        if (step.to >= 0) {
            memcpy(saved + step.to*r.S, cur, size);
        }
    }
}

// Columns [begin, end) of one head of one sequence, all rows. plan: that of the sequence, nullptr without parents.
static void compute_head(const ggml_tensor * dst, const int64_t sequence, const int64_t head, const int64_t begin,
        const int64_t end, const tree_plan * plan, float * work) {
    const ggml_tensor * q    = dst->src[0];
    const ggml_tensor * k    = dst->src[1];
    const ggml_tensor * v    = dst->src[2];
    const ggml_tensor * g    = dst->src[3];
    const ggml_tensor * beta = dst->src[4];
    const int64_t S = dst->ne[0], H = dst->ne[1], T = dst->ne[2];
    const int64_t n_rows = n_rows_of(dst->src[8], sequence, T);

    float * out   = (float *) dst->data + (sequence*T*H + head)*S;
    float * state = (float *) state_of(dst->src[5], dst->src[6], sequence);
    for (int64_t t = 0; t < T; ++t) {
        if (state == nullptr || t >= n_rows || (plan && plan->parent[t] == PADDING)) {
            memset(out + t*H*S + begin, 0, (end - begin)*sizeof(float));
        }
    }
    if (state == nullptr) {
        return;
    }
    state += head*S*S;

    delta_rows r;
    r.S           = S;
    r.stride_q    = q->nb[2];
    r.stride_k    = k->nb[2];
    r.stride_v    = v->nb[2];
    r.stride_beta = beta->nb[2];
    r.stride_out  = S*H;
    r.scale       = 1.0f / sqrtf((float) S);
    for (int64_t first = 0; first < n_rows; first += N_ROWS) {
        const int n = (int) std::min<int64_t>(N_ROWS, n_rows - first);
        r.q    = (const char *) q->data + sequence*q->nb[3] + first*q->nb[2] + head % q->ne[1]*q->nb[1];
        r.k    = (const char *) k->data + sequence*k->nb[3] + first*k->nb[2] + head % k->ne[1]*k->nb[1];
        r.v    = (const char *) v->data + sequence*v->nb[3] + first*v->nb[2] + head*v->nb[1];
        r.beta = (const char *) beta->data + sequence*beta->nb[3] + first*beta->nb[2] + head*beta->nb[1];
        r.out  = out + first*H*S;
        for (int t = 0; t < n; ++t) {
            const size_t offset = sequence*g->nb[3] + (first + t)*g->nb[2] + head*g->nb[1];
            r.decay[t] = expf(*(const float *) ((const char *) g->data + offset));
        }
        for (int64_t column = begin; column < end; ++column) {
            if (plan) {
                walk_tree(r, *plan, column, state + column*S, work);
                continue;
            }
            for (int t = 0; t < n; ++t) {
                advance_column(r, t, column, state + column*S);
            }
        }
    }
}

void moegraph_compute_forward_delta_net(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * parents = dst->src[7];
    const int64_t S = dst->ne[0], H = dst->ne[1];
    const int64_t n_columns = S*H*dst->ne[3];
    float * work = parents ? (float *) params->wdata + params->ith*(1 + N_SAVED)*S : nullptr;

    // about four chunks a thread, as in ops.cpp
    const int64_t per_chunk = (n_columns + 4*params->nth - 1)/(4*params->nth);
    int64_t n_chunks = (n_columns + per_chunk - 1)/per_chunk;
    if (params->nth == 1 || n_chunks < params->nth || ggml_is_numa()) {
        n_chunks = params->nth;
    }
    const int64_t size = (n_columns + n_chunks - 1)/n_chunks;
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);

    tree_plan plan;
    int64_t   planned = -1;
    for (int64_t chunk = params->ith; chunk < n_chunks; chunk = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        const int64_t end = std::min((chunk + 1)*size, n_columns);
        for (int64_t i = chunk*size; i < end;) {
            const int64_t column = i % S, head = i/S % H, sequence = i/S/H;
            const int64_t n = std::min(S - column, end - i);
            if (parents && planned != sequence) {
                read_parents(plan.parent, parents, sequence);
                order_rows(plan, (int) parents->ne[0]);
                planned = sequence;
            }
            compute_head(dst, sequence, head, column, column + n, parents ? &plan : nullptr, work);
            i += n;
        }
    }
}

static constexpr int CONV_CHANNELS = 64; // gathered at a time
static constexpr int CONV_TOKENS   = 32;

size_t moegraph_conv_work_size(const ggml_tensor * dst, int n_tasks) {
    const int64_t n_columns = dst->src[1]->ne[0] - 1 + std::min<int64_t>(CONV_TOKENS, dst->ne[1]);
    return n_columns*CONV_CHANNELS*sizeof(float)*n_tasks;
}

// Some channels of one sequence. They are gathered and handed to the plain operation: a sum of our own could be
// vectorized, and rounded, in another way.
struct conv_channels {
    const ggml_compute_params * params;
    ggml_tensor * dst;
    int           first, n;    // channels
    int64_t       sequence;
    float       * state;       // [d_conv - 1, n]
    float       * tile;

    const float * row(const int64_t t) const {
        const ggml_tensor * rows = dst->src[0];
        return (const float *) ((const char *) rows->data + t*rows->nb[1] + sequence*rows->nb[2]) + first;
    }
    float * result(const int64_t t) const {
        return (float *) ((char *) dst->data + t*dst->nb[1] + sequence*dst->nb[2]) + first;
    }

    // Convolves columns: row numbers, or below 0 those of the state, the last one -1. Results go to rows from t on.
    void run(const int * columns, const int n_columns, const int64_t t) const {
        const ggml_tensor * kernel = dst->src[1];
        const int n_past = (int) kernel->ne[0] - 1;
        for (int j = 0; j < n_columns; ++j) {
            const bool    is_row = columns[j] >= 0;
            const float * from   = is_row ? row(columns[j]) : state + n_past + columns[j];
            const int     stride = is_row ? 1 : n_past;
            for (int c = 0; c < n; ++c) {
                tile[c*n_columns + j] = from[c*stride];
            }
        }
        ggml_compute_params alone = *params;
        alone.ith = 0;
        alone.nth = 1;
        ggml_tensor x = *dst->src[0];
        ggml_tensor w = *kernel;
        ggml_tensor y = *dst;
        x.ne[0] = n_columns;
        x.ne[1] = w.ne[1] = y.ne[0] = n;
        x.ne[2] = y.ne[2] = 1;
        x.nb[1] = n_columns*sizeof(float);
        x.data  = tile;
        w.data  = (char *) kernel->data + first*kernel->nb[1];
        y.ne[1] = n_columns - n_past;
        y.data  = result(t);
        y.src[0] = &x;
        y.src[1] = &w;
        ggml_compute_forward_ssm_conv(&alone, &y);
    }
};

// The first T rows in order; then the last columns become the state. The results of the rest are 0.
static void convolve_chain(const conv_channels & c, const int64_t T) {
    const int n_past = (int) c.dst->src[1]->ne[0] - 1;
    int columns[MOEGRAPH_CONV_WIDTH - 1 + CONV_TOKENS];
    for (int64_t first = 0; first < T; first += CONV_TOKENS) {
        const int n_columns = n_past + (int) std::min<int64_t>(CONV_TOKENS, T - first);
        for (int j = 0; j < n_columns; ++j) {
            columns[j] = (int) first - n_past + j;
        }
        c.run(columns, n_columns, first);
    }
    for (int j = 0; j < n_past; ++j) {
        const int64_t t = T - n_past + j;
        for (int i = 0; i < c.n; ++i) {
            c.state[i*n_past + j] = t < 0 ? c.state[i*n_past + n_past + t] : c.row(t)[i];
        }
    }
    for (int64_t t = T; t < c.dst->ne[1]; ++t) {
        memset(c.result(t), 0, c.n*sizeof(float));
    }
}

static void convolve_tree(const conv_channels & c, const int * parent) {
    const int width = (int) c.dst->src[1]->ne[0];
    int columns[MOEGRAPH_CONV_WIDTH];
    for (int t = 0; t < (int) c.dst->ne[1]; ++t) {
        if (parent[t] == PADDING) {
            memset(c.result(t), 0, c.n*sizeof(float));
            continue;
        }
        int row = t, front = 0; // newest first: the row, its ancestors, then the state
        for (int j = width - 1; j >= 0; --j) {
            columns[j] = row >= 0 ? row : --front;
            row        = row >= 0 ? parent[row] : -1;
        }
        c.run(columns, width, t);
    }
}

void moegraph_compute_forward_conv(const ggml_compute_params * params, ggml_tensor * dst) {
    const ggml_tensor * parents = dst->src[4];
    const int n_past     = (int) dst->src[1]->ne[0] - 1;
    const int n_channels = (int) dst->ne[0];

    // the channels that the plain operation computes in this thread
    const int per_thread = (n_channels + params->nth - 1)/params->nth;
    const int begin      = std::min(per_thread*params->ith, n_channels);
    const int end        = std::min(begin + per_thread, n_channels);

    int parent[N_ROWS];
    conv_channels c;
    c.params = params;
    c.dst    = dst;
    c.tile   = (float *) params->wdata + params->ith*(moegraph_conv_work_size(dst, 1)/sizeof(float));
    for (c.sequence = 0; c.sequence < dst->ne[2]; ++c.sequence) {
        float * state = (float *) state_of(dst->src[2], dst->src[3], c.sequence);
        if (parents) {
            read_parents(parent, parents, c.sequence);
        }
        for (c.first = begin; c.first < end; c.first += c.n) {
            c.n = std::min(CONV_CHANNELS, end - c.first);
            if (state == nullptr) {
                for (int64_t t = 0; t < dst->ne[1]; ++t) {
                    memset(c.result(t), 0, c.n*sizeof(float));
                }
                continue;
            }
            c.state = state + (int64_t) c.first*n_past;
            if (parents) {
                convolve_tree(c, parent);
            } else {
                convolve_chain(c, n_rows_of(dst->src[5], c.sequence, dst->ne[1]));
            }
        }
    }
}
