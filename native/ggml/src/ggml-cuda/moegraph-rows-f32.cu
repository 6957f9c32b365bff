#include "moegraph-rows.cuh"
#include "moegraph-rows-types.cuh"

#include "moegraph.h"

constexpr int MOEGRAPH_F32_WARPS = 8;

// Float weights: a block takes n_w weight rows and n_a activation rows, its warps share the values. The sum of a row does
// not depend on these numbers. Grid: (groups of weight rows, groups of activation rows).
template <int n_w, int n_a>
static __global__ void moegraph_rows_f32_kernel(
        const float * x, const float * y, float * dst, const int n_values, const int n_rows, const int n_cols,
        const int64_t stride_x, const int64_t stride_y, const int64_t stride_dst, const int early) {
    const int row0 = n_w*blockIdx.x;
    const int col0 = n_a*blockIdx.y;
    const int i0   = 4*(32*threadIdx.y + threadIdx.x);

    const float * x_row[n_w];
    float4 xv[n_w];
    ggml_cuda_pdl_lc();
    if (!early) {
        ggml_cuda_pdl_sync();
    }
#pragma unroll
    for (int r = 0; r < n_w; ++r) {
        x_row[r] = x + min(row0 + r, n_rows - 1)*stride_x;
        xv[r]    = i0 < n_values ? *(const float4 *) (x_row[r] + i0) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
    if (early) {
        ggml_cuda_pdl_sync();
    }

    float acc[n_w][n_a] = {};
    for (int i = i0; i < n_values; i += 4*32*MOEGRAPH_F32_WARPS) {
        float4 x_next[n_w];
        const int i_next = i + 4*32*MOEGRAPH_F32_WARPS;
#pragma unroll
        for (int r = 0; r < n_w; ++r) {
            x_next[r] = i_next < n_values ? *(const float4 *) (x_row[r] + i_next) : xv[r];
        }
#pragma unroll
        for (int c = 0; c < n_a; ++c) {
            const float4 yv = *(const float4 *) (y + min(col0 + c, n_cols - 1)*stride_y + i);
#pragma unroll
            for (int r = 0; r < n_w; ++r) {
                acc[r][c] = __fmaf_rn(xv[r].x, yv.x, acc[r][c]);
                acc[r][c] = __fmaf_rn(xv[r].y, yv.y, acc[r][c]);
                acc[r][c] = __fmaf_rn(xv[r].z, yv.z, acc[r][c]);
                acc[r][c] = __fmaf_rn(xv[r].w, yv.w, acc[r][c]);
            }
        }
#pragma unroll
        for (int r = 0; r < n_w; ++r) {
            xv[r] = x_next[r];
        }
    }

    __shared__ float sums[MOEGRAPH_F32_WARPS][n_w*n_a];
#pragma unroll
    for (int r = 0; r < n_w; ++r) {
#pragma unroll
        for (int c = 0; c < n_a; ++c) {
            const float sum = warp_reduce_sum<32>(acc[r][c]);
            if (threadIdx.x == 0) {
                sums[threadIdx.y][r*n_a + c] = sum;
            }
        }
    }
    __syncthreads();
    const int result = 32*threadIdx.y + threadIdx.x;
    if (result >= n_w*n_a) {
        return;
    }
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < MOEGRAPH_F32_WARPS; ++w) {
        sum += sums[w][result];
    }
    const int row = row0 + result / n_a;
    const int col = col0 + result % n_a;
    if (row < n_rows && col < n_cols) {
        dst[col*stride_dst + row] = sum;
    }
}

// Of few rows or few weight rows, upstream's kernels are as fast; but their sums have other orders.
bool moegraph_rows_f32_supported(const ggml_tensor * dst) {
    const ggml_tensor * src0 = dst->src[0];
    const ggml_tensor * src1 = dst->src[1];
    return src0 != nullptr && src1 != nullptr && src0->type == GGML_TYPE_F32 && src1->type == GGML_TYPE_F32 &&
        dst->type == GGML_TYPE_F32 &&
        src0->ne[2] == 1 && src0->ne[3] == 1 && src1->ne[2] == 1 && src1->ne[3] == 1 && src0->ne[1] <= 1024 &&
        (moegraph_rows_are_apart(dst) ||
            (src1->ne[1] >= 3 && src1->ne[1] <= (src0->ne[1] < 16 ? 8 : MOEGRAPH_MAX_COLS))) &&
        src0->ne[0] % 4 == 0 && src0->nb[0] == sizeof(float) && src1->nb[0] == sizeof(float) &&
        dst->nb[0] == sizeof(float) &&
        src0->nb[1] % 16 == 0 && src1->nb[1] % 16 == 0 && (uintptr_t) src0->data % 16 == 0 &&
        (uintptr_t) src1->data % 16 == 0;
}

template <int n_w, int n_a>
static void moegraph_rows_f32_launch(const ggml_tensor * dst, cudaStream_t stream) {
    const ggml_tensor * src0 = dst->src[0];
    const ggml_tensor * src1 = dst->src[1];
    const dim3 grid((src0->ne[1] + n_w - 1)/n_w, (src1->ne[1] + n_a - 1)/n_a, 1);
    const ggml_cuda_kernel_launch_params params(grid, dim3(32, MOEGRAPH_F32_WARPS, 1), (size_t) 0, stream);
    ggml_cuda_kernel_launch(moegraph_rows_f32_kernel<n_w, n_a>, params,
        (const float *) src0->data, (const float *) src1->data, (float *) dst->data,
        (int) src0->ne[0], (int) src0->ne[1], (int) src1->ne[1], (int64_t) (src0->nb[1]/sizeof(float)),
        (int64_t) (src1->nb[1]/sizeof(float)), (int64_t) (dst->nb[1]/sizeof(float)), (int) moegraph_is_constant(src0));
}

void moegraph_rows_f32_mul_mat(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    if (dst->src[1]->ne[1] == 1) {
        moegraph_rows_f32_launch<1, 1>(dst, ctx.stream());
    } else if (dst->src[1]->ne[1] == 2) {
        moegraph_rows_f32_launch<1, 2>(dst, ctx.stream());
    } else if (dst->src[1]->ne[1] > MOEGRAPH_MAX_COLS) {
        moegraph_rows_f32_launch<8, 8>(dst, ctx.stream()); // a row of either is read by fewer blocks
    } else {
        moegraph_rows_f32_launch<2, 8>(dst, ctx.stream());
    }
}
