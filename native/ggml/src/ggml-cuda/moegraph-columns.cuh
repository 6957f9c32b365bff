#pragma once

#include "common.cuh"

constexpr int MOEGRAPH_COLUMN_LANES = 8; // that hold one column of a state of DeltaNet

// The element i of a column lies in lane i % 8. The order of sums is that of the kernel for short chains, where a lane
// has every 32nd element and the first two steps of a reduction add the lanes 16 and 8 away.
template <int S>
struct moegraph_columns {
    static constexpr int width    = S < 32 ? S : 32;
    static constexpr int n_sums   = width/MOEGRAPH_COLUMN_LANES;
    static constexpr int n_rounds = S/width;
    static constexpr int n        = n_sums*n_rounds;   // elements of a lane
    static constexpr int pitch    = n > 4 ? n + 4 : n; // keeps the lanes of a column in other banks
    static constexpr int size     = MOEGRAPH_COLUMN_LANES*pitch;

    static __device__ __forceinline__ int offset(const int i) { // in shared memory
        return i % MOEGRAPH_COLUMN_LANES*pitch + i/width*n_sums + i % width/MOEGRAPH_COLUMN_LANES;
    }
    static __device__ __forceinline__ int index(const int lane, const int e) { // of a lane's element e
        return e/n_sums*width + e % n_sums*MOEGRAPH_COLUMN_LANES + lane;
    }
    static __device__ __forceinline__ void load(float * x, const float * shared) {
        constexpr int step = n < 4 ? n : 4;
#pragma unroll
        for (int e = 0; e < n; e += step) {
            ggml_cuda_memcpy_1<step*sizeof(float)>(x + e, shared + e);
        }
    }
    // The part of a dot product that a lane has; the sum over the lanes (warp_reduce_sum) is the product.
    static __device__ __forceinline__ float partial(const float * x, const float * y) {
        float sum[n_sums];
#pragma unroll
        for (int m = 0; m < n_sums; ++m) {
            sum[m] = 0.0f;
#pragma unroll
            for (int r = 0; r < n_rounds; ++r) {
                sum[m] = __fmaf_rn(x[r*n_sums + m], y[r*n_sums + m], sum[m]);
            }
        }
#pragma unroll
        for (int half = n_sums/2; half > 0; half /= 2) {
#pragma unroll
            for (int m = 0; m < half; ++m) {
                sum[m] += sum[m + half];
            }
        }
        return sum[0];
    }
    static __device__ __forceinline__ float dot(const float * x, const float * y) {
        return warp_reduce_sum<MOEGRAPH_COLUMN_LANES>(partial(x, y));
    }
};
