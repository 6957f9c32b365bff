#include "moegraph-conv.cuh"
#include "unary.cuh"

constexpr int MOEGRAPH_CONV_THREADS = 128; // channels of a block
constexpr int MOEGRAPH_CONV_ROWS    = 32;
constexpr int MOEGRAPH_CONV_BLOCKS  = 65535; // in y and in z

// Strides in floats. A channel is the fastest index of rows and of the result.
struct moegraph_conv_args {
    const float   * rows;
    const float   * w;
    float         * pool;
    const int32_t * slots;
    const int32_t * parents;
    const int32_t * lengths;
    float         * dst;
    int     n_channels;
    int     n_tokens;
    int     n_slots;
    int     silu;
    int64_t rows_t, rows_s;
    int64_t pool_s;
};

// Grid: channels, sequences, rows. A thread has one channel.
template <int d_conv, bool tree>
static __global__ void __launch_bounds__(MOEGRAPH_CONV_THREADS)
moegraph_conv_kernel(const moegraph_conv_args a) {
    static_assert(MOEGRAPH_CONV_THREADS >= MOEGRAPH_TREE_ROWS, "a thread for each row of a tree");
    __shared__ moegraph_conv_windows<d_conv, tree ? MOEGRAPH_CONV_ROWS : 1> windows;

    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();

    const int sequence = blockIdx.y;
    const int first    = blockIdx.z*MOEGRAPH_CONV_ROWS;
    const int n        = min(MOEGRAPH_CONV_ROWS, a.n_tokens - first);
    const int channel  = blockIdx.x*MOEGRAPH_CONV_THREADS + threadIdx.x;
    const int slot     = a.slots[sequence];
    if (tree) {
        windows.make(a.parents + (int64_t) sequence*a.n_tokens, a.n_tokens, first, n);
    }
    if (channel >= a.n_channels) {
        return;
    }

    float * dst = a.dst + ((int64_t) sequence*a.n_tokens + first)*a.n_channels + channel;
    const auto put = [&](const int i, const float sum) {
        dst[(int64_t) i*a.n_channels] = a.silu ? ggml_cuda_op_silu_single(sum) : sum;
    };
    if (slot < 0 || slot >= a.n_slots) {
        for (int i = 0; i < n; ++i) {
            put(i, 0.0f);
        }
        return;
    }

    float w[d_conv];
#pragma unroll
    for (int j = 0; j < d_conv; ++j) {
        w[j] = a.w[(int64_t) channel*d_conv + j];
    }
    float       * past = a.pool + slot*a.pool_s + (int64_t) channel*(d_conv - 1);
    const float * rows = a.rows + sequence*a.rows_s + channel;
    if (tree) {
        windows.convolve(past, rows, a.rows_t, n, w, put);
        return;
    }
    const int n_rows = moegraph_n_rows(a.lengths, sequence, a.n_tokens);
    const int n_here = max(0, min(n, n_rows - first));
    float x[d_conv];
    moegraph_conv_chain<d_conv>(past, rows, a.rows_t, first, n_here, w, x, put);
    for (int i = n_here; i < n; ++i) {
        put(i, 0.0f);
    }
    if (first > 0) {
        return;
    }
    // the blocks that read the state write it: no other one would know when they have
    if (n_here < n_rows) {
#pragma unroll
        for (int j = 0; j < d_conv - 1; ++j) {
            x[j] = rows[(n_rows - (d_conv - 1) + j)*a.rows_t];
        }
    }
#pragma unroll
    for (int j = 0; j < d_conv - 1; ++j) {
        past[j] = x[j];
    }
}

bool moegraph_conv_supported(const ggml_tensor * dst) {
    const int64_t d_conv = dst->src[1]->ne[0];
    return (d_conv == 3 || d_conv == 4 || d_conv == 5 || d_conv == 9 || d_conv == 15) &&
        dst->ne[2] <= MOEGRAPH_CONV_BLOCKS && dst->ne[1] <= (int64_t) MOEGRAPH_CONV_BLOCKS*MOEGRAPH_CONV_ROWS;
}

template <int d_conv>
static void moegraph_conv_launch(const moegraph_conv_args & a, const int n_seqs, cudaStream_t stream) {
    static_assert(d_conv - 1 <= MOEGRAPH_CONV_ROWS, "only the first block of rows reads the state");
    const ggml_cuda_kernel_launch_params params(
        dim3((a.n_channels + MOEGRAPH_CONV_THREADS - 1)/MOEGRAPH_CONV_THREADS, n_seqs,
            (a.n_tokens + MOEGRAPH_CONV_ROWS - 1)/MOEGRAPH_CONV_ROWS),
        dim3(MOEGRAPH_CONV_THREADS), (size_t) 0, stream);
    if (a.parents) {
        ggml_cuda_kernel_launch(moegraph_conv_kernel<d_conv, true>, params, a);
    } else {
        ggml_cuda_kernel_launch(moegraph_conv_kernel<d_conv, false>, params, a);
    }
}

void moegraph_conv(ggml_backend_cuda_context & ctx, const ggml_tensor * dst, ggml_tensor * out, const bool silu) {
    const ggml_tensor * rows = dst->src[0];
    const ggml_tensor * w    = dst->src[1];
    const ggml_tensor * pool = dst->src[2];
    const ggml_tensor * parents = dst->src[4];
    const ggml_tensor * lengths = dst->src[5];

    moegraph_conv_args a;
    a.rows       = (const float *) rows->data;
    a.w          = (const float *) w->data;
    a.pool       = (float *) pool->data;
    a.slots      = (const int32_t *) dst->src[3]->data;
    a.parents    = parents ? (const int32_t *) parents->data : nullptr;
    a.lengths    = lengths ? (const int32_t *) lengths->data : nullptr;
    a.dst        = (float *) out->data;
    a.n_channels = (int) dst->ne[0];
    a.n_tokens   = (int) dst->ne[1];
    a.n_slots    = (int) pool->ne[1];
    a.silu       = silu;
    a.rows_t     = rows->nb[1]/sizeof(float);
    a.rows_s     = rows->nb[2]/sizeof(float);
    a.pool_s     = pool->nb[1]/sizeof(float);
    const int n_seqs = (int) dst->ne[2];
    switch (w->ne[0]) {
        case  3: moegraph_conv_launch< 3>(a, n_seqs, ctx.stream()); break;
        case  4: moegraph_conv_launch< 4>(a, n_seqs, ctx.stream()); break;
        case  5: moegraph_conv_launch< 5>(a, n_seqs, ctx.stream()); break;
        case  9: moegraph_conv_launch< 9>(a, n_seqs, ctx.stream()); break;
        case 15: moegraph_conv_launch<15>(a, n_seqs, ctx.stream()); break;
        default: GGML_ABORT("moegraph_conv: kernel size %d, not 3, 4, 5, 9 or 15", (int) w->ne[0]);
    }
}
