// Takes the place of the instructions that attention is made of. Only the kernel that adds up partial sums is emulated; what
// the other one uses is declared, so that the files compile.
#pragma once

#include "common.cuh"
#include "moegraph-attn.h"

static inline half2 moegraph_attn_half2(const uint32_t bits) {
    half2 x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}
uint32_t moegraph_attn_bits(half2 x);
half2    __floats2half2_rn(float x, float y);
half2    __hsub2(half2 x, half2 y);
half2    __hmul2(half2 x, half2 y);
template <int n_bytes> void moegraph_attn_copy(char * smem, const char * global);
unsigned __match_any_sync(unsigned mask, int x);
int      __ffs(unsigned x);
