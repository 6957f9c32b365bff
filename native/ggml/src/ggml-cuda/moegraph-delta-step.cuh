#pragma once

#include "moegraph-conv.cuh"
#include "moegraph-recurrence.cuh"
#include "moegraph-rows-types.cuh"
#include "unary.cuh"

constexpr int MOEGRAPH_STEP_D_CONV = 4;

// What a DeltaNet layer computes between its products (moegraph-deltanet.cu). Strides are in floats.
struct moegraph_step_args {
    const float * qkv;      // channels side by side
    int64_t       qkv_t;    // floats between tokens and between sequences
    int64_t       qkv_s;
    float       * pool;     // the last d_conv - 1 values of each channel, updated in place
    int64_t       pool_s;   // floats between slots
    const int32_t * slots;
    const int32_t * parents; // nullptr: chains
    const int32_t * lengths; // of chains; nullptr: all rows count
    const float * w;
    float       * conv;     // silu of the convolution, all channels
    float       * q;
    float       * k;
    float         eps[2];   // of q and k
    float         scale[2];
    const float * beta;
    float       * beta_out;
    const float * alpha;
    const float * dt;
    const float * a;
    float       * gate;
    int           n_conv_blocks;
    int           n_channels;
    int           n_qk;     // channels of q, and of k
    int           n_v;      // heads with a gate
    int           n_tokens;
    int           n_slots;
    int           early_w;  // what may be read before the preceding kernel has ended
    int           early_slots;
};


// rms_norm of a row of d values, its weights f and the product with silu(g). Each of d/4 neighbouring threads has four
// values; the rows of a warp are whole. y: where the quantized values go, or nullptr.
template <int d>
static __device__ __forceinline__ void moegraph_gated_row(float4 v, const float4 f, const float4 g, const float eps,
        float * dst, moegraph_block_y * y) {
    constexpr int n_threads = d/4;
    float squares = v.x*v.x + v.y*v.y + v.z*v.z + v.w*v.w;
    const int      lane = threadIdx.x % WARP_SIZE / n_threads*n_threads; // the group's first
    const unsigned mask = n_threads == WARP_SIZE ? 0xFFFFFFFFu : 0xFFFFu << lane;
#pragma unroll
    for (int offset = n_threads/2; offset > 0; offset /= 2) {
        squares += __shfl_xor_sync(mask, squares, offset, n_threads);
    }
    const float scale = rsqrtf(squares/d + eps);
    v.x = scale*v.x*f.x*ggml_cuda_op_silu_single(g.x);
    v.y = scale*v.y*f.y*ggml_cuda_op_silu_single(g.y);
    v.z = scale*v.z*f.z*ggml_cuda_op_silu_single(g.z);
    v.w = scale*v.w*f.w*ggml_cuda_op_silu_single(g.w);
    *(float4 *) dst = v;
    if (y != nullptr) {
        moegraph_quantize_4(v, y);
    }
}

// The gated norm behind the delta rule; dst is nullptr where the launch has none.
struct moegraph_gated_args {
    const float      * w;
    const float      * z;
    float            * dst;
    moegraph_block_y * y;
    float              eps;
};

// The step, the delta rule and the gated norm of one token of each sequence, with the bits of their own kernels.
constexpr int MOEGRAPH_DELTA_STEP_D    = 128; // values of a head
constexpr int MOEGRAPH_DELTA_STEP_SEQS = 4;   // of more, each block would read what others have computed

struct moegraph_delta_step_args {
    moegraph_step_args  step;
    moegraph_delta_args delta;
    moegraph_gated_args gated;
    uint3               n_head_k;
    int                 n_head;
    unsigned          * arrived; // counts of blocks: of each head, then of each head of keys
};

// Whether so many heads fit into the counts.
bool moegraph_delta_step_supported(const ggml_tensor * delta);

// Launches it; sets `arrived` and n_head.
void moegraph_delta_step(ggml_backend_cuda_context & ctx, moegraph_delta_step_args & args, const ggml_tensor * delta);
