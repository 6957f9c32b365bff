// Takes the place of our moegraph-copy.cuh: asynchronous copies arrive as late as they may.
#pragma once

#include "common.cuh"

static inline void moegraph_copy_16(char * dst, const char * src, const int n) {
    emulated::copy(dst, src, n);
}
static inline int4 moegraph_load_16(const char * p) {
    if ((uintptr_t) p % 16 != 0) {
        emulated::fail("a load of 16 bytes is not aligned: %p", p);
    }
    int4 v;
    memcpy(&v, p, 16);
    return v;
}
static inline void moegraph_copy_commit() {
    emulated::commit_copies();
}
template <int n> static inline void moegraph_copy_wait() {
    emulated::wait_for_copies(n);
}
