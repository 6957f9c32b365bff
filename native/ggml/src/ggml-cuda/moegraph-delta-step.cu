#include "moegraph-arrive.cuh"
#include "moegraph-context.cuh"
#include "moegraph-delta-step.cuh"

constexpr int MOEGRAPH_DELTA_STEP_COLUMNS = 8; // of the state, a block has: one a warp
constexpr int MOEGRAPH_DELTA_STEP_THREADS = MOEGRAPH_DELTA_STEP_COLUMNS*WARP_SIZE;

// Returns whether this block is the last of n that count themselves here; then the count is 0 again.
static __device__ __forceinline__ bool moegraph_arrives_last(unsigned * count, const unsigned n) {
    const bool is_last = moegraph_arrive(count) == n - 1;
    if (is_last) {
        *count = 0;
    }
    return is_last;
}

// The convolution of one row and its activation. x: the channel's window, and then what the next row continues.
static __device__ __forceinline__ float moegraph_step_channel(const moegraph_step_args & a, const float * qkv, const float * past,
        const float4 w4, float (&x)[MOEGRAPH_STEP_D_CONV]) {
    const float w[MOEGRAPH_STEP_D_CONV] = { w4.x, w4.y, w4.z, w4.w };
    float y = 0.0f;
    moegraph_conv_chain<MOEGRAPH_STEP_D_CONV>(past, qkv, a.qkv_t, 0, 1, w, x,
        [&](const int, const float sum) { y = ggml_cuda_op_silu_single(sum); });
    return y;
}

// Grid: heads, sequences, columns of the state. A thread has one channel of q or k, which all blocks of a head of keys
// compute for themselves; a warp has one column, with its channel of v. All of them read the window of q and k, so the last
// one to have read it writes it; the last block of a head normalises the head.
static __global__ void __launch_bounds__(MOEGRAPH_DELTA_STEP_THREADS, 4)
moegraph_delta_step_kernel(const moegraph_delta_step_args args) {
    constexpr int S = MOEGRAPH_DELTA_STEP_D;
    constexpr int n = S/WARP_SIZE;
    static_assert(MOEGRAPH_DELTA_STEP_THREADS == 2*S, "a thread for each channel of q and k");
    __shared__ float values[2*S];
    __shared__ bool  last_of_head, last_of_keys;
    ggml_cuda_pdl_lc();

    const moegraph_step_args & a = args.step;
    const int tid    = threadIdx.x;
    const int lane   = tid % WARP_SIZE;
    const int head   = blockIdx.x;
    const int seq    = blockIdx.y;
    const int column = blockIdx.z*MOEGRAPH_DELTA_STEP_COLUMNS + tid/WARP_SIZE;
    const int head_k = fastmodulo(head, args.n_head_k);
    const int c      = (tid < S ? 0 : a.n_qk) + head_k*S + tid % S;
    const int c_v    = 2*a.n_qk + head*S + column;
    int    slot = 0;
    float4 w_qk = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float4 w_v  = w_qk;
    if (a.early_slots) {
        slot = a.slots[seq];
    }
    if (a.early_w) {
        w_qk = *(const float4 *) (a.w + (int64_t) c*MOEGRAPH_STEP_D_CONV);
        w_v  = *(const float4 *) (a.w + (int64_t) c_v*MOEGRAPH_STEP_D_CONV);
    }
    ggml_cuda_pdl_sync();
    if (!a.early_slots) {
        slot = a.slots[seq];
    }
    if (!a.early_w) {
        w_qk = *(const float4 *) (a.w + (int64_t) c*MOEGRAPH_STEP_D_CONV);
        w_v  = *(const float4 *) (a.w + (int64_t) c_v*MOEGRAPH_STEP_D_CONV);
    }

    const bool    there = slot >= 0 && slot < a.n_slots;
    const float * qkv   = a.qkv + seq*a.qkv_s;
    float * state  = args.delta.pool + slot*args.delta.pool_s + ((int64_t) head*S + column)*S;
    float * past   = a.pool + slot*a.pool_s + (int64_t) c*(MOEGRAPH_STEP_D_CONV - 1);
    float * past_v = a.pool + slot*a.pool_s + (int64_t) c_v*(MOEGRAPH_STEP_D_CONV - 1);
    float s[n] = {};
    float x[MOEGRAPH_STEP_D_CONV];
    float x_v[MOEGRAPH_STEP_D_CONV];
    float y  = 0.0f;
    float vt = 0.0f;
    if (there) {
#pragma unroll
        for (int r = 0; r < n; ++r) {
            s[r] = state[r*WARP_SIZE + lane];
        }
        y  = moegraph_step_channel(a, qkv + c, past, w_qk, x);
        vt = moegraph_step_channel(a, qkv + c_v, past_v, w_v, x_v);
    }
    const int64_t at    = (int64_t) seq*a.n_v + head;
    const float   alpha = a.alpha[at] + a.dt[head];
    const float   beta  = 1.0f/(1.0f + expf(-a.beta[at]));
    const float   gate  = (alpha > 20.0f ? alpha : logf(1.0f + expf(alpha)))*a.a[head];
    values[tid] = y;
    __syncthreads();
    if (tid == 0) {
        const unsigned n_keys = args.n_head/args.n_head_k.z*gridDim.z;
        last_of_keys = moegraph_arrives_last(args.arrived + moegraph_step_state::N_COUNTS/2 + seq*args.n_head_k.z + head_k, n_keys);
    }

    float qt[n];
    float kt[n];
    float squares_q = 0.0f;
    float squares_k = 0.0f;
#pragma unroll
    for (int r = 0; r < n; ++r) {
        qt[r] = values[r*WARP_SIZE + lane];
        kt[r] = values[S + r*WARP_SIZE + lane];
        squares_q += qt[r]*qt[r];
        squares_k += kt[r]*kt[r];
    }
    squares_q = warp_reduce_sum<WARP_SIZE>(squares_q);
    squares_k = warp_reduce_sum<WARP_SIZE>(squares_k);
    const float scale_q = rsqrtf(squares_q/S + a.eps[0]);
    const float scale_k = rsqrtf(squares_k/S + a.eps[1]);
#pragma unroll
    for (int r = 0; r < n; ++r) {
        qt[r] = scale_q*qt[r]*a.scale[0];
        kt[r] = scale_k*kt[r]*a.scale[1];
    }

    const float dot = moegraph_delta_column<WARP_SIZE>(s, kt, qt, vt, expf(gate), beta);
    if (lane == 0) {
        args.delta.dst[at*S + column] = there ? dot*args.delta.scale : 0.0f;
    }
    if (args.gated.dst != nullptr) {
        __syncthreads();
        if (tid == 0) {
            last_of_head = moegraph_arrives_last(args.arrived + at, gridDim.z);
        }
    }
    if (there) {
#pragma unroll
        for (int r = 0; r < n; ++r) {
            state[r*WARP_SIZE + lane] = s[r];
        }
        if (lane == 0) {
#pragma unroll
            for (int j = 0; j < MOEGRAPH_STEP_D_CONV - 1; ++j) {
                past_v[j] = x_v[j];
            }
        }
    }
    __syncthreads();
    if (args.gated.dst != nullptr && last_of_head && tid < WARP_SIZE) {
        const int64_t i = at*S + 4*lane;
        moegraph_gated_row<S>(__ldcg((const float4 *) (args.delta.dst + i)), *(const float4 *) (args.gated.w + 4*lane),
            *(const float4 *) (args.gated.z + i), args.gated.eps, args.gated.dst + i, args.gated.y ? args.gated.y + i/32 : nullptr);
    }
    if (there && last_of_keys) {
#pragma unroll
        for (int j = 0; j < MOEGRAPH_STEP_D_CONV - 1; ++j) {
            past[j] = x[j];
        }
    }
}

bool moegraph_delta_step_supported(const ggml_tensor * delta) {
    return delta->ne[0] == MOEGRAPH_DELTA_STEP_D && delta->ne[2] == 1 && delta->ne[3] <= MOEGRAPH_DELTA_STEP_SEQS &&
        delta->src[7] == nullptr && delta->src[8] == nullptr && delta->ne[1] % delta->src[0]->ne[1] == 0 &&
        delta->ne[1]*delta->ne[3] <= moegraph_step_state::N_COUNTS/2;
}

void moegraph_delta_step(ggml_backend_cuda_context & ctx, moegraph_delta_step_args & args, const ggml_tensor * delta) {
    moegraph_step_state & state = moegraph_get_context(ctx).step;
    if (state.arrived == nullptr) { // in the stream, so that a graph that is being captured begins with it
        const size_t size = moegraph_step_state::N_COUNTS*sizeof(unsigned);
        CUDA_CHECK(cudaMalloc((void **) &state.arrived, size));
        CUDA_CHECK(cudaMemsetAsync(state.arrived, 0, size, ctx.stream()));
    }
    args.arrived  = state.arrived;
    args.n_head   = (int) delta->ne[1];
    args.n_head_k = init_fastdiv_values(delta->src[0]->ne[1]);
    const ggml_cuda_kernel_launch_params params(
        dim3(args.n_head, delta->ne[3], MOEGRAPH_DELTA_STEP_D/MOEGRAPH_DELTA_STEP_COLUMNS), dim3(MOEGRAPH_DELTA_STEP_THREADS),
        (size_t) 0, ctx.stream());
    ggml_cuda_kernel_launch(moegraph_delta_step_kernel, params, args);
}
