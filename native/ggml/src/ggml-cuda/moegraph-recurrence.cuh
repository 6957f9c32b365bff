#pragma once

#include "common.cuh"

// GGML_OP_MOEGRAPH_DELTA_NET (moegraph.h).
bool moegraph_delta_net_supported(const ggml_tensor * dst);
void moegraph_delta_net(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// The same with parents.
bool moegraph_delta_tree_supported(const ggml_tensor * dst);
void moegraph_delta_tree(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// What the kernels for chains and for trees are both given. Strides are in floats.
struct moegraph_delta_args {
    const float   * q;
    const float   * k;
    const float   * v;
    const float   * gate;
    const float   * beta;
    float         * pool;
    const int32_t * slots;
    float         * dst;
    int64_t pool_s;
    int     n_tokens;
    int     n_slots;
    int     early; // slots may be read before the preceding kernel has ended
    float   scale;
};

// Reads them from the tensors of an operation.
moegraph_delta_args moegraph_delta_args_of(const ggml_tensor * dst);

struct moegraph_chain_args : moegraph_delta_args {
    const int32_t * lengths;
    uint3   n_head_k;
    int64_t sq1, sq2, sq3;
    int64_t sv1, sv2, sv3;
};

// The delta rule of a column of the state and one row, by `width` lanes with n elements each: updates s and returns the sum
// with q, without its scale. The sums have the order of GATED_DELTA_NET, and what is contracted is spelled out.
template <int width, int n>
static __device__ __forceinline__ float moegraph_delta_column(float (&s)[n], const float (&k)[n], const float (&q)[n],
        const float v, const float decay, const float beta) {
    float dot = 0.0f;
#pragma unroll
    for (int r = 0; r < n; ++r) {
        dot = __fmaf_rn(s[r], k[r], dot);
    }
    dot = warp_reduce_sum<width>(dot);
    const float delta = __fmul_rn(__fmaf_rn(-decay, dot, v), beta);

    dot = 0.0f;
#pragma unroll
    for (int r = 0; r < n; ++r) {
        s[r] = __fmaf_rn(decay, s[r], __fmul_rn(k[r], delta));
        dot  = __fmaf_rn(s[r], q[r], dot);
    }
    return warp_reduce_sum<width>(dot);
}

// Chains of as many rows and more have a kernel of their own, with the same bits.
constexpr int MOEGRAPH_LONG_CHAIN = 8;

template <int S>
void moegraph_long_chain(const moegraph_chain_args & a, int n_head, int n_seqs, cudaStream_t stream);
