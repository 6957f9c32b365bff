// What a sweep must know of the router's choice before it computes missing experts: which rows chose them, in order. The
// device waits for it, so this is C. A place is the number of a choice: row * n_used + k.

#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Count in counts [n_expert] how often ids [n] name each expert. Write those to found [n_expert] whose entry of table
// [n_expert] is below 0, the most chosen first, of equals in ascending order, and return how many there are, or -1 if an
// id is outside of 0 to n_expert - 1. absent: [n], gets 1 where an id is one of them, else 0.
int32_t mg_find_missing(const int32_t * ids, int32_t n, const int32_t * table, int32_t n_expert, uint8_t * absent,
        int32_t * counts, int32_t * found);

// Sort the places of ids [n] where absent [n] is not 0 by expert, places of one expert in ascending order: expert e has
// places[bounds[e]] to places[bounds[e + 1] - 1]. bounds: [n_expert + 1]. places: [n]; the other ones are behind. Returns
// how many there are, or -1 if an id is outside of 0 to n_expert - 1.
int32_t mg_sort_places(const int32_t * ids, const uint8_t * absent, int32_t n, int32_t n_expert, int32_t * bounds,
        int32_t * places);

// Write the places of some experts to `out` in ascending order, and return how many there are. sorted, bounds: from
// mg_sort_places. ends: scratch, [n_rows + 1].
int32_t mg_merge_places(const int32_t * sorted, const int32_t * bounds, const int32_t * experts, int32_t n_experts,
        int32_t n_used, int32_t n_rows, int32_t * ends, int32_t * out);

// Write the inputs of a unit for ascending places [n]: token, slot, place and target, n_padded words each, then rounds of
// n_padded terms, and return how many rounds, a power of two; -1 if that is more than max_rounds. slots: of each expert
// in the ring. Padding: token 0, slot -1, place n_rows * n_used, target n_rows, term no_term.
int32_t mg_unit(const int32_t * places, int32_t n, const int32_t * ids, const int32_t * slots, int32_t n_used,
        int32_t n_rows, int32_t n_padded, int32_t max_rounds, int32_t no_term, int32_t * words);

#ifdef __cplusplus
}
#endif
