#include "moegraph-one.cuh"
#include "moegraph-one-x.cuh"

#include "moegraph.h"

constexpr int MOEGRAPH_ONE_WARPS  = 4;     // of a block
constexpr int MOEGRAPH_ONE_MAX    = 16384; // values of a row: few rows of weights fit into shared memory at once
constexpr int MOEGRAPH_ONE_SHARED = 48*1024;

// Where a warp works.
struct moegraph_one_place {
    moegraph_segment seg;
    int  row;
    bool present; // its expert
    int  id;      // of the expert, or its slot
    int  fetched; // the expert that the slot gets before it is read, or -1
    const char * x[2];
    int64_t bias; // where those of its expert begin
};

// Waits for the preceding kernel, unless weights may be read before. block: of the rows.
template <int n_rows>
static __device__ __forceinline__ moegraph_one_place moegraph_one_begin(
        const moegraph_rows_args & args, const int block, const int slot) {
    if (args.ids != nullptr || !args.early) {
        ggml_cuda_pdl_sync();
    }
    moegraph_one_place p;
    p.seg = moegraph_segment_of_block(args);
    p.row = ((block - p.seg.first_block)*blockDim.y + threadIdx.y)*n_rows;
    const bool    fetches = args.fetch.from != nullptr;
    const int32_t chosen  = args.ids != nullptr ? __ldcg(args.ids + slot) : 0;
    const int     id      = fetches ? moegraph_one_slot(chosen) : chosen;
    p.id       = id;
    p.fetched  = fetches ? moegraph_one_fetched(chosen) : -1;
    p.present  = (uint32_t) id < (uint32_t) args.n_experts;
    p.x[0]     = p.seg.x     + (p.present ? id : 0)*args.stride_expert;
    p.x[1]     = args.x_gate + (p.present ? id : 0)*args.stride_expert;
    p.bias     = (p.present ? id : 0)*args.stride_bias;
    p.seg.dst += slot*p.seg.stride_dst_col;
    return p;
}

// What is added to the sum of a row, which may be none of this matrix.
static __device__ __forceinline__ float moegraph_one_bias(
        const moegraph_one_place & p, const moegraph_rows_args & args, const int mat, const int row) {
    const float * bias = mat == 0 ? p.seg.bias : args.bias_gate;
    return bias != nullptr && p.present ? bias[p.bias + min(p.row + row, p.seg.n_rows - 1)] : 0.0f;
}

static __device__ __forceinline__ void moegraph_one_started(const moegraph_rows_args & args) {
    ggml_cuda_pdl_lc();
    if (args.ids == nullptr && args.early) {
        ggml_cuda_pdl_sync();
    }
}

static __device__ __forceinline__ const char * moegraph_one_row(
        const moegraph_one_place & p, const moegraph_rows_args & args, const int mat, const int row) {
    return p.x[mat] + min(p.row + row, p.seg.n_rows - 1)*args.stride_row;
}

// A warp copies bytes, a multiple of 16, from host memory.
static __device__ __forceinline__ void moegraph_one_fetch_bytes(char * to, const char * from, const int n) {
    constexpr int loads = 4; // of a lane, on their way at once
    for (int i = 16*threadIdx.x; i < n; i += loads*16*32) {
        int4 v[loads];
#pragma unroll
        for (int l = 0; l < loads; ++l) {
            v[l] = i + l*16*32 < n ? __ldcs((const int4 *) (from + i + l*16*32)) : make_int4(0, 0, 0, 0);
        }
#pragma unroll
        for (int l = 0; l < loads; ++l) {
            if (i + l*16*32 < n) {
                *(int4 *) (to + i + l*16*32) = v[l];
            }
        }
    }
}

// Where an expert is missing, each of its warps copies the rows that it needs, and a share of what follows gate and up. The
// kernel that reads that has to wait for the end of this one.
template <int n_rows>
static __device__ __forceinline__ void moegraph_one_fetch_rows(
        const moegraph_rows_args & args, const moegraph_one_place & p, const int block, const int slot) {
    const moegraph_rows_fetch & f = args.fetch;
    if (f.from == nullptr) {
        return;
    }
    if (block == 0 && threadIdx.y == 0 && threadIdx.x == 0) {
        f.dst[slot] = p.id;
    }
    if (p.fetched < 0) {
        return;
    }
    char       * to   = f.to + p.id*f.stride_to;
    const char * from = f.from + p.fetched*f.stride_from;
    const int    n    = min(n_rows, p.seg.n_rows - p.row)*args.row_bytes;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        const int64_t at = p.x[m] + p.row*args.stride_row - to;
        moegraph_one_fetch_bytes(to + at, from + at, n);
    }
    const int n_warps = gridDim.x*blockDim.y;
    const int share   = (f.n_bytes - f.rest + 16*n_warps - 1)/(16*n_warps)*16;
    const int begin   = f.rest + (block*(int) blockDim.y + (int) threadIdx.y)*share;
    moegraph_one_fetch_bytes(to + begin, from + begin, min(share, f.n_bytes - begin));
    __syncwarp();
}

// The bias of the sum that moegraph_one_end gives a lane. What is added may come from the preceding kernel, so load it behind
// moegraph_one_started, and not at the end, where nothing hides how long that takes.
template <int n_rows, bool glu>
static __device__ __forceinline__ float moegraph_one_end_bias(const moegraph_one_place & p, const moegraph_rows_args & args) {
    const int mine = threadIdx.x/(32/(glu ? 2*n_rows : n_rows));
    return moegraph_one_bias(p, args, mine/n_rows, mine % n_rows);
}

// Adds up over the lanes: first the rows, behind them those of the gate. Writes the results, zeros for an absent expert.
template <int n_rows, bool glu>
static __device__ __forceinline__ void moegraph_one_end(
        float (&v)[glu ? 2*n_rows : n_rows], const float bias, const moegraph_rows_args & args, const moegraph_one_place & p) {
    constexpr int n = glu ? 2*n_rows : n_rows; // lane l gets the sum of l/(32/n)
    const int mine = threadIdx.x/(32/n);
#pragma unroll
    for (int step = 16, m = n/2; step >= 1; step /= 2, m /= 2) {
        const bool upper = (threadIdx.x & step) != 0;
#pragma unroll
        for (int i = 0; i < m; ++i) {
            const float give = upper ? v[i] : v[i + m];
            const float keep = upper ? v[i + m] : v[i];
            v[i] = keep + __shfl_xor_sync(0xFFFFFFFF, give, step, 32);
        }
        if (m == 0) {
            v[0] += __shfl_xor_sync(0xFFFFFFFF, v[0], step, 32);
        }
    }
    v[0] = __fadd_rn(v[0], bias);
    float result = v[0];
    if constexpr (glu) {
        result = moegraph_glu(v[0], __shfl_xor_sync(0xFFFFFFFF, v[0], 16, 32), args.glu_op, args.glu_limit);
    }
    if (threadIdx.x % (32/n) == 0 && mine < n_rows && p.row + mine < p.seg.n_rows) {
        p.seg.dst[p.row + mine] = p.present ? result : 0.0f;
    }
}

// All rows of a warp are on their way to registers before it waits for the first.
template <ggml_type type, int n_rows, bool glu, bool fetches = false>
static __device__ __forceinline__ void moegraph_one_registers_rows(
        const moegraph_rows_args & args, const int block, const int slot) {
    typedef moegraph_one_x<type> X;
    constexpr int n_mats = glu ? 2 : 1;
    const moegraph_one_place p = moegraph_one_begin<n_rows>(args, block, slot);
    if constexpr (fetches) {
        moegraph_one_fetch_rows<n_rows>(args, p, block, slot);
    }
    const int n_parts = args.n_chunks*(MOEGRAPH_CHUNK/MOEGRAPH_ONE_VALUES);
    float v[n_mats*n_rows] = {}, bias = 0.0f;
    for (int first = 0; first < n_parts; first += 32) {
        const bool there = first + (int) threadIdx.x < n_parts;
        const int  part  = there ? first + threadIdx.x : n_parts - 1;
        X x[n_mats*n_rows];
        if (p.present) {
#pragma unroll
            for (int i = 0; i < n_mats*n_rows; ++i) {
                x[i].load(moegraph_one_row(p, args, i/n_rows, i % n_rows), part);
            }
        }
        if (first == 0) {
            moegraph_one_started(args);
            bias = moegraph_one_end_bias<n_rows, glu>(p, args);
        }
        if (p.present) {
            typename X::y_t y;
            y.load(args.y, part, there);
#pragma unroll
            for (int i = 0; i < n_mats*n_rows; ++i) {
                v[i] = __fadd_rn(v[i], x[i].dot(y, part));
            }
        }
    }
    moegraph_one_end<n_rows, glu>(v, bias, args, p);
}

// Grid of this kernel and of the two that follow: (rows, slots). Block: (32, warps).
template <ggml_type type, int n_rows, bool glu>
static __global__ void __launch_bounds__(MOEGRAPH_ONE_WARPS*32, 1) moegraph_one_registers(const moegraph_rows_args args) {
    moegraph_one_registers_rows<type, n_rows, glu>(args, blockIdx.x, blockIdx.y);
}

// Calls f(i) for the i-th group of n, when its copies are there.
template <int i, int n, typename F>
static __device__ __forceinline__ void moegraph_one_each(const F & f) {
    if constexpr (i < n) {
        moegraph_copy_wait<n - 1 - i>();
        __syncwarp();
        f(i);
        moegraph_one_each<i + 1, n>(f);
    }
}

// Bytes of shared memory for a row, which may begin at any even byte of 16.
template <ggml_type type> static __host__ __device__ __forceinline__ int moegraph_one_pitch(const int row_bytes) {
    return (row_bytes + (moegraph_x<type>::unaligned ? 14 : 0) + 15) & ~15;
}

// The same through shared memory, a group of copies for each row (with its gate). n_steps: parts that a lane has of the
// activations at a time.
template <ggml_type type, int n_rows, int n_steps, bool glu, bool fetches = false>
static __device__ __forceinline__ void moegraph_one_shared_rows(
        const moegraph_rows_args & args, const int block, const int slot) {
    typedef moegraph_one_x<type> X;
    constexpr int n_mats = glu ? 2 : 1;
    extern __shared__ int4 moegraph_one_smem[];
    const int pitch = moegraph_one_pitch<type>(args.row_bytes);
    char    * s     = (char *) moegraph_one_smem + threadIdx.y*n_rows*n_mats*pitch;
    const moegraph_one_place p = moegraph_one_begin<n_rows>(args, block, slot);
    if constexpr (fetches) {
        moegraph_one_fetch_rows<n_rows>(args, p, block, slot);
    }
    if (p.present) {
#pragma unroll
        for (int r = 0; r < n_rows; ++r) {
#pragma unroll
            for (int m = 0; m < n_mats; ++m) {
                const char * row = moegraph_one_row(p, args, m, r);
                const int    off = moegraph_x<type>::unaligned ? (int) ((uintptr_t) row & 15) : 0;
                for (int i = 16*threadIdx.x; i < off + args.row_bytes; i += 16*32) {
                    moegraph_copy_16(s + (m*n_rows + r)*pitch + i, row - off + i, min(16, off + args.row_bytes - i));
                }
            }
            moegraph_copy_commit();
        }
    }
    moegraph_one_started(args);
    const float bias = moegraph_one_end_bias<n_rows, glu>(p, args);
    const moegraph_block_y * row_y = args.y;
    if (args.raw != nullptr) { // whole warps do, so all lanes of a shuffle are there
        moegraph_block_y * mine = (moegraph_block_y *) ((char *) moegraph_one_smem + blockDim.y*n_rows*n_mats*pitch);
        for (int i = 4*(32*threadIdx.y + threadIdx.x); i < args.n_chunks*MOEGRAPH_CHUNK; i += 4*32*blockDim.y) {
            moegraph_quantize_4(*(const float4 *) (args.raw + i), mine + i/32);
        }
        row_y = mine;
        __syncthreads();
    }
    const int n_parts = args.n_chunks*(MOEGRAPH_CHUNK/MOEGRAPH_ONE_VALUES);
    float v[n_mats*n_rows] = {};
    for (int first = 0; p.present && first < n_parts; first += 32*n_steps) {
        typename X::y_t y[n_steps];
        int part[n_steps];
#pragma unroll
        for (int k = 0; k < n_steps; ++k) {
            part[k] = min(first + 32*k + (int) threadIdx.x, n_parts - 1);
            y[k].load(row_y, part[k], part[k] == first + 32*k + (int) threadIdx.x);
        }
        moegraph_one_each<0, n_rows>([&](const int r) {
#pragma unroll
            for (int i = r; i < n_mats*n_rows; i += n_rows) {
                const int off = moegraph_x<type>::unaligned ?
                    (int) ((uintptr_t) moegraph_one_row(p, args, i/n_rows, r) & 15) : 0;
#pragma unroll
                for (int k = 0; k < n_steps; ++k) {
                    v[i] = __fadd_rn(v[i], X::dot(s + i*pitch + off, y[k], part[k]));
                }
            }
        });
    }
    moegraph_one_end<n_rows, glu>(v, bias, args, p);
}

template <ggml_type type, int n_rows, int n_steps, bool glu>
static __global__ void __launch_bounds__(MOEGRAPH_ONE_WARPS*32, 1) moegraph_one_shared(const moegraph_rows_args args) {
    moegraph_one_shared_rows<type, n_rows, n_steps, glu>(args, blockIdx.x, blockIdx.y);
}

// Rows of a warp in gate and up of experts: as many bytes as are on their way at once.
template <ggml_type type> constexpr int MOEGRAPH_ONE_GLU_ROWS =
    moegraph_one_x<type>::registers && type != GGML_TYPE_Q5_K ? 2 : 1;

// Gate, up and activation of a token's experts, which may be fetched, and of the shared expert (Q8_0). That needs no ids, so its blocks come first
// and request weights while the router chooses. They have the first n_before lines of the grid, (rows, n_before + slots). Five
// blocks on a multiprocessor let all of 640 run at once on 132.
template <ggml_type type, int n_steps>
static __global__ void __launch_bounds__(MOEGRAPH_ONE_WARPS*32, 5) moegraph_one_experts_kernel(
        const moegraph_rows_args routed, const moegraph_rows_args shared, const int n_before) {
    const int slot = (int) blockIdx.y - n_before;
    if (slot >= 0) {
        if constexpr (moegraph_one_x<type>::registers) {
            moegraph_one_registers_rows<type, MOEGRAPH_ONE_GLU_ROWS<type>, true, true>(routed, blockIdx.x, slot);
        } else {
            moegraph_one_shared_rows<type, MOEGRAPH_ONE_GLU_ROWS<type>, n_steps, true, true>(routed, blockIdx.x, slot);
        }
    } else {
        const int block = blockIdx.y*gridDim.x + blockIdx.x;
        if (block*(int) blockDim.y < shared.segments[0].n_rows) {
            moegraph_one_shared_rows<GGML_TYPE_Q8_0, 1, n_steps, true>(shared, block, 0);
        }
    }
}

// Rows that end anywhere: n_lanes lanes have one, and n_rows each, which lie in one piece for the warp. So 2,880 values keep
// 15 of 16 lanes at work.
template <ggml_type type, int n_lanes, int n_steps, int n_rows, bool glu>
static __global__ void __launch_bounds__(MOEGRAPH_ONE_WARPS*32, 1) moegraph_one_pieces(const moegraph_rows_args args) {
    typedef moegraph_one_x<type> X;
    constexpr int n_mats = glu ? 2 : 1, n_groups = 32/n_lanes, n_all = n_groups*n_rows;
    extern __shared__ int4 moegraph_one_smem[];
    const int pitch = moegraph_one_piece_bytes(n_all*args.row_bytes);
    char    * s     = (char *) moegraph_one_smem + threadIdx.y*n_mats*pitch;
    const int group = threadIdx.x/n_lanes, lane = threadIdx.x % n_lanes;
    const moegraph_one_place p = moegraph_one_begin<n_all>(args, blockIdx.x, blockIdx.y);
    const bool there = p.present && p.row < p.seg.n_rows;
    if (there) {
#pragma unroll
        for (int m = 0; m < n_mats; ++m) {
            moegraph_one_copy(s + m*pitch, moegraph_one_row(p, args, m, 0), min(n_all, p.seg.n_rows - p.row)*args.row_bytes);
        }
    }
    moegraph_copy_commit();
    moegraph_one_started(args);
    const int n_parts = args.row_bytes/X::part_bytes;
    float v[n_mats][n_rows] = {}, bias[n_mats][n_rows];
#pragma unroll
    for (int i = 0; i < n_mats*n_rows; ++i) {
        bias[i/n_rows][i % n_rows] = moegraph_one_bias(p, args, i/n_rows, i % n_rows*n_groups + group);
    }
    for (int first = 0; there && first < n_parts; first += n_lanes*n_steps) {
        typename X::y_t y[n_steps];
        int part[n_steps];
#pragma unroll
        for (int k = 0; k < n_steps; ++k) {
            part[k] = min(first + n_lanes*k + lane, n_parts - 1);
            y[k].load(args.y, part[k], first + n_lanes*k + lane < n_parts);
        }
        moegraph_copy_wait<0>();
        __syncwarp();
#pragma unroll
        for (int i = 0; i < n_mats*n_rows; ++i) {
            const char * row = s + i/n_rows*pitch + ((uintptr_t) moegraph_one_row(p, args, i/n_rows, 0) & 15);
#pragma unroll
            for (int k = 0; k < n_steps; ++k) {
                float & sum = v[i/n_rows][i % n_rows];
                sum = __fadd_rn(sum, X::dot(row + (i % n_rows*n_groups + group)*args.row_bytes, y[k], part[k]));
            }
        }
    }
#pragma unroll
    for (int r = 0; r < n_rows; ++r) {
        const int row = p.row + r*n_groups + group;
        float result = __fadd_rn(moegraph_one_sum<n_lanes>(v[0][r]), bias[0][r]);
        if constexpr (glu) {
            const float gate = __fadd_rn(moegraph_one_sum<n_lanes>(v[1][r]), bias[1][r]);
            result = moegraph_glu(result, gate, args.glu_op, args.glu_limit);
        }
        if (lane == 0 && row < p.seg.n_rows) {
            p.seg.dst[row] = p.present ? result : 0.0f;
        }
    }
}

bool moegraph_one_reads(const ggml_tensor * x, const ggml_type type, const int cc) {
    const size_t strides = x->ne[2] == 1 ? x->nb[1] : x->nb[1] | x->nb[2];
    const bool   pieces  = x->nb[1] == ggml_row_size(x->type, x->ne[0]) && x->ne[0] % MOEGRAPH_ONE_VALUES == 0;
    if (!cp_async_available(cc) || x->ne[0] > MOEGRAPH_ONE_MAX) {
        return false;
    }
    switch ((int) type) {
        case GGML_TYPE_Q8_0:
        case GGML_TYPE_Q4_K:
        case GGML_TYPE_Q5_K:
        case GGML_TYPE_Q6_K:          return true;
        case GGML_TYPE_MXFP4:         return pieces && strides % 2 == 0;
        case MOEGRAPH_TYPE_Q8_0_ODD:  return pieces && strides % 4 == 0;
        default:                      return false;
    }
}

// With experts only where all have the same row: where each has its own, the end of the experts follows
// (moegraph-one-down.cu).
bool moegraph_one_supported(const ggml_tensor * dst, const ggml_type type, const int cc) {
    const bool mmid = dst->op == GGML_OP_MUL_MAT_ID;
    return dst->ne[mmid ? 2 : 1] == 1 && dst->src[1]->ne[1] == 1 && !moegraph_rows_are_apart(dst) &&
        moegraph_one_reads(dst->src[0], type, cc);
}

// Lays n_rows rows of each warp out over blocks. Returns the parameters of the launch.
static ggml_cuda_kernel_launch_params moegraph_one_params(
        moegraph_rows_args & args, int n_warps, const int n_rows, const size_t warp_bytes, cudaStream_t stream) {
    while (n_warps > 1 && n_warps*warp_bytes > MOEGRAPH_ONE_SHARED) {
        n_warps /= 2;
    }
    int n_blocks = 0;
    for (int i = 0; i < args.n_segments; ++i) {
        args.segments[i].first_block = n_blocks;
        n_blocks += (args.segments[i].n_rows + n_warps*n_rows - 1)/(n_warps*n_rows);
    }
    return ggml_cuda_kernel_launch_params(
        dim3(n_blocks, args.n_used, 1), dim3(32, n_warps, 1), n_warps*warp_bytes, stream);
}

template <ggml_type type, int n_rows, int n_steps, bool glu>
static void moegraph_one_launch(moegraph_rows_args & args, cudaStream_t stream) {
    constexpr bool registers = moegraph_one_x<type>::registers;
    const size_t warp_bytes = registers ? 0 : (glu ? 2 : 1)*n_rows*moegraph_one_pitch<type>(args.row_bytes);
    ggml_cuda_kernel_launch_params params = moegraph_one_params(
        args, MOEGRAPH_ONE_WARPS, n_rows, warp_bytes, stream);
    if (args.raw != nullptr) {
        params.shmem += args.n_chunks*MOEGRAPH_CHUNK/32*sizeof(moegraph_block_y);
    }
    if constexpr (registers) {
        ggml_cuda_kernel_launch(moegraph_one_registers<type, n_rows, glu>, params, args);
    } else {
        const ggml_cuda_device_info::cuda_device_info & dev = ggml_cuda_info().devices[ggml_cuda_get_device()];
        const auto kernel = moegraph_one_shared<type, n_rows, n_steps, glu>;
        CUDA_SET_SHARED_MEMORY_LIMIT(kernel, dev.smpbo);
        ggml_cuda_kernel_launch(kernel, params, args);
    }
}

template <ggml_type type, int n_steps, int n_rows, bool glu>
static void moegraph_one_launch_pieces(moegraph_rows_args & args, cudaStream_t stream) {
    constexpr int n_lanes = 16, n_all = 32/n_lanes*n_rows;
    const size_t warp_bytes = (glu ? 2 : 1)*moegraph_one_piece_bytes(n_all*args.row_bytes);
    const ggml_cuda_kernel_launch_params params = moegraph_one_params(
        args, MOEGRAPH_ONE_WARPS, n_all, warp_bytes, stream);
    const auto kernel = moegraph_one_pieces<type, n_lanes, n_steps, n_rows, glu>;
    CUDA_SET_SHARED_MEMORY_LIMIT(kernel, ggml_cuda_info().devices[ggml_cuda_get_device()].smpbo);
    ggml_cuda_kernel_launch(kernel, params, args);
}

// Rows that end anywhere: 8 of a warp where there are many, as below, and a block has shared memory for them; else 2.
template <ggml_type type, int n_steps, bool glu>
static void moegraph_one_switch_pieces(moegraph_rows_args & args, cudaStream_t stream) {
    if constexpr (!glu && type == MOEGRAPH_TYPE_Q8_0_ODD) {
        int n_all = 0;
        for (int i = 0; i < args.n_segments; ++i) {
            n_all += args.segments[i].n_rows*args.n_used;
        }
        if (n_all >= 12*ggml_cuda_info().devices[ggml_cuda_get_device()].nsm && 8*args.row_bytes <= MOEGRAPH_ONE_SHARED/2) {
            return moegraph_one_launch_pieces<type, n_steps, 4, glu>(args, stream);
        }
    }
    moegraph_one_launch_pieces<type, n_steps, 1, glu>(args, stream);
}

// Chooses the rows of a warp: 8 (with a gate, pairs of them count) as long as there are 3 warps for 2 multiprocessors.
// Of long rows 2, which are as many bytes; through registers 2 or, of the most registers, 1.
template <ggml_type type, bool glu>
static void moegraph_one_switch_rows(moegraph_rows_args & args, cudaStream_t stream) {
    if constexpr (type == GGML_TYPE_MXFP4 || type == MOEGRAPH_TYPE_Q8_0_ODD) {
        if (args.row_bytes <= 16*moegraph_one_x<type>::part_bytes) {
            moegraph_one_switch_pieces<type, 1, glu>(args, stream);
        } else {
            moegraph_one_switch_pieces<type, 3, glu>(args, stream);
        }
    } else if constexpr (moegraph_one_x<type>::registers) {
        moegraph_one_launch<type, glu ? MOEGRAPH_ONE_GLU_ROWS<type> : 2, 1, glu>(args, stream);
    } else {
        int n_all = 0;
        for (int i = 0; i < args.n_segments; ++i) {
            n_all += args.segments[i].n_rows*args.n_used;
        }
        const int n_wanted = ggml_cuda_info().devices[ggml_cuda_get_device()].nsm*3/2;
        if (args.n_chunks*MOEGRAPH_CHUNK > 32*MOEGRAPH_ONE_VALUES) {
            moegraph_one_launch<type, 2, 2, glu>(args, stream);
        } else if (!glu && n_all >= 8*n_wanted) {
            moegraph_one_launch<type, glu ? 4 : 8, 1, glu>(args, stream);
        } else if (n_all >= 4*n_wanted) {
            moegraph_one_launch<type, 4, 1, glu>(args, stream);
        } else {
            moegraph_one_launch<type, 2, 1, glu>(args, stream);
        }
    }
}

template <ggml_type type, int n_steps>
static bool moegraph_one_launch_experts(moegraph_rows_args & routed, moegraph_rows_args & shared, cudaStream_t stream) {
    constexpr int n_warps = MOEGRAPH_ONE_WARPS, block_rows = n_warps*MOEGRAPH_ONE_GLU_ROWS<type>;
    const int pitch = moegraph_one_x<type>::registers ? 0 : moegraph_one_pitch<type>(routed.row_bytes);
    const size_t smem = 2*n_warps*std::max(moegraph_one_pitch<GGML_TYPE_Q8_0>(shared.row_bytes), pitch);
    if (smem > MOEGRAPH_ONE_SHARED) {
        return false;
    }
    const int n_x      = (routed.segments[0].n_rows + block_rows - 1)/block_rows;
    const int n_before = (shared.segments[0].n_rows + n_warps*n_x - 1)/(n_warps*n_x);
    const ggml_cuda_kernel_launch_params params(
        dim3(n_x, n_before + routed.n_used, 1), dim3(32, n_warps, 1), smem, stream);
    ggml_cuda_kernel_launch(moegraph_one_experts_kernel<type, n_steps>, params, routed, shared, n_before);
    return true;
}

bool moegraph_one_experts(
        const ggml_type type, moegraph_rows_args & routed, moegraph_rows_args & shared, cudaStream_t stream) {
    const auto run = [&](const auto t) {
        return routed.n_chunks*MOEGRAPH_CHUNK > 32*MOEGRAPH_ONE_VALUES ?
            moegraph_one_launch_experts<t.value, 2>(routed, shared, stream) :
            moegraph_one_launch_experts<t.value, 1>(routed, shared, stream);
    };
    switch (type) {
        case GGML_TYPE_Q8_0: return run(std::integral_constant<ggml_type, GGML_TYPE_Q8_0>());
        case GGML_TYPE_Q4_K: return run(std::integral_constant<ggml_type, GGML_TYPE_Q4_K>());
        case GGML_TYPE_Q5_K: return run(std::integral_constant<ggml_type, GGML_TYPE_Q5_K>());
        case GGML_TYPE_Q6_K: return run(std::integral_constant<ggml_type, GGML_TYPE_Q6_K>());
        default:             return false;
    }
}

void moegraph_one_mul_mat(const ggml_type type, moegraph_rows_args & args, cudaStream_t stream) {
    const auto run = [&](const auto t) {
        args.x_gate ? moegraph_one_switch_rows<t.value, true>(args, stream) :
            moegraph_one_switch_rows<t.value, false>(args, stream);
    };
    switch ((int) type) {
        case GGML_TYPE_MXFP4: return run(std::integral_constant<ggml_type, GGML_TYPE_MXFP4>());
        case MOEGRAPH_TYPE_Q8_0_ODD: return run(std::integral_constant<ggml_type, MOEGRAPH_TYPE_Q8_0_ODD>());
        case GGML_TYPE_Q8_0: return run(std::integral_constant<ggml_type, GGML_TYPE_Q8_0>());
        case GGML_TYPE_Q4_K: return run(std::integral_constant<ggml_type, GGML_TYPE_Q4_K>());
        case GGML_TYPE_Q5_K: return run(std::integral_constant<ggml_type, GGML_TYPE_Q5_K>());
        case GGML_TYPE_Q6_K: return run(std::integral_constant<ggml_type, GGML_TYPE_Q6_K>());
        default: GGML_ABORT("no kernel for one row of type %d", (int) type);
    }
}
