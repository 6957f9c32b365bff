#include "moegraph-context.cuh"
#include "moegraph-match.cuh"
#include "moegraph-publish.cuh"

#include "moegraph.h"

// 1 belongs to the shared expert; rankings have a stream of their own, so that no copy waits for one
constexpr int MOEGRAPH_PUBLISH_STREAM  = 2;
constexpr int MOEGRAPH_RANKING_STREAM  = 3;
constexpr int MOEGRAPH_PUBLISH_PARTS   = 4;
constexpr int MOEGRAPH_PUBLISH_THREADS = 512;

struct moegraph_publish_part {
    const char * src;
    int        * dst;
    int64_t      stride; // bytes from row to row of src
    int          ne0;
    int          n;
};

struct moegraph_publish_args {
    moegraph_publish_part parts[MOEGRAPH_PUBLISH_PARTS];
    int n_parts;
};

static __global__ void moegraph_publish_kernel(const moegraph_publish_args args) {
    for (int p = 0; p < args.n_parts; ++p) {
        const moegraph_publish_part part = args.parts[p];
        if (p > 0) {
            __threadfence_system(); // the host sees what came before
            __syncthreads();
        }
        for (int i = threadIdx.x; i < part.n; i += blockDim.x) {
            const int row = i/part.ne0;
            part.dst[i] = *(const int *) (part.src + row*part.stride + (i - row*part.ne0)*sizeof(int));
        }
    }
}

static moegraph_fork_events & moegraph_publish_get_events(ggml_backend_cuda_context & ctx) {
    moegraph_fork_events & events = moegraph_get_context(ctx).publish;
    if (events.create()) {
        int least, greatest; // one block that the host waits for goes before the many of an expert product
        CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
        for (const int no : { MOEGRAPH_PUBLISH_STREAM, MOEGRAPH_RANKING_STREAM }) {
            cudaStream_t & stream = ctx.streams[ctx.device][no];
            if (stream == nullptr) {
                CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
            }
        }
    }
    return events;
}

// A product of one row and the order of its values, of which the host gets some and nobody else anything: found are its
// two nodes, returned is the copy. 0 if node i does not start one.
static int moegraph_publish_match_ranking(const ggml_cgraph * cgraph, const int i, int found[2]) {
    static const ggml_op ops[3] = { GGML_OP_MUL_MAT, GGML_OP_ARGSORT, GGML_OP_CPY };
    int nodes[3];
    const int last = cgraph->nodes[i]->op == GGML_OP_MUL_MAT ? moegraph_find_ops(cgraph, i, ops, 3, nodes) : -1;
    if (last < 0 || !moegraph_is_published(cgraph, last)) {
        return 0;
    }
    const ggml_tensor * product = cgraph->nodes[i];
    const ggml_tensor * order   = cgraph->nodes[nodes[1]];
    const ggml_tensor * told    = cgraph->nodes[last]->src[0];
    while (told != order && moegraph_is_view_op(told)) {
        told = told->src[0];
    }
    if (told != order || order->src[0] != product || ggml_nrows(product) != 1 ||
            ggml_is_quantized(product->src[0]->type) || !ggml_node_has_n_uses(cgraph, i, 1) ||
            !ggml_node_has_n_uses(cgraph, nodes[1], 1)) {
        return 0;
    }
    found[0] = i;
    found[1] = nodes[1];
    return last;
}

cudaStream_t moegraph_publisher::fork(const int no) {
    const moegraph_fork_events & events = moegraph_publish_get_events(ctx);
    const cudaStream_t stream = ctx.stream(ctx.device, no);
    CUDA_CHECK(cudaEventRecord(events.fork, ctx.stream()));
    CUDA_CHECK(cudaStreamWaitEvent(stream, events.fork));
    forked[no == MOEGRAPH_RANKING_STREAM] = true;
    return stream;
}

void moegraph_publisher::join() {
    for (const int no : { MOEGRAPH_PUBLISH_STREAM, MOEGRAPH_RANKING_STREAM }) {
        bool & open = forked[no == MOEGRAPH_RANKING_STREAM];
        if (open) {
            const moegraph_fork_events & events = moegraph_publish_get_events(ctx);
            CUDA_CHECK(cudaEventRecord(events.join, ctx.stream(ctx.device, no)));
            CUDA_CHECK(cudaStreamWaitEvent(ctx.stream(), events.join));
            open = false;
        }
    }
}

int moegraph_publisher::try_publish(const ggml_cgraph * cgraph, int i, const moegraph_compute compute) {
    if (ctx.curr_stream_no != 0) {
        return 0;
    }
    const int first = i;
    int ranking[2];
    const int copy = moegraph_publish_match_ranking(cgraph, i, ranking);
    if (copy == 0 && !moegraph_is_published(cgraph, i)) {
        return 0;
    }
    const cudaStream_t stream = fork(copy > 0 ? MOEGRAPH_RANKING_STREAM : MOEGRAPH_PUBLISH_STREAM);
    if (copy > 0) {
        ctx.curr_stream_no = MOEGRAPH_RANKING_STREAM;
        for (const int node : ranking) {
            GGML_ASSERT(compute(ctx, cgraph->nodes[node]));
        }
        ctx.curr_stream_no = 0;
        i = copy;
    }
    moegraph_publish_args args;
    args.n_parts = 0;
    while (i < cgraph->n_nodes && args.n_parts < MOEGRAPH_PUBLISH_PARTS && moegraph_is_published(cgraph, i)) {
        const ggml_tensor * node = cgraph->nodes[i++];
        const ggml_tensor * src  = node->src[0];
        moegraph_publish_part & part = args.parts[args.n_parts++];
        part.n      = (int) ggml_nelements(src);
        part.ne0    = ggml_is_contiguous(src) ? part.n : (int) src->ne[0];
        part.stride = src->nb[1];
        part.src    = (const char *) src->data;
        part.dst    = (int *) node->data;
    }
    moegraph_publish_kernel<<<1, MOEGRAPH_PUBLISH_THREADS, 0, stream>>>(args);
    CUDA_CHECK(cudaGetLastError());
    return i - first;
}

void moegraph_publish_keep(const ggml_cgraph * cgraph, const int i, const ggml_backend_graph_optimize_params * params) {
    ggml_tensor * last = cgraph->nodes[cgraph->n_nodes - 1];
    int ranking[2];
    if (moegraph_publish_match_ranking(cgraph, i, ranking)) {
        params->add_alloc_dep(params->user_data, cgraph->nodes[i]->src[1], last);
        for (const int node : ranking) {
            params->add_alloc_dep(params->user_data, cgraph->nodes[node], last);
        }
    } else if (moegraph_is_published(cgraph, i)) {
        params->add_alloc_dep(params->user_data, cgraph->nodes[i]->src[0], last);
    }
}
