#pragma once

#include "moegraph.h"

#include <stdint.h>

// What the backends and the host share of moegraph_candidates (moegraph.h): its operands, its result, and the random
// numbers of tokens.

#ifdef __CUDACC__
#define MOEGRAPH_CANDIDATES_CALL static __host__ __device__ __forceinline__
#else
#define MOEGRAPH_CANDIDATES_CALL static inline
#endif

// Tokens are dealt to columns by their id. The n-th largest of the columns' maxima is a floor that at least n tokens
// reach, and few more than n: MOEGRAPH_LIKELY of the logits, these of the scores.
#define MOEGRAPH_CANDIDATES_COLUMNS 256
#define MOEGRAPH_CANDIDATES_EARLY   8
#define MOEGRAPH_CANDIDATES_MASSES  8   // early tokens of which it is known how many are likelier
#define MOEGRAPH_CANDIDATES_PARTS   32  // sums over the vocabulary come in parts

// What the host says of a row of logits.
struct moegraph_draw {
    float    inv_temperature; // 0: no early tokens are wanted
    uint32_t key[2];          // of the row's random numbers, low word first
    int32_t  unused;
    int32_t  wanted[MOEGRAPH_DRAW_IDS];
};

// The result for a row. All tokens whose logit is at least `floor` are listed, largest first, equal ones by id; n_likely
// is their number, and if it is above MOEGRAPH_CANDIDATES none is listed. The same holds for those of the largest
// scores (moegraph_score), and MOEGRAPH_EARLY.
struct moegraph_listed {
    float   total;   // of exp(logit - largest); NaN if a logit is NaN or infinite
    float   largest;
    float   floor;
    int32_t n_likely;
    int32_t ids[MOEGRAPH_CANDIDATES];
    float   logits[MOEGRAPH_CANDIDATES];
    float   early_floor;
    int32_t n_early; // 0 if none are wanted
    int32_t early_ids[MOEGRAPH_EARLY];
    float   early_logits[MOEGRAPH_EARLY];
    // of tokens before the k-th early one in the order of logits: exp(logit - largest), and their number
    float   above[MOEGRAPH_CANDIDATES_PARTS][MOEGRAPH_CANDIDATES_MASSES];
    int32_t n_above[MOEGRAPH_CANDIDATES_PARTS][MOEGRAPH_CANDIDATES_MASSES];
    float   wanted[MOEGRAPH_DRAW_IDS]; // logits
};

// The random bits of a token: a function of the key, which is that of a seed and a position, and of the id.
MOEGRAPH_CANDIDATES_CALL uint64_t moegraph_random(const uint64_t key, const uint32_t id) {
    uint64_t x = key + (uint64_t) (id + 1)*0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30))*0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27))*0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// Order of tokens by logit: whether a is before b.
MOEGRAPH_CANDIDATES_CALL bool moegraph_is_before(const float a, const int32_t a_id, const float b, const int32_t b_id) {
    return a > b || (a == b && a_id < b_id);
}
