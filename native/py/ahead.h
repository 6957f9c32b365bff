// Experts that are fetched ahead: copies that begin before the graphs that may need them (moegraph_fetch_coming). The device
// waits for the plan, so it is C.

#pragma once

#include "ggml-backend.h"

#ifdef __cplusplus
extern "C" {
#endif

// A layer whose graph fetches. row: on the host, its slot table [n_expert], pairs of a slot and the expert in it, or -1, that
// may be given up, in this order [n_victims], a zero, and how many of them may be taken for what is fetched ahead. base: its
// packed experts in host memory, stride bytes apart there and in `memory`, its slots. NULL for a row: another layer.
struct mg_ahead_layer {
    int32_t * row;
    struct ggml_tensor * memory;
    const void * base;
    size_t stride;
    size_t n_bytes;
    struct ggml_tensor * there;
};

// Find what tokens [n_tokens] are expected to choose in the layers from `first` on, and that has no slot. known: what each
// token chose last, an id + 1 or 0, [n_vocab][n_layers][n_used]. Experts of the most tokens first get the slots of a layer's
// first pairs, unless the expert in one is expected too. The rows say so (MOEGRAPH_FETCH_COMES), and have these pairs no more.
// counts: scratch, [n_expert], zeros before and after. Writes layer, expert and slot to found, in the order of layers, and
// returns how many there are.
int32_t mg_plan_ahead(const struct mg_ahead_layer * layers, int32_t n_layers, int32_t first, const uint16_t * known,
        const int32_t * tokens, int32_t n_tokens, int32_t n_used, int32_t n_expert, int32_t n_victims, int32_t * counts,
        int32_t * found);

// Enqueue the copies of what mg_plan_ahead found; behind those of a layer, one, a word of host memory, goes to its `there`.
// Returns the bytes of the experts.
size_t mg_send_ahead(ggml_backend_t upload, const struct mg_ahead_layer * layers, const int32_t * found, int32_t n,
        const int32_t * one);

#ifdef __cplusplus
}
#endif
