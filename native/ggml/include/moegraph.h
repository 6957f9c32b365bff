#pragma once

// Additions of the moegraph patch set to the ggml API.

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

    // Hash over the patch files that this library was built with.
    GGML_API const char * moegraph_patchset(void);

    // The recurrences of a gated DeltaNet layer over states that sequences have by slot. CPU and CUDA only.
    //
    // pool    : F32 [n_state, n_slots], the states. Without parents the op writes the state behind the last row back to
    //           the slot. So the pool is in memory of its own, as a leaf that the caller places: nodes run in the order of
    //           the graph, and what reads the pool before or after must stand there before or after.
    // slots   : I32 [n_seqs]: whose state each sequence continues. Without parents, each once. Outside of [0, n_slots)
    //           the sequence is padding: no state is read or written, and its results are 0. A kernel may read slots
    //           early if ggml_set_input marked it: then copies may write it, but no node.
    // parents : I32 [n_tokens, n_seqs], contiguous, n_tokens <= MOEGRAPH_TREE_ROWS, or NULL. Without parents, rows
    //           continue one another in order. With them, row i continues row parents[i] < i, or the slot's state where
    //           parents[i] is -1, and the pool is only read. -2 means padding: the row's results are 0, and it is no
    //           row's parent. Any other value, and a parent that is padding, counts as -1.
    // lengths : I32 [n_seqs], or NULL; not together with parents. Sequence s has only the first lengths[s] of its rows (at
    //           least 0, at most n_tokens): its state becomes that behind the last of them, and the results of the rest
    //           are 0.
    #define MOEGRAPH_TREE_ROWS 64

    // Depthwise causal convolution, summed as ggml_ssm_conv sums.
    // rows F32 [n_channels, n_tokens, n_seqs], kernel F32 [d_conv, n_channels], pool [(d_conv - 1)*n_channels, n_slots] with
    // the last d_conv - 1 values of each channel side by side: F32 [n_channels, n_tokens, n_seqs]
    #define MOEGRAPH_CONV_WIDTH 64 // the largest d_conv

    GGML_API struct ggml_tensor * moegraph_conv(
            struct ggml_context * ctx,
            struct ggml_tensor  * rows,
            struct ggml_tensor  * kernel,
            struct ggml_tensor  * pool,
            struct ggml_tensor  * slots,
            struct ggml_tensor  * parents,
            struct ggml_tensor  * lengths);

    // Gated delta rule with a scalar gate, summed as ggml_gated_delta_net sums.
    // q, k F32 [S, n_k_heads, n_tokens, n_seqs], v F32 [S, H, n_tokens, n_seqs], gate and beta F32 [1, H, n_tokens, n_seqs],
    // pool [S*S*H, n_slots]: F32 [S, H, n_tokens, n_seqs]
    GGML_API struct ggml_tensor * moegraph_delta_net(
            struct ggml_context * ctx,
            struct ggml_tensor  * q,
            struct ggml_tensor  * k,
            struct ggml_tensor  * v,
            struct ggml_tensor  * gate,
            struct ggml_tensor  * beta,
            struct ggml_tensor  * pool,
            struct ggml_tensor  * slots,
            struct ggml_tensor  * parents,
            struct ggml_tensor  * lengths);

    // ggml_get_rows(table, ids) for a table that says in which row of a cache something is: what is in none is fetched
    // first. CPU and CUDA only. A scheduler of backends would copy `from` as a whole.
    //
    // table   : I32 [1, n], a row of `to` each, below 0 for what is not there
    // ids     : I32 [n_ids], contiguous, n_ids <= MOEGRAPH_FETCH_IDS; one that is not below n gives -1
    // victims : I32 [2, n_victims], contiguous, n_victims <= MOEGRAPH_FETCH_IDS: a row of `to` that may be given up, each
    //           once, and what the table has there (below 0: nothing)
    // from    : F32 [ne0, n], in memory that the device can read, on the host too
    // to      : F32 [ne0, n_rows]; ne0 is a multiple of 4, strides of rows are multiples of 16 bytes
    //
    // Each missing id, in their order and once, takes the next victim that is a row of `to` and that none of ids needs;
    // where there is none left, its result is -1. The table stays as it is.
    #define MOEGRAPH_FETCH_IDS 256

    GGML_API struct ggml_tensor * moegraph_fetch_rows(
            struct ggml_context * ctx,
            struct ggml_tensor  * table,
            struct ggml_tensor  * ids,
            struct ggml_tensor  * victims,
            struct ggml_tensor  * from,
            struct ggml_tensor  * to);

    // ggml_cpy(a, host), of numbers of 4 bytes into memory of the host that nothing in the graph reads, under whatever
    // name: CUDA writes it as soon as `a` is there, beside the nodes that follow. Other backends copy.
    GGML_API struct ggml_tensor * moegraph_publish(
            struct ggml_context * ctx,
            struct ggml_tensor  * a,
            struct ggml_tensor  * host);
    GGML_API bool moegraph_is_publish(const struct ggml_tensor * node);

    // Marks the products of a graph (MUL_MAT, MUL_MAT_ID): each row gets the bits that it gets alone. Where CUDA has no
    // kernel that keeps them, it computes one row after the other. Other backends ignore it.
    GGML_API void moegraph_keep_rows_apart(struct ggml_cgraph * graph);
    GGML_API bool moegraph_rows_are_apart(const struct ggml_tensor * node);

    // Attention of rows of any sequences, whose keys and values lie in pages of a pool. CPU and CUDA only. CUDA plans 32 rows
    // at a time, in their order: those of a sequence among them share what they read.
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
    #define MOEGRAPH_ATTN_ROWS  65536
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

    // Adds to a result of moegraph_attn what not all models have. sinks: F32 [n_head], contiguous, or NULL: for each head a
    // score without a value, as ggml_flash_attn_ext_add_sinks has them. window: the positions that a row attends to, its own
    // and those before it; 0: all. Pages of other positions need only be some rows of the pool.
    GGML_API void moegraph_attn_add(struct ggml_tensor * attn, struct ggml_tensor * sinks, int window);

    // What a host needs of each row of logits to choose a token as samplers do, without the row itself. CPU and CUDA only.
    //
    // logits : F32 [n_vocab, n_rows], contiguous, n_rows <= MOEGRAPH_DRAW_ROWS
    // draws  : I32 [MOEGRAPH_DRAW_WORDS, n_rows], contiguous, a struct moegraph_draw (moegraph-candidates.h) for each row
    //
    // The result is I32 [n, n_rows], a struct moegraph_listed for each row: the likeliest tokens; the sum over all; the
    // logits of the ids that draws names (NaN for one that is none); and the tokens of the largest scores. The score of a
    // token is its logit divided by the temperature plus a random number of the Gumbel distribution, which is a function of
    // the key of the row and of the token: the token of the largest score is a draw from the distribution, and the first one
    // of a subset is a draw from the distribution of that subset. Scores are rounded, so whoever needs the first computes
    // those of the listed tokens again.
    #define MOEGRAPH_DRAW_ROWS  32
    #define MOEGRAPH_DRAW_IDS   508
    #define MOEGRAPH_DRAW_WORDS 512
    #define MOEGRAPH_LIKELY     128 // the list of the likeliest tokens has so many, if there is room for it
    #define MOEGRAPH_CANDIDATES 384 // most tokens in the list of the likeliest
    #define MOEGRAPH_EARLY      32  // most tokens in the list of the largest scores

    GGML_API struct ggml_tensor * moegraph_candidates(
            struct ggml_context * ctx,
            struct ggml_tensor  * logits,
            struct ggml_tensor  * draws);

#ifdef __cplusplus
}
#endif
