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

constexpr float MOEGRAPH_ATTN_LEAST = -1e30f; // below all scores: a window may hide all of a tile

// Shared memory of a block; what is behind it: a ring of slots.
struct moegraph_attn_smem {
    uint4 * q;      // [high, then low halves if refined][tile of columns][32 elements][lane]
    uint2 * p;      // weights: [high, then low halves if refined][tile of columns][16 positions][lane]
    float * max;    // [4][column]
    float * sum;    // [4][column]
    int   * place;  // [unit % 2][column]: where its partial sum is; -1: nowhere
    int   * n_keys; // [column]: of its row
    int   * query;  // [column]: where its query is, in 16 bytes; -1: there is none
    char  * ring;
    char  * halves; // of a quantized tile
};

// Bytes for a tile of columns.
static __host__ __device__ __forceinline__ size_t moegraph_attn_column_bytes(
        const int d, const bool refined, const bool refined_p) {
    return (refined ? 2 : 1)*d*sizeof(uint4) + (refined_p ? 2 : 1)*4*32*sizeof(uint2) +
        (2*4*sizeof(float) + 4*sizeof(int))*MOEGRAPH_ATTN_COLS;
}

// Loads tiles ahead of what is computed: keys and values of a tile in turn.
template <int d> struct moegraph_attn_loader {
    const moegraph_attn_args & args;
    const moegraph_attn_plan & plan;
    char *                     ring;
    moegraph_attn_unit         unit;
    int                        turn;
    int                        begin; // of the tile
    int                        at;    // lane i < 8: where its row warp + 8*i is in the pool
    int                        part;
    int                        slot;

    __device__ __forceinline__ moegraph_attn_loader(
            const moegraph_attn_args & args, const moegraph_attn_plan & plan, char * ring)
        : args(args), plan(plan), ring(ring), turn(0), at(0), part(MOEGRAPH_ATTN_K),
          slot(0) {
        unit  = moegraph_attn_find_unit(args, plan, 0);
        begin = unit.begin;
        locate();
    }

    __device__ __forceinline__ void locate() {
        if (unit.row >= 0) {
            const int i = threadIdx.x % 8; // of the warp's rows
            at = moegraph_attn_locate(args, plan, unit, begin + threadIdx.x/32 + 8*i);
        }
    }

    __device__ __forceinline__ void load_next() {
        if (unit.row >= 0) {
            const int n = (min(unit.end - begin, MOEGRAPH_ATTN_TILE) + 15)/16*16;
            moegraph_attn_copy_tile<d>(args, part, blockIdx.y, at, n, ring + slot*args.slot_bytes);
            if (part == MOEGRAPH_ATTN_V) {
                begin += MOEGRAPH_ATTN_TILE;
                if (begin >= unit.end) {
                    unit  = moegraph_attn_find_unit(args, plan, ++turn);
                    begin = unit.begin;
                }
                locate();
            }
            part = 1 - part;
            slot = slot + 1 == args.n_slots ? 0 : slot + 1;
        }
        moegraph_attn_copy_commit();
    }
};

// Queries of a unit, in the order of the fragments: word i has eight of column i/d*8 + i % 32/4, for two steps of 16.
template <int d>
static __device__ __forceinline__ void moegraph_attn_get_q(
        const moegraph_attn_args & args, const int * query, const int i, float2 x[4]) {
    const int at = query[i/d*MOEGRAPH_ATTN_COLS + i % 32/4];
    const float2 * q = (const float2 *) (args.q + (int64_t) at*16) + i/32 % (d/32)*16 + i % 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        x[j] = at >= 0 ? q[4*j] : make_float2(0.0f, 0.0f);
    }
}

// Word i, scaled, as halves.
template <int d, bool refined>
static __device__ __forceinline__ void moegraph_attn_put_q(
        const moegraph_attn_args & args, const int i, const float2 x[4], uint4 * smem) {
    uint32_t high[4], low[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const float  a    = __fmul_rn(x[j].x, args.scale), b = __fmul_rn(x[j].y, args.scale);
        const half2  near = __floats2half2_rn(a, b);
        const float2 back = __half22float2(near);
        high[j] = moegraph_attn_bits(near);
        low[j]  = moegraph_attn_bits(__floats2half2_rn(a - back.x, b - back.y));
    }
    smem[i] = make_uint4(high[0], high[1], high[2], high[3]);
    if (refined) {
        smem[args.n_tiles*d + i] = make_uint4(low[0], low[1], low[2], low[3]);
    }
}

// The queries of n_tiles tiles of columns. n: words that a thread has on their way at once.
template <int d, bool refined, int n>
static __device__ __forceinline__ void moegraph_attn_load_q(
        const moegraph_attn_args & args, const int * query, const int n_tiles, uint4 * smem) {
    for (int i = threadIdx.x; i < n_tiles*d; i += n*MOEGRAPH_ATTN_THREADS) {
        float2 x[n][4];
#pragma unroll
        for (int j = 0; j < n; ++j) {
            if (i + j*MOEGRAPH_ATTN_THREADS < n_tiles*d) {
                moegraph_attn_get_q<d>(args, query, i + j*MOEGRAPH_ATTN_THREADS, x[j]);
            }
        }
#pragma unroll
        for (int j = 0; j < n; ++j) {
            if (i + j*MOEGRAPH_ATTN_THREADS < n_tiles*d) {
                moegraph_attn_put_q<d, refined>(args, i + j*MOEGRAPH_ATTN_THREADS, x[j], smem);
            }
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

// What a warp computes of a unit. Functions of N compute the first N of the team's tiles of columns.
template <int d, bool refined, int NC, int WC> struct moegraph_attn_sums {
    static constexpr int n_team = MOEGRAPH_ATTN_WARPS/WC;          // warps
    static constexpr int n_keys = n_team < 4 ? 4/n_team : 1;       // tiles of 16 positions of a warp
    static constexpr int n_m    = d/16 > n_team ? d/16/n_team : 1; // tiles of 16 elements of a warp

    const moegraph_attn_args & args;
    moegraph_attn_smem         smem;
    int                        lane;
    int                        team;
    int                        rank;    // in the team
    int                        n_tiles; // of the team's columns that there are
    float                      acc[NC][n_m][4];
    float                      max[NC][2];
    float                      sum[NC][n_keys][2];
    float                      alpha[NC][2];
    float                      s[NC][n_keys][4];

    __device__ __forceinline__ moegraph_attn_sums(const moegraph_attn_args & args, const moegraph_attn_smem & smem)
        : args(args), smem(smem), lane(threadIdx.x % 32), team(threadIdx.x/32/n_team),
          rank(threadIdx.x/32 % n_team) {}

    // Behind a barrier the columns are known to all warps.
    __device__ __forceinline__ void find_columns(
            const moegraph_attn_plan & plan, const moegraph_attn_unit & unit, const int turn) {
        const int col = threadIdx.x;
        if (col < args.n_tiles*MOEGRAPH_ATTN_COLS) {
            const int  r    = col/args.n_group;
            const int  row  = moegraph_attn_row_of(unit, min(r, unit.n_rows - 1));
            const int  head = blockIdx.y*args.n_group + col - r*args.n_group;
            const int  at   = unit.split - moegraph_attn_first(plan.n_keys[row], args.window)/plan.size[row];
            // else its row ends before this split, or begins behind it
            const bool has  = r < unit.n_rows && plan.n_keys[row] > unit.begin && at >= 0;
            smem.place[(turn % 2*args.n_tiles)*MOEGRAPH_ATTN_COLS + col] =
                has ? ((moegraph_attn_first_row() + row)*args.n_head + head)*args.n_splits + at : -1;
            smem.n_keys[col] = plan.n_keys[row];
            smem.query[col]  = r < unit.n_rows ?
                (int) (((moegraph_attn_first_row() + row)*args.q_row + head*args.q_head)/16) : -1;
        }
        n_tiles = moegraph_attn_divide_up(unit.n_rows*args.n_group, MOEGRAPH_ATTN_COLS) - team*NC;
    }

    __device__ __forceinline__ void reset() {
#pragma unroll
        for (int c = 0; c < NC; ++c) {
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                max[c][x] = MOEGRAPH_ATTN_LEAST;
#pragma unroll
                for (int k = 0; k < n_keys; ++k) {
                    sum[c][k][x] = 0.0f;
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
    template <typename T> __device__ __forceinline__ T * at_column(T * x, const int i, const int c) const {
        return x + (i*args.n_tiles + team*NC + c)*MOEGRAPH_ATTN_COLS + 2*(lane % 4);
    }

    __device__ __forceinline__ float2 * at_columns(float * x, const int i, const int c) const {
        return (float2 *) at_column(x, i, c);
    }

    __device__ __forceinline__ bool has_keys(const int k, const int n) const {
        return 16*(rank*n_keys + k) < n;
    }

    template <int N> __device__ __forceinline__ void multiply_keys(const char * tile) {
#pragma unroll
        for (int c = 0; c < N; ++c) {
#pragma unroll
            for (int k = 0; k < n_keys; ++k) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    s[c][k][i] = 0.0f;
                }
            }
        }
        const char *  row = tile + (16*rank*n_keys + lane % 16)*(2*d);
        const uint4 * q   = smem.q + team*NC*d + lane;
#pragma unroll (NC == 1 ? d/32 : 2)
        for (int step = 0; step < d/32; ++step) {
            uint32_t a[2][n_keys][4];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int at = 16*moegraph_attn_swap(lane, 4*step + 2*h + lane/16);
#pragma unroll
                for (int k = 0; k < n_keys; ++k) {
                    moegraph_attn_load_matrices(a[h][k], row + 16*k*(2*d) + at);
                }
            }
#pragma unroll
            for (int low = 0; low < (refined ? 2 : 1); ++low) {
                uint4 b[N];
#pragma unroll
                for (int c = 0; c < N; ++c) {
                    b[c] = q[(low*args.n_tiles + c)*d + 32*step];
                }
#pragma unroll
                for (int h = 0; h < 2; ++h) {
#pragma unroll
                    for (int c = 0; c < N; ++c) {
#pragma unroll
                        for (int k = 0; k < n_keys; ++k) {
                            moegraph_attn_mma(s[c][k], a[h][k], h == 0 ? b[c].x : b[c].z, h == 0 ? b[c].y : b[c].w);
                        }
                    }
                }
            }
        }
    }

    // Positions that a column does not see get no weight. begin, n: the tile; n_all: positions that all rows have.
    template <int N> __device__ __forceinline__ void hide(const int begin, const int n, const int n_all) {
        const bool same = begin + n <= n_all;
        if (same && n == MOEGRAPH_ATTN_TILE && args.window == 0) {
            return;
        }
#pragma unroll
        for (int c = 0; c < N; ++c) {
#pragma unroll
            for (int x = 0; x < 2; ++x) {
                const int n_keys_c = at_column(smem.n_keys, 0, c)[x];
                const int least    = moegraph_attn_first(n_keys_c, args.window) - begin;
                const int most     = same ? n : min(n, n_keys_c - begin);
#pragma unroll
                for (int k = 0; k < n_keys; ++k) {
                    const int i = 16*(rank*n_keys + k) + lane/4;
                    s[c][k][x]     = i >= least && i < most ? s[c][k][x] : -INFINITY;
                    s[c][k][x + 2] = i + 8 >= least && i + 8 < most ? s[c][k][x + 2] : -INFINITY;
                }
            }
        }
    }

    template <int N> __device__ __forceinline__ void put_max() {
#pragma unroll
        for (int c = 0; c < N; ++c) {
            float2 most = make_float2(-INFINITY, -INFINITY);
#pragma unroll
            for (int k = 0; k < n_keys; ++k) {
                most.x = fmaxf(most.x, fmaxf(s[c][k][0], s[c][k][2]));
                most.y = fmaxf(most.y, fmaxf(s[c][k][1], s[c][k][3]));
            }
            most = moegraph_attn_max_over(most);
            if (lane < 4) {
                *at_columns(smem.max, rank, c) = most;
            }
        }
    }

    // The maxima with this tile, and what sums so far are multiplied by.
    template <int N> __device__ __forceinline__ void get_max(const int n) {
#pragma unroll
        for (int c = 0; c < N; ++c) {
            float2 most = make_float2(max[c][0], max[c][1]);
#pragma unroll
            for (int w = 0; w < (n_team < 4 ? n_team : 4); ++w) {
                if (16*w*n_keys < n) {
                    const float2 x = *at_columns(smem.max, w, c);
                    most = make_float2(fmaxf(most.x, x.x), fmaxf(most.y, x.y));
                }
            }
            alpha[c][0] = exp2f((max[c][0] - most.x)*MOEGRAPH_ATTN_LOG2E);
            alpha[c][1] = exp2f((max[c][1] - most.y)*MOEGRAPH_ATTN_LOG2E);
            max[c][0] = most.x;
            max[c][1] = most.y;
        }
    }

    // Rounds weights to half, of both columns of a thread, and returns what became of them. i: the first or the last
    // eight of the 16 positions.
    __device__ __forceinline__ float2 put_weights(uint2 * to, const int i, const float2 x) {
        const half2 h = __floats2half2_rn(x.x, x.y);
        ((uint32_t *) to)[i] = moegraph_attn_transpose(moegraph_attn_bits(h));
        return __half22float2(h);
    }

    template <int N> __device__ __forceinline__ void weigh(const int n) {
#pragma unroll
        for (int c = 0; c < N; ++c) {
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
                            exp2f(fmaf(s[c][k][2*i], MOEGRAPH_ATTN_LOG2E, -x)),
                            exp2f(fmaf(s[c][k][2*i + 1], MOEGRAPH_ATTN_LOG2E, -y)));
                        const float2 r = put_weights(to, i, w);
                        total = make_float2(total.x + r.x, total.y + r.y);
                        if (refined && args.refined_p) {
                            const float2 l = put_weights(to + args.n_tiles*4*32, i, make_float2(w.x - r.x, w.y - r.y));
                            total = make_float2(total.x + l.x, total.y + l.y);
                        }
                    }
                }
                sum[c][k][0] = fmaf(sum[c][k][0], alpha[c][0], total.x);
                sum[c][k][1] = fmaf(sum[c][k][1], alpha[c][1], total.y);
            }
        }
    }

    // Weights of a tile of keys. By the whole team.
    template <int N> __device__ __forceinline__ void add_keys(
            const char * tile, const int begin, const int n, const int n_all) {
        if (n_tiles > 0 && has_keys(0, n)) {
            multiply_keys<N>(tile);
            hide<N>(begin, n, n_all);
            put_max<N>();
        }
        moegraph_attn_barrier(1 + team, 32*n_team);
        if (n_tiles > 0) {
            get_max<N>(n);
            weigh<N>(n);
        }
    }

    template <int N> __device__ __forceinline__ void rescale() {
        bool same = true;
#pragma unroll
        for (int c = 0; c < N; ++c) {
            same = same && alpha[c][0] == 1.0f && alpha[c][1] == 1.0f;
        }
        if (__all_sync(0xFFFFFFFF, same)) {
            return;
        }
#pragma unroll
        for (int c = 0; c < N; ++c) {
#pragma unroll
            for (int m = 0; m < n_m; ++m) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    acc[c][m][i] *= alpha[c][i % 2];
                }
            }
        }
    }

    // A tile of values times its weights.
    template <int N> __device__ __forceinline__ void add_values(const char * tile, const int n) {
        if (n_tiles <= 0 || rank*n_m*16 >= d) {
            return;
        }
        rescale<N>();
        const char *  row = tile + (lane % 8 + lane/16*8)*(2*d);
        const uint2 * p   = smem.p + team*NC*4*32 + lane;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (16*i < n) {
#pragma unroll
                for (int low = 0; low < (refined ? 2 : 1); ++low) {
                    if (low == 0 || args.refined_p) {
                        uint2 b[N];
#pragma unroll
                        for (int c = 0; c < N; ++c) {
                            b[c] = p[((low*args.n_tiles + c)*4 + i)*32];
                        }
#pragma unroll
                        for (int m = 0; m < n_m; ++m) {
                            uint32_t a[4];
                            moegraph_attn_load_transposed(a, row + 16*i*(2*d) +
                                16*moegraph_attn_swap(lane, 2*(rank*n_m + m) + lane/8 % 2));
#pragma unroll
                            for (int c = 0; c < N; ++c) {
                                moegraph_attn_mma(acc[c][m], a, b[c].x, b[c].y);
                            }
                        }
                    }
                }
            }
        }
    }

    // A tile of elements, of both columns of a thread. refined: as they are; else divided by the sums of weights, as
    // halves: then two neighbours are stored at once.
    __device__ __forceinline__ void store_tile(
            const float x[4], const float2 scale, const int64_t at0, const int64_t at1, const int m) const {
        const int first = (rank*n_m + m)*16 + lane/4;
        if (refined) {
            float * out = (float *) args.partial + first;
            if (at0 >= 0) {
                out[at0*d]     = x[0];
                out[at0*d + 8] = x[2];
            }
            if (at1 >= 0) {
                out[at1*d]     = x[1];
                out[at1*d + 8] = x[3];
            }
        } else {
            const uint32_t low   = moegraph_attn_bits(__floats2half2_rn(x[0]*scale.x, x[1]*scale.y));
            const uint32_t high  = moegraph_attn_bits(__floats2half2_rn(x[2]*scale.x, x[3]*scale.y));
            const bool     odd   = lane/4 % 2 == 1;
            const uint32_t other = __shfl_xor_sync(0xFFFFFFFF, odd ? low : high, 4);
            const uint32_t a = odd ? other : low, b = odd ? high : other; // elements e and e + 1
            half * out = (half *) args.partial + first + (odd ? 7 : 0);
            if (at0 >= 0) {
                *(uint32_t *) (out + at0*d) = __byte_perm(a, b, 0x5410);
            }
            if (at1 >= 0) {
                *(uint32_t *) (out + at1*d) = __byte_perm(a, b, 0x7632);
            }
        }
    }

    // Stores the partial sums. By the whole block, as there is a barrier in it.
    __device__ __forceinline__ void store(const int turn) {
#pragma unroll
        for (int c = 0; c < NC; ++c) {
            if (c < n_tiles) {
#pragma unroll
                for (int k = 0; k < n_keys; ++k) {
                    const float2 x = moegraph_attn_sum_over(make_float2(sum[c][k][0], sum[c][k][1]));
                    if (lane < 4 && rank < 4) {
                        *at_columns(smem.sum, rank*n_keys + k, c) = x;
                    }
                }
                if (lane < 4 && rank == 0) {
                    *at_columns(smem.max, 0, c) = make_float2(max[c][0], max[c][1]);
                }
            }
        }
        __syncthreads();
        const int   n_cols = args.n_tiles*MOEGRAPH_ATTN_COLS;
        const int * place  = smem.place + turn % 2*n_cols;
#pragma unroll
        for (int c = 0; c < NC; ++c) {
            if (c < n_tiles && rank*n_m*16 < d) {
                float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float2 x = *at_columns(smem.sum, i, c);
                    total = make_float2(total.x + x.x, total.y + x.y);
                }
                const int2 at = *(const int2 *) at_column(place, 0, c);
#pragma unroll
                for (int m = 0; m < n_m; ++m) {
                    store_tile(acc[c][m], make_float2(1.0f/total.x, 1.0f/total.y), at.x, at.y, m);
                }
            }
        }
        const int col = threadIdx.x;
        if (col < n_cols && place[col] >= 0) {
            const float * x = smem.sum + col;
            args.max_sum[place[col]] = make_float2(smem.max[col], x[0] + x[n_cols] + x[2*n_cols] + x[3*n_cols]);
        }
    }
};

template <int d, bool refined, int NC, int WC>
__launch_bounds__(MOEGRAPH_ATTN_THREADS, 1)
static __global__ void moegraph_attn_kernel(const __grid_constant__ moegraph_attn_args args) {
#ifdef TURING_MMA_AVAILABLE
    extern __shared__ uint4 moegraph_attn_dynamic[];
    __shared__ moegraph_attn_plan plan;

    const int n_cols = args.n_tiles*MOEGRAPH_ATTN_COLS;
    moegraph_attn_smem smem;
    smem.q      = moegraph_attn_dynamic;
    smem.p      = (uint2 *) (smem.q + (refined ? 2 : 1)*args.n_tiles*d);
    smem.max    = (float *) (smem.p + (args.refined_p ? 2 : 1)*args.n_tiles*4*32);
    smem.sum    = smem.max + 4*n_cols;
    smem.place  = (int *) (smem.sum + 4*n_cols);
    smem.n_keys = smem.place + 2*n_cols;
    smem.query  = smem.n_keys + n_cols;
    smem.ring   = (char *) (smem.query + n_cols);
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
    moegraph_attn_sums<d, refined, NC, WC> sums(args, smem);
    int  slot = 0;
    bool same = false; // whether a unit has the queries of the one before
    for (int turn = 0; unit.row >= 0; ++turn) {
        sums.find_columns(plan, unit, turn);
        if (!same) {
            __syncthreads();
            const int n_tiles = moegraph_attn_divide_up(unit.n_rows*args.n_group, MOEGRAPH_ATTN_COLS);
            moegraph_attn_load_q<d, refined, NC>(
                args, smem.query, n_tiles == 1 ? 1 : (n_tiles + NC - 1)/NC*NC, smem.q);
        }
        sums.reset();
        int part = MOEGRAPH_ATTN_K, begin = unit.begin;
        while (begin < unit.end) {
            moegraph_attn_copy_wait(max(args.n_slots - 2, 0));
            __syncthreads(); // the tile is there, and no warp reads the one before
            loader.load_next();
            if (args.n_slots == 1) {
                moegraph_attn_copy_wait(0);
                __syncthreads();
            }
            const int    n    = min(unit.end - begin, MOEGRAPH_ATTN_TILE);
            const char * tile = smem.ring + slot*args.slot_bytes;
            slot = slot + 1 == args.n_slots ? 0 : slot + 1;
            if (args.type[part] != GGML_TYPE_F16) {
                moegraph_attn_convert_tile<d>(args.type[part], tile, smem.halves, (n + 15)/16*16);
                __syncthreads();
                tile = smem.halves;
            }
            const bool one = NC > 1 && sums.n_tiles == 1;
            if (part == MOEGRAPH_ATTN_K) {
                if (one) {
                    sums.template add_keys<1>(tile, begin, n, unit.n_all);
                } else {
                    sums.template add_keys<NC>(tile, begin, n, unit.n_all);
                }
            } else {
                if (one) {
                    sums.template add_values<1>(tile, n);
                } else {
                    sums.template add_values<NC>(tile, n);
                }
                begin += MOEGRAPH_ATTN_TILE;
            }
            part = 1 - part;
        }
        sums.store(turn);
        const moegraph_attn_unit next = moegraph_attn_find_unit(args, plan, turn + 1);
        same = next.members == unit.members && next.first == unit.first;
        unit = next;
    }
#else
    GGML_UNUSED_VARS(args);
    NO_DEVICE_CODE;
#endif // TURING_MMA_AVAILABLE
}
