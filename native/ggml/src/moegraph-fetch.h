#pragma once

#include <stdbool.h>
#include <stdint.h>

// What the backends share of moegraph_fetch_rows (moegraph.h); a header, because one of them runs it on its device.

#ifdef __CUDACC__
#define MOEGRAPH_FETCH_CALL static __device__ __forceinline__
#else
#define MOEGRAPH_FETCH_CALL static inline
#endif

MOEGRAPH_FETCH_CALL int moegraph_fetch_find(const int32_t * ids, const int n_ids, const int32_t id) {
    int i = 0;
    while (i < n_ids && ids[i] != id) {
        ++i;
    }
    return i;
}

// rows[i]: what the table says of ids[i]. What is below 0 becomes the row that id i is fetched to, or -1 if there is
// none; fetched[i] says whether it is, false for what another id fetches. n, n_to: rows of the table and of `to`; an
// id or a victim outside is left alone. Keep in step with LayerSlots.commit_fetched (moegraph/experts/slots.py), which
// records what a graph has fetched.
MOEGRAPH_FETCH_CALL void moegraph_fetch_assign(
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
