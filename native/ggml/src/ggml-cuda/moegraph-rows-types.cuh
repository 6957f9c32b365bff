#pragma once

#include "common.cuh"

// One warp multiplies a tile of 16 weight rows with 8*n_tiles activation rows on the int8 tensor cores. Weights go
// through shared memory in chunks of 256 values per row, two chunks in flight for each warp, so that a block needs
// no barrier before its partial sums are added up.

constexpr int MOEGRAPH_CHUNK      = 256; // values per weight row and step
constexpr int MOEGRAPH_TILE_ROWS  = 16;
constexpr int MOEGRAPH_TILE_COLS  = 8;   // activation rows per tile
constexpr int MOEGRAPH_MAX_COLS   = 32;  // activation rows of a dense product, slots of a group of an expert
constexpr int MOEGRAPH_MAX_WARPS  = 8;
constexpr int MOEGRAPH_PREP_THREADS = 512; // of the kernel that quantizes and lists
constexpr int MOEGRAPH_FEW_SLOTS  = 512; // tokens*slots of MUL_MAT_ID, one for each of these threads; more are for moegraph-wide.cu
constexpr int MOEGRAPH_MAX_SLOTS  = 65536;
constexpr int MOEGRAPH_MIN_BLOCKS = 2;   // 128 registers a thread; 80 are 5 to 10 % slower with experts
constexpr int MOEGRAPH_STAGES     = 2;

// Q8_0 whose rows begin or end within 16 bytes, as those of 2,880 values do: a type of its own for kernels.
constexpr ggml_type MOEGRAPH_TYPE_Q8_0_ODD = GGML_TYPE_COUNT;

// 32 activations. Lane c of a quad reads the values 4c..4c+3 and 16+4c..16+4c+3 of each block: they lie side by side.
struct moegraph_block_y {
    float  d;    // scale
    float  s;    // scale times the sum of the quants
    int8_t qs[32];
};
static_assert(sizeof(moegraph_block_y) == 40, "bad block size");

// Slots (token*n_used + i) that use one expert, expert < 0: slots without an expert.
struct moegraph_group {
    int expert;
    int n;
    int slots[MOEGRAPH_MAX_COLS];
};

// How many groups there can be; one more expert takes the ids outside of the experts.
static int moegraph_max_groups(const int n_slots, const int n_experts, const int group_cols) {
    const int n = n_experts + 1 + n_slots/group_cols;
    return n < n_slots ? n : n_slots;
}

// One of the products of the same activations that share a launch.
struct moegraph_segment {
    const char * x;              // weights
    float      * dst;
    int64_t      stride_dst_col; // floats, between slots of a token or dense columns
    int          n_rows;
    int          first_block;
    int          k_split;        // warps that share a tile, parts of its sums
    const float * bias;          // added to each row of results (moegraph-one.cu), or nullptr; of experts, too; or a residual
};

constexpr int MOEGRAPH_MAX_SEGMENTS = 4;

// Experts that gate and up copy to their slots before they read them (moegraph-one.cu).
struct moegraph_rows_fetch {
    const char * from;        // all experts, in host memory; nullptr: nothing is fetched
    char       * to;          // slots
    int32_t    * dst;         // [n_used] gets the slots of the chosen experts, for kernels that follow
    int64_t      stride_from; // bytes
    int64_t      stride_to;
    int          rest;        // of an expert, what comes behind gate and up begins here
    int          n_bytes;     // of an expert
};

struct moegraph_rows_args {
    moegraph_segment         segments[MOEGRAPH_MAX_SEGMENTS];
    int                      n_segments;
    const char             * x_gate;   // weights of the gate product, nullptr without GLU (one segment)
    const float            * bias_gate;
    int64_t                  stride_bias; // floats, between experts
    const moegraph_block_y * y;
    const float            * raw;      // not nullptr: each block quantizes this row, there is no y (moegraph_one_shared)
    const moegraph_group   * groups;   // nullptr: dense
    const int              * n_groups;
    const int32_t          * ids;      // of one token, where there are no groups (moegraph-one.cu), or nullptr
    int                      n_experts;
    int                      group_cols;    // slots that a group may have
    int                      row_bytes;
    int64_t                  stride_row;    // bytes
    int64_t                  stride_expert; // bytes
    int64_t                  stride_dst_token; // floats
    int                      n_cols;   // dense columns
    int                      n_chunks;
    int                      n_used;   // slots per token
    int                      n_y;      // activation rows per token
    int                      early;    // weights may be read before the preceding kernel has ended
    int                      apart;    // a row's bits must not depend on how many rows or products there are
    int                      glu_op;
    float                    glu_limit;
    moegraph_rows_fetch      fetch;    // then ids are packed (moegraph_one_pack)
};

// Quantizes 32 values with the 8 neighbouring threads that hold 4 each.
static __device__ __forceinline__ void moegraph_quantize_4(const float4 v, moegraph_block_y * dst) {
    const int      j    = threadIdx.x % 8;
    const unsigned mask = 0xFFu << (threadIdx.x % 32 - j);
    float amax = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) {
        amax = fmaxf(amax, __shfl_xor_sync(mask, amax, offset, 8));
    }
    const float d_inv = amax > 0.0f ? 127.0f/amax : 0.0f;
    const char4 q = make_char4(roundf(v.x*d_inv), roundf(v.y*d_inv), roundf(v.z*d_inv), roundf(v.w*d_inv));
    int sum = q.x + q.y + q.z + q.w;
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(mask, sum, offset, 8);
    }
    *(char4 *) (dst->qs + 8*(j % 4) + 4*(j/4)) = q;
    if (j == 0) {
        const float d = amax/127.0f;
        *(float2 *) dst = make_float2(d, d*sum);
    }
}

// The same in the format of the vector kernels, with the bits of quantize_q8_1: its 32 threads add up what lies 16, 8, 4, 2
// and 1 apart, in this order.
static __device__ __forceinline__ void moegraph_quantize_q8_1_4(const float4 v, block_q8_1 * dst) {
    const int      j    = threadIdx.x % 8;
    const unsigned mask = 0xFFu << (threadIdx.x % 32 - j);
    float  amax = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
    float4 sums = v;
#pragma unroll
    for (int offset = 4; offset > 0; offset /= 2) {
        amax    = fmaxf(amax, __shfl_xor_sync(mask, amax, offset, 8));
        sums.x += __shfl_xor_sync(mask, sums.x, offset, 8);
        sums.y += __shfl_xor_sync(mask, sums.y, offset, 8);
        sums.z += __shfl_xor_sync(mask, sums.z, offset, 8);
        sums.w += __shfl_xor_sync(mask, sums.w, offset, 8);
    }
    const float sum = (sums.x + sums.z) + (sums.y + sums.w);
    const float d = amax/127.0f;
    const char4 q = amax == 0.0f ? make_char4(0, 0, 0, 0) :
        make_char4(roundf(v.x/d), roundf(v.y/d), roundf(v.z/d), roundf(v.w/d));
    *(char4 *) (dst->qs + 4*j) = q;
    if (j == 0) {
        dst->ds = make_half2(d, sum);
    }
}

// Rows of activations are padded to whole chunks, with blocks of zeros.
static __host__ __device__ __forceinline__ int moegraph_padded(const int n_values) {
    return (n_values + MOEGRAPH_CHUNK - 1)/MOEGRAPH_CHUNK*MOEGRAPH_CHUNK;
}

// What a product reads besides weights. The pools hold it where it is not remembered for other products.
constexpr int MOEGRAPH_ONE_RAW = 512; // values of a row at most that each block quantizes for itself

struct moegraph_rows_operands {
    ggml_cuda_pool_alloc<char> pool_y;
    ggml_cuda_pool_alloc<char> pool_groups;
    const moegraph_block_y   * y        = nullptr;
    const float              * raw      = nullptr; // instead of y
    const moegraph_group     * groups   = nullptr;
    const int                * n_groups = nullptr;
    int                        group_cols = 0; // slots that a group may have

    explicit moegraph_rows_operands(ggml_cuda_pool & pool) : pool_y(pool), pool_groups(pool) {}
};

// Quantizes the activations of a product and lists the groups of its experts, unless that has been done already. one:
// experts need no groups.
void moegraph_rows_prepare(
    ggml_backend_cuda_context & ctx, const ggml_tensor * dst, bool one, moegraph_rows_operands & result);

static bool moegraph_is_view_op(const ggml_tensor * t) {
    return t->op == GGML_OP_RESHAPE || t->op == GGML_OP_VIEW || t->op == GGML_OP_PERMUTE || t->op == GGML_OP_TRANSPOSE;
}

[[maybe_unused]] static const ggml_tensor * moegraph_rows_origin(const ggml_tensor * t) {
    while (moegraph_is_view_op(t)) {
        t = t->src[0];
    }
    return t;
}

// Whether a product has more rows than moegraph-rows.cu computes: moegraph-wide.cu does.
static bool moegraph_rows_are_many(const ggml_tensor * dst) {
    return dst->op == GGML_OP_MUL_MAT_ID ? ggml_nelements(dst->src[2]) > MOEGRAPH_FEW_SLOTS :
        dst->src[1]->ne[1] > MOEGRAPH_MAX_COLS;
}

// Whether no kernel writes a tensor, so that it may be loaded before the preceding kernel has ended.
static bool moegraph_is_constant(const ggml_tensor * t) {
    while (moegraph_is_view_op(t)) {
        t = t->src[0];
    }
    return t->op == GGML_OP_NONE && t->view_src == nullptr && t->buffer != nullptr &&
        ggml_backend_buffer_get_usage(t->buffer) == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}
