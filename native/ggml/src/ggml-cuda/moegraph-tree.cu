#include "moegraph-columns.cuh"
#include "moegraph-parents.cuh"
#include "moegraph-recurrence.cuh"

constexpr int TREE_ROWS    = MOEGRAPH_TREE_ROWS;
constexpr int TREE_THREADS = 128;

// Rows in the order of visits: depth first, a child's subtree before those of larger siblings. Then each state that
// waits for other children doubles the rows that a tree must have, 2^(w + 1) - 1 for w of them with the committed
// state counted as a row, and few registers hold them all. Every block of a sequence finds the same order.
struct tree_order {
    unsigned long long path[TREE_ROWS]; // a bit for the row and each of its ancestors, 0 for padding
    int jump[TREE_ROWS];                // first ancestor that path does not know of yet
    int parent[TREE_ROWS];
    int size[TREE_ROWS];                // of the subtree
    int before[TREE_ROWS];              // rows of siblings' subtrees that come first
    int light[TREE_ROWS];               // whether siblings come later
    int branch[TREE_ROWS];              // whether there are several children
    // row, 1 + waiting state to continue (0: that of the step before), 1 + where to keep it
    int step[TREE_ROWS];
};

static __device__ __forceinline__ int tree_step_row (const int step) { return step & 0xFF; }
static __device__ __forceinline__ int tree_step_from(const int step) { return (step >> 8 & 0xFF) - 1; }
static __device__ __forceinline__ int tree_step_to  (const int step) { return (step >> 16) - 1; }

// Returns the number of steps: padding is in none.
static __device__ int tree_make_order(tree_order & o, const int32_t * parents, const int n) {
    const int  i      = threadIdx.x;
    const int  parent = i < n ? moegraph_parent(parents, i) : MOEGRAPH_PADDING;
    const bool active = parent != MOEGRAPH_PADDING;

    unsigned long long path = active ? 1ull << i : 0;
    int jump = parent;
    if (i < n) {
        o.path[i]   = path;
        o.jump[i]   = jump;
        o.parent[i] = parent;
        o.branch[i] = 0;
    }
    while (__syncthreads_or(jump >= 0)) {
        unsigned long long more = 0;
        if (jump >= 0) {
            more = o.path[jump];
            jump = o.jump[jump];
        }
        __syncthreads();
        path |= more;
        if (active) {
            o.path[i] = path;
            o.jump[i] = jump;
        }
    }

    int size = 0;
    if (active) {
        for (int j = 0; j < n; ++j) {
            size += o.path[j] >> i & 1;
        }
        o.size[i] = size;
    }
    __syncthreads();
    int before = 0, light = 0;
    if (active) {
        for (int j = 0; j < n; ++j) {
            if (j != i && o.parent[j] == parent) {
                if (o.size[j] < size || (o.size[j] == size && j < i)) {
                    before += o.size[j];
                } else {
                    light = 1;
                }
            }
        }
        o.before[i] = before;
        o.light[i]  = light;
        if (!light && before > 0 && parent >= 0) { // the last of several children
            o.branch[parent] = 1;
        }
    }
    __syncthreads();
    if (active) {
        int position = -1, level = 0;
        for (int j = 0; j <= i; ++j) {
            if (path >> j & 1) {
                position += o.before[j] + 1;
                level    += o.light[j];
            }
        }
        const int from = before > 0  ? 1 + level - light : 0;
        const int to   = o.branch[i] ? 1 + level         : 0;
        o.step[position] = i | from << 8 | to << 16;
    }
    return __syncthreads_count(active);
}

// 32 bits, because registers are scarce.
struct tree_delta_args : moegraph_delta_args {
    const int32_t * parents;
    int n_head_k;
    int sq1, sq2, sq3;
    int sv1, sv2, sv3;
    int sb2, sb3;
};

constexpr int TREE_COLS  = TREE_THREADS/MOEGRAPH_COLUMN_LANES; // of a block
constexpr int TREE_CHUNK = 4;                                  // rows that are read at once

template <int S>
struct alignas(16) tree_chunk {
    float k[TREE_CHUNK][moegraph_columns<S>::size];
    float q[TREE_CHUNK][moegraph_columns<S>::size];
    float v[TREE_CHUNK][TREE_COLS];
    float decay[TREE_CHUNK];
    float beta[TREE_CHUNK];
};

// What a thread carries from global to shared memory: an element of k and q of some rows, and one other value.
template <int S>
struct tree_fetch {
    static constexpr int stride = TREE_THREADS/S; // rows that the block reads at a time
    static constexpr int n      = (TREE_CHUNK + stride - 1)/stride;
    static_assert(TREE_CHUNK*(TREE_COLS + 2) <= TREE_THREADS, "one more value for each thread");
    float k[n];
    float q[n];
    float other;

    // offset_*: of row 0 of the head. Behind the last step, its row is read again.
    __device__ __forceinline__ void read(const tree_delta_args & a, const int offset_k, const int offset_v,
            const int offset_g, const int * steps, const int n_steps, const int begin) {
        const int tid = threadIdx.x;
#pragma unroll
        for (int l = 0; l < n; ++l) {
            const int step   = min(begin + l*stride + tid/S, n_steps - 1);
            const int offset = offset_k + tree_step_row(steps[step])*a.sq2 + tid % S;
            k[l] = a.k[offset];
            q[l] = a.q[offset];
        }
        const int row = tree_step_row(steps[min(begin + tid % TREE_CHUNK, n_steps - 1)]);
        const int i   = tid/TREE_CHUNK;
        if (i < TREE_COLS) {
            other = a.v[offset_v + row*a.sv2 + i];
        } else if (i == TREE_COLS) {
            other = expf(a.gate[offset_g + row*a.sb2]);
        } else {
            other = a.beta[offset_g + row*a.sb2];
        }
    }

    __device__ __forceinline__ void write(tree_chunk<S> & to) const {
        const int tid = threadIdx.x;
#pragma unroll
        for (int l = 0; l < n; ++l) {
            const int c = l*stride + tid/S;
            if (c < TREE_CHUNK) {
                to.k[c][moegraph_columns<S>::offset(tid % S)] = k[l];
                to.q[c][moegraph_columns<S>::offset(tid % S)] = q[l];
            }
        }
        const int i = tid/TREE_CHUNK;
        if (i < TREE_COLS) {
            to.v[tid % TREE_CHUNK][i] = other;
        } else if (i == TREE_COLS) {
            to.decay[tid % TREE_CHUNK] = other;
        } else if (i == TREE_COLS + 1) {
            to.beta[tid % TREE_CHUNK] = other;
        }
    }
};

// Grid: heads, sequences, columns of the state. The state never leaves the registers.
template <int S, int n_saved>
static __global__ void __launch_bounds__(TREE_THREADS, n_saved <= 3 ? 4 : 3)
moegraph_tree_delta_kernel(const tree_delta_args a) {
    typedef moegraph_columns<S> layout;
    __shared__ tree_order order;
    __shared__ tree_chunk<S> chunks[2];

    ggml_cuda_pdl_lc();
    const int slot = moegraph_wait_for_slot(a);

    const int head     = blockIdx.x;
    const int n_head   = gridDim.x;
    const int sequence = blockIdx.y;
    const int column0  = blockIdx.z*TREE_COLS;
    const int column   = threadIdx.x/MOEGRAPH_COLUMN_LANES;
    const int lane     = threadIdx.x % MOEGRAPH_COLUMN_LANES;

    float * dst = a.dst + ((int64_t) sequence*a.n_tokens*n_head + head)*S + column0 + column;
    if (slot < 0 || slot >= a.n_slots) {
        for (int row = lane; row < a.n_tokens; row += MOEGRAPH_COLUMN_LANES) {
            dst[row*n_head*S] = 0.0f;
        }
        return;
    }

    float cur[layout::n];
    float saved[n_saved][layout::n];
    const float * state = a.pool + slot*a.pool_s + ((int64_t) head*S + column0 + column)*S;
#pragma unroll
    for (int e = 0; e < layout::n; ++e) {
        cur[e] = saved[0][e] = state[layout::index(lane, e)];
    }

    const int n_steps = tree_make_order(order, a.parents + (int64_t) sequence*a.n_tokens, a.n_tokens);
    for (int row = lane; row < a.n_tokens; row += MOEGRAPH_COLUMN_LANES) {
        if (order.parent[row] == MOEGRAPH_PADDING) {
            dst[row*n_head*S] = 0.0f;
        }
    }
    if (n_steps == 0) {
        return;
    }

    const int offset_k = sequence*a.sq3 + head % a.n_head_k*a.sq1;
    const int offset_v = sequence*a.sv3 + head*a.sv1 + column0;
    const int offset_g = sequence*a.sb3 + head;

    tree_fetch<S> fetch;
    fetch.read(a, offset_k, offset_v, offset_g, order.step, n_steps, 0);
    for (int begin = 0; begin < n_steps; begin += TREE_CHUNK) {
        tree_chunk<S> & chunk = chunks[begin/TREE_CHUNK % 2];
        fetch.write(chunk);
        __syncthreads();
        fetch.read(a, offset_k, offset_v, offset_g, order.step, n_steps, begin + TREE_CHUNK);

#pragma unroll 1
        for (int c = 0; c < TREE_CHUNK && begin + c < n_steps; ++c) {
            const int step = order.step[begin + c];
            const int from = tree_step_from(step), to = tree_step_to(step);
            if (from >= 0) {
#pragma unroll
                for (int w = 0; w < n_saved; ++w) {
#pragma unroll
                    for (int e = 0; e < layout::n; ++e) {
                        cur[e] = w == from ? saved[w][e] : cur[e];
                    }
                }
            }

            float x[layout::n];
            layout::load(x, chunk.k[c] + lane*layout::pitch);
            const float decay     = chunk.decay[c];
            const float kv_col    = layout::dot(cur, x);
            const float delta_col = __fmul_rn(__fmaf_rn(-decay, kv_col, chunk.v[c][column]), chunk.beta[c]);
#pragma unroll
            for (int e = 0; e < layout::n; ++e) {
                cur[e] = __fmaf_rn(decay, cur[e], __fmul_rn(x[e], delta_col));
            }
            layout::load(x, chunk.q[c] + lane*layout::pitch);
            const float attn_col = layout::dot(cur, x);
            if (lane == 0) {
                dst[tree_step_row(step)*n_head*S] = attn_col * a.scale;
            }

            if (to >= 0) {
#pragma unroll
                for (int w = 0; w < n_saved; ++w) {
#pragma unroll
                    for (int e = 0; e < layout::n; ++e) {
                        saved[w][e] = w == to ? cur[e] : saved[w][e];
                    }
                }
            }
        }
    }
}

template <int S>
static void tree_delta_launch(const tree_delta_args & a, const int n_head, const int n_seqs, cudaStream_t stream) {
    static_assert(TREE_ROWS + 1 < (1 << 7) - 1, "a tree could need six states");
    const ggml_cuda_kernel_launch_params params(dim3(n_head, n_seqs, S/TREE_COLS), dim3(TREE_THREADS), (size_t) 0,
        stream);
    if (a.n_tokens + 1 < (1 << 5) - 1) {
        ggml_cuda_kernel_launch(moegraph_tree_delta_kernel<S, 3>, params, a);
    } else {
        ggml_cuda_kernel_launch(moegraph_tree_delta_kernel<S, 5>, params, a);
    }
}

bool moegraph_delta_tree_supported(const ggml_tensor * dst) {
    return ggml_nbytes(dst->src[0]) <= INT_MAX && ggml_nbytes(dst->src[2]) <= INT_MAX;
}

void moegraph_delta_tree(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * q    = dst->src[0];
    const ggml_tensor * v    = dst->src[2];
    const ggml_tensor * beta = dst->src[4];
    GGML_ASSERT(moegraph_delta_tree_supported(dst));

    tree_delta_args a = { moegraph_delta_args_of(dst) };
    a.parents  = (const int32_t *) dst->src[7]->data;
    a.n_head_k = (int) q->ne[1];
    a.sq1 = (int) (q->nb[1]/sizeof(float));
    a.sq2 = (int) (q->nb[2]/sizeof(float));
    a.sq3 = (int) (q->nb[3]/sizeof(float));
    a.sv1 = (int) (v->nb[1]/sizeof(float));
    a.sv2 = (int) (v->nb[2]/sizeof(float));
    a.sv3 = (int) (v->nb[3]/sizeof(float));
    a.sb2 = (int) (beta->nb[2]/sizeof(float));
    a.sb3 = (int) (beta->nb[3]/sizeof(float));

    const int n_head = (int) v->ne[1];
    const int n_seqs = (int) v->ne[3];
    switch (v->ne[0]) {
        case  16: tree_delta_launch< 16>(a, n_head, n_seqs, ctx.stream()); break;
        case  32: tree_delta_launch< 32>(a, n_head, n_seqs, ctx.stream()); break;
        case  64: tree_delta_launch< 64>(a, n_head, n_seqs, ctx.stream()); break;
        case 128: tree_delta_launch<128>(a, n_head, n_seqs, ctx.stream()); break;
        default:  GGML_ABORT("moegraph_delta_net: head size %d, not 16, 32, 64 or 128", (int) v->ne[0]);
    }
}
