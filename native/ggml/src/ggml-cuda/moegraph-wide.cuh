#pragma once

#include "moegraph-rows-types.cuh"

// Products of experts that have many rows, more than MOEGRAPH_FEW_SLOTS in all; and, where rows are kept apart, dense
// products of more than MOEGRAPH_MAX_COLS rows.

// How many slots a group of an expert's rows may have on the current device.
int moegraph_wide_cols();

// Runs a product. args: one segment with groups of moegraph_wide_cols() slots, or without groups a dense product.
void moegraph_wide_mul_mat(ggml_type type, const moegraph_rows_args & args, int n_groups, cudaStream_t stream);
