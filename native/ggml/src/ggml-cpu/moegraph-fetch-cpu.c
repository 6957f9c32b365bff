#include "moegraph-cpu.h"
#include "ggml-impl.h"
#include "moegraph.h"

#include <stdbool.h>
#include <string.h>

static int moegraph_fetch_find(const int32_t * ids, const int n_ids, const int32_t id) {
    int i = 0;
    while (i < n_ids && ids[i] != id) {
        ++i;
    }
    return i;
}

// rows[i]: what the table says of ids[i]. What is below 0 becomes the row that id i is fetched to, or -1 if there is
// none; fetched[i] says whether it is, false for what another id fetches. n, n_to: rows of the table and of `to`; an
// id or a victim outside is left alone. Keep in step with the CUDA kernel and with LayerSlots.commit_fetched
// (moegraph/experts/slots.py), which records what a graph has fetched.
static void moegraph_fetch_assign(
        const int32_t * ids, const int n_ids, const int64_t n, const int32_t * victims, const int n_victims,
        const int64_t n_to, int32_t * rows, bool * fetched) {
    int next = 0;
    for (int i = 0; i < n_ids; ++i) {
        fetched[i] = false;
        if (rows[i] >= 0) {
            continue;
        }
        rows[i] = -1;
        if (ids[i] < 0 || ids[i] >= n) {
            continue;
        }
        const int first = moegraph_fetch_find(ids, i, ids[i]);
        if (first < i) {
            rows[i] = rows[first];
            continue;
        }
        while (next < n_victims && (victims[2*next] < 0 || victims[2*next] >= n_to ||
                (victims[2*next + 1] >= 0 && moegraph_fetch_find(ids, n_ids, victims[2*next + 1]) < n_ids))) {
            ++next;
        }
        if (next < n_victims) {
            rows[i]    = victims[2*next++];
            fetched[i] = true;
        }
    }
}

void moegraph_compute_forward_fetch_rows(const struct ggml_compute_params * params, struct ggml_tensor * dst) {
    if (params->ith != 0) {
        return;
    }
    const struct ggml_tensor * table   = dst->src[0];
    const struct ggml_tensor * victims = dst->src[2];
    const struct ggml_tensor * from    = dst->src[3];
    const struct ggml_tensor * to      = dst->src[4];
    const int32_t * ids   = (const int32_t *) dst->src[1]->data;
    const int       n_ids = (int) dst->src[1]->ne[0];

    int32_t * rows = (int32_t *) dst->data;
    bool      fetched[MOEGRAPH_FETCH_IDS];
    for (int i = 0; i < n_ids; ++i) {
        rows[i] = ids[i] >= 0 && ids[i] < table->ne[1] ? ((const int32_t *) table->data)[ids[i]] : -1;
    }
    moegraph_fetch_assign(ids, n_ids, table->ne[1], (const int32_t *) victims->data, (int) victims->ne[1], to->ne[1],
        rows, fetched);
    for (int i = 0; i < n_ids; ++i) {
        if (fetched[i]) {
            memcpy((char *) to->data + rows[i]*to->nb[1], (const char *) from->data + ids[i]*from->nb[1],
                from->ne[0]*sizeof(float));
        }
    }
}
