#pragma once

#include "moegraph-attn-ptx.cuh"

// Which rows and positions of moegraph_attn a block computes. Every block derives it from the rows, so a captured graph
// serves any rows.

// A row's keys are summed in splits of one size, the least multiple of 32 for which they are no more than this number,
// divided by the number of heads of keys. So the splits of one row occupy a large device once, whatever their length.
// They begin at multiples of their size, also where a window begins between two of these: so the size, and which positions
// are summed together, follow from the row's own position.
#define MOEGRAPH_ATTN_SPLITS 128

constexpr float MOEGRAPH_ATTN_BOOST = 10.0f; // weights are at most 2 to this: the small ones stay normal in half
constexpr float MOEGRAPH_ATTN_LOG2E = 1.4426950408889634f;

// The most splits of a row.
static __host__ __device__ __forceinline__ int moegraph_attn_most_splits(const int n_head_kv) {
    return n_head_kv < MOEGRAPH_ATTN_SPLITS ? MOEGRAPH_ATTN_SPLITS/n_head_kv : 1;
}

// Rows that are planned together: a lane has one. Blocks of another z have the rows after them.
#define MOEGRAPH_ATTN_PLANNED 32

struct moegraph_attn_args {
    const char       * q;
    const char       * data[2];   // keys, values
    uint32_t           stride[2]; // of their rows, in bytes
    int                head[2];   // bytes of a head in a row
    ggml_type          type[2];
    const int32_t    * rows;
    void             * partial;   // [d] of each row, head and split: floats if refined, else halves, and divided by the
    float2           * max_sum;   // sums of weights; here these, without [d]
    moegraph_attn_pool pool;
    int64_t            q_head;    // strides in bytes
    int64_t            q_row;
    const float      * sinks;     // of each head of queries, or nullptr
    float              scale;
    int                window;    // positions that a row attends to; 0: all
    int                n_rows;
    int                n_head;
    int                n_head_kv;
    int                n_group;   // query heads of a head of keys
    int                n_chunk;   // most rows of a unit
    int                n_splits;  // most of a row
    int                n_tiles;   // of columns, in a block
    int                n_slots;   // of shared memory for keys or values
    int                slot_bytes;
    bool               refined;   // queries are sums of two halves
    bool               refined_p; // so are weights
    bool               early;     // rows and pages may be read before the preceding kernel has ended
};

// Positions of a split of a row with n_keys. A window may begin within a split: then there is one more.
static __device__ __forceinline__ int moegraph_attn_split_size(const moegraph_attn_args & args, const int n_keys) {
    const int n_seen = n_keys - moegraph_attn_first(n_keys, args.window);
    const int n      = 32*(args.n_splits - (args.window > 0 ? 1 : 0));
    return n_seen > n ? 32*((n_seen + n - 1)/n) : 32;
}

// Some rows of a sequence and one split of their positions. Row i of the unit is bit first + i of members.
struct moegraph_attn_unit {
    int      row;     // whose path it is; -1: there is no unit
    unsigned members;
    int      first;
    int      n_rows;
    int      split;
    int      begin;   // positions
    int      end;
    int      n_all;   // positions that all rows have
};

// What a block knows of the rows, in shared memory. A group is the rows of a sequence with one n_past and one size of
// splits. They have their committed positions in common. A family is the rows of a group on one path: in a chain, all.
struct moegraph_attn_plan {
    int      seq[32];
    int      n_past[32];
    int      n_keys[32];
    int      size[32];     // of splits
    unsigned group[32];    // rows, as bits
    unsigned family[32];
    int      n_common[32]; // units of the group's committed splits, in its first row; 0: a family computes them
    int      end_unit[32]; // units of this and earlier rows
};

// The first row of this block's plan, and how many rows the plan has.
static __device__ __forceinline__ int moegraph_attn_first_row() {
    return MOEGRAPH_ATTN_PLANNED*blockIdx.z;
}
static __device__ __forceinline__ int moegraph_attn_n_planned(const moegraph_attn_args & args) {
    return min(MOEGRAPH_ATTN_PLANNED, args.n_rows - moegraph_attn_first_row());
}

static __device__ __forceinline__ int moegraph_attn_divide_up(const int x, const int y) {
    return (x + y - 1)/y;
}

// The longest row whose path begins with this row's path; of equal ones the first.
static __device__ __forceinline__ int moegraph_attn_find_leader(
        const moegraph_attn_args & args, const unsigned group, const int n_past, const int n_keys) {
    const int lane  = threadIdx.x % 32;
    const int depth = min(n_keys - n_past, MOEGRAPH_ATTN_PATH);
    int most = (group & (group - 1)) != 0 ? depth : 0; // of rows that are not alone
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        most = max(most, __shfl_xor_sync(0xFFFFFFFF, most, offset));
    }
    if (most == 0) {
        return __ffs(group) - 1;
    }
    const int row = moegraph_attn_first_row() + min(lane, moegraph_attn_n_planned(args) - 1);
    const int32_t * path = args.rows + row*MOEGRAPH_ATTN_WORDS + MOEGRAPH_ATTN_FIRST;
    unsigned same = group, extends = group;
#pragma unroll 8
    for (int i = 0; i < most; ++i) {
        const bool     has = i < depth;
        const unsigned at  = __match_any_sync(0xFFFFFFFF, path[i]) & __ballot_sync(0xFFFFFFFF, has);
        same    = has ? same & at : 0;
        extends = has ? same : extends;
    }
    int leader = lane, longest = n_keys;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        const int other = __shfl_sync(0xFFFFFFFF, n_keys, i);
        if (extends >> i & 1 && (other > longest || (other == longest && i < leader))) {
            leader  = i;
            longest = other;
        }
    }
    return leader;
}

// By one warp; lane r has row r.
static __device__ __forceinline__ void moegraph_attn_make_plan(
        const moegraph_attn_args & args, moegraph_attn_plan & plan) {
    const int lane = threadIdx.x;
    int n_keys = 0, n_past = 0, seq = -1 - lane; // in no group
    const int n_rows = moegraph_attn_n_planned(args);
    if (lane < n_rows) {
        const int32_t * row = args.rows + (moegraph_attn_first_row() + lane)*MOEGRAPH_ATTN_WORDS;
        n_keys = moegraph_attn_n_keys(args.pool, row);
        n_past = max(0, min(row[MOEGRAPH_ATTN_N_PAST], n_keys));
        seq    = n_keys > 0 ? row[MOEGRAPH_ATTN_SEQ] : seq;
    }
    const int      size   = moegraph_attn_split_size(args, n_keys);
    const int      begin  = moegraph_attn_first(n_past, args.window)/size; // no row of the group has an earlier split
    unsigned group = 1u << lane, family = group;
    int      leader = lane;
    if (n_rows > 1) {
        group = __match_any_sync(0xFFFFFFFF, seq) & __match_any_sync(0xFFFFFFFF, n_past) &
            __match_any_sync(0xFFFFFFFF, size);
        leader = moegraph_attn_find_leader(args, group, n_past, n_keys);
        family = __match_any_sync(0xFFFFFFFF, leader);
    }
    const int common = family == group ? begin : n_past/size;
    int n_common = 0, n = 0;
    if (lane == __ffs(group) - 1) {
        n_common = (common - begin)*moegraph_attn_divide_up(__popc(group), args.n_chunk);
        n        = n_common;
    }
    if (lane == leader) {
        n += (moegraph_attn_divide_up(n_keys, size) - common)*moegraph_attn_divide_up(__popc(family), args.n_chunk);
    }
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int earlier = __shfl_up_sync(0xFFFFFFFF, n, offset);
        n += lane >= offset ? earlier : 0;
    }
    plan.seq[lane]      = seq;
    plan.n_past[lane]   = n_past;
    plan.n_keys[lane]   = n_keys;
    plan.size[lane]     = size;
    plan.group[lane]    = group;
    plan.family[lane]   = family;
    plan.n_common[lane] = n_common;
    plan.end_unit[lane] = n;
}

// The k-th unit of the block.
static __device__ __forceinline__ moegraph_attn_unit moegraph_attn_find_unit(
        const moegraph_attn_args & args, const moegraph_attn_plan & plan, const int k) {
    int u = k*gridDim.x + blockIdx.x;
    moegraph_attn_unit unit = {};
    unit.row = __ffs(__ballot_sync(0xFFFFFFFF, plan.end_unit[threadIdx.x % 32] > u)) - 1;
    if (unit.row < 0) {
        return unit;
    }
    u -= unit.row > 0 ? plan.end_unit[unit.row - 1] : 0;
    const int n_past = plan.n_past[unit.row], size = plan.size[unit.row], n_common = plan.n_common[unit.row];
    const unsigned group = plan.group[unit.row], family = plan.family[unit.row];
    const bool in_common = u < n_common;
    unit.members = in_common ? group : family;
    u           -= in_common ? 0 : n_common;
    const int n_members = __popc(unit.members);
    const int n_chunks  = moegraph_attn_divide_up(n_members, args.n_chunk); // side by side: they read the same
    const int split     = u/n_chunks;
    unit.first  = (u - split*n_chunks)*args.n_chunk;
    unit.n_rows = min(args.n_chunk, n_members - unit.first);
    unit.split  = split + (in_common || family == group ? moegraph_attn_first(n_past, args.window) : n_past)/size;
    unit.begin  = unit.split*size;
    unit.end    = min(unit.begin + size, plan.n_keys[unit.row]);
    unit.n_all  = in_common || n_members == 1 ? unit.end : n_past;
    return unit;
}

// The i-th row of a unit.
static __device__ __forceinline__ int moegraph_attn_row_of(const moegraph_attn_unit & unit, const int i) {
    int n = unit.first + i, at = 0;
#pragma unroll
    for (int width = 16; width > 0; width /= 2) {
        const int here = __popc(unit.members >> at & ((1u << width) - 1));
        at += here <= n ? width : 0;
        n  -= here <= n ? here : 0;
    }
    return at;
}

// Where a position is in the pool. Behind the end: the last key again, with weight 0.
static __device__ __forceinline__ int moegraph_attn_locate(
        const moegraph_attn_args & args, const moegraph_attn_plan & plan, const moegraph_attn_unit & unit,
        const int position) {
    return moegraph_attn_pool_row(args.pool, args.rows + (moegraph_attn_first_row() + unit.row)*MOEGRAPH_ATTN_WORDS, plan.seq[unit.row],
        plan.n_past[unit.row], min(position, unit.end - 1));
}
