#pragma once

#include "common.cuh"
#include "moegraph-attn.h"

// Single instructions that moegraph_attn is made of.

static __device__ __forceinline__ uint32_t moegraph_attn_bits(const half2 x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}

static __device__ __forceinline__ half2 moegraph_attn_half2(const uint32_t bits) {
    half2 x;
    memcpy(&x, &bits, sizeof(x));
    return x;
}

// c += a*b with a 16 x 16 (rows lane/4 and lane/4 + 8) and b 16 x 8 (column lane/4).
static __device__ __forceinline__ void moegraph_attn_mma(
        float c[4], const uint32_t a[4], const uint32_t b0, const uint32_t b1) {
#if __CUDA_ARCH__ >= GGML_CUDA_CC_AMPERE
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#elif __CUDA_ARCH__ >= GGML_CUDA_CC_TURING
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[2]), "r"(a[3]), "r"(b1));
#else
    GGML_UNUSED_VARS(c, a, b0, b1);
    NO_DEVICE_CODE;
#endif
}

// Rows of an 8 x 8 matrix of halves become columns.
static __device__ __forceinline__ uint32_t moegraph_attn_transpose(const uint32_t x) {
    uint32_t y = 0;
#if __CUDA_ARCH__ >= GGML_CUDA_CC_TURING
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
#else
    GGML_UNUSED(x);
    NO_DEVICE_CODE;
#endif
    return y;
}

// Four 8 x 8 matrices of halves from shared memory; lane has the address of row lane % 8 of matrix lane/8.
static __device__ __forceinline__ void moegraph_attn_load_matrices(uint32_t a[4], const char * smem) {
#if __CUDA_ARCH__ >= GGML_CUDA_CC_TURING
    const unsigned at = (unsigned) __cvta_generic_to_shared(smem);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
#else
    GGML_UNUSED_VARS(a, smem);
    NO_DEVICE_CODE;
#endif
}

// The same, each transposed.
static __device__ __forceinline__ void moegraph_attn_load_transposed(uint32_t a[4], const char * smem) {
#if __CUDA_ARCH__ >= GGML_CUDA_CC_TURING
    const unsigned at = (unsigned) __cvta_generic_to_shared(smem);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(at) : "memory");
#else
    GGML_UNUSED_VARS(a, smem);
    NO_DEVICE_CODE;
#endif
}

// Copies 4, 8 or 16 bytes to shared memory, asynchronously if the device can.
template <int n_bytes> static __device__ __forceinline__ void moegraph_attn_copy(char * smem, const char * global) {
#ifdef CP_ASYNC_AVAILABLE
    const unsigned to = (unsigned) __cvta_generic_to_shared(smem);
    if (n_bytes == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" : : "r"(to), "l"(global) : "memory");
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" : : "r"(to), "l"(global), "n"(n_bytes) : "memory");
    }
#else
    if (n_bytes == 16) {
        *(uint4 *) smem = *(const uint4 *) global;
    } else if (n_bytes == 8) {
        *(uint2 *) smem = *(const uint2 *) global;
    } else {
        *(uint32_t *) smem = *(const uint32_t *) global;
    }
#endif // CP_ASYNC_AVAILABLE
}

// Ends a group of this thread's copies.
static __device__ __forceinline__ void moegraph_attn_copy_commit() {
#ifdef CP_ASYNC_AVAILABLE
    asm volatile("cp.async.commit_group;" : : : "memory");
#endif // CP_ASYNC_AVAILABLE
}

// Waits for this thread's copies, except for the last n groups (at most the last six).
static __device__ __forceinline__ void moegraph_attn_copy_wait(const int n) {
#ifdef CP_ASYNC_AVAILABLE
    switch (n) {
        case 0:
            asm volatile("cp.async.wait_group 0;" : : : "memory");
            break;
        case 1:
            asm volatile("cp.async.wait_group 1;" : : : "memory");
            break;
        case 2:
            asm volatile("cp.async.wait_group 2;" : : : "memory");
            break;
        case 3:
            asm volatile("cp.async.wait_group 3;" : : : "memory");
            break;
        case 4:
            asm volatile("cp.async.wait_group 4;" : : : "memory");
            break;
        case 5:
            asm volatile("cp.async.wait_group 5;" : : : "memory");
            break;
        default:
            asm volatile("cp.async.wait_group 6;" : : : "memory");
            break;
    }
#else
    GGML_UNUSED(n);
#endif // CP_ASYNC_AVAILABLE
}

// A barrier for n threads of a block, whole warps; ids 1 to 15.
static __device__ __forceinline__ void moegraph_attn_barrier(const int id, const int n) {
    asm volatile("bar.sync %0, %1;" : : "r"(id), "r"(n) : "memory");
}
