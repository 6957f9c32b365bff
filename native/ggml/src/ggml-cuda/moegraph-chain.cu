#include "moegraph-columns.cuh"
#include "moegraph-parents.cuh"
#include "moegraph-recurrence.cuh"

// The delta rule along a chain is one long dependence: a row's product with k, the sum over lanes, the update of the
// state, the next row. Four things make a row short here. Eight lanes hold a column, not 32: a sum over lanes has three
// steps, and a lane's own sums are independent of one another. Rows are read ahead, into registers and from there to
// shared memory. The sums of the results wait until eight rows are done; then each lane finishes one of them. And eight
// rows are one straight piece of code, so that a row's result is computed while the next row waits for its sum.
constexpr int LONG_THREADS = 128;
constexpr int LONG_COLS    = LONG_THREADS/MOEGRAPH_COLUMN_LANES; // of a block
constexpr int LONG_ROWS    = MOEGRAPH_COLUMN_LANES;              // that are read at once: a lane finishes one

template <int S>
struct alignas(16) long_rows {
    float  k[LONG_ROWS][moegraph_columns<S>::size];
    float  q[LONG_ROWS][moegraph_columns<S>::size];
    float  v[LONG_ROWS][LONG_COLS];
    float2 gates[LONG_ROWS]; // decay, beta
};

// What a thread carries from global to shared memory: elements of k and q, one of v, and the gates of one row.
template <int S>
struct long_fetch {
    static constexpr int stride = LONG_THREADS/S; // rows that the block reads at a time
    static constexpr int n      = (LONG_ROWS + stride - 1)/stride;
    static_assert(LONG_ROWS*LONG_COLS == LONG_THREADS, "one value of v for each thread");
    float  k[n];
    float  q[n];
    float  v;
    float2 gates;

    // q, k, v, gate, beta: row 0 of the head. Behind the last row, that row is read again.
    __device__ __forceinline__ void read(const moegraph_chain_args & a, const float * qs, const float * ks,
            const float * vs, const float * gate, const float * beta, const int n_head, const int begin, const int n_rows) {
        const int tid = threadIdx.x;
#pragma unroll
        for (int l = 0; l < n; ++l) {
            const int row = min(begin + l*stride + tid/S, n_rows - 1);
            k[l] = ks[row*a.sq2 + tid % S];
            q[l] = qs[row*a.sq2 + tid % S];
        }
        v = vs[min(begin + tid/LONG_COLS, n_rows - 1)*a.sv2 + tid % LONG_COLS];
        if (tid < LONG_ROWS) {
            const int64_t row = min(begin + tid, n_rows - 1);
            gates = make_float2(expf(gate[row*n_head]), beta[row*n_head]);
        }
    }

    __device__ __forceinline__ void write(long_rows<S> & to) const {
        const int tid = threadIdx.x;
#pragma unroll
        for (int l = 0; l < n; ++l) {
            const int r = l*stride + tid/S;
            if (LONG_ROWS % stride == 0 || r < LONG_ROWS) {
                to.k[r][moegraph_columns<S>::offset(tid % S)] = k[l];
                to.q[r][moegraph_columns<S>::offset(tid % S)] = q[l];
            }
        }
        to.v[tid/LONG_COLS][tid % LONG_COLS] = v;
        if (tid < LONG_ROWS) {
            to.gates[tid] = gates;
        }
    }
};

// Continues a column's state s through n rows, all eight if full; returns the result of the row of this lane's number.
template <int S, bool full>
static __device__ __forceinline__ float long_walk(const long_rows<S> & rows, float * s, const int column, const int lane,
        const int n) {
    typedef moegraph_columns<S> layout;
    float sums[LONG_ROWS];
#pragma unroll
    for (int r = 0; r < LONG_ROWS; ++r) {
        sums[r] = 0.0f;
        if (full || r < n) {
            float x[layout::n];
            layout::load(x, rows.k[r] + lane*layout::pitch);
            const float2 gates = rows.gates[r];
            const float  delta = __fmul_rn(__fmaf_rn(-gates.x, layout::dot(s, x), rows.v[r][column]), gates.y);
#pragma unroll
            for (int e = 0; e < layout::n; ++e) {
                s[e] = __fmaf_rn(gates.x, s[e], __fmul_rn(x[e], delta));
            }
            layout::load(x, rows.q[r] + lane*layout::pitch);
            sums[r] = layout::partial(s, x);
        }
    }
    // the sums of warp_reduce_sum; each step leaves a lane half of the rows
#pragma unroll
    for (int half = LONG_ROWS/2; half > 0; half /= 2) {
        const bool upper = lane & half;
#pragma unroll
        for (int r = 0; r < half; ++r) {
            const float mine  = upper ? sums[r + half] : sums[r];
            const float other = upper ? sums[r] : sums[r + half];
            sums[r] = mine + __shfl_xor_sync(0xFFFFFFFF, other, half, MOEGRAPH_COLUMN_LANES);
        }
    }
    return sums[0];
}

// Grid: heads, sequences, columns of the state. The state stays in registers. ragged: there are lengths.
template <int S, bool ragged>
static __global__ void __launch_bounds__(LONG_THREADS, 3) moegraph_long_chain_kernel(const moegraph_chain_args a) {
    typedef moegraph_columns<S> layout;
    __shared__ long_rows<S> shared[2];

    int slot = a.early ? a.slots[blockIdx.y] : 0;
    ggml_cuda_pdl_sync();
    if (!a.early) {
        slot = a.slots[blockIdx.y];
    }

    const int head     = blockIdx.x;
    const int n_head   = gridDim.x;
    const int sequence = blockIdx.y;
    const int column0  = blockIdx.z*LONG_COLS;
    const int column   = threadIdx.x/MOEGRAPH_COLUMN_LANES;
    const int lane     = threadIdx.x % MOEGRAPH_COLUMN_LANES;

    const int64_t first  = (int64_t) sequence*a.n_tokens*n_head + head; // of the gates; the others have S for each
    const int64_t stride = (int64_t) n_head*S;
    float * out = a.dst + first*S + column0 + column;
    const bool there  = slot >= 0 && slot < a.n_slots;
    const int  n_rows = !there ? 0 : ragged ? moegraph_n_rows(a.lengths, sequence, a.n_tokens) : a.n_tokens;
    for (int t = n_rows + lane; t < a.n_tokens; t += MOEGRAPH_COLUMN_LANES) {
        out[t*stride] = 0.0f;
    }
    if (n_rows == 0) {
        return;
    }

    float * state = a.pool + slot*a.pool_s + ((int64_t) head*S + column0 + column)*S;
    float s[layout::n];
#pragma unroll
    for (int e = 0; e < layout::n; ++e) {
        s[e] = state[layout::index(lane, e)];
    }

    const int     head_k = fastmodulo(head, a.n_head_k);
    const float * q      = a.q + sequence*a.sq3 + head_k*a.sq1;
    const float * k      = a.k + sequence*a.sq3 + head_k*a.sq1;
    const float * v      = a.v + sequence*a.sv3 + head*a.sv1 + column0;
    long_fetch<S> fetch;
    fetch.read(a, q, k, v, a.gate + first, a.beta + first, n_head, 0, n_rows);
    for (int begin = 0; begin < n_rows; begin += LONG_ROWS) {
        long_rows<S> & rows = shared[begin/LONG_ROWS % 2];
        fetch.write(rows);
        __syncthreads();
        fetch.read(a, q, k, v, a.gate + first, a.beta + first, n_head, begin + LONG_ROWS, n_rows);

        const int   n   = n_rows - begin;
        const float sum = n >= LONG_ROWS ? long_walk<S, true>(rows, s, column, lane, n)
                                         : long_walk<S, false>(rows, s, column, lane, n);
        if (lane < n) {
            out[(begin + lane)*stride] = sum * a.scale;
        }
    }

#pragma unroll
    for (int e = 0; e < layout::n; ++e) {
        state[layout::index(lane, e)] = s[e];
    }
}

template <int S>
void moegraph_long_chain(const moegraph_chain_args & a, const int n_head, const int n_seqs, cudaStream_t stream) {
    const ggml_cuda_kernel_launch_params params(dim3(n_head, n_seqs, S/LONG_COLS), dim3(LONG_THREADS), (size_t) 0, stream);
    if (a.lengths) {
        ggml_cuda_kernel_launch(moegraph_long_chain_kernel<S, true>, params, a);
    } else {
        ggml_cuda_kernel_launch(moegraph_long_chain_kernel<S, false>, params, a);
    }
}

template void moegraph_long_chain< 16>(const moegraph_chain_args & a, int n_head, int n_seqs, cudaStream_t stream);
template void moegraph_long_chain< 32>(const moegraph_chain_args & a, int n_head, int n_seqs, cudaStream_t stream);
template void moegraph_long_chain< 64>(const moegraph_chain_args & a, int n_head, int n_seqs, cudaStream_t stream);
template void moegraph_long_chain<128>(const moegraph_chain_args & a, int n_head, int n_seqs, cudaStream_t stream);
