#pragma once

#include "moegraph-parents.cuh"

// GGML_OP_MOEGRAPH_CONV (moegraph.h); out: where the result goes, of dst's shape, activated if silu.
bool moegraph_conv_supported(const ggml_tensor * dst);
void moegraph_conv(ggml_backend_cuda_context & ctx, const ggml_tensor * dst, ggml_tensor * out, bool silu);

// The sums of one channel. The order is that of SSM_CONV.

// Rows first to first + n - 1 of a chain; past: the channel's state. x is what the next row continues.
template <int d_conv, typename F>
static __device__ __forceinline__ void moegraph_conv_chain(const float * past, const float * rows, const int64_t stride,
        const int first, const int n, const float (&w)[d_conv], float (&x)[d_conv], const F & put) {
#pragma unroll
    for (int j = 0; j < d_conv - 1; ++j) {
        const int t = first - (d_conv - 1) + j;
        x[j] = t < 0 ? past[d_conv - 1 + t] : rows[t*stride];
    }
    constexpr int n_ahead = 4; // results might lie where rows do, for all that the compiler knows
    for (int i0 = 0; i0 < n; i0 += n_ahead) {
        float next[n_ahead];
#pragma unroll
        for (int l = 0; l < n_ahead; ++l) {
            next[l] = i0 + l < n ? rows[(first + i0 + l)*stride] : 0.0f;
        }
#pragma unroll
        for (int l = 0; l < n_ahead; ++l) {
            if (i0 + l >= n) {
                break;
            }
            x[d_conv - 1] = next[l];
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < d_conv; ++j) {
                sum += x[j]*w[j];
            }
            put(i0 + l, sum);
#pragma unroll
            for (int j = 0; j < d_conv - 1; ++j) {
                x[j] = x[j + 1];
            }
        }
    }
}

// Windows of some rows of a tree: row numbers, below 0 columns of the state, the last one -1. The last of a window is
// the row itself, or MOEGRAPH_PADDING.
template <int d_conv, int max_rows>
struct moegraph_conv_windows {
    int parent[MOEGRAPH_TREE_ROWS];
    int column[max_rows][d_conv];

    // All threads of a block, at least MOEGRAPH_TREE_ROWS of them.
    __device__ __forceinline__ void make(const int32_t * parents, const int n_tokens, const int first, const int n) {
        const int tid = threadIdx.x;
        if (tid < n_tokens) {
            parent[tid] = moegraph_parent(parents, tid);
        }
        __syncthreads();
        if (tid < n) {
            int row = first + tid, front = 0;
            if (parent[row] == MOEGRAPH_PADDING) {
                column[tid][d_conv - 1] = MOEGRAPH_PADDING;
            } else {
#pragma unroll
                for (int j = d_conv - 1; j >= 0; --j) {
                    column[tid][j] = row >= 0 ? row : --front;
                    row            = row >= 0 ? parent[row] : -1;
                }
            }
        }
        __syncthreads();
    }

    // As moegraph_conv_chain; a row of padding is 0.
    template <typename F>
    __device__ __forceinline__ void convolve(const float * past, const float * rows, const int64_t stride, const int n,
            const float (&w)[d_conv], const F & put) const {
        for (int i = 0; i < n; ++i) {
            float sum = 0.0f;
            if (column[i][d_conv - 1] != MOEGRAPH_PADDING) {
#pragma unroll
                for (int j = 0; j < d_conv; ++j) {
                    const int t = column[i][j];
                    sum += (t < 0 ? past[d_conv - 1 + t] : rows[t*stride])*w[j];
                }
            }
            put(i, sum);
        }
    }
};
