#pragma once

#include "moegraph-publish.cuh"

// Products whose rows must have the bits that they have alone (moegraph_keep_rows_apart): where no kernel for few rows
// sees to that, each row is a product of its own. Returns how many nodes that covers from node i on, 0 if nothing has
// been run.
int moegraph_apart_try(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int i, moegraph_compute compute);
