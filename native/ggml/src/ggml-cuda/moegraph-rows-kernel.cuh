#pragma once

#include <algorithm>
#include <type_traits>

#include "mma.cuh"
#include "moegraph-copy.cuh"
#include "moegraph-rows-unpack.cuh"
#include "unary.cuh"

// What a block computes a part of.
static __device__ __forceinline__ moegraph_segment moegraph_segment_of_block(const moegraph_rows_args & args) {
    moegraph_segment seg = args.segments[0];
#pragma unroll
    for (int i = 1; i < MOEGRAPH_MAX_SEGMENTS; ++i) {
        if (i < args.n_segments && (int) blockIdx.x >= args.segments[i].first_block) {
            seg = args.segments[i];
        }
    }
    return seg;
}

// Of each matrix: the first row of weights that a lane copies and computes, and the one 8 below.
template <int n_mats>
static __device__ __forceinline__ void moegraph_rows_of_lane(
        const char * (&rows)[n_mats][2], const moegraph_rows_args & args, const moegraph_segment & seg, const int expert,
        const int row) {
#pragma unroll
    for (int m = 0; m < n_mats; ++m) {
        const char * base = (m == 0 ? seg.x : args.x_gate) + max(expert, 0)*args.stride_expert;
        rows[m][0] = base + min(row,     seg.n_rows - 1)*args.stride_row;
        rows[m][1] = base + min(row + 8, seg.n_rows - 1)*args.stride_row;
    }
}

// Copies one chunk of the tile's rows. Lane 4*g + c copies vectors c, c + 4, ... of the rows g and g + 8. Behind the end
// of a row there are zeros: with those of the activations they change no sum.
template <ggml_type type>
static __device__ __forceinline__ void moegraph_load_chunk(
        char * stage, const char * row0, const char * row1, const int row_bytes, const int chunk) {
    typedef moegraph_x<type> X;
    const int g = threadIdx.x / 4;
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const char * src = (r == 0 ? row0 : row1) + (int64_t) chunk*X::bytes;
        if constexpr (X::unaligned) {
            src = (const char *) ((uintptr_t) src & ~(uintptr_t) 15);
        }
        src += 16*c;
        char * dst = stage + (g + 8*r)*X::pitch + 16*c;
#pragma unroll
        for (int v = 0; v < X::vecs; v += 4) {
            if (v + 4 > X::vecs && c >= X::vecs - v) {
                break;
            }
            int n = 16;
            if constexpr (X::unaligned) {
                n = min(16, max(0, (int) ((r == 0 ? row0 : row1) + row_bytes - (src + 16*v))));
                moegraph_copy_16(dst + 16*v, n > 0 ? src + 16*v : row0 - ((uintptr_t) row0 & 15), n);
            } else {
                moegraph_copy_16(dst + 16*v, src + 16*v, n);
            }
        }
    }
    GGML_UNUSED(row_bytes);
}

// Adds the product of one chunk to acc (the layout of the 16 x 8 accumulator of the tensor cores). y_quants, y_scales: where
// the chunk of a lane's columns begins, in bytes behind y. Products and sums are spelled out: a row's bits must not depend
// on what the compiler contracts for some number of tiles.
template <ggml_type type, int n_tiles, int n_mats>
static __device__ __forceinline__ void moegraph_dot_chunk(
        float (&acc)[n_mats][n_tiles][4], const char * const (&s)[n_mats][2], const char * y,
        const int (&y_quants)[n_tiles], const int (&y_scales)[n_tiles][2]) {
    using namespace ggml_cuda_mma;
    typedef moegraph_x<type> X;
    const int c = threadIdx.x % 4;

    typename X::head head[n_mats][2];
#pragma unroll
    for (int m = 0; m < n_mats; ++m) {
        head[m][0].load(s[m][0]);
        head[m][1].load(s[m][1]);
    }
#pragma unroll
    for (int k = 0; k < MOEGRAPH_CHUNK/32; ++k) {
        tile<8, 8, int> b[n_tiles];
        float2 ys[n_tiles][2];
#pragma unroll
        for (int t = 0; t < n_tiles; ++t) {
            const int2 q = *(const int2 *) (((const moegraph_block_y *) (y + y_quants[t]))[k].qs + 8*c);
            b[t].x[0] = q.x;
            b[t].x[1] = q.y;
            ys[t][0] = *(const float2 *) ((const moegraph_block_y *) (y + y_scales[t][0]) + k);
            ys[t][1] = *(const float2 *) ((const moegraph_block_y *) (y + y_scales[t][1]) + k);
        }
#pragma unroll
        for (int m = 0; m < n_mats; ++m) {
            int q0[2];
            int q1[2];
            X::quants(s[m][0], k, c, q0);
            X::quants(s[m][1], k, c, q1);
            if constexpr (X::halves) {
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float xs[2] = { X::scale(head[m][0], s[m][0], k, h), X::scale(head[m][1], s[m][1], k, h) };
                    tile<16, 4, int> a;
                    a.x[0] = q0[h];
                    a.x[1] = q1[h];
#pragma unroll
                    for (int t = 0; t < n_tiles; ++t) {
                        tile<8, 4, int> bh;
                        bh.x[0] = b[t].x[h];
                        tile<16, 8, int> d;
                        mma(d, a, bh);
#pragma unroll
                        for (int l = 0; l < 4; ++l) {
                            acc[m][t][l] = __fmaf_rn(xs[l/2], __fmul_rn(ys[t][l%2].x, (float) d.x[l]), acc[m][t][l]);
                        }
                    }
                }
            } else {
                const float xs[2] = { X::scale(head[m][0], s[m][0], k, 0), X::scale(head[m][1], s[m][1], k, 0) };
                tile<16, 8, int> a;
                a.x[0] = q0[0];
                a.x[1] = q1[0];
                a.x[2] = q0[1];
                a.x[3] = q1[1];
#pragma unroll
                for (int t = 0; t < n_tiles; ++t) {
                    tile<16, 8, int> d;
                    mma(d, a, b[t]);
#pragma unroll
                    for (int l = 0; l < 4; ++l) {
                        acc[m][t][l] = __fmaf_rn(xs[l/2], __fmul_rn(ys[t][l%2].x, (float) d.x[l]), acc[m][t][l]);
                        if constexpr (X::has_min) {
                            acc[m][t][l] = __fmaf_rn(-head[m][l/2].minimum(k), ys[t][l%2].y, acc[m][t][l]);
                        }
                    }
                }
            }
        }
    }
}

// Calls f with a type that the kernels read, as a constant.
template <typename F>
static void moegraph_switch_type(const ggml_type type, const F & f) {
    switch (type) {
        case GGML_TYPE_Q4_0:         return f(std::integral_constant<ggml_type, GGML_TYPE_Q4_0>());
        case GGML_TYPE_Q8_0:         return f(std::integral_constant<ggml_type, GGML_TYPE_Q8_0>());
        case MOEGRAPH_TYPE_Q8_0_ODD: return f(std::integral_constant<ggml_type, MOEGRAPH_TYPE_Q8_0_ODD>());
        case GGML_TYPE_Q4_K:         return f(std::integral_constant<ggml_type, GGML_TYPE_Q4_K>());
        case GGML_TYPE_Q5_K:         return f(std::integral_constant<ggml_type, GGML_TYPE_Q5_K>());
        case GGML_TYPE_Q6_K:         return f(std::integral_constant<ggml_type, GGML_TYPE_Q6_K>());
        case GGML_TYPE_MXFP4:        return f(std::integral_constant<ggml_type, GGML_TYPE_MXFP4>());
        default: GGML_ABORT("no kernel for rows of type %d", (int) type);
    }
}

// How many warps of moegraph_rows_kernel a block may have on a device with so much shared memory.
template <ggml_type type, bool glu>
static int moegraph_rows_most_warps(const size_t smem) {
    constexpr size_t warp_bytes = MOEGRAPH_STAGES*(glu ? 2 : 1)*MOEGRAPH_TILE_ROWS*moegraph_x<type>::pitch;
    int n = MOEGRAPH_MAX_WARPS;
    while (n > 1 && n*warp_bytes > smem) {
        n /= 2;
    }
    return n;
}

// Into how many parts the sums of a product with so many tiles of rows are divided. Several warps share a tile if there are
// few tiles, as long as all warps fit on the device at once. How many groups of experts there will be is not known: two
// chunks a warp. apart: other products may share the launch or not, so each takes half of the device at most.
template <ggml_type type, bool glu>
static int moegraph_rows_parts(const moegraph_rows_args & args, const int n_tiles) {
    const ggml_cuda_device_info::cuda_device_info & dev = ggml_cuda_info().devices[ggml_cuda_get_device()];
    const int  n_wanted = dev.nsm*MOEGRAPH_MAX_WARPS*MOEGRAPH_MIN_BLOCKS/(args.apart && !glu ? 2 : 1);
    const bool dense    = args.groups == nullptr;
    const int  most     = std::min(moegraph_rows_most_warps<type, glu>(dev.smpbo), dense ? MOEGRAPH_MAX_WARPS : 4);
    int n = 1;
    while (n < most && (dense ? 2*n <= args.n_chunks && 2*n_tiles*n <= n_wanted : 4*n <= args.n_chunks)) {
        n *= 2;
    }
    return n;
}

static int moegraph_n_tiles(const moegraph_segment & seg) {
    return (seg.n_rows + MOEGRAPH_TILE_ROWS - 1)/MOEGRAPH_TILE_ROWS;
}

// Divides the sums of each product, see moegraph_rows_parts. Returns the most parts.
template <ggml_type type, bool glu>
static int moegraph_rows_divide(moegraph_rows_args & args) {
    int n_all = 0, most = 1;
    for (int i = 0; i < args.n_segments; ++i) {
        n_all += moegraph_n_tiles(args.segments[i]);
    }
    for (int i = 0; i < args.n_segments; ++i) {
        moegraph_segment & seg = args.segments[i];
        seg.k_split = moegraph_rows_parts<type, glu>(args, args.apart ? moegraph_n_tiles(seg) : n_all);
        most = std::max(most, seg.k_split);
    }
    return most;
}

// Gives each product its blocks of n_warps warps, of which so many as share_tiles says share a tile. Returns their number.
static int moegraph_rows_lay_out(moegraph_rows_args & args, const int n_warps, const bool share_tiles) {
    int n = 0;
    for (int i = 0; i < args.n_segments; ++i) {
        moegraph_segment & seg = args.segments[i];
        const int n_tiles = share_tiles ? n_warps/seg.k_split : n_warps;
        seg.first_block = n;
        n += (moegraph_n_tiles(seg) + n_tiles - 1)/n_tiles;
    }
    return n;
}

static __device__ __forceinline__ float moegraph_glu(const float up, const float gate, const int op,
        const float limit) {
    switch (op) {
        case GGML_GLU_OP_SWIGLU:       return up * ggml_cuda_op_silu_single(gate);
        case GGML_GLU_OP_GEGLU:        return up * ggml_cuda_op_gelu_single(gate);
        case GGML_GLU_OP_SWIGLU_OAI:   return ggml_cuda_op_swiglu_oai_single(gate, up);
        case GGML_GLU_OP_SWIGLU_CLAMP: return ggml_cuda_op_swiglu_clamp_single(gate, up, limit);
        default:                       return up * gate;
    }
}

// Adds up the parts of a tile, each warp's shared memory takes its own sums. Returns whether this warp has the result.
template <ggml_type type, int n_tiles, int n_mats>
static __device__ __forceinline__ bool moegraph_rows_sum_parts(
        float (&acc)[n_mats][n_tiles][4], char * smem_warp, const int part, const int k_split) {
    constexpr int n_acc      = n_mats*n_tiles*4;
    constexpr int warp_bytes = MOEGRAPH_STAGES*n_mats*MOEGRAPH_TILE_ROWS*moegraph_x<type>::pitch;
    static_assert(n_acc*32*sizeof(float) <= warp_bytes, "sums do not fit");
    float * sums = (float *) smem_warp;
    __syncwarp();
    if (part > 0) {
#pragma unroll
        for (int l = 0; l < n_acc; ++l) {
            sums[32*l + threadIdx.x] = acc[l/(4*n_tiles)][(l/4) % n_tiles][l%4];
        }
    }
    __syncthreads();
    if (part > 0) {
        return false;
    }
    for (int p = 1; p < k_split; ++p) {
        const float * other = (const float *) (smem_warp + p*warp_bytes);
#pragma unroll
        for (int l = 0; l < n_acc; ++l) {
            acc[l/(4*n_tiles)][(l/4) % n_tiles][l%4] += other[32*l + threadIdx.x];
        }
    }
    return true;
}

// Writes the 16 x 8 results of a warp; zeros for slots without an expert.
template <int n_tiles, bool glu>
static __device__ __forceinline__ void moegraph_rows_store(
        const float (&acc)[glu ? 2 : 1][n_tiles][4], const moegraph_rows_args & args, const moegraph_segment & seg,
        const int * slots, const int expert, const int n, const int row) {
    const int c = threadIdx.x % 4;
#pragma unroll
    for (int t = 0; t < n_tiles; ++t) {
#pragma unroll
        for (int l = 0; l < 4; ++l) {
            const int col = 8*t + 2*c + l%2;
            const int i   = row + 8*(l/2);
            if (col >= n || i >= seg.n_rows) {
                continue;
            }
            int64_t offset = col*seg.stride_dst_col;
            if (slots != nullptr) {
                const int slot = slots[col];
                offset = (slot / args.n_used)*args.stride_dst_token + (slot % args.n_used)*seg.stride_dst_col;
            }
            float result = acc[0][t][l];
            if constexpr (glu) {
                result = moegraph_glu(result, acc[1][t][l], args.glu_op, args.glu_limit);
            }
            seg.dst[offset + i] = expert < 0 ? 0.0f : result;
        }
    }
}

// Grid: (blocks of tiles, groups or 1). Block: (32, n_warps), k_split neighbouring warps share a tile.
template <ggml_type type, int n_tiles, bool glu>
__launch_bounds__(MOEGRAPH_MAX_WARPS*32, MOEGRAPH_MIN_BLOCKS)
static __global__ void moegraph_rows_kernel(const moegraph_rows_args args) {
#ifdef TURING_MMA_AVAILABLE
    typedef moegraph_x<type> X;
    constexpr int n_mats      = glu ? 2 : 1;
    constexpr int stage_bytes = MOEGRAPH_TILE_ROWS*X::pitch;

    extern __shared__ char4 moegraph_rows_smem[];
    char * smem_warp = (char *) moegraph_rows_smem + threadIdx.y*(MOEGRAPH_STAGES*n_mats*stage_bytes);

    const int g    = threadIdx.x / 4;
    const int c    = threadIdx.x % 4;
    const moegraph_segment seg = moegraph_segment_of_block(args);
    const int k_split = seg.k_split;
    const int part    = threadIdx.y % k_split;
    const int tile    = (blockIdx.x - seg.first_block)*(blockDim.y / k_split) + threadIdx.y / k_split;
    const int row     = tile*MOEGRAPH_TILE_ROWS + g;

    const bool dense = args.groups == nullptr;
    if (!dense || !args.early) {
        ggml_cuda_pdl_sync();
    }

    int expert = 0;
    int n      = args.n_cols;
    const int * slots = nullptr;
    if (!dense) {
        if ((int) blockIdx.y >= *args.n_groups) {
            return;
        }
        const moegraph_group * group = args.groups + blockIdx.y;
        expert = group->expert;
        n      = group->n;
        slots  = group->slots;
    }

    const char * rows[n_mats][2];
    moegraph_rows_of_lane<n_mats>(rows, args, seg, expert, row);

    const int n_steps = expert < 0 || part >= args.n_chunks ? 0 :
        (args.n_chunks - part + k_split - 1) / k_split;
#pragma unroll
    for (int i = 0; i < MOEGRAPH_STAGES; ++i) {
        if (i < n_steps) {
#pragma unroll
            for (int m = 0; m < n_mats; ++m) {
                moegraph_load_chunk<type>(smem_warp + (i*n_mats + m)*stage_bytes, rows[m][0], rows[m][1],
                    args.row_bytes, part + i*k_split);
            }
        }
        moegraph_copy_commit();
    }
    ggml_cuda_pdl_lc(); // the next kernel may load its weights while this one computes
    if (dense && args.early) {
        ggml_cuda_pdl_sync();
    }

    // columns past the last one repeat it, their results are dropped
    const int blocks_per_row = args.n_chunks*(MOEGRAPH_CHUNK/32);
    const auto y_offset = [&](const int col) {
        int y_row = min(col, n - 1);
        if (!dense) {
            const int slot = slots[y_row];
            y_row = (slot / args.n_used)*args.n_y + (slot % args.n_used) % args.n_y;
        }
        return y_row*blocks_per_row*(int) sizeof(moegraph_block_y);
    };
    int y_quants[n_tiles];
    int y_scales[n_tiles][2];
#pragma unroll
    for (int t = 0; t < n_tiles; ++t) {
        y_quants[t]    = y_offset(8*t + g);
        y_scales[t][0] = y_offset(8*t + 2*c + 0);
        y_scales[t][1] = y_offset(8*t + 2*c + 1);
    }

    float acc[n_mats][n_tiles][4] = {};
    for (int i = 0; i < n_steps; ++i) {
        const int chunk = part + i*k_split;
        char * stage = smem_warp + (i % MOEGRAPH_STAGES)*n_mats*stage_bytes;
        moegraph_copy_wait<MOEGRAPH_STAGES - 1>();
        __syncwarp();

        const char * s[n_mats][2];
#pragma unroll
        for (int m = 0; m < n_mats; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                s[m][r] = stage + m*stage_bytes + (g + 8*r)*X::pitch;
                if constexpr (X::unaligned) {
                    s[m][r] += (uintptr_t) (rows[m][r] + (int64_t) chunk*X::bytes) & 15;
                }
            }
        }
        moegraph_dot_chunk<type, n_tiles, n_mats>(
            acc, s, (const char *) (args.y + chunk*(MOEGRAPH_CHUNK/32)), y_quants, y_scales);

        __syncwarp();
        if (i + MOEGRAPH_STAGES < n_steps) {
#pragma unroll
            for (int m = 0; m < n_mats; ++m) {
                moegraph_load_chunk<type>(stage + m*stage_bytes, rows[m][0], rows[m][1],
                    args.row_bytes, chunk + MOEGRAPH_STAGES*k_split);
            }
        }
        moegraph_copy_commit();
    }

    if (k_split > 1 && !moegraph_rows_sum_parts<type, n_tiles, n_mats>(acc, smem_warp, part, k_split)) {
        return;
    }
    moegraph_rows_store<n_tiles, glu>(acc, args, seg, slots, expert, n, row);
#else
    GGML_UNUSED(args);
    NO_DEVICE_CODE;
#endif // TURING_MMA_AVAILABLE
}
