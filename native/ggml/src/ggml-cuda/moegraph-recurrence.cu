#include "moegraph-parents.cuh"
#include "moegraph-recurrence.cuh"

constexpr int MOEGRAPH_CHAIN_COLUMNS = 4; // of the state, a block has
constexpr int MOEGRAPH_CHAIN_SEQS    = 65535; // blocks in y

// Grid: heads, sequences, columns of the state. The lanes of a row of threads hold one column, element i in lane
// i % width, from the first row to the last. Sums are as in the kernels for long chains and for trees: a row has the same
// bits in all. ragged: there are lengths.
template <int S, bool ragged>
static __global__ void __launch_bounds__((S < WARP_SIZE ? S : WARP_SIZE)*MOEGRAPH_CHAIN_COLUMNS, 2)
moegraph_chain_kernel(const moegraph_chain_args a) {
    constexpr int width = S < WARP_SIZE ? S : WARP_SIZE;
    constexpr int n     = S/width;
    const int head     = blockIdx.x;
    const int n_head   = gridDim.x;
    const int sequence = blockIdx.y;
    const int column   = blockIdx.z*MOEGRAPH_CHAIN_COLUMNS + threadIdx.y;
    const int lane     = threadIdx.x;
    const int slot     = moegraph_wait_for_slot(a);

    const int64_t first = (int64_t) sequence*a.n_tokens*n_head + head; // of the gates; the others have S for each
    float * out = a.dst + first*S + column;
    if (slot < 0 || slot >= a.n_slots) {
        for (int t = lane; t < a.n_tokens; t += width) {
            out[(int64_t) t*n_head*S] = 0.0f;
        }
        return;
    }

    float * state = a.pool + slot*a.pool_s + ((int64_t) head*S + column)*S;
    float s[n];
#pragma unroll
    for (int r = 0; r < n; ++r) {
        s[r] = state[r*width + lane];
    }

    const int     head_k = fastmodulo(head, a.n_head_k);
    const float * q      = a.q + sequence*a.sq3 + head_k*a.sq1;
    const float * k      = a.k + sequence*a.sq3 + head_k*a.sq1;
    const float * v      = a.v + sequence*a.sv3 + head*a.sv1 + column;
    const float * gate   = a.gate + first;
    const float * beta   = a.beta + first;
    const int n_rows = ragged ? moegraph_n_rows(a.lengths, sequence, a.n_tokens) : a.n_tokens;
    for (int t = 0; t < n_rows; ++t) {
        const float b  = *beta;
        const float vt = *v;
        float kt[n];
        float qt[n];
#pragma unroll
        for (int r = 0; r < n; ++r) {
            kt[r] = k[r*width + lane];
            qt[r] = q[r*width + lane];
        }
        const float decay = expf(*gate);

        const float dot = moegraph_delta_column<width>(s, kt, qt, vt, decay, b);
        if (lane == 0) {
            *out = dot * a.scale;
        }

        q    += a.sq2;
        k    += a.sq2;
        v    += a.sv2;
        gate += n_head;
        beta += n_head;
        out  += n_head*S;
    }
    if (ragged) {
        for (int t = n_rows + lane; t < a.n_tokens; t += width) {
            out[(int64_t) (t - n_rows)*n_head*S] = 0.0f;
        }
    }

#pragma unroll
    for (int r = 0; r < n; ++r) {
        state[r*width + lane] = s[r];
    }
}

bool moegraph_delta_net_supported(const ggml_tensor * dst) {
    const int64_t S = dst->ne[0];
    return (S == 16 || S == 32 || S == 64 || S == 128) && ggml_are_same_stride(dst->src[0], dst->src[1]) &&
        dst->ne[3] <= MOEGRAPH_CHAIN_SEQS && (dst->src[7] == nullptr || moegraph_delta_tree_supported(dst));
}

template <int S>
static void moegraph_chain_launch(const moegraph_chain_args & a, const int n_head, const int n_seqs, cudaStream_t stream) {
    if (a.n_tokens >= MOEGRAPH_LONG_CHAIN) {
        moegraph_long_chain<S>(a, n_head, n_seqs, stream);
        return;
    }
    const ggml_cuda_kernel_launch_params params(dim3(n_head, n_seqs, S/MOEGRAPH_CHAIN_COLUMNS),
        dim3(S < WARP_SIZE ? S : WARP_SIZE, MOEGRAPH_CHAIN_COLUMNS), (size_t) 0, stream);
    if (a.lengths) {
        ggml_cuda_kernel_launch(moegraph_chain_kernel<S, true>, params, a);
    } else {
        ggml_cuda_kernel_launch(moegraph_chain_kernel<S, false>, params, a);
    }
}

moegraph_delta_args moegraph_delta_args_of(const ggml_tensor * dst) {
    const ggml_tensor * pool  = dst->src[5];
    const ggml_tensor * slots = dst->src[6];
    GGML_ASSERT(ggml_are_same_stride(dst->src[0], dst->src[1]));
    moegraph_delta_args a;
    a.q        = (const float *) dst->src[0]->data;
    a.k        = (const float *) dst->src[1]->data;
    a.v        = (const float *) dst->src[2]->data;
    a.gate     = (const float *) dst->src[3]->data;
    a.beta     = (const float *) dst->src[4]->data;
    a.pool     = (float *) pool->data;
    a.slots    = (const int32_t *) slots->data;
    a.dst      = (float *) dst->data;
    a.pool_s   = pool->nb[1]/sizeof(float);
    a.n_tokens = (int) dst->ne[2];
    a.n_slots  = (int) pool->ne[1];
    a.early    = moegraph_is_input(slots);
    a.scale    = 1.0f / sqrtf((float) dst->ne[0]);
    return a;
}

void moegraph_delta_net(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    if (dst->src[7] != nullptr) {
        moegraph_delta_tree(ctx, dst);
        return;
    }
    const ggml_tensor * q       = dst->src[0];
    const ggml_tensor * v       = dst->src[2];
    const ggml_tensor * lengths = dst->src[8];

    moegraph_chain_args a = { moegraph_delta_args_of(dst) };
    a.lengths  = lengths ? (const int32_t *) lengths->data : nullptr;
    a.n_head_k = init_fastdiv_values(q->ne[1]);
    a.sq1      = q->nb[1]/sizeof(float);
    a.sq2      = q->nb[2]/sizeof(float);
    a.sq3      = q->nb[3]/sizeof(float);
    a.sv1      = v->nb[1]/sizeof(float);
    a.sv2      = v->nb[2]/sizeof(float);
    a.sv3      = v->nb[3]/sizeof(float);

    const int n_head = (int) dst->ne[1];
    const int n_seqs = (int) dst->ne[3];
    switch (dst->ne[0]) {
        case  16: moegraph_chain_launch< 16>(a, n_head, n_seqs, ctx.stream()); break;
        case  32: moegraph_chain_launch< 32>(a, n_head, n_seqs, ctx.stream()); break;
        case  64: moegraph_chain_launch< 64>(a, n_head, n_seqs, ctx.stream()); break;
        case 128: moegraph_chain_launch<128>(a, n_head, n_seqs, ctx.stream()); break;
        default:  GGML_ABORT("moegraph_delta_net: head size %d, not 16, 32, 64 or 128", (int) dst->ne[0]);
    }
}
