#pragma once

#include "moegraph-rows-types.cuh"

// A residual sum, its norm and weights, for the kernels that compute them.

struct moegraph_add_norm_args {
    const float      * terms[3]; // the second and the third may be nullptr
    int                gated;    // the term that is multiplied by its row's gate, -1 for none
    const float      * gate;     // what the sigmoid is taken of, nullptr: the product of the next two
    const float      * gate_x;
    const float      * gate_w;
    const float      * w;    // nullptr: no norm follows the sum
    float            * sum;  // nullptr: nobody reads it
    float            * dst;
    moegraph_block_y * y;   // nullptr: not quantized for products of few rows
    block_q8_1       * q8_1; // the same for the experts of one token
    int                n;
    int                early; // weights may be read before the preceding kernel has ended
    float              eps;
};

// Spelled out, as nvcc has it: moegraph-one-down.cu computes the same.
static __device__ __forceinline__ float4 moegraph_add_scaled_4(const float4 a, const float4 b, const float f) {
    return make_float4(__fmaf_rn(b.x, f, a.x), __fmaf_rn(b.y, f, a.y), __fmaf_rn(b.z, f, a.z), __fmaf_rn(b.w, f, a.w));
}

// Spelled out: kernels of the same row must not differ in what the compiler contracts.
static __device__ __forceinline__ float moegraph_squares_4(const float4 v) {
    return __fmaf_rn(v.w, v.w, __fmaf_rn(v.z, v.z, __fmaf_rn(v.y, v.y, __fmul_rn(v.x, v.x))));
}

// The part of a shared expert's gate that comes from four values, in the order that nvcc once chose.
static __device__ __forceinline__ float moegraph_gate_4(const float4 x, const float4 w) {
    return __fmaf_rn(x.w, w.w, __fmaf_rn(x.z, w.z, __fmaf_rn(x.x, w.x, __fmul_rn(x.y, w.y))));
}

// What a block computes for a row: calls take(k, i, sum, normed) for each four values, the k-th of the thread, from value i on. Waits for the preceding kernel, behind
// the loads of weights if they are early.
template <int n_threads, int n_values, typename F>
static __device__ __forceinline__ void moegraph_add_norm_row(
        const moegraph_add_norm_args & args, const int row, const F & take) {
    const int64_t offset  = (int64_t) row*args.n;
    const bool    product = args.gated >= 0 && args.gate == nullptr;
    const float4  zero    = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

    float4 w[n_values];
    float4 gate_w[n_values];
    if (!args.early) {
        ggml_cuda_pdl_sync();
    }
#pragma unroll
    for (int k = 0; k < n_values; ++k) {
        const int  i    = 4*(threadIdx.x + k*n_threads);
        const bool mine = i < args.n;
        w[k]      = mine && args.w != nullptr ? *(const float4 *) (args.w + i) : zero;
        gate_w[k] = mine && product ? *(const float4 *) (args.gate_w + i) : zero;
    }
    if (args.early) {
        ggml_cuda_pdl_sync();
    }

    float4 terms[3][n_values];
    float  gate = args.gated >= 0 && !product ? args.gate[row] : 0.0f;
#pragma unroll
    for (int k = 0; k < n_values; ++k) {
        const int  i    = 4*(threadIdx.x + k*n_threads);
        const bool mine = i < args.n;
#pragma unroll
        for (int t = 0; t < 3; ++t) {
            terms[t][k] = mine && args.terms[t] != nullptr ? *(const float4 *) (args.terms[t] + offset + i) : zero;
        }
        if (mine && product) {
            const float4 x = *(const float4 *) (args.gate_x + offset + i);
            gate = __fadd_rn(gate, moegraph_gate_4(x, gate_w[k]));
        }
    }

    __shared__ float shared[2][32];
    if (product) {
        gate = block_reduce<block_reduce_method::SUM, n_threads>(gate, shared[0]);
    }
    gate = 1.0f/(1.0f + expf(-gate));

    float4 v[n_values];
    float  squares = 0.0f;
#pragma unroll
    for (int k = 0; k < n_values; ++k) {
        v[k] = zero;
#pragma unroll
        for (int t = 0; t < 3; ++t) {
            v[k] = moegraph_add_scaled_4(v[k], terms[t][k], t == args.gated ? gate : 1.0f);
        }
        squares = __fadd_rn(squares, moegraph_squares_4(v[k]));
    }
    if (args.w != nullptr) {
        squares = block_reduce<block_reduce_method::SUM, n_threads>(squares, shared[1]);
    }
    const float scale = rsqrtf(squares/args.n + args.eps);

#pragma unroll
    for (int k = 0; k < n_values; ++k) {
        const int i = 4*(threadIdx.x + k*n_threads);
        if (i < args.n) {
            take(k, i, v[k], make_float4(scale*v[k].x*w[k].x, scale*v[k].y*w[k].y, scale*v[k].z*w[k].z, scale*v[k].w*w[k].w));
        }
    }
}

// at: of the first value, among all rows.
static __device__ __forceinline__ void moegraph_add_norm_write(
        const moegraph_add_norm_args & args, const int64_t at, const float4 sum, const float4 v) {
    if (args.sum != nullptr) {
        *(float4 *) (args.sum + at) = sum;
    }
    if (args.w == nullptr) {
        return;
    }
    *(float4 *) (args.dst + at) = v;
    if (args.y != nullptr) {
        moegraph_quantize_4(v, args.y + at/32);
    }
    if (args.q8_1 != nullptr) {
        moegraph_quantize_q8_1_4(v, args.q8_1 + at/32);
    }
}

struct moegraph_add_norm_nodes {
    const ggml_tensor * terms[3]; // the third is nullptr where two are summed
    int                 gated;    // the term that is multiplied by a gate, -1 for none
    const ggml_tensor * gate;     // [1, n_rows], before the sigmoid
    const ggml_tensor * product;  // the product that is the gate, where it is computed here, or nullptr
    const ggml_tensor * w;        // nullptr: no norm follows the sum; then dst is the sum, and there is no norm
    ggml_tensor * sum;
    ggml_tensor * norm;
    ggml_tensor * dst;
    int           n_ops;
};

// Finds the nodes from node i on: a sum with what may be in front of it and the norm behind it, or a norm of what another node
// or graph has summed, with the bits that it would have behind the sum.
bool moegraph_add_norm_match(const ggml_cgraph * cgraph, int i, moegraph_add_norm_nodes & m);
bool moegraph_lone_norm_match(const ggml_cgraph * cgraph, int i, moegraph_add_norm_nodes & m);

// Fills in what the kernel gets, and takes places for the quantized rows. Returns whether the kernel can compute the nodes,
// if no other block writes what a block reads.
bool moegraph_add_norm_prepare(
    ggml_backend_cuda_context & ctx, const moegraph_add_norm_nodes & m, moegraph_add_norm_args & args);
