#include "ahead.h"

#include "moegraph.h"

// Of a layer: the slots of what is expected and absent.
static int32_t plan_layer(const struct mg_ahead_layer * layer, const uint16_t * known, size_t token_stride,
        const int32_t * tokens, int32_t n_tokens, int32_t n_used, int32_t * victims, int32_t n_landing,
        const int32_t * counts, int32_t at, int32_t * found) {
    int32_t n = 0;
    for (int32_t place = 0; place < n_landing; place++) {
        const int32_t slot = victims[2 * place], old = victims[2 * place + 1];
        int32_t best = -1;
        for (int32_t t = 0; t < n_tokens; t++) {
            const uint16_t * ids = known + (size_t) tokens[t] * token_stride;
            for (int32_t k = 0; k < n_used; k++) {
                const int32_t id = ids[k] - 1;
                if (id >= 0 && layer->row[id] == -1 && (best < 0 || counts[id] > counts[best])) {
                    best = id;
                }
            }
        }
        if (best < 0) {
            break;
        }
        if (old >= 0 && counts[old] > 0) {
            continue;
        }
        layer->row[best] = slot + MOEGRAPH_FETCH_COMES;
        if (old >= 0) {
            layer->row[old] = -1;
        }
        victims[2 * place] = victims[2 * place + 1] = -1;
        found[3 * n] = at;
        found[3 * n + 1] = best;
        found[3 * n++ + 2] = slot;
    }
    return n;
}

int32_t mg_plan_ahead(const struct mg_ahead_layer * layers, int32_t n_layers, int32_t first, const uint16_t * known,
        const int32_t * tokens, int32_t n_tokens, int32_t n_used, int32_t n_expert, int32_t n_victims, int32_t * counts,
        int32_t * found) {
    const size_t token_stride = (size_t) n_layers * (size_t) n_used;
    int32_t n = 0;
    for (int32_t at = first; at < n_layers; at++) {
        const struct mg_ahead_layer * layer = &layers[at];
        const int32_t n_landing = layer->row != NULL ? layer->row[n_expert + 2 * n_victims + 1] : 0;
        if (n_landing == 0) {
            continue;
        }
        const uint16_t * ids = known + (size_t) at * (size_t) n_used;
        for (int32_t change = 1; change >= -1; change -= 2) { // count; plan; set to zero
            for (int32_t t = 0; t < n_tokens; t++) {
                for (int32_t k = 0; k < n_used; k++) {
                    const int32_t id = ids[(size_t) tokens[t] * token_stride + (size_t) k] - 1;
                    if (id >= 0 && id < n_expert) {
                        counts[id] += change;
                    }
                }
            }
            if (change > 0) {
                n += plan_layer(layer, ids, token_stride, tokens, n_tokens, n_used, layer->row + n_expert, n_landing,
                    counts, at, found + 3 * n);
            }
        }
    }
    return n;
}

size_t mg_send_ahead(ggml_backend_t upload, const struct mg_ahead_layer * layers, const int32_t * found, int32_t n,
        const int32_t * one) {
    size_t n_bytes = 0;
    for (int32_t i = 0; i < n; i++) {
        const struct mg_ahead_layer * layer = &layers[found[3 * i]];
        const char * from = (const char *) layer->base + (size_t) found[3 * i + 1] * layer->stride;
        ggml_backend_tensor_set_async(upload, layer->memory, from, (size_t) found[3 * i + 2] * layer->stride, layer->n_bytes);
        if (i + 1 == n || found[3 * i] != found[3 * i + 3]) {
            ggml_backend_tensor_set_async(upload, layer->there, one, 0, sizeof(*one));
        }
        n_bytes += layer->n_bytes;
    }
    return n_bytes;
}
