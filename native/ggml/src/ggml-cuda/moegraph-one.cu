#include "moegraph-one.cuh"
#include "moegraph-rows-kernel.cuh"

#include "moegraph.h"

constexpr int MOEGRAPH_ONE_VALUES = 64;    // of a row, that a lane multiplies at a time
constexpr int MOEGRAPH_ONE_WARPS  = 4;     // of a block
constexpr int MOEGRAPH_ONE_MAX    = 16384; // values of a row: few rows of weights fit into shared memory at once
constexpr int MOEGRAPH_ONE_SHARED = 48*1024;

// Spelled out: bits must not depend on what the compiler contracts for some number of rows.
static __device__ __forceinline__ float moegraph_one_two(const float a, const float b, const float c, const float d) {
    return __fmaf_rn(c, d, __fmul_rn(a, b));
}

template <int n> static __device__ __forceinline__ void moegraph_words(int * w, const int4 * p) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
        const int4 v = p[i];
        w[4*i] = v.x, w[4*i + 1] = v.y, w[4*i + 2] = v.z, w[4*i + 3] = v.w;
    }
}

// What a lane has of the activations: two blocks, words in the order of the values.
struct moegraph_one_y {
    int   q[16];
    float d[2];
    float s[2];

    // w: the words of a block. there: whether the lane has a part of the row.
    __device__ __forceinline__ void set(const int b, const int * w, const bool there) {
        d[b] = there ? __int_as_float(w[0]) : 0.0f;
        s[b] = there ? __int_as_float(w[1]) : 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            q[8*b + i] = w[2 + (i < 4 ? 2*i : 2*i - 7)];
        }
    }
    __device__ __forceinline__ void load(const moegraph_block_y * y, const int part, const bool there) {
        int w[20];
        moegraph_words<5>(w, (const int4 *) (y + 2*part));
        set(0, w, there);
        set(1, w + 10, there);
    }
};

// How a lane multiplies its part of a row. Q4_K and Q5_K: from registers, as parts begin at 16 bytes.
template <ggml_type type> struct moegraph_one_x {
    static constexpr bool registers = true, five = type == GGML_TYPE_Q5_K;
    static constexpr int  bytes = moegraph_x<type>::bytes;
    typedef moegraph_one_y y_t;

    int4 head, high[2], low[2];

    __device__ __forceinline__ void load(const char * row, const int part) {
        const char * b = row + part/4*bytes;
        const char * q = b + (five ? 48 : 16) + 32*(part % 4);
        head = moegraph_load_16(b);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            low[i] = moegraph_load_16(q + 16*i);
            if constexpr (five) {
                high[i] = moegraph_load_16(b + 16 + 16*i);
            }
        }
    }
    __device__ __forceinline__ float dot(const y_t & y, const int part) const {
        const int j = part % 4;
        const uint32_t u0 = head.y, u1 = head.z, u2 = head.w;
        const uint32_t sc = (j < 2 ? u0 & 0x3F3F3F3F : (u2 & 0x0F0F0F0F)        | ((u0 >> 2) & 0x30303030)) >> 16*(j % 2);
        const uint32_t mn = (j < 2 ? u1 & 0x3F3F3F3F : ((u2 >> 4) & 0x0F0F0F0F) | ((u1 >> 2) & 0x30303030)) >> 16*(j % 2);
        const float2   dm = __half22float2(*(const half2 *) &head.x);
        int q[8], h[8], sums[2] = { 0, 0 };
        moegraph_words<2>(q, low);
        if constexpr (five) {
            moegraph_words<2>(h, high);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint32_t a = q[i] & 0x0F0F0F0F, b = (q[i] >> 4) & 0x0F0F0F0F;
            if constexpr (five) {
                a |= ((uint32_t) h[i] >> 2*j << 4) & 0x10101010;
                b |= ((uint32_t) h[i] >> 2*j << 3) & 0x10101010;
            }
            sums[0] = ggml_cuda_dp4a(a, y.q[i],     sums[0]);
            sums[1] = ggml_cuda_dp4a(b, y.q[8 + i], sums[1]);
        }
        const float x = moegraph_one_two(__fmul_rn(sc & 0xFF, y.d[0]), sums[0], __fmul_rn(sc >> 8 & 0xFF, y.d[1]), sums[1]);
        const float m = moegraph_one_two(mn & 0xFF, y.s[0], mn >> 8 & 0xFF, y.s[1]);
        return moegraph_one_two(dm.x, x, -dm.y, m);
    }
};

// 68 bytes a part, from words of shared memory, in which the first block lies two bytes off. So its activations do, too.
template <> struct moegraph_one_x<GGML_TYPE_Q8_0> {
    static constexpr bool registers = false;
    struct y_t {
        int   q[17];
        float d[2];
        __device__ __forceinline__ void load(const moegraph_block_y * y, const int part, const bool there) {
            moegraph_one_y o;
            o.load(y, part, there);
#pragma unroll
            for (int i = 0; i < 9; ++i) {
                q[i] = __funnelshift_r(i > 0 ? o.q[i - 1] : 0, i < 8 ? o.q[i] : 0, 16);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                q[9 + i] = o.q[8 + i];
            }
            d[0] = o.d[0];
            d[1] = o.d[1];
        }
    };
    static __device__ __forceinline__ float dot(const char * row, const y_t & y, const int part) {
        const int * w  = (const int *) (row + 68*part);
        const int   w0 = w[0], w8 = w[8];
        int sums[2] = { 0, 0 };
#pragma unroll
        for (int i = 0; i < 9; ++i) {
            sums[0] = ggml_cuda_dp4a(w[i], y.q[i], sums[0]);
        }
#pragma unroll
        for (int i = 9; i < 17; ++i) {
            sums[1] = ggml_cuda_dp4a(w[i], y.q[i], sums[1]);
        }
        return moegraph_one_two(__fmul_rn(moegraph_load_half((const char *) &w0),     y.d[0]), sums[0],
                                __fmul_rn(moegraph_load_half((const char *) &w8 + 2), y.d[1]), sums[1]);
    }
};

// A part is two blocks that share bytes: those at 32*p and at 32*p + 64 of half a superblock. Superblocks begin at any
// even byte. The 32 that each value is too large is taken off as the first term of the sums.
template <> struct moegraph_one_x<GGML_TYPE_Q6_K> {
    static constexpr bool registers = false;
    struct y_t : moegraph_one_y {
        int off[4];
        __device__ __forceinline__ void load(const moegraph_block_y * y, const int part, const bool there) {
#pragma unroll
            for (int b = 0; b < 2; ++b) { // a block of 40 bytes lies in 48 that begin at 16
                const int odd = part % 2;
                int w[12];
                moegraph_words<3>(w, (const int4 *) ((const char *) (y + part/2*4 + 2*b + odd) - 8*odd));
#pragma unroll
                for (int i = 0; i < 10; ++i) {
                    w[i] = odd ? w[i + 2] : w[i];
                }
                set(b, w, there);
            }
#pragma unroll
            for (int h = 0; h < 4; ++h) {
                off[h] = 0;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    off[h] = ggml_cuda_dp4a(0x01010101, q[4*h + i], off[h]);
                }
                off[h] *= -32;
            }
        }
    };
    static __device__ __forceinline__ float dot(const char * row, const y_t & y, const int part) {
        const char * b   = row + part/4*210;
        const int    odd = (int) ((uintptr_t) b & 2), p = part % 2;
        const int  * ql  = (const int *) (b - odd + 32*(part % 4));
        const int  * qh  = (const int *) (b - odd + 128 + 32*(part % 4/2));
        int sums[4] = { y.off[0], y.off[1], y.off[2], y.off[3] };
        uint32_t l0 = ql[0], h0 = qh[0];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint32_t l1 = ql[i + 1], h1 = qh[i + 1];
            const uint32_t l  = __funnelshift_r(l0, l1, 8*odd), h = __funnelshift_r(h0, h1, 8*odd) >> 2*p;
            sums[i/4]     = ggml_cuda_dp4a((l & 0x0F0F0F0F)        | ((h << 4) & 0x30303030), y.q[i],     sums[i/4]);
            sums[2 + i/4] = ggml_cuda_dp4a(((l >> 4) & 0x0F0F0F0F) | (h & 0x30303030),        y.q[8 + i], sums[2 + i/4]);
            l0 = l1, h0 = h1;
        }
        const int8_t * sc = (const int8_t *) b + 192 + 8*(part % 4/2) + 2*p;
        return __fmul_rn(moegraph_load_half(b + 208),
            moegraph_one_two(y.d[0], sc[0]*sums[0] + sc[1]*sums[1], y.d[1], sc[4]*sums[2] + sc[5]*sums[3]));
    }
};

// Where a warp works.
struct moegraph_one_place {
    moegraph_segment seg;
    int  row;
    bool present; // its expert
    const char * x[2];
};

// Waits for the preceding kernel, unless weights may be read before.
template <int n_rows>
static __device__ __forceinline__ moegraph_one_place moegraph_one_begin(const moegraph_rows_args & args) {
    if (args.ids != nullptr || !args.early) {
        ggml_cuda_pdl_sync();
    }
    moegraph_one_place p;
    p.seg = moegraph_segment_of_block(args);
    p.row = ((blockIdx.x - p.seg.first_block)*blockDim.y + threadIdx.y)*n_rows;
    const int slot = blockIdx.y;
    const int id   = args.ids != nullptr ? __ldcg(args.ids + slot) : 0;
    p.present  = (uint32_t) id < (uint32_t) args.n_experts;
    p.x[0]     = p.seg.x     + (p.present ? id : 0)*args.stride_expert;
    p.x[1]     = args.x_gate + (p.present ? id : 0)*args.stride_expert;
    p.seg.dst += slot*p.seg.stride_dst_col;
    return p;
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

// Adds up over the lanes: first the rows, behind them those of the gate. Writes the results, zeros for an absent expert.
template <int n_rows, bool glu>
static __device__ __forceinline__ void moegraph_one_end(
        float (&v)[glu ? 2*n_rows : n_rows], const moegraph_rows_args & args, const moegraph_one_place & p) {
    constexpr int n = glu ? 2*n_rows : n_rows; // lane l gets the sum of l/(32/n)
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
    float result = v[0];
    if constexpr (glu) {
        result = moegraph_glu(v[0], __shfl_xor_sync(0xFFFFFFFF, v[0], 16, 32), args.glu_op, args.glu_limit);
    }
    const int i = threadIdx.x/(32/n);
    if (threadIdx.x % (32/n) == 0 && i < n_rows && p.row + i < p.seg.n_rows) {
        p.seg.dst[p.row + i] = p.present ? result : 0.0f;
    }
}

// All rows of a warp are on their way to registers before it waits for the first.
// Grid of both kernels: (rows, slots). Block: (32, warps).
template <ggml_type type, int n_rows, bool glu>
static __global__ void __launch_bounds__(MOEGRAPH_ONE_WARPS*32, 1) moegraph_one_registers(const moegraph_rows_args args) {
    typedef moegraph_one_x<type> X;
    constexpr int n_mats = glu ? 2 : 1;
    const moegraph_one_place p = moegraph_one_begin<n_rows>(args);
    const int n_parts = args.n_chunks*(MOEGRAPH_CHUNK/MOEGRAPH_ONE_VALUES);
    float v[n_mats*n_rows] = {};
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
    moegraph_one_end<n_rows, glu>(v, args, p);
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
template <ggml_type type, int n_rows, int n_steps, bool glu>
static __global__ void __launch_bounds__(MOEGRAPH_ONE_WARPS*32, 1) moegraph_one_shared(const moegraph_rows_args args) {
    typedef moegraph_one_x<type> X;
    constexpr int n_mats = glu ? 2 : 1;
    extern __shared__ int4 moegraph_one_smem[];
    const int pitch = moegraph_one_pitch<type>(args.row_bytes);
    char    * s     = (char *) moegraph_one_smem + threadIdx.y*n_rows*n_mats*pitch;
    const moegraph_one_place p = moegraph_one_begin<n_rows>(args);
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
    const int n_parts = args.n_chunks*(MOEGRAPH_CHUNK/MOEGRAPH_ONE_VALUES);
    float v[n_mats*n_rows] = {};
    for (int first = 0; p.present && first < n_parts; first += 32*n_steps) {
        typename X::y_t y[n_steps];
        int part[n_steps];
#pragma unroll
        for (int k = 0; k < n_steps; ++k) {
            part[k] = min(first + 32*k + (int) threadIdx.x, n_parts - 1);
            y[k].load(args.y, part[k], part[k] == first + 32*k + (int) threadIdx.x);
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
    moegraph_one_end<n_rows, glu>(v, args, p);
}

// With experts only where all have the same row: where each has its own, the end of the experts follows (moegraph-moe.cu), and
// products that cannot be fused there are upstream's, whose sums that kernel has.
bool moegraph_one_supported(const ggml_tensor * dst, const ggml_type type, const int cc) {
    const bool mmid = dst->op == GGML_OP_MUL_MAT_ID;
    return cp_async_available(cc) && dst->ne[mmid ? 2 : 1] == 1 && dst->src[1]->ne[1] == 1 &&
        dst->src[0]->ne[0] <= MOEGRAPH_ONE_MAX && !moegraph_rows_are_apart(dst) &&
        (type == GGML_TYPE_Q8_0 || type == GGML_TYPE_Q4_K || type == GGML_TYPE_Q5_K || type == GGML_TYPE_Q6_K);
}

template <ggml_type type, int n_rows, int n_steps, bool glu>
static void moegraph_one_launch(moegraph_rows_args & args, cudaStream_t stream) {
    constexpr bool registers = moegraph_one_x<type>::registers;
    const size_t warp_bytes = registers ? 0 : (glu ? 2 : 1)*n_rows*moegraph_one_pitch<type>(args.row_bytes);
    int n_warps = MOEGRAPH_ONE_WARPS;
    while (n_warps > 1 && n_warps*warp_bytes > MOEGRAPH_ONE_SHARED) {
        n_warps /= 2;
    }
    int n_blocks = 0;
    for (int i = 0; i < args.n_segments; ++i) {
        args.segments[i].first_block = n_blocks;
        n_blocks += (args.segments[i].n_rows + n_warps*n_rows - 1)/(n_warps*n_rows);
    }
    const ggml_cuda_kernel_launch_params params(
        dim3(n_blocks, args.n_used, 1), dim3(32, n_warps, 1), n_warps*warp_bytes, stream);
    if constexpr (registers) {
        ggml_cuda_kernel_launch(moegraph_one_registers<type, n_rows, glu>, params, args);
    } else {
        const ggml_cuda_device_info::cuda_device_info & dev = ggml_cuda_info().devices[ggml_cuda_get_device()];
        const auto kernel = moegraph_one_shared<type, n_rows, n_steps, glu>;
        CUDA_SET_SHARED_MEMORY_LIMIT(kernel, dev.smpbo);
        ggml_cuda_kernel_launch(kernel, params, args);
    }
}

// Chooses the rows of a warp: 8 (with a gate, pairs of them count) as long as there are 3 warps for 2 multiprocessors.
// Of long rows 2, which are as many bytes; through registers 2 or, of the most registers, 1.
template <ggml_type type, bool glu>
static void moegraph_one_switch_rows(moegraph_rows_args & args, cudaStream_t stream) {
    if constexpr (moegraph_one_x<type>::registers) {
        moegraph_one_launch<type, glu && type == GGML_TYPE_Q5_K ? 1 : 2, 1, glu>(args, stream);
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

void moegraph_one_mul_mat(const ggml_type type, moegraph_rows_args & args, cudaStream_t stream) {
    const auto run = [&](const auto t) {
        args.x_gate ? moegraph_one_switch_rows<t.value, true>(args, stream) :
            moegraph_one_switch_rows<t.value, false>(args, stream);
    };
    switch (type) {
        case GGML_TYPE_Q8_0: return run(std::integral_constant<ggml_type, GGML_TYPE_Q8_0>());
        case GGML_TYPE_Q4_K: return run(std::integral_constant<ggml_type, GGML_TYPE_Q4_K>());
        case GGML_TYPE_Q5_K: return run(std::integral_constant<ggml_type, GGML_TYPE_Q5_K>());
        case GGML_TYPE_Q6_K: return run(std::integral_constant<ggml_type, GGML_TYPE_Q6_K>());
        default: GGML_ABORT("no kernel for one row of type %d", (int) type);
    }
}
