#include "moegraph-fetch-cpu.h"
#include "ggml-impl.h"
#include "moegraph-fetch.h"
#include "moegraph.h"

#include <string.h>

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
