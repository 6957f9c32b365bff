#pragma once

#include "common.cuh"

// Products of quantized weights with a few activation rows (dense, and grouped by expert for MUL_MAT_ID).

// Whether the product dst = src0 x src1 (with ids: MUL_MAT_ID) runs on these kernels. gate: the tensor of a
// gate product with the same operands that is combined with dst by a GLU, or nullptr.
bool moegraph_rows_supported(const ggml_tensor * dst, const ggml_tensor * gate, int cc);

// Whether the kernels of one row do (moegraph-one.cu).
bool moegraph_rows_is_one(const ggml_tensor * dst, int cc);

// Runs the product. glu: the node that combines it with its gate product, nullptr for a plain product.
void moegraph_rows_mul_mat(ggml_backend_cuda_context & ctx, ggml_tensor * dst, const ggml_tensor * gate,
    ggml_tensor * glu);

// Runs the product of node i together with the products of the same activations right behind it.
// Returns how many nodes behind i that covers, 0 if there are none (then nothing has been run).
int moegraph_rows_try_group(ggml_backend_cuda_context & ctx, ggml_cgraph * cgraph, int i);

// The same for float weights with few rows, such as a router.
bool moegraph_rows_f32_supported(const ggml_tensor * dst);
void moegraph_rows_f32_mul_mat(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// Where to quantize a tensor (contiguous F32) for the products of few rows that read it, nullptr if there are none.
// The caller fills it before any of them runs.
void * moegraph_rows_reserve(ggml_backend_cuda_context & ctx, const ggml_tensor * tensor);

// The same for the vector kernel that multiplies one token with its experts.
void * moegraph_q8_1_reserve(ggml_backend_cuda_context & ctx, const ggml_tensor * tensor);

// The q8_1 blocks of the activations of such a product, quantized here unless that has been done already; nullptr if
// the caller has to do it.
const void * moegraph_q8_1(ggml_backend_cuda_context & ctx, const ggml_tensor * src1);

// Forgets quantized activations of the last evaluation. Call before the nodes of a graph are launched.
void moegraph_rows_begin(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph);
