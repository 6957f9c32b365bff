#define _GNU_SOURCE // RTLD_DEFAULT
#include "shim.h"

#include "ggml-backend-impl.h"
#include "ggml-cuda/moegraph-forget.h"
#include "ggml-cuda/moegraph-pin.h"
#include "ggml-impl.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// Reads of memory that the device writes, before the host synchronizes: 10 to 50 ms in all.
#define SPINS 1000000

// A function of libggml-cuda, or NULL if it is not there: this library is linked to it, or Python has loaded it later from a
// package, for all to see, or there is none.
static void * cuda_function(const char * name) {
    return dlsym(RTLD_DEFAULT, name);
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

const char * mg_patchset_built(void) {
    return MOEGRAPH_PATCHSET;
}

const char * mg_llama_commit(void) {
    return MOEGRAPH_LLAMA_COMMIT;
}

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static char last_error[512];
static int  failed_device = -1; // of a CUDA call that failed, after which ggml aborts
static int  log_verbose;

static void on_log(enum ggml_log_level level, const char * text, void * user_data) {
    (void) user_data;
    if (log_verbose) {
        fputs(text, stderr);
    }
    if (level != GGML_LOG_LEVEL_ERROR) {
        return;
    }
    pthread_mutex_lock(&log_lock);
    // the first line of a failed CUDA call says what happened, the next ones where
    const bool is_where = sscanf(text, " current device: %d", &failed_device) == 1;
    if (!is_where && (failed_device < 0 || text[0] != ' ')) {
        snprintf(last_error, sizeof(last_error), "%s", text);
        last_error[strcspn(last_error, "\n")] = '\0';
    }
    pthread_mutex_unlock(&log_lock);
}

// If this returned, ggml_abort would call abort(): a core dump and a bare "Aborted" tell a user nothing.
static void on_abort(const char * message) {
    char where[32] = "";
    if (failed_device >= 0) {
        snprintf(where, sizeof(where), "cuda:%d: ", failed_device);
    }
    if (last_error[0] != '\0') {
        fprintf(stderr, "moegraph: %snative failure: %.400s: %.500s\n", where, last_error, message);
    } else {
        fprintf(stderr, "moegraph: %snative failure: %.900s\n", where, message);
    }
    fflush(stderr);
    _exit(4);
}

void mg_install_callbacks(int verbose) {
    log_verbose = verbose;
    ggml_log_set(on_log, NULL);
    ggml_set_abort_callback(on_abort);
}

size_t mg_last_error(char * out, size_t size) {
    pthread_mutex_lock(&log_lock);
    const int n = snprintf(out, size, "%s", last_error);
    last_error[0] = '\0';
    pthread_mutex_unlock(&log_lock);
    return n < 0 ? 0 : (size_t) n;
}

int mg_ids_where(bool (*is)(const void * vocab, int32_t id), const void * vocab, int n, int32_t * out) {
    int n_found = 0;
    for (int32_t id = 0; id < n; id++) {
        if (is(vocab, id)) {
            out[n_found++] = id;
        }
    }
    return n_found;
}

static bool cancel_requested(void * data) {
    return *(volatile int32_t *) data != 0;
}

void mg_cancel_bind(ggml_backend_t backend_cpu, volatile int32_t * flag) {
    ggml_backend_cpu_set_abort_callback(backend_cpu, flag ? cancel_requested : NULL, (void *) flag);
}

// A request of the backend: `tensor` must stay allocated until the node `until`, number `at`, has been computed.
struct keep {
    struct ggml_tensor * tensor;
    struct ggml_tensor * until;
    int at;
};

struct keep_list {
    struct keep * items;
    size_t n;
    size_t capacity;
};

static void on_keep(void * user_data, struct ggml_tensor * tensor, struct ggml_tensor * until) {
    struct keep_list * list = (struct keep_list *) user_data;
    if (list->n == list->capacity) {
        const size_t capacity = list->capacity ? 2*list->capacity : 256;
        struct keep * items = (struct keep *) realloc(list->items, capacity*sizeof(struct keep));
        GGML_ASSERT(items != NULL);
        list->items    = items;
        list->capacity = capacity;
    }
    list->items[list->n++] = (struct keep) { tensor, until, -1 };
}

static int by_node(const void * a, const void * b) {
    return ((const struct keep *) a)->at - ((const struct keep *) b)->at;
}

// Requests come nearly in node order, so each search starts where the previous one ended. A request whose `until` is not
// in the graph (upstream may look one past the end) keeps at = -1 and is dropped.
static void locate_keeps(const struct ggml_cgraph * graph, struct keep_list * list) {
    int from = 0;
    for (size_t k = 0; k < list->n; k++) {
        for (int step = 0; step < graph->n_nodes; step++) {
            const int i = (from + step) % graph->n_nodes;
            if (graph->nodes[i] == list->items[k].until) {
                list->items[k].at = from = i;
                break;
            }
        }
    }
    qsort(list->items, list->n, sizeof(struct keep), by_node);
}

// The graph that the allocator sees: the same nodes, and after each `until` node a view of `tensor`, which counts as one
// more use of it.
static struct ggml_cgraph * with_keeps(struct ggml_context * ctx, struct ggml_cgraph * graph, const struct keep_list * list) {
    struct ggml_cgraph * copy = ggml_new_graph_custom(ctx, graph->n_nodes + graph->n_leafs + list->n, false);
    size_t k = 0;
    while (k < list->n && list->items[k].at < 0) {
        k++;
    }
    for (int i = 0; i < graph->n_leafs; i++) {
        copy->leafs[copy->n_leafs++] = graph->leafs[i];
    }
    for (int i = 0; i < graph->n_nodes; i++) {
        copy->nodes[copy->n_nodes++] = graph->nodes[i];
        for (; k < list->n && list->items[k].at == i; k++) {
            struct ggml_tensor * use = ggml_view_tensor(ctx, list->items[k].tensor);
            use->src[0] = list->items[k].tensor;
            copy->nodes[copy->n_nodes++] = use;
        }
    }
    return copy;
}

bool mg_graph_alloc(ggml_gallocr_t galloc, ggml_backend_t backend, struct ggml_context * ctx, struct ggml_cgraph * graph) {
    struct keep_list list = { NULL, 0, 0 };
    if (backend->iface.graph_optimize) {
        struct ggml_backend_graph_optimize_params params = { on_keep, &list };
        backend->iface.graph_optimize(backend, graph, &params);
    }
    locate_keeps(graph, &list);
    struct ggml_cgraph * seen = list.n ? with_keeps(ctx, graph, &list) : graph;
    const bool ok = ggml_gallocr_alloc_graph(galloc, seen);
    free(list.items);
    graph->uid = ggml_graph_next_uid();
    return ok;
}

struct ggml_tensor * mg_graph_unsupported(ggml_backend_t backend, const struct ggml_cgraph * graph) {
    for (int i = 0; i < graph->n_nodes; i++) {
        if (!ggml_backend_supports_op(backend, graph->nodes[i])) {
            return graph->nodes[i];
        }
    }
    return NULL;
}

void mg_graph_forget(ggml_backend_t backend, const struct ggml_cgraph * graph) {
    const __typeof__(&moegraph_forget_graph) forget = (__typeof__(forget)) cuda_function("moegraph_forget_graph");
    if (forget != NULL && graph->n_nodes > 0) {
        forget(backend, graph->nodes[0]);
    }
}

bool mg_pin(ggml_backend_t backend, void * data, size_t size) {
    const __typeof__(&moegraph_pin) pin = (__typeof__(pin)) cuda_function("moegraph_pin");
    return pin != NULL && pin(backend, data, size);
}

void mg_unpin(void * data) {
    ((__typeof__(&moegraph_unpin)) cuda_function("moegraph_unpin"))(data);
}

static void enqueue_reads(ggml_backend_t backend, const struct mg_readback * reads, int n_reads) {
    for (int i = 0; i < n_reads; i++) {
        ggml_backend_tensor_get_async(backend, reads[i].src, reads[i].dst, 0, reads[i].size);
    }
}

enum ggml_status mg_launch(ggml_backend_t backend, struct ggml_cgraph * graph, const struct mg_readback * reads, int n_reads) {
    const enum ggml_status status = ggml_backend_graph_compute_async(backend, graph);
    if (status == GGML_STATUS_SUCCESS) {
        enqueue_reads(backend, reads, n_reads);
    }
    return status;
}

static bool ids_arrived(const int32_t * ids, int n) {
    for (int i = n - 1; i >= 0; i--) {
        if (__atomic_load_n(&ids[i], __ATOMIC_ACQUIRE) == MG_NO_ID) {
            return false;
        }
    }
    return true;
}

bool mg_wait_ids(ggml_backend_t backend, const int32_t * ids, int n) {
    for (int i = 0; i < SPINS; i++) {
        if (ids_arrived(ids, n)) {
            return true;
        }
        relax();
    }
    // a long prompt, or a device that failed: synchronize to find out
    ggml_backend_synchronize(backend);
    return ids_arrived(ids, n);
}

void mg_get_pieces(ggml_backend_t backend, const struct mg_piece * pieces, int n) {
    for (int i = 0; i < n; i++) {
        const struct mg_piece * p = &pieces[i];
        ggml_backend_tensor_get_async(backend, p->src, p->dst, p->offset, p->size);
    }
}

void mg_move_bytes(const struct mg_move * moves, int n) {
    for (int i = 0; i < n; i++) {
        memcpy(moves[i].dst, moves[i].src, moves[i].size);
    }
}

void mg_copy_across(ggml_backend_t source, ggml_backend_t target, const struct ggml_tensor * from, size_t from_offset,
        const struct ggml_tensor * to, size_t to_offset, size_t size) {
    // ggml copies only tensors, so describe the bytes as two; ggml keeps no pointer to them
    struct ggml_tensor tensors[2] = { *from, *to };
    const size_t offsets[2] = { from_offset, to_offset };
    for (int i = 0; i < 2; i++) {
        struct ggml_tensor * t = &tensors[i];
        GGML_ASSERT(offsets[i] + size <= ggml_nbytes(t));
        t->type = GGML_TYPE_I8;
        t->data = (char *) t->data + offsets[i];
        for (int d = 0; d < GGML_MAX_DIMS; d++) {
            t->ne[d] = d == 0 ? (int64_t) size : 1;
            t->nb[d] = d == 0 ? 1 : size;
        }
    }
    ggml_backend_tensor_copy_async(source, target, &tensors[0], &tensors[1]);
}

void mg_copy_bytes(ggml_backend_t backend, const struct ggml_tensor * from, size_t from_offset,
        const struct ggml_tensor * to, size_t to_offset, size_t size) {
    mg_copy_across(backend, backend, from, from_offset, to, to_offset, size);
}

void mg_copy_experts(ggml_backend_t backend, const struct ggml_tensor * from, const struct ggml_tensor * to,
        const int32_t * pairs, int n, size_t stride, size_t size) {
    for (int i = 0; i < n; i++) {
        mg_copy_bytes(backend, from, (size_t) pairs[2 * i] * stride, to, (size_t) pairs[2 * i + 1] * stride, size);
    }
}

enum ggml_status mg_upload_launch(ggml_backend_t compute, ggml_backend_t upload,
        struct ggml_tensor * slots, const void * numbers, size_t size,
        ggml_backend_event_t ev_free, ggml_backend_event_t ev_uploaded, struct ggml_cgraph * graph) {
    ggml_backend_tensor_set_async(compute, slots, numbers, 0, size);
    if (ev_uploaded) {
        ggml_backend_event_record(ev_uploaded, upload);
        ggml_backend_event_wait(compute, ev_uploaded);
    }
    const enum ggml_status status = ggml_backend_graph_compute_async(compute, graph);
    if (ev_free && status == GGML_STATUS_SUCCESS) {
        ggml_backend_event_record(ev_free, compute);
    }
    return status;
}

void mg_upload_experts(ggml_backend_t upload, struct ggml_tensor * memory, const void * base, size_t stride,
        const int32_t * pairs, int n, size_t slot_stride, size_t size, int times) {
    for (int i = 0; i < n; i++) {
        const char * from = (const char *) base + (size_t) pairs[2 * i] * stride;
        for (int at = 0; at < times; at++) {
            ggml_backend_tensor_set_async(upload, memory, from, (size_t) pairs[2 * i + 1] * slot_stride, size);
        }
    }
}

void mg_rows_to_float(ggml_to_float_t to_float, const void * base, size_t row_bytes, const int32_t * tokens, int n,
        int64_t n_embd, float * out) {
    for (int i = 0; i < n; i++) {
        to_float((const char *) base + (size_t) tokens[i] * row_bytes, out + i * n_embd, n_embd);
    }
}
