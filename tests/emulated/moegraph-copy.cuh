// Takes the place of our moegraph-copy.cuh: asynchronous copies arrive as late as they may.
#pragma once

#include "common.cuh"

static inline void moegraph_copy_16(char * dst, const char * src, const int n) {
    emulated::copy(dst, src, n);
}
static inline void moegraph_copy_commit() {
    emulated::commit_copies();
}
template <int n> static inline void moegraph_copy_wait() {
    emulated::wait_for_copies(n);
}
