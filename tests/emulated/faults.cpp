// Kernels with one error each, by name: what the emulator must say about it.
//
// Usage: faults NAME. A fault that only makes results NaN is counted and printed here.

#include "driver.h"
#include "mma.cuh"
#include "moegraph-copy.cuh"

#include <functional>
#include <map>

EMULATED_SHARED(float, dynamic_memory);

static float * memory; // of the device

static void run(void (* kernel)(float *), const int n_threads = 64, const size_t shared = 0) {
    ggml_cuda_kernel_launch(kernel, ggml_cuda_kernel_launch_params(dim3(1), dim3(n_threads), shared, nullptr), memory);
}

static void print_nan(const int n) {
    int n_nan = 0;
    for (int i = 0; i < n; ++i) {
        n_nan += std::isnan(memory[i]);
    }
    printf("%d of %d are NaN\n", n_nan, n);
}

static void neighbours(float * out, const bool wait) {
    __shared__ float shared[64];
    shared[threadIdx.x] = 1.0f;
    if (wait) {
        __syncthreads();
    }
    out[threadIdx.x] = shared[threadIdx.x ^ 63];
}

static const std::map<std::string, std::function<void()>> FAULTS = {
    { "none", [] {
        run([](float * out) { neighbours(out, true); });
        print_nan(64);
    } },
    { "no barrier, first to last", [] {
        run([](float * out) { neighbours(out, false); });
        print_nan(64);
    } },
    { "barrier of some threads", [] {
        run([](float *) {
            if (threadIdx.x < 40) {
                __syncthreads();
            }
        });
    } },
    { "lane outside of its mask", [] {
        run([](float * out) { out[threadIdx.x] = __shfl_xor_sync(0xFF, 1.0f, 1, 8); });
    } },
    { "reads behind memory", [] { run([](float * out) { out[0] = out[1024 + threadIdx.x]; }); } },
    { "copy not aligned", [] { run([](float * out) { ggml_cuda_memcpy_1<16>(out + 4*threadIdx.x + 1, out); }); } },
    { "too much shared memory", [] { run([](float *) {}, 64, 50*1024); } },
    { "copies without a wait", [] {
        run([](float * out) {
            alignas(16) __shared__ float shared[256];
            out[4*threadIdx.x] = 1.0f;
            moegraph_copy_16((char *) (shared + 4*threadIdx.x), (const char *) (out + 4*threadIdx.x), 16);
            moegraph_copy_commit();
            moegraph_copy_wait<1>();
            out[threadIdx.x] = shared[4*threadIdx.x];
        });
        print_nan(64);
    } },
};

int main(int argc, char ** argv) {
    memory = (float *) emulated::allocate(1024*sizeof(float));
    const auto fault = FAULTS.find(argc > 1 ? argv[1] : "");
    if (fault == FAULTS.end()) {
        fprintf(stderr, "faults: usage: faults NAME, one of:\n");
        for (const auto & f : FAULTS) {
            fprintf(stderr, "  %s\n", f.first.c_str());
        }
        return 2;
    }
    fault->second();
    return 0;
}
