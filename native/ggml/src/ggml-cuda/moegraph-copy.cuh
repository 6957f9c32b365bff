#pragma once

#include "common.cuh"

// Copies 16 bytes to shared memory, asynchronously where the device can; the bytes from n on become zero.
static __device__ __forceinline__ void moegraph_copy_16(char * dst, const char * src, const int n) {
#ifdef CP_ASYNC_AVAILABLE
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        : : "r"((unsigned int) __cvta_generic_to_shared(dst)), "l"(src), "r"(n) : "memory");
#else
    if (n == 16) {
        *(int4 *) dst = *(const int4 *) src;
    } else {
        for (int i = 0; i < 16; i += 2) {
            *(uint16_t *) (dst + i) = i < n ? *(const uint16_t *) (src + i) : 0;
        }
    }
#endif // CP_ASYNC_AVAILABLE
}

// Loads 16 bytes of weights, which will not be needed again. Not as constant (.nc): this warp may have copied them, and then
// a __syncwarp comes between.
static __device__ __forceinline__ int4 moegraph_load_16(const char * p) {
    int4 v;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.s32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

static __device__ __forceinline__ void moegraph_copy_commit() {
#ifdef CP_ASYNC_AVAILABLE
    asm volatile("cp.async.commit_group;" : : : "memory");
#endif // CP_ASYNC_AVAILABLE
}

template <int n> static __device__ __forceinline__ void moegraph_copy_wait() {
#ifdef CP_ASYNC_AVAILABLE
    asm volatile("cp.async.wait_group %0;" : : "n"(n) : "memory");
#endif // CP_ASYNC_AVAILABLE
}
