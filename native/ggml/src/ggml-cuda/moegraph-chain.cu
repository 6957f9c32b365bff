#include "moegraph-columns.cuh"
#include "moegraph-parents.cuh"
#include "moegraph-recurrence.cuh"

// The delta rule along a chain is one long dependence: a row's product with k, the sum over lanes, the update of the
// state, the next row. Five things make a row short here. Eight lanes hold a column, not 32: a sum over lanes has three
// steps, and a lane's own sums are independent of one another. Two columns of a lane share what it reads of q and k. Rows
// are read ahead, into registers and from there to shared memory. The sums of the results wait until eight rows are done;
// then each lane finishes one of them. And eight rows are one straight piece of code, so that a row's result is computed
// while the next row waits for its sum.
constexpr int LONG_THREADS = 128;
constexpr int LONG_TEAMS   = LONG_THREADS/MOEGRAPH_COLUMN_LANES; // of lanes that hold a column
constexpr int LONG_ROWS    = MOEGRAPH_COLUMN_LANES;              // that are read at once: a lane finishes one

// The columns of a lane; they lie LONG_TEAMS apart.
template <int S> constexpr int long_own  = S >= 2*LONG_TEAMS ? 2 : 1;
template <int S> constexpr int long_cols = long_own<S>*LONG_TEAMS; // of a block

template <int S>
struct alignas(16) long_rows {
    float  k[LONG_ROWS][moegraph_columns<S>::size];
    float  q[LONG_ROWS][moegraph_columns<S>::size];
    float  v[LONG_ROWS][long_cols<S>];
    float2 gates[LONG_ROWS]; // decay, beta
};

// What a thread carries from global to shared memory: elements of k, q and v, and the gates of one row.
template <int S>
struct long_fetch {
    static constexpr int stride = LONG_THREADS/S; // rows that the block reads at a time
    static constexpr int n      = (LONG_ROWS + stride - 1)/stride;
    static constexpr int n_v    = LONG_ROWS*long_cols<S>/LONG_THREADS;
    float  k[n];
    float  q[n];
    float  v[n_v];
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
#pragma unroll
        for (int l = 0; l < n_v; ++l) {
            const int i = tid + l*LONG_THREADS;
            v[l] = vs[min(begin + i/long_cols<S>, n_rows - 1)*a.sv2 + i % long_cols<S>];
        }
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
#pragma unroll
        for (int l = 0; l < n_v; ++l) {
            const int i = tid + l*LONG_THREADS;
            to.v[i/long_cols<S>][i % long_cols<S>] = v[l];
        }
        if (tid < LONG_ROWS) {
            to.gates[tid] = gates;
        }
    }
};

// Continues the states s of a lane's columns through n rows, all eight if full; results: of the row of this lane's number.
template <int S, bool full>
static __device__ __forceinline__ void long_walk(
        const long_rows<S> & rows, float (&s)[long_own<S>][moegraph_columns<S>::n], float (&results)[long_own<S>],
        const int team, const int lane, const int n) {
    typedef moegraph_columns<S> layout;
    float sums[long_own<S>][LONG_ROWS];
#pragma unroll
    for (int r = 0; r < LONG_ROWS; ++r) {
#pragma unroll
        for (int o = 0; o < long_own<S>; ++o) {
            sums[o][r] = 0.0f;
        }
        if (full || r < n) {
            float x[layout::n];
            layout::load(x, rows.k[r] + lane*layout::pitch);
            const float2 gates = rows.gates[r];
#pragma unroll
            for (int o = 0; o < long_own<S>; ++o) {
                const float v     = rows.v[r][team + o*LONG_TEAMS];
                const float delta = __fmul_rn(__fmaf_rn(-gates.x, layout::dot(s[o], x), v), gates.y);
#pragma unroll
                for (int e = 0; e < layout::n; ++e) {
                    s[o][e] = __fmaf_rn(gates.x, s[o][e], __fmul_rn(x[e], delta));
                }
            }
            layout::load(x, rows.q[r] + lane*layout::pitch);
#pragma unroll
            for (int o = 0; o < long_own<S>; ++o) {
                sums[o][r] = layout::partial(s[o], x);
            }
        }
    }
    // the sums of warp_reduce_sum; each step leaves a lane half of the rows
#pragma unroll
    for (int o = 0; o < long_own<S>; ++o) {
#pragma unroll
        for (int half = LONG_ROWS/2; half > 0; half /= 2) {
            const bool upper = lane & half;
#pragma unroll
            for (int r = 0; r < half; ++r) {
                const float mine  = upper ? sums[o][r + half] : sums[o][r];
                const float other = upper ? sums[o][r] : sums[o][r + half];
                sums[o][r] = mine + __shfl_xor_sync(0xFFFFFFFF, other, half, MOEGRAPH_COLUMN_LANES);
            }
        }
        results[o] = sums[o][0];
    }
}

// Grid: heads, sequences, columns of the state. The state stays in registers. ragged: there are lengths.
template <int S, bool ragged>
static __global__ void __launch_bounds__(LONG_THREADS, 3) moegraph_long_chain_kernel(const moegraph_chain_args a) {
    typedef moegraph_columns<S> layout;
    __shared__ long_rows<S> shared[2];

    const int slot = moegraph_wait_for_slot(a);

    const int head     = blockIdx.x;
    const int n_head   = gridDim.x;
    const int sequence = blockIdx.y;
    const int column0  = blockIdx.z*long_cols<S>;
    const int team     = threadIdx.x/MOEGRAPH_COLUMN_LANES;
    const int lane     = threadIdx.x % MOEGRAPH_COLUMN_LANES;

    const int64_t first  = (int64_t) sequence*a.n_tokens*n_head + head; // of the gates; the others have S for each
    const int64_t stride = (int64_t) n_head*S;
    float * out = a.dst + first*S + column0 + team;
    const bool there  = slot >= 0 && slot < a.n_slots;
    const int  n_rows = !there ? 0 : ragged ? moegraph_n_rows(a.lengths, sequence, a.n_tokens) : a.n_tokens;
    for (int t = n_rows + lane; t < a.n_tokens; t += MOEGRAPH_COLUMN_LANES) {
#pragma unroll
        for (int o = 0; o < long_own<S>; ++o) {
            out[t*stride + o*LONG_TEAMS] = 0.0f;
        }
    }
    if (n_rows == 0) {
        return;
    }

    float * state = a.pool + slot*a.pool_s + ((int64_t) head*S + column0 + team)*S;
    float s[long_own<S>][layout::n];
#pragma unroll
    for (int o = 0; o < long_own<S>; ++o) {
#pragma unroll
        for (int e = 0; e < layout::n; ++e) {
            s[o][e] = state[o*LONG_TEAMS*S + layout::index(lane, e)];
        }
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

        const int n = n_rows - begin;
        float results[long_own<S>];
        if (n >= LONG_ROWS) {
            long_walk<S, true>(rows, s, results, team, lane, n);
        } else {
            long_walk<S, false>(rows, s, results, team, lane, n);
        }
        if (lane < n) {
#pragma unroll
            for (int o = 0; o < long_own<S>; ++o) {
                out[(begin + lane)*stride + o*LONG_TEAMS] = results[o] * a.scale;
            }
        }
    }

#pragma unroll
    for (int o = 0; o < long_own<S>; ++o) {
#pragma unroll
        for (int e = 0; e < layout::n; ++e) {
            state[o*LONG_TEAMS*S + layout::index(lane, e)] = s[o][e];
        }
    }
}

template <int S>
void moegraph_long_chain(const moegraph_chain_args & a, const int n_head, const int n_seqs, cudaStream_t stream) {
    const ggml_cuda_kernel_launch_params params(dim3(n_head, n_seqs, S/long_cols<S>), dim3(LONG_THREADS), (size_t) 0, stream);
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
