#include "moegraph-match.cuh"
#include "moegraph-one-x.cuh"
#include "moegraph-one.cuh"
#include "moegraph-router.cuh"
#include "moegraph-rows.cuh"

#include "moegraph.h"

constexpr int MOEGRAPH_DOWN_ONE_WARPS    = 16; // of a block
constexpr int MOEGRAPH_DOWN_SHARED_WARPS = 20; // with a shared expert: 96 registers a thread

// A shared expert, and what is added behind the experts.
struct moegraph_one_down_shared_args {
    const char  * x;        // its down, Q8_0
    const float * y;        // its activations [n_values]
    const float * gate;     // the products are multiplied by its sigmoid
    const float * residual; // [n_rows]
    int           row_bytes;
    int           n_values;
    int           n_lanes;  // that share a row
    int           early;    // x may be read before the preceding kernel has ended
};

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
    bool            packed;        // ids are (moegraph_one_pack)
    moegraph_one_down_shared_args shared;
};

// The products of a warp's rows of the shared expert, in the order of moegraph-one.cu. Rows that are none read what lies there.
template <int n_all>
static __device__ __forceinline__ void moegraph_one_down_shared(
        const moegraph_one_down_shared_args & args, const char * rows, const moegraph_block_y * y, float * sums) {
    typedef moegraph_one_x<GGML_TYPE_Q8_0> X;
    const int n_groups = 32/args.n_lanes, group = threadIdx.x/args.n_lanes, lane = threadIdx.x % args.n_lanes;
    const int n_parts  = args.n_values/MOEGRAPH_ONE_VALUES;
    float v[n_all] = {};
    for (int first = 0; first < n_parts; first += args.n_lanes) {
        const int part = min(first + lane, n_parts - 1);
        X::y_t mine;
        mine.load(y, part, first + lane < n_parts);
#pragma unroll
        for (int r = 0; r < n_all; ++r) {
            if (r*n_groups < n_all) {
                v[r] = __fadd_rn(v[r], X::dot(rows + min(r*n_groups + group, n_all - 1)*args.row_bytes, mine, part));
            }
        }
    }
#pragma unroll
    for (int r = 0; r < n_all; ++r) {
        if (r*n_groups < n_all) {
#pragma unroll
            for (int step = 16; step >= 1; step /= 2) {
                v[r] = step < args.n_lanes ? __fadd_rn(v[r], __shfl_xor_sync(0xFFFFFFFF, v[r], step, 32)) : v[r];
            }
            if (lane == 0 && r*n_groups + group < n_all) {
                sums[r*n_groups + group] = v[r];
            }
        }
    }
}

// A block computes some rows of the result, n_warps warps for each chosen expert. All bytes of weights of a warp are on
// their way, to registers or shared memory, before it waits; meanwhile an expert's warps quantize its activations. n_lanes
// lanes have a row, n_steps parts each, and n_rows rows. with_shared: the last n_warps warps compute as many rows of the
// shared expert, and the result is the sum of all. Grid: rows. Block: (32, n_used*n_warps), with one expert more if with_shared.
template <ggml_type type, int n_lanes, int n_steps, int n_rows, bool with_shared>
static __global__ void __launch_bounds__((with_shared ? MOEGRAPH_DOWN_SHARED_WARPS : MOEGRAPH_DOWN_ONE_WARPS)*32, 1)
        moegraph_one_down_kernel(const moegraph_one_down_args args) {
    typedef moegraph_one_x<type> X;
    constexpr int n_groups = 32/n_lanes, n_all = n_groups*n_rows;
    extern __shared__ int4 moegraph_one_smem[];
    __shared__ float sums[(with_shared ? MOEGRAPH_DOWN_SHARED_WARPS : MOEGRAPH_DOWN_ONE_WARPS)*n_all];
    const int pitch      = X::registers ? 0 : moegraph_one_piece_bytes(n_all*args.row_bytes);
    const int slot       = threadIdx.y/args.n_warps;
    const int block_rows = args.n_warps*n_all;
    const int warp_row   = threadIdx.y % args.n_warps*n_all;
    const int row        = blockIdx.x*block_rows + warp_row;
    const int group      = threadIdx.x/n_lanes, lane = threadIdx.x % n_lanes;
    const int n_parts    = args.n_values/MOEGRAPH_ONE_VALUES;
    const bool own = with_shared && slot == args.n_used; // this warp has the shared expert
    char * s = (char *) moegraph_one_smem + threadIdx.y*pitch;
    char * behind = (char *) moegraph_one_smem + args.n_used*args.n_warps*pitch; // the rows of routed experts
    if constexpr (with_shared) {
        const int shared_pitch = moegraph_one_piece_bytes(n_all*args.shared.row_bytes);
        s       = own ? behind + threadIdx.y % args.n_warps*shared_pitch : s;
        behind += args.n_warps*shared_pitch;
    }
    moegraph_block_y * y = (moegraph_block_y *) behind + slot*(moegraph_padded(args.n_values)/32);

    const bool early = own ? args.shared.early : args.early;
    if (!early) {
        ggml_cuda_pdl_sync();
    }
    const int32_t chosen = own ? -1 : __ldcg(args.ids + slot); // what the first cache holds may be older
    if (early && args.packed && moegraph_one_fetched(chosen) >= 0) { // by the preceding kernel
        ggml_cuda_pdl_sync();
    }
    const int    id      = args.packed ? moegraph_one_slot(chosen) : chosen;
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
    const char * shared_src = args.shared.x + (int64_t) row*args.shared.row_bytes;
    const bool   shared     = own && row < args.n_rows;
    if (shared) {
        moegraph_one_copy(s, shared_src, min(n_all, args.n_rows - row)*args.shared.row_bytes);
    }
    moegraph_copy_commit();
    ggml_cuda_pdl_lc();
    if (early) {
        ggml_cuda_pdl_sync();
    }

    // the weight of an expert that is not there may be anything
    const float   weight = args.weights != nullptr && there ? args.weights[slot] : 0.0f;
    const float   scale  = args.scale != nullptr && there ? args.scale[slot] : 1.0f;
    const float * act    = own ? args.shared.y : args.y + (int64_t) slot*args.n_values;
    const int     n_act  = own ? args.shared.n_values : args.n_values;
    const int     first  = 32*threadIdx.y + threadIdx.x, out = blockIdx.x*block_rows + first; // the result of this thread
    const bool    mine   = with_shared && first < block_rows && out < args.n_rows;
    const float   residual = mine ? args.shared.residual[out] : 0.0f;
    const float   gate     = mine ? *args.shared.gate : 0.0f;
    const int     tid    = 32*(threadIdx.y % args.n_warps) + threadIdx.x;
    const int     stride = 4*32*args.n_warps;
    constexpr int loads  = 4; // that do not wait for one another
    for (int i = 4*tid; i < n_act; i += loads*stride) { // 8 threads have a block of 32
        float4 v[loads];
#pragma unroll
        for (int l = 0; l < loads; ++l) {
            v[l] = i + l*stride < n_act ? *(const float4 *) (act + i + l*stride) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
#pragma unroll
        for (int l = 0; l < loads; ++l) {
            if (i + l*stride < n_act) {
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
        const int   at  = r*n_groups + group;
        if (lane == 0 && args.weights != nullptr && !own) {
            sums[slot*block_rows + warp_row + at] = present ?
                __fmul_rn(__fmul_rn(__fadd_rn(sum, bias[r]), scale), weight) : 0.0f;
        } else if (lane == 0 && !own && row + at < args.n_rows) {
            args.dst[(int64_t) slot*args.n_rows + row + at] = sum;
        }
    }
    if (shared) {
        moegraph_copy_wait<0>();
        __syncwarp();
        moegraph_one_down_shared<n_all>(
            args.shared, s + ((uintptr_t) shared_src & 15), y, sums + slot*block_rows + warp_row);
    }
    __syncthreads();
    if (args.weights != nullptr && first < block_rows && out < args.n_rows) {
        float result = 0.0f;
        for (int e = 0; e < args.n_used; ++e) {
            result = __fadd_rn(result, sums[e*block_rows + first]);
        }
        if constexpr (with_shared) { // as the kernel of the norm adds its terms
            result = __fmaf_rn(sums[args.n_used*block_rows + first], 1.0f/(1.0f + expf(-gate)), result);
            result = __fadd_rn(result, residual);
        }
        args.dst[out] = result;
    }
}

// As few warps for each expert as let all blocks run at once, one on each multiprocessor; one if no number does.
template <ggml_type type, int n_lanes, int n_steps, int n_rows, bool with_shared>
static bool moegraph_one_down_launch(moegraph_one_down_args & args, const bool run, cudaStream_t stream) {
    const ggml_cuda_device_info::cuda_device_info & dev = ggml_cuda_info().devices[ggml_cuda_get_device()];
    constexpr int n_all = 32/n_lanes*n_rows, max_warps = with_shared ? MOEGRAPH_DOWN_SHARED_WARPS : MOEGRAPH_DOWN_ONE_WARPS;
    const int    n_experts = args.n_used + with_shared;
    const size_t limit  = dev.smpbo - 2048; // what is not dynamic counts, too
    const size_t smem_x = (moegraph_one_x<type>::registers ? 0 : args.n_used*moegraph_one_piece_bytes(n_all*args.row_bytes)) +
        (with_shared ? moegraph_one_piece_bytes(n_all*args.shared.row_bytes) : 0);
    const size_t smem_y = (args.n_used*moegraph_padded(args.n_values) + moegraph_padded(args.shared.n_values))/32*
        sizeof(moegraph_block_y);
    const auto blocks   = [&](const int n_warps) { return (args.n_rows + n_warps*n_all - 1)/(n_warps*n_all); };
    if (smem_x + smem_y > limit || n_experts > max_warps) {
        return false;
    }
    if (!run) {
        return true;
    }
    args.n_warps = 1;
    for (int n = 2; blocks(args.n_warps) > dev.nsm && n*n_experts <= max_warps && n*smem_x + smem_y <= limit; ++n) {
        args.n_warps = n;
    }
    args.n_warps = blocks(args.n_warps) > dev.nsm ? 1 : args.n_warps;
    const auto kernel = moegraph_one_down_kernel<type, n_lanes, n_steps, n_rows, with_shared>;
    CUDA_SET_SHARED_MEMORY_LIMIT(kernel, limit);
    const ggml_cuda_kernel_launch_params params(
        dim3(blocks(args.n_warps)), dim3(32, n_experts*args.n_warps), args.n_warps*smem_x + smem_y, stream);
    ggml_cuda_kernel_launch(kernel, params, args);
    return true;
}

// A row's parts choose the lanes, so its bits depend on nothing else. Of longer rows only MXFP4 was measured.
template <ggml_type type, bool with_shared>
static bool moegraph_one_down_lanes(moegraph_one_down_args & args, const bool run, cudaStream_t stream) {
    const int n_parts = args.n_values/MOEGRAPH_ONE_VALUES;
    if (n_parts <= 8) {
        return moegraph_one_down_launch<type, 8, 1, 2, with_shared>(args, run, stream);
    }
    if (n_parts <= 16) {
        return moegraph_one_down_launch<type, 16, 1, 4, with_shared>(args, run, stream);
    }
    if (n_parts <= 24) {
        return moegraph_one_down_launch<type, 8, 3, 1, with_shared>(args, run, stream);
    }
    if constexpr (type == GGML_TYPE_MXFP4) {
        return n_parts <= 48 && moegraph_one_down_launch<type, 16, 3, 4, with_shared>(args, run, stream);
    }
    return false;
}

template <ggml_type type>
static bool moegraph_one_down_switch(moegraph_one_down_args & args, const bool run, cudaStream_t stream) {
    return args.shared.x != nullptr ? moegraph_one_down_lanes<type, true>(args, run, stream) :
        moegraph_one_down_lanes<type, false>(args, run, stream);
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
    args.ids           = args.ids != nullptr ? args.ids : (const int32_t *) ids->data;
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

// The shared expert's down, its activations and what is added behind it. Returns false if the kernel does not support them.
static bool moegraph_one_down_set_shared(
        const moegraph_one_shared_expert & shared, const int n_rows, moegraph_one_down_shared_args & args) {
    const int cc = ggml_cuda_info().devices[ggml_cuda_get_device()].cc;
    const ggml_tensor * down = shared.down, * x = down->src[0], * act = down->src[1];
    const ggml_type type = moegraph_rows_type(x);
    if (x->type != GGML_TYPE_Q8_0 || !moegraph_rows_is_one(down, cc) || x->nb[1] != ggml_row_size(x->type, x->ne[0]) ||
            (uintptr_t) x->data % 4 != 0 || x->ne[0] % MOEGRAPH_ONE_VALUES != 0 || x->ne[1] != n_rows ||
            act->type != GGML_TYPE_F32 || !ggml_is_contiguous(act) || (uintptr_t) act->data % 16 != 0) {
        return false;
    }
    const int n_parts = x->ne[0]/MOEGRAPH_ONE_VALUES;
    args.x         = (const char *) x->data;
    args.y         = (const float *) act->data;
    args.gate      = shared.gate;
    args.residual  = (const float *) shared.residual->data;
    args.row_bytes = x->nb[1];
    args.n_values  = x->ne[0];
    args.n_lanes   = n_parts <= 8 ? 8 : n_parts <= 16 || (int) type == MOEGRAPH_TYPE_Q8_0_ODD ? 16 : 32; // as in moegraph-one.cu
    args.early     = moegraph_is_constant(x);
    return true;
}

bool moegraph_one_down(ggml_backend_cuda_context & ctx, const ggml_tensor * down, const ggml_tensor * bias,
        const ggml_tensor * scale, const ggml_tensor * weights, ggml_tensor * dst, const bool early,
        const moegraph_one_shared_expert * shared) {
    if (!moegraph_apart(dst, down->src[1]) || !moegraph_apart(dst, down->src[2]) || (weights && !moegraph_apart(dst, weights)) ||
            (scale && !moegraph_apart(dst, scale)) || (shared && !moegraph_apart(dst, shared->down->src[1]))) {
        return false; // blocks end at different times
    }
    moegraph_one_down_args args = {};
    args.ids         = moegraph_router_slots(ctx, down->src[2]); // or nullptr
    args.packed      = args.ids != nullptr;
    args.scale       = scale ? (const float *) scale->data : nullptr;
    args.weights     = weights ? (const float *) weights->data : nullptr;
    args.bias        = bias ? (const float *) bias->data : nullptr;
    args.stride_bias = bias ? bias->nb[1]/sizeof(float) : 0;
    args.dst         = (float *) dst->data;
    args.early       = early;
    if (shared && !moegraph_one_down_set_shared(*shared, down->ne[0], args.shared)) {
        return false;
    }
    return moegraph_one_down_try(down, args, true, ctx.stream());
}
