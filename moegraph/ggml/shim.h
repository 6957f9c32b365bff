// The C side of moegraph.ggml: what would otherwise be many calls, or needs ggml's internal headers.
//
// Threads: one engine thread owns every handle. Nothing here calls back into Python, so the interpreter
// lock can stay released for the whole call. The one exception to "one thread" is the cancel flag of
// mg_cancel_bind, an aligned 32-bit word that any thread or signal handler may set.

#pragma once

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "moegraph.h"

#ifdef __cplusplus
extern "C" {
#endif

// Patch set this extension was built for, and the one of the libggml-base that is loaded.
const char * mg_patchset_built(void);
const char * mg_patchset_loaded(void);
// The commit of llama.cpp that was patched: vendor/pin.json's.
const char * mg_llama_commit(void);

// Copy `size` bytes of a tensor to host memory that stays valid until the read has finished.
struct mg_readback {
    const struct ggml_tensor * src;
    void * dst;
    size_t size;
};

// Keep ggml's last error line for mg_last_error instead of printing it, and turn ggml's abort into one line
// and exit status 4. `verbose` passes every log line through to stderr.
void   mg_install_callbacks(int verbose);
size_t mg_last_error(char * out, size_t size);

// The CPU backend stops between two nodes once *flag is not zero; the launch then returns GGML_STATUS_ABORTED.
void mg_cancel_bind(ggml_backend_t backend_cpu, volatile int32_t * flag);

// Allocate a graph's intermediates as ggml's scheduler would: the backend may reorder nodes for fusion and may
// ask that tensors outlive their last use; both are honoured. Sets a fresh uid, so that an unchanged graph is
// replayed without comparing its nodes.
// ctx needs room for the extra nodes.
bool mg_graph_alloc(ggml_gallocr_t galloc, ggml_backend_t backend, struct ggml_context * ctx, struct ggml_cgraph * graph);

// Enqueue a graph and, behind it on the same stream, its read-backs.
enum ggml_status mg_launch(ggml_backend_t backend, struct ggml_cgraph * graph, const struct mg_readback * reads, int n_reads);

// What the host writes where ids shall arrive: no router chooses it.
#define MG_NO_ID INT32_MIN

// Watch host memory until a graph on `backend` has written all n ids. False if the backend came to rest without it.
bool mg_wait_ids(ggml_backend_t backend, const int32_t * ids, int n);

// Enqueue a copy of bytes from one tensor to another of the same device.
void mg_copy_bytes(ggml_backend_t backend, const struct ggml_tensor * from, size_t from_offset,
        const struct ggml_tensor * to, size_t to_offset, size_t size);

// Run `graph` on the compute stream once everything enqueued on the upload stream so far has arrived. Its slot numbers
// go to the device on the compute stream first; they stay as they are until that has run. ev_free, if given, is recorded
// behind the graph.
enum ggml_status mg_upload_launch(ggml_backend_t compute, ggml_backend_t upload,
        struct ggml_tensor * slots, const void * numbers, size_t size,
        ggml_backend_event_t ev_free, ggml_backend_event_t ev_here, struct ggml_cgraph * graph);

#ifdef __cplusplus
}
#endif
