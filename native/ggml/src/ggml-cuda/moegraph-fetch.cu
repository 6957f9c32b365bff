#include "moegraph-fetch.cuh"

#include "moegraph-fetch.h"
#include "moegraph-rows-types.cuh"
#include "moegraph.h"

// 256 KiB on their way keep PCIe 5.0 busy; more blocks would take multiprocessors from what runs beside.
constexpr int MOEGRAPH_FETCH_BLOCKS  = 16;
constexpr int MOEGRAPH_FETCH_THREADS = 256;
constexpr int MOEGRAPH_FETCH_LOADS   = 4;
constexpr int MOEGRAPH_FETCH_TABLE   = 512; // rows of a table that are read ahead

static_assert(MOEGRAPH_FETCH_IDS <= MOEGRAPH_FETCH_THREADS, "a thread for each id");

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

// Every block finds out the same. Where nothing is missing this is a look-up, and the next kernel may start at once.
// Where something is, none may before the last byte is there: products read `to` as constant (ld.global.nc).
// early: the table and the victims, which no kernel writes, are read while the preceding one runs.
__launch_bounds__(MOEGRAPH_FETCH_THREADS)
static __global__ void moegraph_fetch_kernel(const moegraph_fetch_args args) {
    __shared__ int32_t ids[MOEGRAPH_FETCH_IDS];
    __shared__ int32_t rows[MOEGRAPH_FETCH_IDS];
    __shared__ bool    fetched[MOEGRAPH_FETCH_IDS];
    __shared__ int32_t victims[2*MOEGRAPH_FETCH_IDS];
    __shared__ int32_t table[MOEGRAPH_FETCH_TABLE];

    const int  tid     = threadIdx.x;
    const bool in_smem = args.n <= MOEGRAPH_FETCH_TABLE && args.n_victims <= MOEGRAPH_FETCH_IDS;
    int32_t    id      = -1;
    if (!args.early) {
        ggml_cuda_pdl_sync();
        if (tid < args.n_ids) {
            id = args.ids[tid]; // on its way with the rest
        }
    }
    for (int i = tid; in_smem && i < args.n; i += MOEGRAPH_FETCH_THREADS) {
        table[i] = __ldcg(args.table + i);
    }
    for (int i = tid; in_smem && i < 2*args.n_victims; i += MOEGRAPH_FETCH_THREADS) {
        victims[i] = __ldcg(args.victims + i);
    }
    __syncthreads();
    if (args.early) {
        ggml_cuda_pdl_sync();
        if (tid < args.n_ids) {
            id = args.ids[tid];
        }
    }
    bool miss = false;
    if (tid < args.n_ids) {
        const bool known = id >= 0 && id < args.n;
        ids[tid]  = id;
        rows[tid] = !known ? -1 : in_smem ? table[id] : args.table[id];
        miss = known && rows[tid] < 0;
    }
    if (__syncthreads_or(miss)) {
        if (tid == 0) {
            moegraph_fetch_assign(ids, args.n_ids, args.n, in_smem ? victims : args.victims, args.n_victims, args.n_to,
                rows, fetched);
        }
        __syncthreads();
        constexpr int step = MOEGRAPH_FETCH_BLOCKS*MOEGRAPH_FETCH_THREADS;
        for (int e = 0; e < args.n_ids; ++e) {
            if (!fetched[e]) {
                continue;
            }
            const int4 * src = (const int4 *) (args.from + ids[e]*args.from_stride);
            int4       * out = (int4 *) (args.to + rows[e]*args.to_stride);
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
        args.dst[tid] = rows[tid];
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
