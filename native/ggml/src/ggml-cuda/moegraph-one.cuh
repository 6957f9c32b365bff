#pragma once

#include "moegraph-rows-types.cuh"

// Products of one row of activations, dense or with the experts of a token, with or without a gate and a GLU. What counts
// is how many bytes of weights are on their way; a lane multiplies them with its part of the row.

// Whether these kernels compute the product dst. type: as what rows reads its weights.
bool moegraph_one_supported(const ggml_tensor * dst, ggml_type type, int cc);

// Runs what moegraph-rows.cu has laid down in args, without groups.
void moegraph_one_mul_mat(ggml_type type, moegraph_rows_args & args, cudaStream_t stream);
