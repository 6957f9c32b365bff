"""A slower link to the device: a library that has every large copy to it made several times.

It is loaded before a program (LD_PRELOAD), stands before CUDA's runtime, and so treats all programs
alike, those of llama.cpp too. Each copy of 16 KiB or more from host to device is enqueued several
times. Two kernels of moegraph read experts from host memory themselves. A copy of the one, made
from its source, takes its place and reads them as often. In front of the other, which computes as
well, goes a kernel that reads the same experts the other times. What goes to the host stays as it
is, and so does the CPU. At its end the library says how many copies and kernels it has changed.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import _cuda
from _tools import ROOT, BuildError

KERNELS = ROOT / "native" / "ggml" / "src" / "ggml-cuda"
FETCH, TYPES = KERNELS / "moegraph-fetch.cu", KERNELS / "moegraph-rows-types.cuh"
# What the kernel takes from ggml's headers.
_HEAD = """
#include <cuda_runtime.h>
#include <cstdint>
#define WARP_SIZE 32
constexpr int MOEGRAPH_FETCH_IDS = 256;
static __device__ void ggml_cuda_pdl_sync() {
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}
static __device__ void ggml_cuda_pdl_lc() {
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}
// no cache may keep what it reads
static __device__ int4 slow_load(const int4 * p) {
    int4 v;
    asm volatile("ld.relaxed.sys.global.v4.s32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
"""
# Ids are packed as moegraph_one_pack does.
_TAIL = """
static __device__ int slow_link_sum;

// What is read is used, or nobody would wait for it.
static __global__ void slow_link_read(const moegraph_rows_args args) {
    ggml_cuda_pdl_sync();
    bool read = false;
    int  sum  = 0;
    for (int s = 0; s < args.n_used; ++s) {
        const int32_t packed = ((const volatile int32_t *) args.ids)[s];
        const int expert = packed < 0 ? -1 : (packed >> 16) - 1;
        if (expert < 0) {
            continue;
        }
        read = true;
        const int4 * src = (const int4 *) (args.fetch.from + expert*args.fetch.stride_from);
        const int n = args.fetch.n_bytes/16, step = gridDim.x*blockDim.x;
        for (int again = 1; again < TIMES; ++again) {
            for (int i = blockIdx.x*blockDim.x + threadIdx.x; i < n; i += 4*step) {
#pragma unroll
                for (int l = 0; l < 4; ++l) {
                    if (i + l*step < n) {
                        sum += slow_load(src + i + l*step).x;
                    }
                }
            }
        }
    }
    if (!read) {
        ggml_cuda_pdl_lc();
    } else if (sum == 1) {
        slow_link_sum = sum;
    }
}
extern "C" const void * slow_link_kernel() { return (const void *) moegraph_fetch_kernel; }
extern "C" const void * slow_link_reader(const void * args) {
    const bool fetches = ((const moegraph_rows_args *) args)->fetch.from != nullptr;
    return fetches ? (const void *) slow_link_read : nullptr;
}
"""
_CALLS = """
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <unistd.h>
static constexpr size_t LEAST = 16384;
static const void * fetch = nullptr;
static const void * experts[64];
static int n_experts = 0;
static std::atomic<long> n_copies{0}, n_kernels{0};
extern "C" const void * slow_link_kernel();
extern "C" const void * slow_link_reader(const void * args);
template <typename F> static F next(const char * name) { return (F) dlsym(RTLD_NEXT, name); }
static bool is_up(const void * from, cudaMemcpyKind kind) {
    if (kind == cudaMemcpyHostToDevice) return true;
    cudaPointerAttributes a;
    return kind == cudaMemcpyDefault && cudaPointerGetAttributes(&a, from) == cudaSuccess &&
        a.type != cudaMemoryTypeDevice;
}
extern "C" cudaError_t cudaMemcpyAsync(void * to, const void * from, size_t n, cudaMemcpyKind kind,
                                       cudaStream_t stream) {
    static auto real = next<decltype(&cudaMemcpyAsync)>("cudaMemcpyAsync");
    const bool slow = n >= LEAST && is_up(from, kind);
    n_copies += slow;
    for (int i = 1; slow && i < TIMES; ++i) {
        if (cudaError_t e = real(to, from, n, kind, stream)) return e;
    }
    return real(to, from, n, kind, stream);
}
extern "C" cudaError_t cudaMemcpy2DAsync(void * to, size_t to_pitch, const void * from,
        size_t pitch, size_t width, size_t height, cudaMemcpyKind kind, cudaStream_t stream) {
    static auto real = next<decltype(&cudaMemcpy2DAsync)>("cudaMemcpy2DAsync");
    const bool slow = width*height >= LEAST && is_up(from, kind);
    n_copies += slow;
    for (int i = 1; slow && i < TIMES; ++i) {
        if (cudaError_t e = real(to, to_pitch, from, pitch, width, height, kind, stream)) return e;
    }
    return real(to, to_pitch, from, pitch, width, height, kind, stream);
}
extern "C" cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t * config, const void * kernel,
                                           void ** args) {
    static auto real = next<decltype(&cudaLaunchKernelExC)>("cudaLaunchKernelExC");
    const bool slow = fetch && kernel == fetch;
    n_kernels += slow;
    for (int i = 0; i < n_experts; ++i) {
        const void * reader = experts[i] == kernel ? slow_link_reader(args[0]) : nullptr;
        if (reader) {
            n_kernels += 1;
            cudaLaunchConfig_t before = *config;
            before.gridDim  = dim3(16);
            before.blockDim = dim3(256);
            before.dynamicSmemBytes = 0;
            if (cudaError_t e = real(&before, reader, args)) return e;
        }
    }
    return real(config, slow ? slow_link_kernel() : kernel, args);
}
extern "C" void __cudaRegisterFunction(void ** handle, const char * host, char * device,
        const char * name, int limit, void * a, void * b, void * c, void * d, int * e) {
    static auto real = next<void (*)(void **, const char *, char *, const char *, int, void *,
        void *, void *, void *, int *)>("__cudaRegisterFunction");
    // the library's own copy comes first
    static int n_seen = 0;
    if (strstr(name, "moegraph_fetch_kernel") && n_seen++ == 1) fetch = host;
    if (strstr(name, "moegraph_one_experts_kernel") && n_experts < 64) experts[n_experts++] = host;
    real(handle, host, device, name, limit, a, b, c, d, e);
}
__attribute__((destructor)) static void said() {
    if (n_copies || n_kernels) {
        dprintf(2, "slow link: %ld copies and %ld launches, %d times each\\n", n_copies.load(),
            n_kernels.load(), TIMES);
    }
}
"""


def kernel(source: str) -> str:
    """Return the kernel of moegraph-fetch.cu as one that reads everything TIMES times.

    Raises:
        BuildError: the source is not as this expects.
    """
    start, end = source.find("constexpr int MOEGRAPH_FETCH_BLOCKS"), source.find("\nvoid moegraph_")
    text, n_loops = re.subn(
        r"( +)(for \(int i = blockIdx\.x\*MOEGRAPH_FETCH_THREADS)",
        r"\1for (int again = 0; again < TIMES; ++again)\n\1\2", source[start:end],
    )  # fmt: skip
    text, n_loads = re.subn(r"__ldcs\(", "slow_load(", text)
    if start < 0 or end < 0 or (n_loops, n_loads) != (1, 1):
        raise BuildError(f"{FETCH.name} reads host memory in another way than _slow_link.py knows")
    return text


def arguments(source: str) -> str:
    """Return what moegraph-rows-types.cuh says about the arguments of the other kernel.

    Raises:
        BuildError: the source is not as this expects.
    """
    start = source.find("struct moegraph_segment {")
    last = source.find("struct moegraph_rows_args {")
    end = source.find("};\n", last)
    if not 0 <= start < last < end or "moegraph_rows_fetch      fetch;" not in source[last:end]:
        raise BuildError(f"{TYPES.name} has other arguments than _slow_link.py knows")
    return f"struct moegraph_block_y;\nstruct moegraph_group;\n{source[start : end + 3]}"


def build(times: int, folder: Path) -> Path:
    """Compile the library for this machine's nvcc into a folder; return it."""
    toolkit, _ = _cuda.find_toolkit()
    device, calls = folder / "slow_link_kernel.cu", folder / "slow_link.cpp"
    text, types = (path.read_text(encoding="utf-8") for path in (FETCH, TYPES))
    device.write_text(_HEAD + kernel(text) + "\n" + arguments(types) + _TAIL, encoding="utf-8")
    calls.write_text(_CALLS, encoding="utf-8")
    library = folder / "slow_link.so"
    # PTX: the driver takes the newer one that the card knows; kernels start early from 9.0 on
    archs = [f"-gencode=arch=compute_{arch},code=compute_{arch}" for arch in (75, 90)]
    command = [
        str(toolkit / "bin" / "nvcc"), "-shared", "-cudart", "shared", "-O3", "-std=c++17",
        "-Xcompiler", "-fPIC", *archs, f"-DTIMES={times}",
        "-o", str(library), str(device), str(calls), "-ldl",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"nvcc: {(done.stderr.strip().splitlines() or ['it failed'])[-1]}")
    return library


def use(times: int, folder: Path) -> None:
    """Have every process that this one starts use a link that many times slower."""
    before = os.environ.get("LD_PRELOAD")
    os.environ["LD_PRELOAD"] = ":".join(filter(None, [str(build(times, folder)), before]))
