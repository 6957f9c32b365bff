#pragma once

#include "moegraph-attn-unpack.cuh"

// Attention over pages of keys and values, a part of the positions a time (moegraph.h says what it computes).
//
// A block of eight warps has one split of positions, one head of keys and values, and up to NC*8 columns: the query
// heads that share that head, of one row or of several rows of a sequence. It walks 128 positions at a time:
//   keys    : a warp has 16 of them and multiplies them with all columns
//   softmax : maximum and sum over the eight warps go through shared memory, and so do the weights
//   values  : a warp has a slice of their elements and multiplies the slice of all 128 values with the weights
// So each key and each value is loaded once, by one warp, from memory to the registers it is multiplied from. A column
// of a product of matrices depends on no other column, a warp adds up positions in order, and splits and tiles are
// aligned to fixed positions. This is why a row's bits do not depend on the rows beside it.

constexpr int MOEGRAPH_ATTN_WARPS   = 8;
constexpr int MOEGRAPH_ATTN_THREADS = 32*MOEGRAPH_ATTN_WARPS;
constexpr int MOEGRAPH_ATTN_TILE    = 16*MOEGRAPH_ATTN_WARPS; // positions
constexpr int MOEGRAPH_ATTN_COLS    = 8;                      // of one product
constexpr float MOEGRAPH_ATTN_BOOST = 10.0f; // weights are at most 2 to this: the small ones stay normal in half

// Blocks on a multiprocessor: two where their registers suffice for both.
template <ggml_type type_k, ggml_type type_v, int d, int NC> constexpr int moegraph_attn_blocks() {
    return NC == 1 && sizeof(moegraph_attn_k<type_k, d>) + sizeof(moegraph_attn_v<type_v, d>) <= 256 ? 2 : 1;
}

// Per tile of columns; the kernel's dynamic shared memory is this, then the raw values of a tile of positions.
template <ggml_type type_v, int d> constexpr size_t moegraph_attn_smem_per_tile() {
    return (d/16)*32*sizeof(uint4) + (type_v == GGML_TYPE_F16 ? 2 : 1)*MOEGRAPH_ATTN_WARPS*32*sizeof(uint2) +
        (2*MOEGRAPH_ATTN_WARPS + 4)*MOEGRAPH_ATTN_COLS*sizeof(float);
}

struct moegraph_attn_args {
    const char       * q;
    const char       * k;
    const char       * v;
    const int32_t    * rows;
    float            * partial; // [d] of each row, head and split
    float2           * max_sum; // the same without [d]
    moegraph_attn_pool pool;
    int64_t            q_head;  // strides in bytes
    int64_t            q_row;
    int64_t            k_row;
    int64_t            v_row;
    float              scale;   // times log2(e)
    int                n_rows;
    int                n_head;
    int                n_head_kv;
    int                n_group;  // query heads of a head of keys
    int                n_splits; // most of a row
    int                n_tiles;  // most tiles of columns of a block
    bool               refined;  // weights of F16 values are sums of two halves
    bool               early;    // rows and pages may be read before the preceding kernel has ended
};

// Some rows and one split of their positions.
struct moegraph_attn_unit {
    int row;    // lane that knows the sequence; the row itself if there is only one
    int rank;   // of the first row in its group, -1: the row itself
    int n_rows;
    int split;
    int begin;  // positions
    int end;
};

// What a block knows of the rows, in shared memory.
struct moegraph_attn_plan {
    int seq[32];
    int n_past[32];
    int n_keys[32];
    int n_members[32];                         // of the row's group: rows of a sequence with one n_past
    int n_chunks[32];                          // of the group, 0 if another row of it stands for it
    int n_shared[MOEGRAPH_ATTN_LEVELS][32];    // splits of a level in which the group's rows have the same keys
    int end_unit[MOEGRAPH_ATTN_LEVELS][32];    // units of a level in this and earlier rows
    int n_units[MOEGRAPH_ATTN_LEVELS];
    int at[2][MOEGRAPH_ATTN_TILE];             // of this and the next tile: rows of the pool
    unsigned char member[32][32];              // [first row of a group][rank]: row
    moegraph_attn_unit unit[3];                // this one, the next, and one that a warp may still be storing
};

// Shared memory that depends on the tiles of columns.
struct moegraph_attn_smem {
    uint4 * q;       // [tile of columns][step][lane]: high halves, then low ones
    uint2 * p;       // [tile of columns][16 positions][lane]: weights, if refined also what their halves round off
    float * max;     // [warp][column]
    float * sum;     // [warp][column]
    float * running; // [4][column]: maximum so far, with this tile, what sums so far are multiplied by, sum of weights
    char  * v;       // raw values of a tile, if they are quantized
};

// By one warp; lane r has row r.
static __device__ __forceinline__ void moegraph_attn_make_plan(
        const moegraph_attn_args & args, moegraph_attn_plan & plan) {
    const int lane = threadIdx.x;
    int n_keys = 0, n_past = 0, seq = -1 - lane; // in no group
    if (lane < args.n_rows) {
        const int32_t * row = args.rows + lane*MOEGRAPH_ATTN_WORDS;
        n_keys = moegraph_attn_n_keys(args.pool, row);
        n_past = max(0, min(row[MOEGRAPH_ATTN_N_PAST], n_keys));
        seq    = n_keys > 0 ? row[MOEGRAPH_ATTN_SEQ] : seq;
    }
    const unsigned peers     = __match_any_sync(0xFFFFFFFF, seq) & __match_any_sync(0xFFFFFFFF, n_past);
    const int      rank      = __popc(peers & ((1u << lane) - 1));
    const int      n_members = __popc(peers);
    const int      chunk     = args.n_tiles*MOEGRAPH_ATTN_COLS/args.n_group;
    const int      n_chunks  = rank == 0 ? (n_members + chunk - 1)/chunk : 0;
    plan.seq[lane]       = seq;
    plan.n_past[lane]    = n_past;
    plan.n_keys[lane]    = n_keys;
    plan.n_members[lane] = n_members;
    plan.n_chunks[lane]  = n_chunks;
    plan.member[__ffs(peers) - 1][rank] = (unsigned char) lane;
    for (int l = 0; l < MOEGRAPH_ATTN_LEVELS; ++l) {
        const int size     = moegraph_attn_level_size(l);
        const int n_shared = moegraph_attn_level_part(l, n_past)/size;
        int sum = (moegraph_attn_level_part(l, n_keys) + size - 1)/size - n_shared + n_shared*n_chunks;
#pragma unroll
        for (int offset = 1; offset < 32; offset *= 2) {
            const int earlier = __shfl_up_sync(0xFFFFFFFF, sum, offset);
            sum += lane >= offset ? earlier : 0;
        }
        plan.n_shared[l][lane] = n_shared;
        plan.end_unit[l][lane] = sum;
        if (lane == 31) {
            plan.n_units[l] = sum;
        }
    }
}

// The k-th unit of the block, long splits first; row < 0: it has fewer. Blocks take turns in both directions, which
// evens out units of falling length.
static __device__ __forceinline__ moegraph_attn_unit moegraph_attn_find_unit(
        const moegraph_attn_args & args, const moegraph_attn_plan & plan, const int k) {
    const int n_slots = gridDim.x/args.n_head_kv;
    const int slot    = blockIdx.x/args.n_head_kv;
    int u     = k*n_slots + (k % 2 == 0 ? slot : n_slots - 1 - slot);
    int level = MOEGRAPH_ATTN_LEVELS - 1;
    while (level >= 0 && u >= plan.n_units[level]) {
        u -= plan.n_units[level--];
    }
    moegraph_attn_unit unit = { -1, -1, 0, 0, 0, 0 };
    if (level < 0) {
        return unit;
    }
    unit.row = __ffs(__ballot_sync(0xFFFFFFFF, plan.end_unit[level][threadIdx.x % 32] > u)) - 1;
    u -= unit.row > 0 ? plan.end_unit[level][unit.row - 1] : 0;
    const int n_shared = plan.n_shared[level][unit.row];
    const int n_chunks = plan.n_chunks[unit.row];
    int in_level;
    if (u < n_shared*n_chunks) { // chunks of a split side by side: they read the same
        const int chunk = args.n_tiles*MOEGRAPH_ATTN_COLS/args.n_group;
        in_level    = u/n_chunks;
        unit.rank   = (u - in_level*n_chunks)*chunk;
        unit.n_rows = min(chunk, plan.n_members[unit.row] - unit.rank);
    } else {
        in_level    = n_shared + u - n_shared*n_chunks;
        unit.n_rows = 1;
    }
    unit.split = moegraph_attn_level_first(level) + in_level;
    unit.begin = moegraph_attn_level_start(level) + in_level*moegraph_attn_level_size(level);
    unit.end   = min(unit.begin + moegraph_attn_level_size(level), plan.n_keys[unit.row]);
    return unit;
}

static __device__ __forceinline__ int moegraph_attn_row_of(
        const moegraph_attn_plan & plan, const moegraph_attn_unit & unit, const int i) {
    return unit.rank < 0 ? unit.row : plan.member[unit.row][unit.rank + i];
}

// Where position begin + i is in the pool. Behind the end: the last key again, with weight 0.
static __device__ __forceinline__ int moegraph_attn_locate(
        const moegraph_attn_args & args, const moegraph_attn_plan & plan, const moegraph_attn_unit & unit,
        const int begin, const int i) {
    return moegraph_attn_pool_row(args.pool, args.rows + unit.row*MOEGRAPH_ATTN_WORDS, plan.seq[unit.row],
        plan.n_past[unit.row], min(begin + i, unit.end - 1));
}

// The queries of a unit, scaled, each number as the sum of two halves, in the order of the fragments.
template <ggml_type type_k, int d>
static __device__ __forceinline__ void moegraph_attn_load_q(
        const moegraph_attn_args & args, const moegraph_attn_plan & plan, const moegraph_attn_unit & unit,
        const int head_kv, const int n_tiles, uint4 * smem) {
    constexpr int steps = d/16;
    for (int i = threadIdx.x; i < n_tiles*steps*32; i += MOEGRAPH_ATTN_THREADS) {
        const int col = i/(steps*32)*MOEGRAPH_ATTN_COLS + i%32/4;
        const int s   = i/32 % steps;
        uint4 packed  = make_uint4(0, 0, 0, 0);
        if (col < unit.n_rows*args.n_group) {
            const int    row = moegraph_attn_row_of(plan, unit, col/args.n_group);
            const char * q   = args.q + row*args.q_row + (head_kv*args.n_group + col % args.n_group)*args.q_head;
            float x[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                x[j] = __fmul_rn(((const float *) q)[moegraph_attn_k_element<type_k, d>(s, i % 4, j)], args.scale);
            }
            const half2  high0 = __floats2half2_rn(x[0], x[1]), high1 = __floats2half2_rn(x[2], x[3]);
            const float2 h0 = __half22float2(high0), h1 = __half22float2(high1);
            packed.x = moegraph_attn_bits(high0);
            packed.y = moegraph_attn_bits(high1);
            packed.z = moegraph_attn_bits(__floats2half2_rn(x[0] - h0.x, x[1] - h0.y));
            packed.w = moegraph_attn_bits(__floats2half2_rn(x[2] - h1.x, x[3] - h1.y));
        }
        smem[i] = packed;
    }
}

// Maximum and sum over the lanes of one column of a fragment, for both columns of a thread. Every lane gets the same.
static __device__ __forceinline__ float2 moegraph_attn_max_over(float2 x) {
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
        x.x = fmaxf(x.x, __shfl_xor_sync(0xFFFFFFFF, x.x, offset));
        x.y = fmaxf(x.y, __shfl_xor_sync(0xFFFFFFFF, x.y, offset));
    }
    return x;
}

static __device__ __forceinline__ float2 moegraph_attn_sum_over(float2 x) {
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
        x.x += __shfl_xor_sync(0xFFFFFFFF, x.x, offset);
        x.y += __shfl_xor_sync(0xFFFFFFFF, x.y, offset);
    }
    return x;
}

// The sums of a block for its unit, and how it goes on to the next one.
template <ggml_type type_k, ggml_type type_v, int d, int NC> struct moegraph_attn_block {
    static constexpr int  n_m     = moegraph_attn_v<type_v, d>::n_m; // tiles of 16 elements in a warp's slice
    static constexpr int  n_p     = type_v == GGML_TYPE_F16 ? 2 : 1; // products of a value with a weight, if refined
    static constexpr int  n_slice = d/(16*n_m);                      // warps that have one
    // whether registers suffice to load keys and values of the next tile early
    static constexpr bool ahead   = NC == 1 ||
        sizeof(moegraph_attn_k<type_k, d>) + sizeof(moegraph_attn_v<type_v, d>) <= 320;

    const moegraph_attn_args & args;
    moegraph_attn_smem         smem;
    int                        warp;
    int                        lane;
    int                        head_kv;
    moegraph_attn_k<type_k, d> k;
    moegraph_attn_v<type_v, d> v;
    float                      acc[NC][n_m][4];
    float                      s[NC][4];

    __device__ __forceinline__ moegraph_attn_block(const moegraph_attn_args & args, const moegraph_attn_smem & smem)
        : args(args), smem(smem), warp(threadIdx.x/32), lane(threadIdx.x % 32), head_kv(blockIdx.x % args.n_head_kv) {
        reset();
    }

    __device__ __forceinline__ void reset() {
#pragma unroll
        for (int c = 0; c < NC; ++c) {
#pragma unroll
            for (int m = 0; m < n_m; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    acc[c][m][i] = 0.0f;
                }
            }
        }
    }

    // n: positions of the tile; at: where they are
    __device__ __forceinline__ void load_keys(const int * at, const int n) {
        if (16*warp < n) {
            const char * base = args.k + head_kv*moegraph_attn_row_bytes<type_k, d>();
            k.load(base + at[16*warp + lane/4]*args.k_row, base + at[16*warp + lane/4 + 8]*args.k_row);
        }
    }

    __device__ __forceinline__ void load_values(const int * at, const int n) {
        v.load(args.v + head_kv*moegraph_attn_row_bytes<type_v, d>(), args.v_row, at, n);
    }

    __device__ __forceinline__ void multiply_keys(const int n, const int n_tiles) {
#pragma unroll
        for (int c = 0; c < NC; ++c) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                s[c][i] = 0.0f;
            }
        }
        if (16*warp < n) {
#pragma unroll
            for (int step = 0; step < d/16; ++step) {
                uint32_t a[4];
                k.unpack(step, a);
#pragma unroll
                for (int c = 0; c < NC; ++c) {
                    if (c < n_tiles) {
                        const uint4 b = smem.q[(c*(d/16) + step)*32 + lane];
                        moegraph_attn_mma(s[c], a, b.x, b.y);
                        moegraph_attn_mma(s[c], a, b.z, b.w);
                    }
                }
            }
        }
        const bool has0 = 16*warp + lane/4 < n;
        const bool has1 = 16*warp + lane/4 + 8 < n;
#pragma unroll
        for (int c = 0; c < NC; ++c) {
            if (c < n_tiles) {
                s[c][0] = has0 ? s[c][0] : -INFINITY;
                s[c][1] = has0 ? s[c][1] : -INFINITY;
                s[c][2] = has1 ? s[c][2] : -INFINITY;
                s[c][3] = has1 ? s[c][3] : -INFINITY;
                const float2 most = moegraph_attn_max_over(
                    make_float2(fmaxf(s[c][0], s[c][2]), fmaxf(s[c][1], s[c][3])));
                if (lane < 4) {
                    *at_column(smem.max, warp, c) = most;
                }
            }
        }
    }

    __device__ __forceinline__ float2 * at_column(float * x, const int w, const int c) const {
        return (float2 *) (x + (w*args.n_tiles + c)*MOEGRAPH_ATTN_COLS + 2*(lane % 4));
    }

    // Rounds weights to half, of both columns of a thread, and returns what became of them. i: the first or the last
    // eight of the 16 positions; i >= 2: what was rounded off.
    __device__ __forceinline__ float2 put_weights(const int i, const int c, const float2 x) {
        const half2 h = __floats2half2_rn(x.x, x.y);
        uint32_t * p = (uint32_t *) (smem.p + ((i/2*args.n_tiles + c)*MOEGRAPH_ATTN_WARPS + warp)*32 + lane);
        p[i % 2] = moegraph_attn_transpose(moegraph_attn_bits(h));
        return __half22float2(h);
    }

    // Weights of the warp's positions, and the sums so far on the scale of the new maximum.
    __device__ __forceinline__ void weigh(const int n, const int n_tiles) {
#pragma unroll
        for (int c = 0; c < NC; ++c) {
            if (c < n_tiles) {
                const float2 old  = *at_column(smem.running, 0, c);
                const float2 here = moegraph_attn_max_over(*at_column(smem.max, lane/4, c));
                const float2 most = make_float2(fmaxf(old.x, here.x), fmaxf(old.y, here.y));
                const float2 alpha = make_float2(exp2f(old.x - most.x), exp2f(old.y - most.y));
                float2 sum = make_float2(0.0f, 0.0f);
                if (16*warp < n) {
                    const float  x  = most.x - MOEGRAPH_ATTN_BOOST;
                    const float  y  = most.y - MOEGRAPH_ATTN_BOOST;
                    const float2 w0 = make_float2(exp2f(s[c][0] - x), exp2f(s[c][1] - y));
                    const float2 w1 = make_float2(exp2f(s[c][2] - x), exp2f(s[c][3] - y));
                    float2 r0 = put_weights(0, c, w0), r1 = put_weights(1, c, w1);
                    sum = make_float2(r0.x + r1.x, r0.y + r1.y);
                    if (n_p == 2 && args.refined) {
                        r0  = put_weights(2, c, make_float2(w0.x - r0.x, w0.y - r0.y));
                        r1  = put_weights(3, c, make_float2(w1.x - r1.x, w1.y - r1.y));
                        sum = make_float2(sum.x + (r0.x + r1.x), sum.y + (r0.y + r1.y));
                    }
                    sum = moegraph_attn_sum_over(sum);
                }
                if (lane < 4) {
                    *at_column(smem.sum, warp, c) = sum;
                    if (c == warp) {
                        *at_column(smem.running, 1, c) = most;
                        *at_column(smem.running, 2, c) = alpha;
                    }
                }
#pragma unroll
                for (int m = 0; m < n_m; ++m) {
                    acc[c][m][0] *= alpha.x;
                    acc[c][m][1] *= alpha.y;
                    acc[c][m][2] *= alpha.x;
                    acc[c][m][3] *= alpha.y;
                }
            }
        }
    }

    // Maximum and sum of tile of columns `warp`. last: of the unit; they leave, and start anew.
    __device__ __forceinline__ void add_weights(
            const moegraph_attn_plan & plan, const moegraph_attn_unit & unit, const int n_tiles, const bool last) {
        if (warp >= n_tiles) {
            return;
        }
        float2 sum = moegraph_attn_sum_over(*at_column(smem.sum, lane/4, warp));
        if (lane < 4) {
            const float2 most  = *at_column(smem.running, 1, warp);
            const float2 alpha = *at_column(smem.running, 2, warp);
            const float2 old   = *at_column(smem.running, 3, warp);
            sum = make_float2(fmaf(old.x, alpha.x, sum.x), fmaf(old.y, alpha.y, sum.y));
            *at_column(smem.running, 0, warp) = last ? make_float2(-INFINITY, -INFINITY) : most;
            *at_column(smem.running, 3, warp) = last ? make_float2(0.0f, 0.0f) : sum;
            for (int x = 0; last && x < 2; ++x) {
                const int col = warp*MOEGRAPH_ATTN_COLS + 2*lane + x;
                if (col < unit.n_rows*args.n_group) {
                    args.max_sum[place(plan, unit, col)] =
                        x == 0 ? make_float2(most.x, sum.x) : make_float2(most.y, sum.y);
                }
            }
        }
    }

    // Where the partial sum of a column is.
    __device__ __forceinline__ int64_t place(
            const moegraph_attn_plan & plan, const moegraph_attn_unit & unit, const int col) const {
        const int row  = moegraph_attn_row_of(plan, unit, col/args.n_group);
        const int head = head_kv*args.n_group + col % args.n_group;
        return (int64_t) (row*args.n_head + head)*args.n_splits + unit.split;
    }

    __device__ __forceinline__ void multiply_values(const int n, const int n_tiles) {
        if (warp < n_slice) {
#pragma unroll
            for (int i = 0; i < MOEGRAPH_ATTN_WARPS; ++i) {
                if (16*i < n) {
                    uint32_t a[n_m][4];
                    v.unpack(smem.v, i, a);
#pragma unroll
                    for (int c = 0; c < NC; ++c) {
                        if (c < n_tiles) {
#pragma unroll
                            for (int low = 0; low < n_p; ++low) {
                                if (low == 0 || args.refined) {
                                    const uint2 b =
                                        smem.p[((low*args.n_tiles + c)*MOEGRAPH_ATTN_WARPS + i)*32 + lane];
#pragma unroll
                                    for (int m = 0; m < n_m; ++m) {
                                        moegraph_attn_mma(acc[c][m], a[m], b.x, b.y);
                                    }
                                }
                            }
                        }
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void store(const moegraph_attn_plan & plan, const moegraph_attn_unit & unit) {
#pragma unroll
        for (int c = 0; c < NC; ++c) {
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                const int col = c*MOEGRAPH_ATTN_COLS + 2*(lane % 4) + x;
                if (col < unit.n_rows*args.n_group && warp < n_slice) {
                    float * out = args.partial + place(plan, unit, col)*d;
#pragma unroll
                    for (int m = 0; m < n_m; ++m) {
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            out[moegraph_attn_v_element<type_v, d>(warp, m, h, lane/4)] = acc[c][m][2*h + x];
                        }
                    }
                }
            }
        }
        reset();
    }
};

template <ggml_type type_k, ggml_type type_v, int d, int NC>
__launch_bounds__(MOEGRAPH_ATTN_THREADS, moegraph_attn_blocks<type_k, type_v, d, NC>())
static __global__ void moegraph_attn_kernel(const __grid_constant__ moegraph_attn_args args) {
#ifdef TURING_MMA_AVAILABLE
    extern __shared__ uint4 moegraph_attn_dynamic[];
    __shared__ moegraph_attn_plan plan;

    moegraph_attn_smem smem;
    smem.q       = moegraph_attn_dynamic;
    smem.p       = (uint2 *) (smem.q + args.n_tiles*(d/16)*32);
    constexpr int n_p = moegraph_attn_block<type_k, type_v, d, NC>::n_p;
    smem.max     = (float *) (smem.p + n_p*args.n_tiles*MOEGRAPH_ATTN_WARPS*32);
    smem.sum     = smem.max + MOEGRAPH_ATTN_WARPS*args.n_tiles*MOEGRAPH_ATTN_COLS;
    smem.running = smem.sum + MOEGRAPH_ATTN_WARPS*args.n_tiles*MOEGRAPH_ATTN_COLS;
    smem.v       = (char *) (smem.running + 4*args.n_tiles*MOEGRAPH_ATTN_COLS);

    const int tid = threadIdx.x;
    if (!args.early) {
        ggml_cuda_pdl_sync();
    }
    if (tid < 32) {
        moegraph_attn_make_plan(args, plan);
    }
    if (tid < args.n_tiles*MOEGRAPH_ATTN_COLS) {
        smem.running[tid] = -INFINITY;
        smem.running[3*args.n_tiles*MOEGRAPH_ATTN_COLS + tid] = 0.0f;
    }
    __syncthreads();

    int turn = 0;
    moegraph_attn_unit unit = moegraph_attn_find_unit(args, plan, turn);
    if (unit.row >= 0 && tid < MOEGRAPH_ATTN_TILE) {
        plan.at[0][tid] = moegraph_attn_locate(args, plan, unit, unit.begin, tid);
    }
    if (args.early) {
        ggml_cuda_pdl_sync();
    }
    ggml_cuda_pdl_lc();
    if (unit.row < 0) {
        return;
    }
    __syncthreads();

    moegraph_attn_block<type_k, type_v, d, NC> block(args, smem);
    int n_tiles = (unit.n_rows*args.n_group + MOEGRAPH_ATTN_COLS - 1)/MOEGRAPH_ATTN_COLS;
    int begin   = unit.begin;
    int half    = 0; // of plan.at
    if (block.ahead) {
        block.load_keys(plan.at[0], unit.end - begin);
        block.load_values(plan.at[0], unit.end - begin);
    }
    moegraph_attn_load_q<type_k, d>(args, plan, unit, block.head_kv, n_tiles, smem.q);
    if (tid == 0) {
        plan.unit[0] = unit;
    }
    int end = unit.end, slot = 0;
    __syncthreads();

    while (true) {
        const int  n    = min(end - begin, MOEGRAPH_ATTN_TILE);
        const bool last = begin + n == end;
        const int  to   = !last ? slot : slot == 2 ? 0 : slot + 1;
        if (!block.ahead) {
            block.load_keys(plan.at[half], n);
        }
        moegraph_attn_unit next = plan.unit[slot];
        if (last) {
            next = moegraph_attn_find_unit(args, plan, ++turn);
            if (tid == 0) {
                plan.unit[to] = next;
            }
        }
        if (next.row >= 0 && tid < MOEGRAPH_ATTN_TILE) {
            plan.at[1 - half][tid] = moegraph_attn_locate(args, plan, next, last ? next.begin : begin + n, tid);
        }
        block.multiply_keys(n, n_tiles);
        if (!block.ahead) {
            block.load_values(plan.at[half], n);
        }
        half = 1 - half;
        __syncthreads(); // maxima of all warps; where the next tile is; no warp reads the last tile's weights or values

        begin = last ? plan.unit[to].begin : begin + n;
        end   = plan.unit[to].end;
        const bool more = plan.unit[to].row >= 0;
        if (block.ahead && more) {
            block.load_keys(plan.at[half], end - begin);
        }
        block.weigh(n, n_tiles);
        block.v.stage(smem.v, n);
        __syncthreads(); // weights, their sums, raw values

        if (block.ahead && more && block.v.staged) {
            block.load_values(plan.at[half], end - begin);
        }
        block.add_weights(plan, plan.unit[slot], n_tiles, last);
        block.multiply_values(n, n_tiles);
        if (block.ahead && more && !block.v.staged) {
            block.load_values(plan.at[half], end - begin);
        }
        if (last) {
            block.store(plan, plan.unit[slot]);
            if (!more) {
                return;
            }
            if (plan.unit[to].row != plan.unit[slot].row || plan.unit[to].rank != plan.unit[slot].rank) {
                n_tiles = (plan.unit[to].n_rows*args.n_group + MOEGRAPH_ATTN_COLS - 1)/MOEGRAPH_ATTN_COLS;
                moegraph_attn_load_q<type_k, d>(args, plan, plan.unit[to], block.head_kv, n_tiles, smem.q);
                __syncthreads();
            }
            slot = to;
        }
    }
#else
    GGML_UNUSED_VARS(args);
    NO_DEVICE_CODE;
#endif // TURING_MMA_AVAILABLE
}
