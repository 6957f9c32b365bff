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

// Chains of as many rows and more have a kernel of their own, with the same bits.
constexpr int MOEGRAPH_LONG_CHAIN = 8;

template <int S>
void moegraph_long_chain(const moegraph_chain_args & a, int n_head, int n_seqs, cudaStream_t stream);
