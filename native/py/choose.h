// Chooses a token from what the op moegraph_candidates says of a row of logits, as moegraph/sampling.py does from the
// row itself. The device waits for the token, so this is C.

#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Tokens that are neither among the likeliest nor among the early ones may matter: choose from the row itself.
#define MG_CHOOSE_UNKNOWN -1
// No token is left.
#define MG_CHOOSE_NONE -2

struct mg_sampler {
    double temperature; // 0 or less: take the likeliest
    double top_p;       // 1: off
    double typical_p;   // 1: off
    float  min_p_log;   // logarithm of min-p; -INFINITY: off
    int32_t top_k;      // 0 or less: off
    // Tokens whose logits change, in order of their ids. The logit of ids[i] is wanted[places[i]] of the row. It
    // becomes logit + bias[i], then that divided by repeat[i], or times it if not above 0, then less subtracted[i].
    int32_t n_changed;
    const int32_t * ids;
    const int32_t * places;
    const float  * bias;
    const float  * repeat;
    const double * subtracted;
    // A byte for each token, 0 for those that may not be chosen; NULL: all may.
    const uint8_t * allowed;
};

// row: a struct moegraph_listed. key: that of the row's random numbers. Returns a token, or one of the above.
int32_t mg_choose(const struct mg_sampler * sampler, const void * row, uint64_t key);

#ifdef __cplusplus
}
#endif
