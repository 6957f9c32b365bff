#include "moegraph-fetch.cuh"

#include "moegraph-rows-types.cuh"
#include "moegraph.h"

// 256 KiB on their way keep PCIe 5.0 busy; more blocks would take multiprocessors from what runs beside.
constexpr int MOEGRAPH_FETCH_BLOCKS  = 16;
constexpr int MOEGRAPH_FETCH_THREADS = 256;
constexpr int MOEGRAPH_FETCH_WARPS   = MOEGRAPH_FETCH_THREADS/WARP_SIZE;
constexpr int MOEGRAPH_FETCH_LOADS   = 4;
constexpr int MOEGRAPH_FETCH_TABLE   = 512; // rows of a table that are read ahead

static_assert(MOEGRAPH_FETCH_IDS == MOEGRAPH_FETCH_THREADS, "a thread for each id and for each victim");

struct moegraph_fetch_args {
    const int32_t * table;
    const int32_t * ids;
    const int32_t * victims;
    const char    * from;
    char          * to;
    int32_t       * dst;
    int64_t         n;           // of the table
    int64_t         from_stride; // bytes
    int64_t         to_stride;
    int             n_ids;
    int             n_victims;
    int             n_to;  // rows of `to`
    int             n_vec; // 16 bytes each, of a row
    bool            early;
};

struct moegraph_fetch_shared {
    alignas(16) int32_t ids[MOEGRAPH_FETCH_IDS]; // -1 behind the last one
    int32_t rows[MOEGRAPH_FETCH_IDS];
    int32_t victims[2*MOEGRAPH_FETCH_IDS];
    int32_t table[MOEGRAPH_FETCH_TABLE];
    int32_t usable[MOEGRAPH_FETCH_IDS];  // victims that no id needs, in order
    int32_t fetched[MOEGRAPH_FETCH_IDS]; // places of the ids that are fetched, in order
    int     counts[MOEGRAPH_FETCH_WARPS];
};

// Returns the first place of an id among all of them, or MOEGRAPH_FETCH_IDS.
static __device__ __forceinline__ int moegraph_fetch_find(const moegraph_fetch_shared & s, const int n_ids, const int32_t id) {
    int first = MOEGRAPH_FETCH_IDS;
    for (int i = 0; i < n_ids; i += 4) {
        const int4 four = *(const int4 *) (s.ids + i); // the same for all threads: one read
        const int  at   = four.x == id ? i : four.y == id ? i + 1 : four.z == id ? i + 2 :
                          four.w == id ? i + 3 : MOEGRAPH_FETCH_IDS;
        first = min(first, at);
    }
    return first;
}

// Returns how many threads before this one have `here`, and in `total` how many of the block have.
static __device__ __forceinline__ int moegraph_fetch_rank(moegraph_fetch_shared & s, const bool here, int & total) {
    const int      lane  = threadIdx.x % WARP_SIZE;
    const int      warp  = threadIdx.x / WARP_SIZE;
    const unsigned mask  = __ballot_sync(0xFFFFFFFF, here);
    if (lane == 0) {
        s.counts[warp] = __popc(mask);
    }
    __syncthreads();
    int rank = __popc(mask & ((1u << lane) - 1));
    total = 0;
#pragma unroll
    for (int w = 0; w < MOEGRAPH_FETCH_WARPS; ++w) {
        rank  += w < warp ? s.counts[w] : 0;
        total += s.counts[w];
    }
    __syncthreads(); // the counts may be written again
    return rank;
}

// The rule of moegraph_fetch_rows (moegraph.h) with a thread for each id and each victim: sets rows and fetched for the
// ids that are missing, and returns how many are fetched. Keep in step with moegraph_fetch_assign (CPU), with
// moegraph_router_find_slots and with LayerSlots.commit_fetched (moegraph/experts/slots.py), which records what a graph has fetched.
static __device__ int moegraph_fetch_assign(moegraph_fetch_shared & s, const moegraph_fetch_args & args, const bool miss) {
    const int tid = threadIdx.x;
    int row = -1, held = -1;
    if (tid < args.n_victims) {
        row  = s.victims[2*tid];
        held = s.victims[2*tid + 1];
    }
    // no place for an id below 0: a victim that holds nothing is needed by none
    const bool spare = row >= 0 && row < args.n_to &&
        (held < 0 || moegraph_fetch_find(s, args.n_ids, held) == MOEGRAPH_FETCH_IDS);
    int n_usable, n_missing;
    const int place = moegraph_fetch_rank(s, spare, n_usable);
    if (spare) {
        s.usable[place] = row;
    }
    const int first = miss ? moegraph_fetch_find(s, args.n_ids, s.ids[tid]) : -1;
    const int rank  = moegraph_fetch_rank(s, miss && first == tid, n_missing);
    const int n_fetched = min(n_usable, n_missing);
    if (miss && first == tid && rank < n_fetched) {
        s.rows[tid]     = s.usable[rank];
        s.fetched[rank] = tid;
    }
    __syncthreads();
    if (miss && first < tid) {
        s.rows[tid] = s.rows[first]; // another id fetches it
    }
    __syncthreads();
    return n_fetched;
}

// Every block finds out the same. Where nothing is missing this is a look-up, and the next kernel may start at once.
// Where something is, none may before the last byte is there: products read `to` as constant (ld.global.nc).
// early: the table and the victims, which no kernel writes, are read while the preceding one runs.
__launch_bounds__(MOEGRAPH_FETCH_THREADS)
static __global__ void moegraph_fetch_kernel(const moegraph_fetch_args args) {
    __shared__ moegraph_fetch_shared s;

    const int  tid     = threadIdx.x;
    const bool in_smem = args.n <= MOEGRAPH_FETCH_TABLE;
    int32_t    id      = -1;
    if (!args.early) {
        ggml_cuda_pdl_sync();
        if (tid < args.n_ids) {
            id = args.ids[tid]; // on its way with the rest
        }
    }
    for (int i = tid; in_smem && i < args.n; i += MOEGRAPH_FETCH_THREADS) {
        s.table[i] = __ldcg(args.table + i);
    }
    for (int i = tid; i < 2*args.n_victims; i += MOEGRAPH_FETCH_THREADS) {
        s.victims[i] = __ldcg(args.victims + i);
    }
    __syncthreads();
    if (args.early) {
        ggml_cuda_pdl_sync();
        if (tid < args.n_ids) {
            id = args.ids[tid];
        }
    }
    const bool known = id >= 0 && id < args.n;
    const int  row   = !known ? -1 : in_smem ? s.table[id] : args.table[id];
    const bool miss  = known && row < 0;
    s.ids[tid]  = id;
    s.rows[tid] = max(row, -1);
    if (__syncthreads_or(miss)) {
        const int n_fetched = moegraph_fetch_assign(s, args, miss);
        constexpr int step = MOEGRAPH_FETCH_BLOCKS*MOEGRAPH_FETCH_THREADS;
        for (int f = 0; f < n_fetched; ++f) {
            const int    e   = s.fetched[f];
            const int4 * src = (const int4 *) (args.from + s.ids[e]*args.from_stride);
            int4       * out = (int4 *) (args.to + s.rows[e]*args.to_stride);
            for (int i = blockIdx.x*MOEGRAPH_FETCH_THREADS + tid; i < args.n_vec; i += MOEGRAPH_FETCH_LOADS*step) {
                int4 v[MOEGRAPH_FETCH_LOADS];
#pragma unroll
                for (int l = 0; l < MOEGRAPH_FETCH_LOADS; ++l) {
                    if (i + l*step < args.n_vec) {
                        v[l] = __ldcs(src + i + l*step);
                    }
                }
#pragma unroll
                for (int l = 0; l < MOEGRAPH_FETCH_LOADS; ++l) {
                    if (i + l*step < args.n_vec) {
                        out[i + l*step] = v[l];
                    }
                }
            }
        }
    } else {
        ggml_cuda_pdl_lc();
    }
    if (blockIdx.x == 0 && tid < args.n_ids) {
        args.dst[tid] = s.rows[tid];
    }
}

void moegraph_fetch_rows(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * table   = dst->src[0];
    const ggml_tensor * ids     = dst->src[1];
    const ggml_tensor * victims = dst->src[2];
    const ggml_tensor * from    = dst->src[3];
    const ggml_tensor * to      = dst->src[4];
    GGML_ASSERT((uintptr_t) from->data % 16 == 0 && (uintptr_t) to->data % 16 == 0);

    moegraph_fetch_args args;
    args.table       = (const int32_t *) table->data;
    args.ids         = (const int32_t *) ids->data;
    args.victims     = (const int32_t *) victims->data;
    args.from        = (const char *) from->data;
    args.to          = (char *) to->data;
    args.dst         = (int32_t *) dst->data;
    args.n           = table->ne[1];
    args.from_stride = from->nb[1];
    args.to_stride   = to->nb[1];
    args.n_ids       = (int) ids->ne[0];
    args.n_victims   = (int) victims->ne[1];
    args.n_to        = (int) to->ne[1];
    args.n_vec       = (int) (from->ne[0]/4);
    const int cc     = ggml_cuda_info().devices[ctx.device].cc;
    args.early       = GGML_CUDA_CC_IS_NVIDIA(cc) && cc >= GGML_CUDA_CC_HOPPER && // no kernel starts early elsewhere
        moegraph_is_constant(table) && moegraph_is_constant(victims);

    const ggml_cuda_kernel_launch_params params(MOEGRAPH_FETCH_BLOCKS, MOEGRAPH_FETCH_THREADS, 0, ctx.stream());
    ggml_cuda_kernel_launch(moegraph_fetch_kernel, params, args);
}
