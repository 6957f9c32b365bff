#include "moegraph-rows.cuh"
#include "moegraph-rows-types.cuh"
#include "moegraph-copy.cuh"

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

// The same sums of many rows: a block computes 32 x 32 of them and shares what they read. It goes through the values as the
// warps of moegraph_rows_f32_kernel do, warp after warp; each of its own warps takes four of their lanes, 8 apart.
constexpr int F32_TILE   = 32;
constexpr int F32_LANES  = 8;                // of moegraph_rows_f32_kernel that lie between those of a warp
constexpr int F32_CHUNK  = 4*32;             // values of a row that a warp of moegraph_rows_f32_kernel reads at once
constexpr int F32_PITCH  = F32_CHUNK + 4;    // rows begin in other banks
constexpr int F32_STAGE  = 2*F32_TILE*F32_PITCH;
constexpr int F32_STAGES = 2;
constexpr int F32_TILE_WARPS  = 2*F32_LANES; // each has half of the weight rows
constexpr int F32_TILE_BYTES  = (F32_STAGES*F32_STAGE + F32_LANES*F32_TILE*F32_TILE)*sizeof(float);
constexpr int F32_TILE_BLOCKS = 32;          // with fewer blocks, more and smaller ones are faster

// Grid: (tiles of weight rows, tiles of activation rows).
__launch_bounds__(F32_TILE_WARPS*32, 1)
static __global__ void moegraph_rows_f32_tile_kernel(
        const float * x, const float * y, float * dst, const int n_values, const int n_rows, const int n_cols,
        const int64_t stride_x, const int64_t stride_y, const int64_t stride_dst) {
    extern __shared__ float4 moegraph_f32_smem[];
    float * stages = (float *) moegraph_f32_smem;
    float * sums   = stages + F32_STAGES*F32_STAGE;

    const int row0 = F32_TILE*blockIdx.x;
    const int col0 = F32_TILE*blockIdx.y;
    const int tid  = 32*threadIdx.y + threadIdx.x;
    const int q    = threadIdx.y % F32_LANES;
    const int half = threadIdx.y / F32_LANES;
    const int r    = threadIdx.x / 8; // this thread has the rows r, r + 4, r + 8, r + 12 of its half
    const int c    = threadIdx.x % 8; // and the columns c, c + 8, c + 16, c + 24

    const int n_laps   = (n_values + MOEGRAPH_F32_WARPS*F32_CHUNK - 1)/(MOEGRAPH_F32_WARPS*F32_CHUNK);
    const int n_chunks = MOEGRAPH_F32_WARPS*n_laps;
    const auto load = [&](const int chunk) {
        const int first = F32_CHUNK*(chunk/n_laps + MOEGRAPH_F32_WARPS*(chunk % n_laps)) + 4*threadIdx.x;
        float * stage = stages + (chunk % F32_STAGES)*F32_STAGE + 4*threadIdx.x;
#pragma unroll
        for (int i = threadIdx.y; i < 2*F32_TILE; i += F32_TILE_WARPS) { // the tile's weight rows, then its activation rows
            const float * row = i < F32_TILE ? x + min(row0 + i, n_rows - 1)*stride_x :
                y + min(col0 + i - F32_TILE, n_cols - 1)*stride_y;
            const bool there = first < n_values; // zeros change no sum
            moegraph_copy_16((char *) (stage + i*F32_PITCH), (const char *) (row + (there ? first : 0)), there ? 16 : 0);
        }
    };
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
#pragma unroll
    for (int i = 0; i < F32_STAGES; ++i) {
        load(i);
        moegraph_copy_commit();
    }

    float acc[4][4][4] = {}; // lane, weight row, activation row
    float total[2] = {};     // of the results tid and tid + 512 of the tile, in the order of sums
    for (int chunk = 0; chunk < n_chunks; ++chunk) {
        moegraph_copy_wait<F32_STAGES - 1>();
        __syncthreads();
        const float * xs = stages + (chunk % F32_STAGES)*F32_STAGE + (F32_TILE/2*half + r)*F32_PITCH;
        const float * ys = stages + (chunk % F32_STAGES)*F32_STAGE + (F32_TILE + c)*F32_PITCH;
#pragma unroll
        for (int l = 0; l < 4; ++l) {
            const int i = 4*(q + F32_LANES*l);
            float4 xv[4];
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                xv[m] = *(const float4 *) (xs + 4*m*F32_PITCH + i);
            }
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const float4 yv = *(const float4 *) (ys + 8*n*F32_PITCH + i);
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    acc[l][m][n] = __fmaf_rn(xv[m].x, yv.x, acc[l][m][n]);
                    acc[l][m][n] = __fmaf_rn(xv[m].y, yv.y, acc[l][m][n]);
                    acc[l][m][n] = __fmaf_rn(xv[m].z, yv.z, acc[l][m][n]);
                    acc[l][m][n] = __fmaf_rn(xv[m].w, yv.w, acc[l][m][n]);
                }
            }
        }
        const bool ends = chunk % n_laps == n_laps - 1; // of a warp of moegraph_rows_f32_kernel
        if (ends) {
#pragma unroll
            for (int j = 0; j < 16; ++j) { // lanes 16 apart, then 8 apart
                const int m = j/4, n = j%4;
                sums[F32_TILE*F32_TILE*q + 512*half + 32*j + threadIdx.x] =
                    (acc[0][m][n] + acc[2][m][n]) + (acc[1][m][n] + acc[3][m][n]);
                acc[0][m][n] = acc[1][m][n] = acc[2][m][n] = acc[3][m][n] = 0.0f;
            }
        }
        __syncthreads();
        if (chunk + F32_STAGES < n_chunks) {
            load(chunk + F32_STAGES);
        }
        moegraph_copy_commit();
        if (ends) {
#pragma unroll
            for (int h = 0; h < 2; ++h) { // lanes 4, 2 and 1 apart
                const float * s = sums + 512*h + tid;
                constexpr int n = F32_TILE*F32_TILE;
                total[h] += ((s[0] + s[4*n]) + (s[2*n] + s[6*n])) + ((s[n] + s[5*n]) + (s[3*n] + s[7*n]));
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const int row = row0 + F32_TILE/2*h + r + 4*(threadIdx.y/4);
        const int col = col0 + c + 8*(threadIdx.y % 4);
        if (row < n_rows && col < n_cols) {
            dst[col*stride_dst + row] = total[h];
        }
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

// Returns false where the device has too little shared memory, or where there are too few tiles.
static bool moegraph_rows_f32_launch_tiles(const ggml_tensor * dst, cudaStream_t stream) {
    const ggml_tensor * src0 = dst->src[0];
    const ggml_tensor * src1 = dst->src[1];
    const size_t most = ggml_cuda_info().devices[ggml_cuda_get_device()].smpbo;
    const dim3 grid((src0->ne[1] + F32_TILE - 1)/F32_TILE, (src1->ne[1] + F32_TILE - 1)/F32_TILE, 1);
    if (most < F32_TILE_BYTES || grid.x*grid.y < F32_TILE_BLOCKS) {
        return false;
    }
    CUDA_SET_SHARED_MEMORY_LIMIT(moegraph_rows_f32_tile_kernel, most);
    const ggml_cuda_kernel_launch_params params(grid, dim3(32, F32_TILE_WARPS, 1), (size_t) F32_TILE_BYTES, stream);
    ggml_cuda_kernel_launch(moegraph_rows_f32_tile_kernel, params,
        (const float *) src0->data, (const float *) src1->data, (float *) dst->data,
        (int) src0->ne[0], (int) src0->ne[1], (int) src1->ne[1], (int64_t) (src0->nb[1]/sizeof(float)),
        (int64_t) (src1->nb[1]/sizeof(float)), (int64_t) (dst->nb[1]/sizeof(float)));
    return true;
}

void moegraph_rows_f32_mul_mat(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    if (dst->src[1]->ne[1] == 1) {
        moegraph_rows_f32_launch<1, 1>(dst, ctx.stream());
    } else if (dst->src[1]->ne[1] == 2) {
        moegraph_rows_f32_launch<1, 2>(dst, ctx.stream());
    } else if (dst->src[1]->ne[1] > MOEGRAPH_MAX_COLS) {
        if (!moegraph_rows_f32_launch_tiles(dst, ctx.stream())) {
            moegraph_rows_f32_launch<8, 8>(dst, ctx.stream()); // a row of either is read by fewer blocks
        }
    } else {
        moegraph_rows_f32_launch<2, 8>(dst, ctx.stream());
    }
}
