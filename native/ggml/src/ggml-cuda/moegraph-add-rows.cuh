#pragma once

#include "common.cuh"

// rows[target[i]] += products of vectors with their weights, in the order of the lists of terms: a MUL, and the GET_ROWS,
// ADD_IDs and SET_ROWS after it, as one kernel that leaves out what is between them. Its bits are those of the nodes.
// Each target is named once, but for targets without terms. Returns how many nodes after node i that covers, 0 for none.
int moegraph_add_rows_try(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int i);
