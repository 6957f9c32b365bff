#pragma once

#include "common.cuh"

// Counts a block; returns how many came before. Whoever counts the last one sees what those before it wrote; a fence of its own
// would cost more. Where other threads of the block wrote, a barrier comes before.
[[maybe_unused]] static __device__ __forceinline__ unsigned moegraph_arrive(unsigned * arrived) {
#ifdef __CUDA_ARCH__
    unsigned before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
    return before;
#else
    return atomicAdd(arrived, 1u);
#endif // __CUDA_ARCH__
}
