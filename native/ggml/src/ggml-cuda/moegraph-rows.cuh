#pragma once

#include "common.cuh"

#include "ggml-backend-impl.h"

// Products of quantized weights with a few activation rows (dense, and grouped by expert for MUL_MAT_ID).

// As what the kernels read weights, MOEGRAPH_TYPE_Q8_0_ODD among others; GGML_TYPE_F32: they do not.
ggml_type moegraph_rows_type(const ggml_tensor * t);

// Whether the product dst = src0 x src1 (with ids: MUL_MAT_ID) runs on these kernels. gate: the tensor of a
// gate product with the same operands that is combined with dst by a GLU, or nullptr.
bool moegraph_rows_supported(const ggml_tensor * dst, const ggml_tensor * gate, int cc);

// Whether the kernels of one row do (moegraph-one.cu).
bool moegraph_rows_is_one(const ggml_tensor * dst, int cc);

// Runs the product. glu: the node that combines it with its gate product, nullptr for a plain product.
void moegraph_rows_mul_mat(ggml_backend_cuda_context & ctx, ggml_tensor * dst, const ggml_tensor * gate,
    ggml_tensor * glu);

// Runs gate and up of experts with biases and the GLU behind them, of one row, from node i on: experts in slots, too, where a
// view lies between the nodes. Returns how many nodes behind i that covers, 0 if there are none (then nothing has been run).
// _keep: asks that what they read keeps its memory until the GLU has run.
int moegraph_rows_try_biased(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int i);
void moegraph_rows_keep(const ggml_cgraph * cgraph, int i, const ggml_backend_graph_optimize_params * params);

// Runs the product of node i together with the products of the same activations right behind it, and, of one row, the sums
// with biases behind them; or a product of one row with the residual sum behind it.
// Returns how many nodes behind i that covers, 0 if there are none (then nothing has been run).
int moegraph_rows_try_group(ggml_backend_cuda_context & ctx, ggml_cgraph * cgraph, int i);

// Whether gate and up of a token's experts, of which `routed` is one, can fetch what the look-up of slots `fetch` does not find:
// in one launch with the shared expert, whose gate has the product `gate`.
bool moegraph_rows_fetches(ggml_backend_cuda_context & ctx, const ggml_tensor * routed, const ggml_tensor * fetch,
    const ggml_tensor * gate);

// The same for float weights with few rows, such as a router.
bool moegraph_rows_f32_supported(const ggml_tensor * dst);
void moegraph_rows_f32_mul_mat(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// Where to quantize a tensor (contiguous F32) for the products of few rows that read it, nullptr if there are none.
// The caller fills it before any of them runs.
void * moegraph_rows_reserve(ggml_backend_cuda_context & ctx, const ggml_tensor * tensor);

// Lets a branch that forks now read the quantized rows of a tensor, which stay as they are until the next call, at its join
// (nullptr). What the main stream quantizes behind the fork is not for the branch: it would have to wait for it.
void moegraph_rows_pin(ggml_backend_cuda_context & ctx, const ggml_tensor * tensor);

// As moegraph_rows_reserve, for the vector kernel that multiplies one token with its experts.
void * moegraph_q8_1_reserve(ggml_backend_cuda_context & ctx, const ggml_tensor * tensor);

// The q8_1 blocks of the activations of such a product, quantized here unless that has been done already; nullptr if
// the caller has to do it.
const void * moegraph_q8_1(ggml_backend_cuda_context & ctx, const ggml_tensor * src1);

// Forgets quantized activations of the last evaluation. Call before the nodes of a graph are launched.
void moegraph_rows_begin(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph);
