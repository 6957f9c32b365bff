#pragma once

// Additions of the moegraph patch set to the ggml API.

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

    // Hash over the patch files that this library was built with.
    GGML_API const char * moegraph_patchset(void);

    // Trees of rows, for the verification of a draft. Row i of a sequence continues row parents[i] < i, or what is
    // committed (the initial state, the columns in front of the rows) where parents[i] is -1. A value outside of
    // [-1, i) counts as -1. CPU and CUDA only.
    //
    // parents : I32 [n_tokens, n_seqs], contiguous, n_tokens <= MOEGRAPH_TREE_ROWS
    #define MOEGRAPH_TREE_ROWS 64

    // ggml_ssm_conv with the window of a row taken along its ancestors
    GGML_API struct ggml_tensor * moegraph_ssm_conv_tree(
            struct ggml_context * ctx,
            struct ggml_tensor  * sx,
            struct ggml_tensor  * c,
            struct ggml_tensor  * parents);

    // ggml_gated_delta_net with a scalar gate, where each row continues the state of its parent.
    // The result has the attention scores only, [S_v*H_v, n_tokens*n_seqs]: no state is written.
    GGML_API struct ggml_tensor * moegraph_gated_delta_net_tree(
            struct ggml_context * ctx,
            struct ggml_tensor  * q,
            struct ggml_tensor  * k,
            struct ggml_tensor  * v,
            struct ggml_tensor  * g,
            struct ggml_tensor  * beta,
            struct ggml_tensor  * state,
            struct ggml_tensor  * parents);

    // ggml_get_rows(table, ids) for a table that says in which row of a cache something is: what is in none is fetched
    // first. CPU and CUDA only. A scheduler of backends would copy `from` as a whole.
    //
    // table   : I32 [1, n], a row of `to` each, below 0 for what is not there
    // ids     : I32 [n_ids], contiguous, n_ids <= MOEGRAPH_FETCH_IDS; one that is not below n gives -1
    // victims : I32 [2, n_victims], contiguous: a row of `to` that may be given up, each once, and what the table has
    //           there (below 0: nothing)
    // from    : F32 [ne0, n], in memory that the device can read, on the host too
    // to      : F32 [ne0, n_rows]; ne0 is a multiple of 4, strides of rows are multiples of 16 bytes
    //
    // Each missing id, in their order and once, takes the next victim that is a row of `to` and that none of ids needs;
    // where there is none left, its result is -1. The table stays as it is.
    #define MOEGRAPH_FETCH_IDS 64

    GGML_API struct ggml_tensor * moegraph_fetch_rows(
            struct ggml_context * ctx,
            struct ggml_tensor  * table,
            struct ggml_tensor  * ids,
            struct ggml_tensor  * victims,
            struct ggml_tensor  * from,
            struct ggml_tensor  * to);

    // Attention of a few rows of any sequences, whose keys and values lie in pages of a pool. CPU and CUDA only.
    //
    // q     : F32 [d, n_head, n_rows], d contiguous, a multiple of 32 and at most MOEGRAPH_ATTN_HEAD (CUDA: 64, 128 or
    //         256, and at most 16 heads for one head of k), n_rows <= MOEGRAPH_ATTN_ROWS
    // k, v  : F16, Q8_0 or Q4_0 [d*n_head_kv, n_pool_rows]; a page is page_size rows of the pool that follow each other
    // pages : I32 [n_pages, n_seqs], contiguous: the pages of each sequence, in the order of what is stored in them;
    //         n_pages*page_size <= MOEGRAPH_ATTN_CAPACITY
    // rows  : I32 [MOEGRAPH_ATTN_WORDS, n_rows], contiguous, for each row of q:
    //           0 : its sequence in pages; a row whose sequence is none gives zeros
    //           1 : n_past, the committed positions of that sequence
    //           2 : n_keys, its own position + 1; a row without keys gives zeros
    //           3 : not used
    //           4 : and following: for position n_past + i on the row's root path, what is stored n_past + this of the
    //               sequence; 0, 1, 2, ... for a chain. n_keys <= n_past + MOEGRAPH_ATTN_PATH
    // page_size : a power of two, at least 16
    //
    // Position p is what is stored p-th if p < n_past, else what the path says. The result is F32 [d*n_head, n_rows].
    // Its bits depend on the query and on its keys and values in order of position; not on other rows, nor on pages.
    #define MOEGRAPH_ATTN_ROWS  32
    #define MOEGRAPH_ATTN_PATH  32
    #define MOEGRAPH_ATTN_WORDS 36
    #define MOEGRAPH_ATTN_HEAD  256
    #define MOEGRAPH_ATTN_CAPACITY (1 << 20)

    GGML_API struct ggml_tensor * moegraph_attn(
            struct ggml_context * ctx,
            struct ggml_tensor  * q,
            struct ggml_tensor  * k,
            struct ggml_tensor  * v,
            struct ggml_tensor  * pages,
            struct ggml_tensor  * rows,
            int                   page_size,
            float                 scale);

#ifdef __cplusplus
}
#endif
