#pragma once

#include "common.cuh"
#include "convert.cuh"

// What the batched MUL_MAT_ID kernels need to know about ids: its entries sorted by expert.
struct ggml_cuda_mmid_args {
    const int32_t * ids; // [n_expert_used, n_tokens], an entry below 0 or from n_experts on is absent
    int n_experts;
    int n_tokens;
    int n_expert_used;
    int nchannels_y;     // rows of src1 per token, 1 or n_expert_used
    int si1;             // stride of ids between tokens
    int sis1;            // stride of src1 between tokens, in rows
    bool write_inverse;  // ids_src1 maps an entry to its sorted position instead of a position to a row of src1

    int32_t * ids_src1;      // [n_tokens*n_expert_used]
    int32_t * ids_dst;       // [n_tokens*n_expert_used + n_pad], sorted position -> entry, which is the row of dst
    int32_t * expert_bounds; // [n_experts + 1], absent entries are behind the last bound

    float * dst;         // the rows of absent entries are set to zero, the others are not touched
    int     ncols_dst;
    int64_t stride_dst;

    int   n_pad  = 0;    // what a tile may read behind the end of ids_dst ...
    int * y_pad  = nullptr;
    int   n_ypad = 0;    // ... and of the quantized src1, set to zero
};

// Repeated ids within a token are counted each. The order within an expert is that of the entries.
void ggml_cuda_mmid_sort(const ggml_cuda_mmid_args & args, cudaStream_t stream);

// What a block of mul_mat_f computes for one more use of its expert by the same token: rows of x times one column of y.
template <typename T, int rows_per_block, int nwarps>
static __device__ __forceinline__ void mul_mat_f_rows(
        const T * __restrict__ x, const float * __restrict__ y, float * __restrict__ dst,
        const int ncols, const int stride_row, const int offset_y, const int offset_dst) {
    constexpr int warp_size = ggml_cuda_get_physical_warp_size();

#pragma unroll 1
    for (int row = threadIdx.y; row < rows_per_block; row += nwarps) {
        float sum = 0.0f;
#pragma unroll 1
        for (int col = threadIdx.x; col < ncols; col += warp_size) {
            if constexpr (std::is_same_v<T, float>) {
                sum += x[row*stride_row + col] * y[offset_y + col];
            } else {
                float2 tmpx;
                if constexpr (std::is_same_v<T, half2>) {
                    tmpx = __half22float2(x[row*stride_row + col]);
                } else {
                    tmpx = ggml_cuda_cast<float2>(x[row*stride_row + col]);
                }
                const float2 tmpy = ((const float2 *) y)[offset_y + col];
                sum += tmpx.x*tmpy.x + tmpx.y*tmpy.y;
            }
        }
        sum = warp_reduce_sum<warp_size>(sum);
        if (threadIdx.x == 0) {
            dst[offset_dst + row] = sum;
        }
    }
}
