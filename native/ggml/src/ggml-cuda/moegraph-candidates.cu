#include "moegraph-candidates.cuh"

#include "moegraph-candidates.h"

constexpr int MOEGRAPH_CAND_THREADS = 256;
constexpr int MOEGRAPH_CAND_WARPS   = MOEGRAPH_CAND_THREADS/32;
constexpr int MOEGRAPH_CAND_BLOCKS  = 64; // of a row
constexpr int MOEGRAPH_CAND_MAXIMA  = 32*MOEGRAPH_CAND_BLOCKS;
constexpr int MOEGRAPH_CAND_COLUMNS = MOEGRAPH_CANDIDATES_COLUMNS;

// Block b reads the ids whose number of 32 is b modulo the number of blocks. So the ids of a block and a lane are one
// column, and neighbours, which are often alike, are in different ones.
static_assert(MOEGRAPH_CAND_MAXIMA % MOEGRAPH_CAND_COLUMNS == 0, "a column is some blocks and a lane");
static_assert(MOEGRAPH_CAND_COLUMNS == MOEGRAPH_CAND_THREADS, "each thread has a column");

struct moegraph_token {
    float value;
    int   id;
};

// Tokens that reach a floor, in any order. n also counts those that have no room.
struct moegraph_found {
    float          floor;
    int            n;
    moegraph_token tokens[MOEGRAPH_CANDIDATES];
};

// What the kernels hand on, for each row: [0] of logits, [1] of scores.
struct moegraph_cand_work {
    float          maxima[2][MOEGRAPH_CAND_MAXIMA];
    float          sums[MOEGRAPH_CAND_BLOCKS];
    float          largest;
    moegraph_found found[2];
};

static __device__ __forceinline__ float moegraph_score(const moegraph_draw & draw, const float logit, const int id) {
    const uint64_t key = (uint64_t) draw.key[1] << 32 | draw.key[0];
    const float    v   = ((float) (moegraph_random(key, (uint32_t) id) >> 11) + 0.5f)*0x1p-53f;
    // two kernels must round alike: not as a compiler combines products and sums
    return fmaf(logit, draw.inv_temperature, -logf(-log1pf(-fminf(v, 0x1.fffffep-1f))));
}

// The largest logit and the largest score of each lane of a block.
static __global__ void moegraph_cand_maxima(
        const float * logits, const moegraph_draw * draws, moegraph_cand_work * work, const int n) {
    __shared__ float maxima[2][MOEGRAPH_CAND_WARPS][32];
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const int     lane = threadIdx.x % 32, warp = threadIdx.x/32;
    const float * row  = logits + (int64_t) blockIdx.y*n;
    const moegraph_draw & draw = draws[blockIdx.y];
    const bool    scores = draw.inv_temperature > 0.0f;

    float best = -INFINITY, best_score = -INFINITY;
    for (int64_t i = 32*(blockIdx.x + MOEGRAPH_CAND_BLOCKS*warp) + lane; i < n; i += 32*MOEGRAPH_CAND_BLOCKS*MOEGRAPH_CAND_WARPS) {
        const float logit = row[i];
        best = fmaxf(best, logit);
        if (scores) {
            best_score = fmaxf(best_score, moegraph_score(draw, logit, (int) i));
        }
    }
    maxima[0][warp][lane] = best;
    maxima[1][warp][lane] = best_score;
    __syncthreads();
    if (warp < 2) {
        best = maxima[warp][0][lane];
        for (int w = 1; w < MOEGRAPH_CAND_WARPS; ++w) {
            best = fmaxf(best, maxima[warp][w][lane]);
        }
        work[blockIdx.y].maxima[warp][32*blockIdx.x + lane] = best;
        if (blockIdx.x == 0 && lane == 0) {
            work[blockIdx.y].found[warp].n = 0;
        }
    }
}

// The n-th largest maximum of a column; every thread gets it. largest: of all.
static __device__ float moegraph_cand_floor(const float * maxima, const int n, float & largest) {
    __shared__ __align__(16) float columns[MOEGRAPH_CAND_COLUMNS];
    __shared__ float lowest[MOEGRAPH_CAND_WARPS], highest[MOEGRAPH_CAND_WARPS];
    const int tid = threadIdx.x;
    float own = maxima[tid];
#pragma unroll
    for (int j = tid + MOEGRAPH_CAND_COLUMNS; j < MOEGRAPH_CAND_MAXIMA; j += MOEGRAPH_CAND_COLUMNS) {
        own = fmaxf(own, maxima[j]);
    }
    columns[tid] = own;
    __syncthreads();
    int n_larger = 0;
    const float4 * quads = (const float4 *) columns;
#pragma unroll 8
    for (int q = 0; q < MOEGRAPH_CAND_COLUMNS/4; ++q) {
        const float4 other = quads[q];
        n_larger += (other.x > own) + (other.y > own) + (other.z > own) + (other.w > own);
    }
    // those with fewer than n larger ones are the first n in order, and what equals the n-th
    float low = n_larger < n ? own : INFINITY, high = own;
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
        low  = fminf(low,  __shfl_xor_sync(0xFFFFFFFF, low,  offset));
        high = fmaxf(high, __shfl_xor_sync(0xFFFFFFFF, high, offset));
    }
    if (tid % 32 == 0) {
        lowest[tid/32]  = low;
        highest[tid/32] = high;
    }
    __syncthreads();
    largest = highest[0];
    for (int w = 0; w < MOEGRAPH_CAND_WARPS; ++w) {
        low     = fminf(low, lowest[w]);
        largest = fmaxf(largest, highest[w]);
    }
    __syncthreads(); // the next call writes here
    return low;
}

static __device__ __forceinline__ void moegraph_cand_add(moegraph_found & found, const float value, const int id) {
    const int at = atomicAdd(&found.n, 1);
    if (at < MOEGRAPH_CANDIDATES) {
        found.tokens[at] = { value, id };
    }
}

static __device__ float moegraph_cand_block_sum(float sum) {
    __shared__ float warps[MOEGRAPH_CAND_WARPS];
    sum = warp_reduce_sum(sum);
    if (threadIdx.x % 32 == 0) {
        warps[threadIdx.x/32] = sum;
    }
    __syncthreads();
    sum = 0.0f;
    for (int w = 0; w < MOEGRAPH_CAND_WARPS; ++w) {
        sum += warps[w];
    }
    return sum;
}

// Every block finds the same floors, and lists which of its tokens reach them.
static __global__ void moegraph_cand_collect(
        const float * logits, const moegraph_draw * draws, moegraph_cand_work * work, const int n) {
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const int     lane = threadIdx.x % 32, warp = threadIdx.x/32;
    const float * row  = logits + (int64_t) blockIdx.y*n;
    const moegraph_draw & draw   = draws[blockIdx.y];
    moegraph_cand_work  & result = work[blockIdx.y];
    const bool    scores = draw.inv_temperature > 0.0f;

    float largest, unused;
    float floor = moegraph_cand_floor(result.maxima[0], MOEGRAPH_LIKELY, largest);
    float early = scores ? moegraph_cand_floor(result.maxima[1], MOEGRAPH_CANDIDATES_EARLY, unused) : INFINITY;
    if (scores) {
        early -= 1e-5f*(1.0f + fabsf(early)); // if a score of the other kernel still differs in its last bits
    }
    if (n <= MOEGRAPH_CANDIDATES) {
        floor = -INFINITY;
    }
    float sum = 0.0f;
    for (int64_t i = 32*(blockIdx.x + MOEGRAPH_CAND_BLOCKS*warp) + lane; i < n; i += 32*MOEGRAPH_CAND_BLOCKS*MOEGRAPH_CAND_WARPS) {
        const float logit = row[i];
        // not by arithmetic: fast math may assume that it gives no NaN
        const bool is_finite = (__float_as_uint(logit) & 0x7F800000u) != 0x7F800000u;
        sum += is_finite ? expf(logit - largest) : __uint_as_float(0x7FC00000u);
        if (logit >= floor) {
            moegraph_cand_add(result.found[0], logit, (int) i);
        }
        if (scores) {
            const float score = moegraph_score(draw, logit, (int) i);
            if (score >= early) {
                moegraph_cand_add(result.found[1], score, (int) i);
            }
        }
    }
    sum = moegraph_cand_block_sum(sum);
    if (threadIdx.x == 0) {
        result.sums[blockIdx.x] = sum;
        if (blockIdx.x == 0) {
            result.found[0].floor = floor;
            result.found[1].floor = early;
            result.largest = largest;
        }
    }
}

// The rank of a token in its list, of n tokens in shared memory.
static __device__ __forceinline__ int moegraph_cand_rank(const moegraph_token * tokens, const int n, const moegraph_token own) {
    int rank = 0;
    for (int i = 0; i < n; ++i) {
        rank += moegraph_is_before(tokens[i].value, tokens[i].id, own.value, own.id);
    }
    return rank;
}

// Sorts both lists, adds up the sums, and looks up the logits that are wanted.
static __global__ void moegraph_cand_finish(const float * logits, const moegraph_draw * draws,
        const moegraph_cand_work * work, moegraph_listed * dst, const int n) {
    __shared__ moegraph_token tokens[MOEGRAPH_CANDIDATES + MOEGRAPH_EARLY];
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    const int     tid = threadIdx.x;
    const float * row = logits + (int64_t) blockIdx.y*n;
    const moegraph_draw      & draw = draws[blockIdx.y];
    const moegraph_cand_work & from = work[blockIdx.y];
    moegraph_listed      & out  = dst[blockIdx.y];

    const int n_likely = from.found[0].n, n_early = from.found[1].n;
    const int n_tokens = n_likely <= MOEGRAPH_CANDIDATES ? n_likely : 0;
    const int n_first  = n_early <= MOEGRAPH_EARLY ? n_early : 0;
    for (int i = tid; i < n_tokens; i += blockDim.x) {
        tokens[i] = from.found[0].tokens[i];
    }
    for (int i = tid; i < n_first; i += blockDim.x) {
        tokens[MOEGRAPH_CANDIDATES + i] = from.found[1].tokens[i];
    }
    __syncthreads();
    for (int i = tid; i < n_tokens; i += blockDim.x) {
        const int rank = moegraph_cand_rank(tokens, n_tokens, tokens[i]);
        out.ids[rank]    = tokens[i].id;
        out.logits[rank] = tokens[i].value;
    }
    const moegraph_token * first = tokens + MOEGRAPH_CANDIDATES;
    for (int i = tid; i < n_first; i += blockDim.x) {
        const int rank = moegraph_cand_rank(first, n_first, first[i]);
        out.early_ids[rank]    = first[i].id;
        out.early_logits[rank] = row[first[i].id];
    }
    for (int i = tid; i < MOEGRAPH_DRAW_IDS; i += blockDim.x) {
        const int id = draw.wanted[i];
        out.wanted[i] = id >= 0 && id < n ? row[id] : __uint_as_float(0x7FC00000u);
    }
    const float total = moegraph_cand_block_sum(tid < MOEGRAPH_CAND_BLOCKS ? from.sums[tid] : 0.0f);
    if (tid == 0) {
        out.total       = total;
        out.largest     = from.largest;
        out.floor       = from.found[0].floor;
        out.n_likely    = n_likely;
        out.early_floor = from.found[1].floor;
        out.n_early     = n_early;
    }
}

// A part of the vocabulary: what is before each early token in the order of logits.
static __global__ void moegraph_cand_above(const float * logits, moegraph_listed * dst, const int n) {
    __shared__ float sums[MOEGRAPH_CAND_WARPS][MOEGRAPH_CANDIDATES_MASSES];
    __shared__ int   counts[MOEGRAPH_CAND_WARPS][MOEGRAPH_CANDIDATES_MASSES];
    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    moegraph_listed & out = dst[blockIdx.y];
    const float * row   = logits + (int64_t) blockIdx.y*n;
    const int     early = out.n_early <= MOEGRAPH_EARLY ? out.n_early : 0;
    if (early == 0) {
        return;
    }
    float values[MOEGRAPH_CANDIDATES_MASSES], sum[MOEGRAPH_CANDIDATES_MASSES];
    int   ids[MOEGRAPH_CANDIDATES_MASSES], count[MOEGRAPH_CANDIDATES_MASSES];
#pragma unroll
    for (int k = 0; k < MOEGRAPH_CANDIDATES_MASSES; ++k) {
        values[k] = k < early ? out.early_logits[k] : INFINITY;
        ids[k]    = k < early ? out.early_ids[k] : 0;
        sum[k]    = 0.0f;
        count[k]  = 0;
    }
    const float largest = out.largest;
    for (int i = blockIdx.x*MOEGRAPH_CAND_THREADS + threadIdx.x; i < n; i += MOEGRAPH_CANDIDATES_PARTS*MOEGRAPH_CAND_THREADS) {
        const float logit  = row[i];
        const float weight = expf(logit - largest);
#pragma unroll
        for (int k = 0; k < MOEGRAPH_CANDIDATES_MASSES; ++k) {
            if (moegraph_is_before(logit, i, values[k], ids[k])) {
                sum[k] += weight;
                ++count[k];
            }
        }
    }
#pragma unroll
    for (int k = 0; k < MOEGRAPH_CANDIDATES_MASSES; ++k) {
        sum[k]   = warp_reduce_sum(sum[k]);
        count[k] = warp_reduce_sum(count[k]);
        if (threadIdx.x % 32 == 0) {
            sums[threadIdx.x/32][k]   = sum[k];
            counts[threadIdx.x/32][k] = count[k];
        }
    }
    __syncthreads();
    if (threadIdx.x < MOEGRAPH_CANDIDATES_MASSES) {
        float total = 0.0f;
        int   n_all = 0;
        for (int w = 0; w < MOEGRAPH_CAND_WARPS; ++w) {
            total += sums[w][threadIdx.x];
            n_all += counts[w][threadIdx.x];
        }
        out.above[blockIdx.x][threadIdx.x]   = total;
        out.n_above[blockIdx.x][threadIdx.x] = n_all;
    }
}

void moegraph_candidates_rows(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const int             n      = (int) dst->src[0]->ne[0];
    const int             n_rows = (int) dst->src[0]->ne[1];
    const float         * logits = (const float *) dst->src[0]->data;
    const moegraph_draw * draws  = (const moegraph_draw *) dst->src[1]->data;
    moegraph_listed * out    = (moegraph_listed *) dst->data;
    cudaStream_t          stream = ctx.stream();
    ggml_cuda_pool_alloc<moegraph_cand_work> work(ctx.pool(), n_rows);

    const dim3 threads(MOEGRAPH_CAND_THREADS);
    const ggml_cuda_kernel_launch_params scan(dim3(MOEGRAPH_CAND_BLOCKS, n_rows), threads, (size_t) 0, stream);
    const ggml_cuda_kernel_launch_params one(dim3(1, n_rows), threads, (size_t) 0, stream);
    const ggml_cuda_kernel_launch_params parts(dim3(MOEGRAPH_CANDIDATES_PARTS, n_rows), threads, (size_t) 0, stream);
    ggml_cuda_kernel_launch(moegraph_cand_maxima, scan, logits, draws, work.get(), n);
    ggml_cuda_kernel_launch(moegraph_cand_collect, scan, logits, draws, work.get(), n);
    ggml_cuda_kernel_launch(moegraph_cand_finish, one, logits, draws, (const moegraph_cand_work *) work.get(), out, n);
    ggml_cuda_kernel_launch(moegraph_cand_above, parts, logits, out, n);
}
