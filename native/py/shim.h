// The C side of moegraph.ggml: functions that replace many calls, or that need ggml's internal headers.
//
// Threads: one engine thread owns every handle. Nothing here calls back into Python, so the interpreter lock stays
// released for the whole call. Only the cancel flag of mg_cancel_bind, an aligned 32-bit word, may be set by any thread
// or signal handler.

#pragma once

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "moegraph.h"

#ifdef __cplusplus
extern "C" {
#endif

// The patch set that this extension was built for; moegraph_patchset tells that of the loaded libggml-base.
const char * mg_patchset_built(void);
// The commit of llama.cpp before the patches, from vendor/pin.json.
const char * mg_llama_commit(void);

// A copy of the first `size` bytes of a tensor to dst, host memory that must stay valid until the copy is done.
struct mg_readback {
    const struct ggml_tensor * src;
    void * dst;
    size_t size;
};

// Keep ggml's last error line for mg_last_error instead of printing it, and turn ggml's abort into one line and exit
// status 4. With `verbose`, every log line also goes to stderr. mg_last_error copies the line to `out` and clears it.
void   mg_install_callbacks(int verbose);
size_t mg_last_error(char * out, size_t size);

// Write the ids from 0 to n - 1 for which `is` answers yes to `out`, and return their number. One call for a vocabulary
// of 250,000 tokens, because as many from Python take as long as all else before the first token of a small model.
int mg_ids_where(bool (*is)(const void * vocab, int32_t id), const void * vocab, int n, int32_t * out);

// Make the CPU backend stop between two nodes once *flag is not 0; the launch then returns GGML_STATUS_ABORTED. A NULL
// flag unbinds.
void mg_cancel_bind(ggml_backend_t backend_cpu, volatile int32_t * flag);

// Allocate a graph's intermediates as ggml's scheduler does: the backend may reorder nodes for fusion and may ask that
// tensors outlive their last use. ctx needs room for one more node per such request. Sets a new uid: the backend can
// then replay the unchanged graph without comparing its nodes. False if allocation fails.
bool mg_graph_alloc(ggml_gallocr_t galloc, ggml_backend_t backend, struct ggml_context * ctx, struct ggml_cgraph * graph);

// The first node of a graph that the backend cannot compute, or NULL.
struct ggml_tensor * mg_graph_unsupported(ggml_backend_t backend, const struct ggml_cgraph * graph);

// Free what the backend keeps of a graph beside the graph itself; the device may still be running it.
void mg_graph_forget(ggml_backend_t backend, const struct ggml_cgraph * graph);

// Page-lock memory of this process: the device of `backend` can then read it. False if that is refused, or if the
// libraries were built without CUDA. Any thread may call these functions.
bool mg_pin(ggml_backend_t backend, void * data, size_t size);
void mg_unpin(void * data);

// Bytes of a tensor, and host memory that gets them; it must stay valid until the copy is done.
struct mg_piece {
    const struct ggml_tensor * src;
    size_t offset;
    void * dst;
    size_t size;
};

// The same of bytes that are in host memory already.
struct mg_move {
    const void * src;
    void * dst;
    size_t size;
};

// Enqueue copies to host memory. One call for all, because each call has to get the interpreter lock again.
void mg_get_pieces(ggml_backend_t backend, const struct mg_piece * pieces, int n);

// Copy within host memory, and return when that is done. Any thread may call this.
void mg_move_bytes(const struct mg_move * moves, int n);

// Enqueue a graph and, after it on the same stream, its read-backs.
enum ggml_status mg_launch(ggml_backend_t backend, struct ggml_cgraph * graph, const struct mg_readback * reads, int n_reads);

// The host writes this where ids will arrive; no router chooses it.
#define MG_NO_ID INT32_MIN

// Wait until a graph on `backend` has written all n ids to host memory. False if the backend is idle and they have not
// arrived.
bool mg_wait_ids(ggml_backend_t backend, const int32_t * ids, int n);

// Enqueue a copy of bytes from one tensor to another of the same device.
void mg_copy_bytes(ggml_backend_t backend, const struct ggml_tensor * from, size_t from_offset,
        const struct ggml_tensor * to, size_t to_offset, size_t size);

// Enqueue copies of experts between tensors of a device: n pairs (slot in `from`, slot in `to`). Slots are `stride`
// bytes apart in both, and each copy has `size` bytes.
void mg_copy_experts(ggml_backend_t backend, const struct ggml_tensor * from, const struct ggml_tensor * to,
        const int32_t * pairs, int n, size_t stride, size_t size);

// As mg_copy_bytes, from a device to another: after what `source` computes now, and before what `target` computes next.
// The caller sees to it that the target's bytes are not in use.
void mg_copy_across(ggml_backend_t source, ggml_backend_t target, const struct ggml_tensor * from, size_t from_offset,
        const struct ggml_tensor * to, size_t to_offset, size_t size);

// Enqueue on the compute stream: a copy of `size` bytes of slot numbers to `slots`; a wait (ev_uploaded, if given) for all
// uploads enqueued so far; `graph`; ev_free, if given. The caller keeps `numbers` unchanged until the copy is done.
enum ggml_status mg_upload_launch(ggml_backend_t compute, ggml_backend_t upload,
        struct ggml_tensor * slots, const void * numbers, size_t size,
        ggml_backend_event_t ev_free, ggml_backend_event_t ev_uploaded, struct ggml_cgraph * graph);

// Write rows of a table as floats, n_embd each: row tokens[i], which is at base + tokens[i] * row_bytes.
void mg_rows_to_float(ggml_to_float_t to_float, const void * base, size_t row_bytes, const int32_t * tokens, int n,
        int64_t n_embd, float * out);

// Enqueue copies of experts to slots of `memory`: n pairs (expert, slot). Experts are `stride` bytes apart from `base` on,
// pinned host memory, and slots slot_stride bytes. Each copy has `size` bytes and is done `times` times.
void mg_upload_experts(ggml_backend_t upload, struct ggml_tensor * memory, const void * base, size_t stride,
        const int32_t * pairs, int n, size_t slot_stride, size_t size, int times);

#ifdef __cplusplus
}
#endif
