#pragma once

#include "moegraph.h"

#include <stdint.h>

// What the backends share of moegraph_attn (moegraph.h): where a key lies.

#ifdef __CUDACC__
#define MOEGRAPH_ATTN_CALL static __host__ __device__ __forceinline__
#else
#define MOEGRAPH_ATTN_CALL static inline
#endif

// Layout of a row's words.
enum {
    MOEGRAPH_ATTN_SEQ,
    MOEGRAPH_ATTN_N_PAST,
    MOEGRAPH_ATTN_N_KEYS,
    MOEGRAPH_ATTN_SPARE,
    MOEGRAPH_ATTN_FIRST, // of the path
};

// What to look keys up in.
struct moegraph_attn_pool {
    const int32_t * pages;
    int             n_pages; // of a sequence
    int             n_seqs;
    int             page_log2;
    int             n_rows;  // of the pool
};

#ifdef __cplusplus
extern "C" {
#endif
    GGML_API struct moegraph_attn_pool moegraph_attn_pool_of(const struct ggml_tensor * op);
#ifdef __cplusplus
}
#endif

// The row of the pool that holds the key at a position of a row's root path. Values that are out of range give some
// row of the pool: a bad table must not make the op read elsewhere.
MOEGRAPH_ATTN_CALL int moegraph_attn_pool_row(
        const struct moegraph_attn_pool pool, const int32_t * row, const int seq, const int n_past, const int pos) {
    int idx = pos;
    if (pos >= n_past) {
        const int depth = pos - n_past;
        idx = n_past + row[MOEGRAPH_ATTN_FIRST + (depth < MOEGRAPH_ATTN_PATH ? depth : MOEGRAPH_ATTN_PATH - 1)];
    }
    const unsigned page = (unsigned) idx >> pool.page_log2;
    const unsigned last = (unsigned) pool.n_pages - 1;
    const unsigned in   = (unsigned) idx & ((1u << pool.page_log2) - 1);
    const unsigned at   = ((unsigned) pool.pages[(int64_t) seq*pool.n_pages + (page < last ? page : last)]
        << pool.page_log2) + in;
    const unsigned end  = (unsigned) pool.n_rows - 1;
    return (int) (at < end ? at : end);
}

// The first position that a row with n_keys attends to; window: see moegraph_attn_add.
MOEGRAPH_ATTN_CALL int moegraph_attn_first(const int n_keys, const int window) {
    return window > 0 && n_keys > window ? n_keys - window : 0;
}

// The number of keys of a row: its own word, 0 if its sequence is none, never more than the pages hold.
MOEGRAPH_ATTN_CALL int moegraph_attn_n_keys(const struct moegraph_attn_pool pool, const int32_t * row) {
    const int n_keys   = row[MOEGRAPH_ATTN_N_KEYS];
    const int capacity = pool.n_pages << pool.page_log2;
    if (n_keys <= 0 || row[MOEGRAPH_ATTN_SEQ] < 0 || row[MOEGRAPH_ATTN_SEQ] >= pool.n_seqs) {
        return 0;
    }
    return n_keys < capacity ? n_keys : capacity;
}
