#pragma once

#include "moegraph-rows-types.cuh"

// A slot, and the expert that the launch of gate and up fetches into it, or -1.
static __device__ __forceinline__ int32_t moegraph_one_pack(const int slot, const int expert) {
    return slot < 0 ? -1 : slot | (expert + 1) << 16;
}
static __device__ __forceinline__ int moegraph_one_slot(const int32_t packed) {
    return packed < 0 ? -1 : packed & 0xFFFF;
}
static __device__ __forceinline__ int moegraph_one_fetched(const int32_t packed) {
    return packed < 0 ? -1 : (packed >> 16) - 1;
}

// Whether a lane can read rows of x, as what rows reads them (type).
bool moegraph_one_reads(const ggml_tensor * x, ggml_type type, int cc);

// Products of one row of activations, dense or with the experts of a token, with or without a gate and a GLU. What counts
// is how many bytes of weights are on their way; a lane multiplies them with its part of the row.

// Whether these kernels compute the product dst. type: as what rows reads its weights.
bool moegraph_one_supported(const ggml_tensor * dst, ggml_type type, int cc);

// Runs what moegraph-rows.cu has laid down in args, without groups.
void moegraph_one_mul_mat(ggml_type type, moegraph_rows_args & args, cudaStream_t stream);

// The same for gate, up and GLU of a token's experts together with those of the shared expert, Q8_0, of the same row. Returns
// false, and does nothing, if there is no kernel for the type or the rows are too long.
bool moegraph_one_experts(ggml_type type, moegraph_rows_args & routed, moegraph_rows_args & shared, cudaStream_t stream);

// A shared expert of that token, and the residual: what follows the sum of the routed experts.
struct moegraph_one_shared_expert {
    const ggml_tensor * down;     // its product; the activations are there
    const float       * gate;     // before the sigmoid by which the product is multiplied
    const ggml_tensor * residual; // dst may be its memory
};

// The product down of one token's experts, each with a row of its own. Without weights its rows are the result (dst is
// down); with them also the biases and scales of experts (or nullptr), the products with weights and the sum over experts,
// with the same bits as nodes of their own. early: ids and weights may be read before the preceding kernel has ended. With a
// shared expert, dst is the sum of all, with the bits that moegraph-norm.cu would give it. Returns false, and does nothing, if
// the kernel does not support them.
bool moegraph_one_down_supported(const ggml_tensor * down);
bool moegraph_one_down(ggml_backend_cuda_context & ctx, const ggml_tensor * down, const ggml_tensor * bias,
    const ggml_tensor * scale, const ggml_tensor * weights, ggml_tensor * dst, bool early,
    const moegraph_one_shared_expert * shared = nullptr);
