#pragma once

#include "ggml.h"

#include <string.h>

// Set the rows of dst whose id names none of n_as experts to zero; thread ith of nth takes its share.
static inline void ggml_mul_mat_id_clear_absent(
        struct ggml_tensor * dst, const struct ggml_tensor * ids, int64_t n_as, int ith, int nth) {
    const int64_t n_ids = ids->ne[0];

    for (int64_t i = ith; i < n_ids*ids->ne[1]; i += nth) {
        const int64_t i1 = i % n_ids;
        const int64_t i2 = i / n_ids;
        const int32_t id = *(const int32_t *) ((const char *) ids->data + i2*ids->nb[1] + i1*ids->nb[0]);

        if (id < 0 || id >= n_as) {
            memset((char *) dst->data + i1*dst->nb[1] + i2*dst->nb[2], 0, dst->ne[0]*sizeof(float));
        }
    }
}
