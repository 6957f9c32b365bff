#pragma once

#include "moegraph-attn-stage.cuh"

// Attention over pages of keys and values, a split of the positions a time (moegraph.h says what it computes).
//
// A block of eight warps has one split of positions, one head of keys and values, and columns: the query heads that
// share that head, of one or more rows. It walks 64 positions at a time. Keys and values of several such tiles are
// on their way to shared memory meanwhile, in a ring of slots, also those of the block's next split. Warps are WC
// teams of 8/WC warps; a team has up to 8*NC columns:
//   keys    : a warp multiplies some of the positions with the team's columns
//   softmax : the maximum over the team's warps, and weights, go through shared memory
//   values  : a warp multiplies some of the elements of all 64 values with the team's weights
// A column of a product of matrices depends on no other column; positions are multiplied 16 at a time, in order; splits
// and tiles are aligned to fixed positions, and a position that a column does not see has weight 0. So a row's bits do
// not depend on the rows beside it, nor on NC and WC.

constexpr float MOEGRAPH_ATTN_BOOST = 10.0f; // weights are at most 2 to this: the small ones stay normal in half
constexpr float MOEGRAPH_ATTN_LOG2E = 1.4426950408889634f;

// Shared memory of a block; what is behind it: a ring of slots.
struct moegraph_attn_smem {
    uint4 * q;      // [high, then low halves if refined][tile of columns][32 elements][lane]
    uint2 * p;      // weights: [high, then low halves if refined][tile of columns][16 positions][lane]
    float * max;    // [4][column]
    float * sum;    // [4][column]
    char  * halves; // of a quantized tile
    char  * ring;
};

// Bytes of q, p, max and sum for a tile of columns.
static __host__ __device__ __forceinline__ size_t moegraph_attn_column_bytes(
        const int d, const bool refined, const bool refined_p) {
    return (refined ? 2 : 1)*d/32*32*sizeof(uint4) + (refined_p ? 2 : 1)*4*32*sizeof(uint2) +
        2*4*MOEGRAPH_ATTN_COLS*sizeof(float);
}

// Loads tiles ahead of what is computed: keys and values of a tile in turn.
template <int d> struct moegraph_attn_loader {
    const moegraph_attn_args & args;
    const moegraph_attn_plan & plan;
    char *                     ring;
    moegraph_attn_unit         unit;
    int                        head_kv;
    int                        turn;
    int                        begin; // of the tile
    int                        at;    // lane i < 8: where its row warp + 8*i is in the pool
    int                        part;
    int                        slot;

    __device__ __forceinline__ moegraph_attn_loader(
            const moegraph_attn_args & args, const moegraph_attn_plan & plan, char * ring)
        : args(args), plan(plan), ring(ring), head_kv(blockIdx.x % args.n_head_kv), turn(0), part(0), slot(0) {
        unit = moegraph_attn_find_unit(args, plan, 0);
        find_tile(unit.begin);
    }

    __device__ __forceinline__ void find_tile(const int first) {
        begin = first;
        if (unit.row >= 0) {
            const int i = threadIdx.x % 8; // of the warp's rows
            at = moegraph_attn_locate(args, plan, unit, begin + threadIdx.x/32 + 8*i);
        }
    }

    __device__ __forceinline__ void load_next() {
        if (unit.row >= 0) {
            const int n = (min(unit.end - begin, MOEGRAPH_ATTN_TILE) + 15)/16*16;
            moegraph_attn_copy_tile<d>(args, part, head_kv, at, n, ring + slot*args.slot_bytes);
            if (part == MOEGRAPH_ATTN_V) {
                if (begin + MOEGRAPH_ATTN_TILE >= unit.end) {
                    unit = moegraph_attn_find_unit(args, plan, ++turn);
                    find_tile(unit.begin);
                } else {
                    find_tile(begin + MOEGRAPH_ATTN_TILE);
                }
            }
            part = 1 - part;
            slot = slot + 1 == args.n_slots ? 0 : slot + 1;
        }
        moegraph_attn_copy_commit();
    }
};

// The queries of a unit, scaled, as halves in the order of the fragments.
template <int d>
static __device__ __forceinline__ void moegraph_attn_load_q(
        const moegraph_attn_args & args, const moegraph_attn_unit & unit, const int head_kv, const int n_tiles,
        uint4 * smem) {
#pragma unroll 4
    for (int i = threadIdx.x; i < n_tiles*d; i += MOEGRAPH_ATTN_THREADS) {
        const int lane = i % 32;
        const int col  = i/d*MOEGRAPH_ATTN_COLS + lane/4;
        uint4 high = make_uint4(0, 0, 0, 0), low = high;
        if (col < unit.n_rows*args.n_group) {
            const int     r = col/args.n_group;
            const float * q = (const float *) (args.q + moegraph_attn_row_of(unit, r)*args.q_row +
                (head_kv*args.n_group + col - r*args.n_group)*args.q_head) + i/32 % (d/32)*32 + lane % 4*8;
            const float4 x0 = ((const float4 *) q)[0], x1 = ((const float4 *) q)[1];
            const float  x[8] = { x0.x, x0.y, x0.z, x0.w, x1.x, x1.y, x1.z, x1.w };
            uint32_t h[4], l[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float  a    = __fmul_rn(x[2*j], args.scale), b = __fmul_rn(x[2*j + 1], args.scale);
                const half2  half = __floats2half2_rn(a, b);
                const float2 back = __half22float2(half);
                h[j] = moegraph_attn_bits(half);
                l[j] = moegraph_attn_bits(__floats2half2_rn(a - back.x, b - back.y));
            }
            high = make_uint4(h[0], h[1], h[2], h[3]);
            low  = make_uint4(l[0], l[1], l[2], l[3]);
        }
        smem[i] = high;
        if (args.refined) {
            smem[args.n_tiles*d + i] = low;
        }
    }
}

// Over the lanes of one column of a fragment, for both columns of a thread. Every lane gets the same.
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

// What a warp computes of a unit.
template <int d, int NC, int WC> struct moegraph_attn_sums {
    static constexpr int n_team = MOEGRAPH_ATTN_WARPS/WC;                // warps
    static constexpr int n_keys = n_team < 4 ? 4/n_team : 1;             // tiles of 16 positions of a warp
    static constexpr int n_m    = d/16 > n_team ? d/16/n_team : 1;       // tiles of 16 elements

    const moegraph_attn_args & args;
    const moegraph_attn_plan & plan;
    moegraph_attn_smem         smem;
    int                        lane;
    int                        team;
    int                        rank;   // in the team
    int                        head_kv;
    moegraph_attn_unit         unit;
    int                        n_tiles; // of the team's columns that there are
    float                      acc[NC][n_m][4];
    float                      max[NC][2];
    float                      sum[n_keys][NC][2];
    float                      alpha[NC][2];
    float                      s[n_keys][NC][4];

    __device__ __forceinline__ moegraph_attn_sums(
            const moegraph_attn_args & args, const moegraph_attn_plan & plan, const moegraph_attn_smem & smem)
        : args(args), plan(plan), smem(smem), lane(threadIdx.x % 32), team(threadIdx.x/32/n_team),
          rank(threadIdx.x/32 % n_team), head_kv(blockIdx.x % args.n_head_kv) {}

    __device__ __forceinline__ void start(const moegraph_attn_unit & next) {
        unit    = next;
        n_tiles = moegraph_attn_divide_up(unit.n_rows*args.n_group, MOEGRAPH_ATTN_COLS) - team*NC;
#pragma unroll
        for (int c = 0; c < NC; ++c) {
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                max[c][x] = -INFINITY;
#pragma unroll
                for (int k = 0; k < n_keys; ++k) {
                    sum[k][c][x] = 0.0f;
                }
            }
#pragma unroll
            for (int m = 0; m < n_m; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    acc[c][m][i] = 0.0f;
                }
            }
        }
    }

    // Both columns of a thread in an array over columns.
    __device__ __forceinline__ float2 * at_column(float * x, const int i, const int c) const {
        return (float2 *) (x + (i*args.n_tiles + team*NC + c)*MOEGRAPH_ATTN_COLS + 2*(lane % 4));
    }

    __device__ __forceinline__ bool has_keys(const int k, const int n) const {
        return 16*(rank*n_keys + k) < n;
    }

    __device__ __forceinline__ void multiply_keys(const char * tile, const int n) {
#pragma unroll
        for (int k = 0; k < n_keys; ++k) {
#pragma unroll
            for (int c = 0; c < NC; ++c) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    s[k][c][i] = 0.0f;
                }
            }
        }
        if (!has_keys(0, n)) {
            return;
        }
        const uint4 * rows = (const uint4 *) tile + (16*rank*n_keys + lane/4)*(d/8);
        const uint4 * q    = smem.q + team*NC*d + lane;
#pragma unroll 2
        for (int step = 0; step < d/32; ++step) {
            const int at = moegraph_attn_swap(MOEGRAPH_ATTN_K, lane/4, 4*step + lane % 4);
            uint32_t a[n_keys][2][4];
#pragma unroll
            for (int k = 0; k < n_keys; ++k) {
                const uint4 x = rows[16*k*(d/8) + at], y = rows[(16*k + 8)*(d/8) + at];
                a[k][0][0] = x.x, a[k][0][1] = y.x, a[k][0][2] = x.y, a[k][0][3] = y.y;
                a[k][1][0] = x.z, a[k][1][1] = y.z, a[k][1][2] = x.w, a[k][1][3] = y.w;
            }
#pragma unroll
            for (int c = 0; c < NC; ++c) {
                if (c < n_tiles) {
                    const uint4 b = q[c*d + 32*step];
#pragma unroll
                    for (int k = 0; k < n_keys; ++k) {
                        moegraph_attn_mma(s[k][c], a[k][0], b.x, b.y);
                        moegraph_attn_mma(s[k][c], a[k][1], b.z, b.w);
                    }
                    if (args.refined) {
                        const uint4 low = q[args.n_tiles*d + c*d + 32*step];
#pragma unroll
                        for (int k = 0; k < n_keys; ++k) {
                            moegraph_attn_mma(s[k][c], a[k][0], low.x, low.y);
                            moegraph_attn_mma(s[k][c], a[k][1], low.z, low.w);
                        }
                    }
                }
            }
        }
    }

    // Positions of the tile at begin that a column sees.
    __device__ __forceinline__ int seen(const int col, const int begin, const int n) const {
        const int row = moegraph_attn_row_of(unit, min(col/args.n_group, unit.n_rows - 1));
        return min(n, plan.n_keys[row] - begin);
    }

    __device__ __forceinline__ void hide(const int begin, const int n) {
        const bool same = begin + n <= unit.n_all;
        if (same && n == MOEGRAPH_ATTN_TILE) {
            return;
        }
#pragma unroll
        for (int c = 0; c < NC; ++c) {
            if (c < n_tiles) {
#pragma unroll
                for (int x = 0; x < 2; ++x) {
                    const int most = same ? n : seen((team*NC + c)*MOEGRAPH_ATTN_COLS + 2*(lane % 4) + x, begin, n);
#pragma unroll
                    for (int k = 0; k < n_keys; ++k) {
                        const int i = 16*(rank*n_keys + k) + lane/4;
                        s[k][c][x]     = i < most ? s[k][c][x] : -INFINITY;
                        s[k][c][x + 2] = i + 8 < most ? s[k][c][x + 2] : -INFINITY;
                    }
                }
            }
        }
    }

    // The maxima with this tile, and what sums so far are multiplied by.
    __device__ __forceinline__ void find_max(const int n) {
        if (has_keys(0, n)) {
#pragma unroll
            for (int c = 0; c < NC; ++c) {
                if (c < n_tiles) {
                    float2 most = make_float2(-INFINITY, -INFINITY);
#pragma unroll
                    for (int k = 0; k < n_keys; ++k) {
                        most.x = fmaxf(most.x, fmaxf(s[k][c][0], s[k][c][2]));
                        most.y = fmaxf(most.y, fmaxf(s[k][c][1], s[k][c][3]));
                    }
                    most = moegraph_attn_max_over(most);
                    if (lane < 4) {
                        *at_column(smem.max, rank, c) = most;
                    }
                }
            }
        }
        moegraph_attn_barrier(1 + team, 32*n_team);
#pragma unroll
        for (int c = 0; c < NC; ++c) {
            if (c < n_tiles) {
                float2 most = make_float2(max[c][0], max[c][1]);
#pragma unroll
                for (int w = 0; w < (n_team < 4 ? n_team : 4); ++w) {
                    if (16*w*n_keys < n) {
                        const float2 x = *at_column(smem.max, w, c);
                        most = make_float2(fmaxf(most.x, x.x), fmaxf(most.y, x.y));
                    }
                }
                alpha[c][0] = exp2f((max[c][0] - most.x)*MOEGRAPH_ATTN_LOG2E);
                alpha[c][1] = exp2f((max[c][1] - most.y)*MOEGRAPH_ATTN_LOG2E);
                max[c][0] = most.x;
                max[c][1] = most.y;
            }
        }
    }

    // Rounds weights to half, of both columns of a thread, and returns what became of them. i: the first or the last
    // eight of the 16 positions.
    __device__ __forceinline__ float2 put_weights(uint2 * to, const int i, const float2 x) {
        const half2 h = __floats2half2_rn(x.x, x.y);
        ((uint32_t *) to)[i] = moegraph_attn_transpose(moegraph_attn_bits(h));
        return __half22float2(h);
    }

    __device__ __forceinline__ void weigh(const int n) {
#pragma unroll
        for (int c = 0; c < NC; ++c) {
            if (c < n_tiles) {
                const float x = fmaf(max[c][0], MOEGRAPH_ATTN_LOG2E, -MOEGRAPH_ATTN_BOOST);
                const float y = fmaf(max[c][1], MOEGRAPH_ATTN_LOG2E, -MOEGRAPH_ATTN_BOOST);
#pragma unroll
                for (int k = 0; k < n_keys; ++k) {
                    float2 total = make_float2(0.0f, 0.0f);
                    if (has_keys(k, n)) {
                        uint2 * to = smem.p + ((team*NC + c)*4 + rank*n_keys + k)*32 + lane;
#pragma unroll
                        for (int i = 0; i < 2; ++i) {
                            const float2 w = make_float2(
                                exp2f(fmaf(s[k][c][2*i], MOEGRAPH_ATTN_LOG2E, -x)),
                                exp2f(fmaf(s[k][c][2*i + 1], MOEGRAPH_ATTN_LOG2E, -y)));
                            const float2 r = put_weights(to, i, w);
                            total = make_float2(total.x + r.x, total.y + r.y);
                            if (args.refined_p) {
                                const float2 l = put_weights(to + args.n_tiles*4*32, i,
                                    make_float2(w.x - r.x, w.y - r.y));
                                total = make_float2(total.x + l.x, total.y + l.y);
                            }
                        }
                    }
                    sum[k][c][0] = fmaf(sum[k][c][0], alpha[c][0], total.x);
                    sum[k][c][1] = fmaf(sum[k][c][1], alpha[c][1], total.y);
                }
            }
        }
    }

    __device__ __forceinline__ void multiply_values(const char * tile, const int n) {
        if (rank*n_m*16 >= d || n_tiles <= 0) {
            return;
        }
        bool same = true;
#pragma unroll
        for (int c = 0; c < NC; ++c) {
            same = same && (c >= n_tiles || (alpha[c][0] == 1.0f && alpha[c][1] == 1.0f));
        }
        if (!__all_sync(0xFFFFFFFF, same)) {
#pragma unroll
            for (int c = 0; c < NC; ++c) {
                if (c < n_tiles) {
#pragma unroll
                    for (int m = 0; m < n_m; ++m) {
#pragma unroll
                        for (int i = 0; i < 4; ++i) {
                            acc[c][m][i] *= alpha[c][i % 2];
                        }
                    }
                }
            }
        }
        const char *  row = tile + (lane % 8 + lane/16*8)*(2*d);
        const uint2 * p   = smem.p + team*NC*4*32 + lane;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (16*i < n) {
                uint2 b[2][NC];
#pragma unroll
                for (int c = 0; c < NC; ++c) {
                    b[0][c] = c < n_tiles ? p[(c*4 + i)*32] : make_uint2(0, 0);
                    b[1][c] = args.refined_p && c < n_tiles ? p[((args.n_tiles + c)*4 + i)*32] : make_uint2(0, 0);
                }
#pragma unroll
                for (int m = 0; m < n_m; ++m) {
                    const int chunk = 2*(rank*n_m + m) + lane/8 % 2;
                    uint32_t a[4];
                    moegraph_attn_load_transposed(
                        a, row + 16*i*(2*d) + 16*moegraph_attn_swap(MOEGRAPH_ATTN_V, lane % 8, chunk));
#pragma unroll
                    for (int c = 0; c < NC; ++c) {
                        if (c < n_tiles) {
                            moegraph_attn_mma(acc[c][m], a, b[0][c].x, b[0][c].y);
                            if (args.refined_p) {
                                moegraph_attn_mma(acc[c][m], a, b[1][c].x, b[1][c].y);
                            }
                        }
                    }
                }
            }
        }
    }

    // Where the partial sum of a column is; -1: nowhere, as its row ends before this split.
    __device__ __forceinline__ int64_t place(const int col) const {
        const int r = col/args.n_group;
        if (r >= unit.n_rows) {
            return -1;
        }
        const int row  = moegraph_attn_row_of(unit, r);
        const int head = head_kv*args.n_group + col - r*args.n_group;
        return plan.n_keys[row] <= unit.begin ? -1 : (int64_t) (row*args.n_head + head)*args.n_splits + unit.split;
    }

    // By the whole block, as there is a barrier in it.
    __device__ __forceinline__ void store() {
#pragma unroll
        for (int c = 0; c < NC; ++c) {
            if (c < n_tiles) {
#pragma unroll
                for (int k = 0; k < n_keys; ++k) {
                    const float2 x = moegraph_attn_sum_over(make_float2(sum[k][c][0], sum[k][c][1]));
                    if (lane < 4 && rank < 4) {
                        *at_column(smem.sum, rank*n_keys + k, c) = x;
                    }
                }
                if (lane < 4 && rank == 0) {
                    *at_column(smem.max, 0, c) = make_float2(max[c][0], max[c][1]);
                }
#pragma unroll
                for (int x = 0; x < 2; ++x) {
                    const int64_t at = place((team*NC + c)*MOEGRAPH_ATTN_COLS + 2*(lane % 4) + x);
                    if (at >= 0 && rank*n_m*16 < d) {
                        float * out = args.partial + at*d + rank*n_m*16 + lane/4;
#pragma unroll
                        for (int m = 0; m < n_m; ++m) {
                            out[16*m]     = acc[c][m][x];
                            out[16*m + 8] = acc[c][m][x + 2];
                        }
                    }
                }
            }
        }
        __syncthreads();
        const int col = threadIdx.x, n_cols = args.n_tiles*MOEGRAPH_ATTN_COLS;
        if (col < n_cols) {
            const int64_t at = place(col);
            if (at >= 0) {
                const float * x = smem.sum + col;
                args.max_sum[at] = make_float2(smem.max[col], x[0] + x[n_cols] + x[2*n_cols] + x[3*n_cols]);
            }
        }
    }
};

template <int d, int NC, int WC>
__launch_bounds__(MOEGRAPH_ATTN_THREADS, 1)
static __global__ void moegraph_attn_kernel(const __grid_constant__ moegraph_attn_args args) {
#ifdef TURING_MMA_AVAILABLE
    extern __shared__ uint4 moegraph_attn_dynamic[];
    __shared__ moegraph_attn_plan plan;

    moegraph_attn_smem smem;
    smem.q      = moegraph_attn_dynamic;
    smem.p      = (uint2 *) (smem.q + (args.refined ? 2 : 1)*args.n_tiles*d);
    smem.max    = (float *) (smem.p + (args.refined_p ? 2 : 1)*args.n_tiles*4*32);
    smem.sum    = smem.max + 4*args.n_tiles*MOEGRAPH_ATTN_COLS;
    smem.ring   = (char *) (smem.sum + 4*args.n_tiles*MOEGRAPH_ATTN_COLS);
    smem.halves = smem.ring + args.n_slots*args.slot_bytes;

    if (!args.early) {
        ggml_cuda_pdl_sync();
    }
    if (threadIdx.x < 32) {
        moegraph_attn_make_plan(args, plan);
    }
    __syncthreads();
    moegraph_attn_loader<d> loader(args, plan, smem.ring);
    if (args.early) {
        ggml_cuda_pdl_sync();
    }
    ggml_cuda_pdl_lc();
    moegraph_attn_unit unit = loader.unit;
    if (unit.row < 0) {
        return;
    }
    for (int i = 1; i < args.n_slots; ++i) {
        loader.load_next();
    }

    moegraph_attn_sums<d, NC, WC> sums(args, plan, smem);
    const int head_kv = blockIdx.x % args.n_head_kv;
    int slot = 0;
    // The next tile of keys or values, as halves; behind the barrier in it no warp reads the one before.
    const auto next_tile = [&](const int part, const int n) -> const char * {
        if (args.n_slots == 1) {
            __syncthreads();
            loader.load_next();
        }
        moegraph_attn_copy_wait(max(args.n_slots - 2, 0));
        __syncthreads();
        if (args.n_slots > 1) {
            loader.load_next();
        }
        const char * tile = smem.ring + slot*args.slot_bytes;
        slot = slot + 1 == args.n_slots ? 0 : slot + 1;
        if (args.type[part] == GGML_TYPE_F16) {
            return tile;
        }
        moegraph_attn_convert_tile<d>(args, part, tile, smem.halves, (n + 15)/16*16);
        __syncthreads();
        return smem.halves;
    };

    for (int turn = 0; unit.row >= 0;) {
        sums.start(unit);
        moegraph_attn_load_q<d>(args, unit, head_kv,
            moegraph_attn_divide_up(unit.n_rows*args.n_group, MOEGRAPH_ATTN_COLS), smem.q);
        for (int begin = unit.begin; begin < unit.end; begin += MOEGRAPH_ATTN_TILE) {
            const int n = min(unit.end - begin, MOEGRAPH_ATTN_TILE);
            sums.multiply_keys(next_tile(MOEGRAPH_ATTN_K, n), n);
            sums.hide(begin, n);
            sums.find_max(n);
            sums.weigh(n);
            sums.multiply_values(next_tile(MOEGRAPH_ATTN_V, n), n);
        }
        sums.store();
        unit = moegraph_attn_find_unit(args, plan, ++turn);
    }
#else
    GGML_UNUSED_VARS(args);
    NO_DEVICE_CODE;
#endif // TURING_MMA_AVAILABLE
}
