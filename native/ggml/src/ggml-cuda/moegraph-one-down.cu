#include "moegraph-match.cuh"
#include "moegraph-one-x.cuh"
#include "moegraph-one.cuh"
#include "moegraph-rows.cuh"

#include "moegraph.h"

constexpr int MOEGRAPH_DOWN_ONE_WARPS = 16; // of a block

struct moegraph_one_down_args {
    const char    * x;       // experts
    const float   * y;       // activations [n_values, n_used]
    const int32_t * ids;
    const float   * bias;    // added to the rows of an expert, or nullptr
    const float   * scale;   // [n_used], before the weights, or nullptr
    const float   * weights; // [n_used]; nullptr: each expert's rows are the result
    float         * dst;     // [n_rows], [n_rows, n_used]
    int64_t         stride_expert; // bytes
    int64_t         stride_bias;   // floats
    int             row_bytes;
    int             n_values;
    int             n_rows;
    int             n_experts;
    int             n_used;
    int             n_warps;       // for each expert
    int             early;         // ids and experts may be read before the preceding kernel has ended
};

// A block computes some rows of the result, n_warps warps for each chosen expert. All bytes of weights of a warp are on
// their way, to registers or shared memory, before it waits; meanwhile an expert's warps quantize its activations. n_lanes
// lanes have a row, n_steps parts each, and n_rows rows. Grid: rows. Block: (32, n_used*n_warps).
template <ggml_type type, int n_lanes, int n_steps, int n_rows>
static __global__ void __launch_bounds__(MOEGRAPH_DOWN_ONE_WARPS*32, 1)
        moegraph_one_down_kernel(const moegraph_one_down_args args) {
    typedef moegraph_one_x<type> X;
    constexpr int n_groups = 32/n_lanes, n_all = n_groups*n_rows;
    extern __shared__ int4 moegraph_one_smem[];
    __shared__ float sums[MOEGRAPH_DOWN_ONE_WARPS*n_all];
    const int pitch      = X::registers ? 0 : moegraph_one_piece_bytes(n_all*args.row_bytes);
    const int slot       = threadIdx.y/args.n_warps;
    const int block_rows = args.n_warps*n_all;
    const int warp_row   = threadIdx.y % args.n_warps*n_all;
    const int row        = blockIdx.x*block_rows + warp_row;
    const int group      = threadIdx.x/n_lanes, lane = threadIdx.x % n_lanes;
    const int n_parts    = args.n_values/MOEGRAPH_ONE_VALUES;
    char * s = (char *) moegraph_one_smem + threadIdx.y*pitch;
    moegraph_block_y * y = (moegraph_block_y *) ((char *) moegraph_one_smem + blockDim.y*pitch) +
        slot*(moegraph_padded(args.n_values)/32);

    if (!args.early) {
        ggml_cuda_pdl_sync();
    }
    const int    id      = __ldcg(args.ids + slot); // what the first cache holds may be older
    const bool   there   = (uint32_t) id < (uint32_t) args.n_experts;
    const bool   present = there && row < args.n_rows;
    const char * src     = args.x + (present ? id*args.stride_expert + (int64_t) row*args.row_bytes : 0);
    int part[n_steps];
#pragma unroll
    for (int k = 0; k < n_steps; ++k) {
        part[k] = min(k*n_lanes + lane, n_parts - 1);
    }
    X     x[X::registers ? n_rows*n_steps : 1];
    float bias[n_rows] = {};
    if (present) {
        const int n = min(n_all, args.n_rows - row);
        if constexpr (X::registers) {
#pragma unroll
            for (int i = 0; i < n_rows*n_steps; ++i) {
                x[i].load(src + min(i/n_steps*n_groups + group, n - 1)*args.row_bytes, part[i % n_steps]);
            }
        } else {
            moegraph_one_copy(s, src, n*args.row_bytes);
        }
#pragma unroll
        for (int r = 0; r < n_rows; ++r) {
            if (args.bias != nullptr) {
                bias[r] = args.bias[id*args.stride_bias + row + min(r*n_groups + group, n - 1)];
            }
        }
    }
    moegraph_copy_commit();
    ggml_cuda_pdl_lc();
    if (args.early) {
        ggml_cuda_pdl_sync();
    }

    // the weight of an expert that is not there may be anything
    const float   weight = args.weights != nullptr && there ? args.weights[slot] : 0.0f;
    const float   scale  = args.scale != nullptr && there ? args.scale[slot] : 1.0f;
    const float * act    = args.y + (int64_t) slot*args.n_values;
    const int     tid    = 32*(threadIdx.y % args.n_warps) + threadIdx.x;
    const int     stride = 4*32*args.n_warps;
    constexpr int loads  = 4; // that do not wait for one another
    for (int i = 4*tid; i < args.n_values; i += loads*stride) { // 8 threads have a block of 32
        float4 v[loads];
#pragma unroll
        for (int l = 0; l < loads; ++l) {
            v[l] = i + l*stride < args.n_values ? *(const float4 *) (act + i + l*stride) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
#pragma unroll
        for (int l = 0; l < loads; ++l) {
            if (i + l*stride < args.n_values) {
                moegraph_quantize_4(v[l], y + (i + l*stride)/32);
            }
        }
    }
    __syncthreads();

    float v[n_rows] = {};
    if (present) {
        moegraph_copy_wait<0>();
        __syncwarp();
        s += (uintptr_t) src & 15;
#pragma unroll
        for (int k = 0; k < n_steps; ++k) {
            typename X::y_t mine;
            mine.load(y, part[k], k*n_lanes + lane < n_parts);
#pragma unroll
            for (int r = 0; r < n_rows; ++r) {
                float dot;
                if constexpr (X::registers) {
                    dot = x[r*n_steps + k].dot(mine, part[k]);
                } else {
                    dot = X::dot(s + (r*n_groups + group)*args.row_bytes, mine, part[k]);
                }
                v[r] = __fadd_rn(v[r], dot);
            }
        }
    }
    // products and sums are rounded as nodes of their own are
#pragma unroll
    for (int r = 0; r < n_rows; ++r) {
        const float sum = moegraph_one_sum<n_lanes>(v[r]);
        const int   mine = r*n_groups + group;
        if (lane == 0 && args.weights != nullptr) {
            sums[slot*block_rows + warp_row + mine] = present ?
                __fmul_rn(__fmul_rn(__fadd_rn(sum, bias[r]), scale), weight) : 0.0f;
        } else if (lane == 0 && row + mine < args.n_rows) {
            args.dst[(int64_t) slot*args.n_rows + row + mine] = sum;
        }
    }
    __syncthreads();
    const int first = 32*threadIdx.y + threadIdx.x, out = blockIdx.x*block_rows + first;
    if (args.weights != nullptr && first < block_rows && out < args.n_rows) {
        float result = 0.0f;
        for (int e = 0; e < args.n_used; ++e) {
            result = __fadd_rn(result, sums[e*block_rows + first]);
        }
        args.dst[out] = result;
    }
}

// As few warps for each expert as let all blocks run at once, one on each multiprocessor; one if no number does.
template <ggml_type type, int n_lanes, int n_steps, int n_rows>
static bool moegraph_one_down_launch(moegraph_one_down_args & args, const bool run, cudaStream_t stream) {
    const ggml_cuda_device_info::cuda_device_info & dev = ggml_cuda_info().devices[ggml_cuda_get_device()];
    constexpr int n_all = 32/n_lanes*n_rows;
    const size_t limit  = dev.smpbo - 2048; // what is not dynamic counts, too
    const size_t smem_x = moegraph_one_x<type>::registers ? 0 : args.n_used*moegraph_one_piece_bytes(n_all*args.row_bytes);
    const size_t smem_y = args.n_used*(moegraph_padded(args.n_values)/32)*sizeof(moegraph_block_y);
    const auto blocks   = [&](const int n_warps) { return (args.n_rows + n_warps*n_all - 1)/(n_warps*n_all); };
    if (smem_x + smem_y > limit || args.n_used > MOEGRAPH_DOWN_ONE_WARPS) {
        return false;
    }
    if (!run) {
        return true;
    }
    args.n_warps = 1;
    for (int n = 2; blocks(args.n_warps) > dev.nsm && n*args.n_used <= MOEGRAPH_DOWN_ONE_WARPS && n*smem_x + smem_y <= limit; ++n) {
        args.n_warps = n;
    }
    args.n_warps = blocks(args.n_warps) > dev.nsm ? 1 : args.n_warps;
    const auto kernel = moegraph_one_down_kernel<type, n_lanes, n_steps, n_rows>;
    CUDA_SET_SHARED_MEMORY_LIMIT(kernel, limit);
    const ggml_cuda_kernel_launch_params params(
        dim3(blocks(args.n_warps)), dim3(32, args.n_used*args.n_warps), args.n_warps*smem_x + smem_y, stream);
    ggml_cuda_kernel_launch(kernel, params, args);
    return true;
}

// A row's parts choose the lanes, so its bits depend on nothing else. Of longer rows only MXFP4 was measured.
template <ggml_type type>
static bool moegraph_one_down_switch(moegraph_one_down_args & args, const bool run, cudaStream_t stream) {
    const int n_parts = args.n_values/MOEGRAPH_ONE_VALUES;
    if (n_parts <= 8) {
        return moegraph_one_down_launch<type, 8, 1, 2>(args, run, stream);
    }
    if (n_parts <= 16) {
        return moegraph_one_down_launch<type, 16, 1, 4>(args, run, stream);
    }
    if (n_parts <= 24) {
        return moegraph_one_down_launch<type, 8, 3, 1>(args, run, stream);
    }
    if constexpr (type == GGML_TYPE_MXFP4) {
        return n_parts <= 48 && moegraph_one_down_launch<type, 16, 3, 4>(args, run, stream);
    }
    return false;
}

// run: launches it.
static bool moegraph_one_down_try(const ggml_tensor * down, moegraph_one_down_args & args, const bool run, cudaStream_t stream) {
    const ggml_tensor * x = down->src[0], * act = down->src[1], * ids = down->src[2];
    const int cc = ggml_cuda_info().devices[ggml_cuda_get_device()].cc;
    const ggml_type type = moegraph_rows_type(x);
    if (!GGML_CUDA_CC_IS_NVIDIA(cc) || down->op != GGML_OP_MUL_MAT_ID || down->ne[2] != 1 || down->ne[3] != 1 ||
            moegraph_rows_are_apart(down) || !moegraph_one_reads(x, type, cc) ||
            x->nb[1] != ggml_row_size(x->type, x->ne[0])) {
        return false;
    }
    if (act->type != GGML_TYPE_F32 || !ggml_is_contiguous(act) || act->ne[1] != down->ne[1] || act->ne[1] == 1 ||
            (uintptr_t) act->data % 16 != 0 || ids->nb[0] != sizeof(int32_t) || ids->ne[2] != 1 ||
            down->type != GGML_TYPE_F32 || !ggml_is_contiguous(down)) {
        return false;
    }
    args.x             = (const char *) x->data;
    args.y             = (const float *) act->data;
    args.ids           = (const int32_t *) ids->data;
    args.stride_expert = x->nb[2];
    args.row_bytes     = x->nb[1];
    args.n_values      = x->ne[0];
    args.n_rows        = x->ne[1];
    args.n_experts     = x->ne[2];
    args.n_used        = down->ne[1];
    switch ((int) type) {
        case MOEGRAPH_TYPE_Q8_0_ODD:
        case GGML_TYPE_Q8_0:  return moegraph_one_down_switch<GGML_TYPE_Q8_0>(args, run, stream);
        case GGML_TYPE_Q4_K:  return moegraph_one_down_switch<GGML_TYPE_Q4_K>(args, run, stream);
        case GGML_TYPE_Q5_K:  return moegraph_one_down_switch<GGML_TYPE_Q5_K>(args, run, stream);
        case GGML_TYPE_Q6_K:  return moegraph_one_down_switch<GGML_TYPE_Q6_K>(args, run, stream);
        case GGML_TYPE_MXFP4: return moegraph_one_down_switch<GGML_TYPE_MXFP4>(args, run, stream);
        default:              return false;
    }
}

bool moegraph_one_down_supported(const ggml_tensor * down) {
    moegraph_one_down_args args = {};
    return moegraph_one_down_try(down, args, false, nullptr);
}

bool moegraph_one_down(ggml_backend_cuda_context & ctx, const ggml_tensor * down, const ggml_tensor * bias,
        const ggml_tensor * scale, const ggml_tensor * weights, ggml_tensor * dst, const bool early) {
    if (!moegraph_apart(dst, down->src[1]) || !moegraph_apart(dst, down->src[2]) || (weights && !moegraph_apart(dst, weights)) ||
            (scale && !moegraph_apart(dst, scale))) {
        return false; // blocks end at different times
    }
    moegraph_one_down_args args = {};
    args.scale       = scale ? (const float *) scale->data : nullptr;
    args.weights     = weights ? (const float *) weights->data : nullptr;
    args.bias        = bias ? (const float *) bias->data : nullptr;
    args.stride_bias = bias ? bias->nb[1]/sizeof(float) : 0;
    args.dst         = (float *) dst->data;
    args.early       = early;
    return moegraph_one_down_try(down, args, true, ctx.stream());
}
