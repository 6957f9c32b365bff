#pragma once

#include "common.cuh"
#include "moegraph.h"

// What the kernels over the states of sequences share (moegraph.h says what slots, parents and lengths mean).

constexpr int MOEGRAPH_PADDING = -2; // as the parent of a row

// The parent of row i: an earlier row that is not padding, -1 or MOEGRAPH_PADDING.
static __device__ __forceinline__ int moegraph_parent(const int32_t * parents, const int i) {
    const int p = parents[i];
    return p == MOEGRAPH_PADDING || (p >= 0 && p < i && parents[p] != MOEGRAPH_PADDING) ? p : -1;
}

// How many of its n_tokens rows a sequence has.
static __device__ __forceinline__ int moegraph_n_rows(const int32_t * lengths, const int sequence, const int n_tokens) {
    return lengths ? max(0, min(lengths[sequence], n_tokens)) : n_tokens;
}

// Whether a kernel may read slots before the preceding kernel has ended: only copies write an input, and a copy has ended
// before any kernel behind it starts.
static inline bool moegraph_is_input(const ggml_tensor * slots) {
    return slots->op == GGML_OP_NONE && slots->view_src == nullptr && (slots->flags & GGML_TENSOR_FLAG_INPUT) != 0;
}

// Waits for the preceding kernel. Returns the slot of sequence blockIdx.y, which is read before that if a.early.
template <typename args>
static __device__ __forceinline__ int moegraph_wait_for_slot(const args & a) {
    int slot = a.early ? a.slots[blockIdx.y] : 0;
    ggml_cuda_pdl_sync();
    if (!a.early) {
        slot = a.slots[blockIdx.y];
    }
    return slot;
}
