#include "moegraph-rows-kernel.cuh"
#include "moegraph-wide.cuh"

constexpr int WIDE_WARPS  = 4; // of a block, at most; each has 16 rows of weights, and all share a group's activations
constexpr int WIDE_BLOCKS = 3; // 168 registers a thread

// A chunk of an activation row: how much is copied, and how far rows lie apart, so that they are in other banks.
constexpr int WIDE_Y_BYTES = MOEGRAPH_CHUNK/32*sizeof(moegraph_block_y);
constexpr int WIDE_Y_PITCH = WIDE_Y_BYTES + 16;

// Of the shared memory, the rows of activations of the columns come first. All of it is dynamic: a kernel with other shared
// memory may not be given the device's limit.
constexpr int WIDE_LIST_BYTES = MOEGRAPH_MAX_COLS*sizeof(int);

// Of a warp, the sums of earlier parts, behind the activations.
template <bool glu>
static constexpr __host__ __device__ size_t wide_sum_bytes() {
    return (glu ? 2 : 1)*MOEGRAPH_TILE_ROWS*MOEGRAPH_MAX_COLS*sizeof(float);
}

// 32 columns take 21 KB beside 37 KB of weights (Q4_K, gate and up). Devices with up to 100 KB could then hold one block.
int moegraph_wide_cols() {
    return ggml_cuda_info().devices[ggml_cuda_get_device()].smpbo >= 160*1024 ? MOEGRAPH_MAX_COLS : MOEGRAPH_MAX_COLS/2;
}

// The chunks of a row as moegraph_rows_kernel adds them up: part after part, every n_parts-th chunk in each.
struct wide_order {
    int chunk;
    int part;

    __device__ __forceinline__ void next(const int n_parts, const int n_chunks) {
        chunk += n_parts;
        if (chunk >= n_chunks) {
            chunk = ++part;
        }
    }
};

// Adds the sums of a part to those of the parts before it, and begins the next one.
template <int n_tiles, int n_mats>
static __device__ __forceinline__ void wide_end_part(float (&acc)[n_mats][n_tiles][4], float * sums, const bool first) {
#pragma unroll
    for (int l = 0; l < n_mats*n_tiles*4; ++l) {
        float & x   = acc[l/(4*n_tiles)][(l/4) % n_tiles][l%4];
        float & sum = sums[32*l + threadIdx.x];
        sum = first ? x : sum + x;
        x   = 0.0f;
    }
}

// Computes 16 rows of weights of this warp with n_tiles*8 columns of a group; seg: what these rows belong to, row: the
// first of this lane. apart: in the order of moegraph_rows_kernel.
template <ggml_type type, int n_tiles, bool glu, bool apart>
static __device__ __forceinline__ void wide_block(
        const moegraph_rows_args & args, const moegraph_segment & seg, const int row, const int expert, const int n,
        const int * slots, const int * y_rows, char * smem) {
    typedef moegraph_x<type> X;
    constexpr int n_mats      = glu ? 2 : 1;
    constexpr int stage_bytes = MOEGRAPH_TILE_ROWS*X::pitch;
    constexpr int warp_bytes  = MOEGRAPH_STAGES*n_mats*stage_bytes;
    constexpr int n_vecs      = WIDE_Y_BYTES/16;

    const int g        = threadIdx.x / 4;
    const int c        = threadIdx.x % 4;
    const int tid      = threadIdx.y*32 + threadIdx.x;
    const int n_chunks = expert < 0 ? 0 : args.n_chunks;
    const int y_bytes  = args.group_cols*WIDE_Y_PITCH;
    char * smem_y      = smem + blockDim.y*warp_bytes;
    char * smem_warp   = smem + threadIdx.y*warp_bytes;
    float * sums       = (float *) (smem_y + MOEGRAPH_STAGES*y_bytes + threadIdx.y*wide_sum_bytes<glu>());

    const char * rows[n_mats][2];
    moegraph_rows_of_lane<n_mats>(rows, args, seg, expert, row);
    const auto load = [&](const int chunk, const int stage) {
#pragma unroll
        for (int m = 0; m < n_mats; ++m) {
            moegraph_load_chunk<type>(smem_warp + (stage*n_mats + m)*stage_bytes, rows[m][0], rows[m][1],
                args.row_bytes, chunk);
        }
        const char * y = (const char *) args.y + chunk*WIDE_Y_BYTES;
        for (int i = tid; i < n_tiles*MOEGRAPH_TILE_COLS*n_vecs; i += 32*blockDim.y) {
            const int col = i / n_vecs;
            const int v   = i % n_vecs;
            moegraph_copy_16(smem_y + stage*y_bytes + col*WIDE_Y_PITCH + 16*v,
                y + (int64_t) y_rows[col]*args.n_chunks*WIDE_Y_BYTES + 16*v, 16);
        }
    };
    wide_order ahead = { 0, 0 }, at = { 0, 0 };
#pragma unroll
    for (int i = 0; i < MOEGRAPH_STAGES; ++i) {
        if (i < n_chunks) {
            load(apart ? ahead.chunk : i, i);
            if constexpr (apart) {
                ahead.next(seg.k_split, n_chunks);
            }
        }
        moegraph_copy_commit();
    }
    ggml_cuda_pdl_lc();

    int y_quants[n_tiles];
    int y_scales[n_tiles][2];
#pragma unroll
    for (int t = 0; t < n_tiles; ++t) {
        y_quants[t]    = (8*t + g)*WIDE_Y_PITCH;
        y_scales[t][0] = (8*t + 2*c + 0)*WIDE_Y_PITCH;
        y_scales[t][1] = (8*t + 2*c + 1)*WIDE_Y_PITCH;
    }
    float acc[n_mats][n_tiles][4] = {};
    for (int i = 0; i < n_chunks; ++i) {
        const int stage = i % MOEGRAPH_STAGES;
        const int chunk = apart ? at.chunk : i;
        moegraph_copy_wait<MOEGRAPH_STAGES - 1>();
        __syncthreads();
        const char * s[n_mats][2];
#pragma unroll
        for (int m = 0; m < n_mats; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                s[m][r] = smem_warp + (stage*n_mats + m)*stage_bytes + (g + 8*r)*X::pitch;
                if constexpr (X::unaligned) {
                    s[m][r] += (uintptr_t) (rows[m][r] + (int64_t) chunk*X::bytes) & 15;
                }
            }
        }
        moegraph_dot_chunk<type, n_tiles, n_mats>(acc, s, smem_y + stage*y_bytes, y_quants, y_scales);
        if constexpr (apart) {
            const int part = at.part;
            at.next(seg.k_split, n_chunks);
            if (seg.k_split > 1 && at.part > part) {
                wide_end_part<n_tiles, n_mats>(acc, sums, part == 0);
            }
        }
        __syncthreads();
        if (i + MOEGRAPH_STAGES < n_chunks) {
            load(apart ? ahead.chunk : i + MOEGRAPH_STAGES, stage);
            if constexpr (apart) {
                ahead.next(seg.k_split, n_chunks);
            }
        }
        moegraph_copy_commit();
    }
    if (apart && seg.k_split > 1 && n_chunks > 0) {
#pragma unroll
        for (int l = 0; l < n_mats*n_tiles*4; ++l) {
            acc[l/(4*n_tiles)][(l/4) % n_tiles][l%4] = sums[32*l + threadIdx.x];
        }
    }
    moegraph_rows_store<n_tiles, glu>(acc, args, seg, slots, expert, n, row);
}

// Grid: (blocks of rows, groups). Block: (32, n_warps). A group has as many tiles of columns as it has slots for. Without
// groups, the columns of a dense product that follow each other are one.
template <ggml_type type, bool glu, bool apart>
__launch_bounds__(WIDE_WARPS*32, WIDE_BLOCKS)
static __global__ void moegraph_wide_kernel(const moegraph_rows_args args) {
#ifdef TURING_MMA_AVAILABLE
    extern __shared__ char4 moegraph_wide_smem[];
    int  * y_rows = (int *) moegraph_wide_smem;
    char * smem   = (char *) moegraph_wide_smem + WIDE_LIST_BYTES;

    ggml_cuda_pdl_sync();
    moegraph_segment seg = apart ? moegraph_segment_of_block(args) : args.segments[0];
    int n, expert = 0, first = 0;
    const int * slots = nullptr;
    if (!apart || args.groups != nullptr) {
        if ((int) blockIdx.y >= *args.n_groups) {
            return;
        }
        const moegraph_group & group = args.groups[blockIdx.y];
        n      = group.n;
        expert = group.expert;
        slots  = group.slots;
    } else {
        first = blockIdx.y*args.group_cols;
        n     = min(args.group_cols, args.n_cols - first);
        seg.dst += first*seg.stride_dst_col;
    }
    if (threadIdx.y == 0) { // columns past the last one repeat it, their results are dropped
        const int col = min((int) threadIdx.x, n - 1);
        int y_row = first + col;
        if (slots != nullptr) {
            y_row = (slots[col] / args.n_used)*args.n_y + (slots[col] % args.n_used) % args.n_y;
        }
        y_rows[threadIdx.x] = y_row;
    }
    __syncthreads();
    const int block = blockIdx.x - (apart ? seg.first_block : 0);
    const int row   = (block*blockDim.y + threadIdx.y)*MOEGRAPH_TILE_ROWS + threadIdx.x/4;
    static_assert(MOEGRAPH_MAX_COLS == 4*MOEGRAPH_TILE_COLS && MOEGRAPH_MAX_COLS == 32, "four tiles, and a lane for each column");
    switch ((n - 1)/MOEGRAPH_TILE_COLS) {
        case 0:  wide_block<type, 1, glu, apart>(args, seg, row, expert, n, slots, y_rows, smem); break;
        case 1:  wide_block<type, 2, glu, apart>(args, seg, row, expert, n, slots, y_rows, smem); break;
        case 2:  wide_block<type, 3, glu, apart>(args, seg, row, expert, n, slots, y_rows, smem); break;
        default: wide_block<type, 4, glu, apart>(args, seg, row, expert, n, slots, y_rows, smem); break;
    }
#else
    GGML_UNUSED(args);
    NO_DEVICE_CODE;
#endif // TURING_MMA_AVAILABLE
}

template <ggml_type type, bool glu, bool apart>
static void wide_launch(const moegraph_rows_args & args0, const int n_groups, cudaStream_t stream) {
    constexpr size_t warp_bytes  = MOEGRAPH_STAGES*(glu ? 2 : 1)*MOEGRAPH_TILE_ROWS*moegraph_x<type>::pitch +
        (apart ? wide_sum_bytes<glu>() : 0);
    moegraph_rows_args args = args0;
    const size_t other_bytes = WIDE_LIST_BYTES + (size_t) MOEGRAPH_STAGES*args.group_cols*WIDE_Y_PITCH;
    const size_t most        = ggml_cuda_info().devices[ggml_cuda_get_device()].smpbo;
    int n_warps = WIDE_WARPS;
    while (n_warps > 1 && n_warps*warp_bytes + other_bytes > most) {
        n_warps /= 2;
    }
    moegraph_rows_divide<type, glu>(args);
    const dim3 grid(moegraph_rows_lay_out(args, n_warps, false), n_groups, 1);
    const auto kernel = moegraph_wide_kernel<type, glu, apart>;
    CUDA_SET_SHARED_MEMORY_LIMIT(kernel, most);
    const ggml_cuda_kernel_launch_params params(grid, dim3(32, n_warps), n_warps*warp_bytes + other_bytes, stream);
    ggml_cuda_kernel_launch(kernel, params, args);
}

template <bool glu, bool apart>
static void wide_switch(const ggml_type type, const moegraph_rows_args & args, const int n_groups, cudaStream_t stream) {
    moegraph_switch_type(type, [&](const auto t) { wide_launch<t.value, glu, apart>(args, n_groups, stream); });
}

void moegraph_wide_mul_mat(const ggml_type type, const moegraph_rows_args & args, const int n_groups, cudaStream_t stream) {
    const auto launch = args.x_gate != nullptr ? (args.apart ? wide_switch<true, true> : wide_switch<true, false>) :
        (args.apart ? wide_switch<false, true> : wide_switch<false, false>);
    launch(type, args, n_groups, stream);
}
