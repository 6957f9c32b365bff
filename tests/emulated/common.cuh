// Takes the place of upstream's common.cuh: what our kernels and their host functions use of it, on the emulator.
#pragma once

#include "emulator.h"

#define GGML_COMMON_DECL_CUDA
#define GGML_COMMON_IMPL_CUDA
#include "ggml-common.h"
#include "ggml-backend.h"
#include "ggml-impl.h"

#include <cfloat>
#include <climits>
#include <limits>
#include <memory>

#define WARP_SIZE 32
#define MATRIX_ROW_PADDING 512
#define TURING_MMA_AVAILABLE
#define NO_DEVICE_CODE GGML_ABORT("no device code")

#define GGML_CUDA_CC_IS_NVIDIA(cc) true
#define GGML_CUDA_CC_AMPERE 800
#define GGML_CUDA_CC_HOPPER 900
static inline bool turing_mma_available(const int cc) { return cc >= 750; }
static inline bool cp_async_available(const int cc)   { return cc >= 800; }

// ---- the runtime

typedef struct cudaStream * cudaStream_t;
typedef struct cudaEvent  * cudaEvent_t;
enum { cudaEventDisableTiming };
static inline bool cudaEventCreateWithFlags(cudaEvent_t *, int) { return true; }
static inline bool cudaEventDestroy(cudaEvent_t) { return true; }
static inline bool cudaMalloc(void ** data, const size_t bytes) {
    *data = emulated::allocate(bytes);
    return true;
}
static inline bool cudaMemsetAsync(void * data, const int value, const size_t bytes, cudaStream_t) {
    memset(data, value, bytes);
    return true;
}
static inline bool cudaFree(void * data) {
    emulated::release(data);
    return true;
}
#define CUDA_CHECK(x) GGML_ASSERT(x)
#define CUDA_SET_SHARED_MEMORY_LIMIT(kernel, bytes) emulated::limit_shared((const void *) (kernel), bytes)

struct ggml_cuda_device_info {
    struct cuda_device_info {
        int    cc    = 900;
        int    nsm   = 132;
        size_t smpbo = emulated::shared_limit;
    };
    cuda_device_info devices[1];
};
static inline ggml_cuda_device_info ggml_cuda_info() { return {}; }
static inline int  ggml_cuda_get_device() { return 0; }
static inline void ggml_cuda_set_device(int) {}

struct ggml_cuda_pool {};
template <typename T> struct ggml_cuda_pool_alloc {
    T * ptr = nullptr;
    explicit ggml_cuda_pool_alloc(ggml_cuda_pool &) {}
    ~ggml_cuda_pool_alloc() { emulated::release(ptr); }
    T * alloc(const size_t n) { return ptr = (T *) emulated::allocate(n*sizeof(T)); }
    T * get() const { return ptr; }
};

struct ggml_backend_cuda_context {
    int                   device         = 0;
    int                   curr_stream_no = 0;
    std::shared_ptr<void> moegraph;
    ggml_cuda_pool        memory;
    ggml_cuda_pool & pool()   { return memory; }
    cudaStream_t     stream() { return nullptr; }
};

struct ggml_cuda_kernel_launch_params {
    dim3         grid, block;
    size_t       shmem;
    cudaStream_t stream;
    ggml_cuda_kernel_launch_params(const dim3 grid, const dim3 block, const size_t shmem, cudaStream_t stream) :
        grid(grid), block(block), shmem(shmem), stream(stream) {}
};
template <typename... P, typename... A>
static void emulated_launch(const char * file, const int line, void (* kernel)(P...), const ggml_cuda_kernel_launch_params & params,
        const A &... args) {
    emulated::launch({ file, line, (const void *) kernel, params.grid, params.block, params.shmem }, [&] { kernel(args...); });
}
#define ggml_cuda_kernel_launch(...) emulated_launch(__FILE__, __LINE__, __VA_ARGS__)

// ---- the device

static inline void ggml_cuda_pdl_sync() {}
static inline void ggml_cuda_pdl_lc() {}

static inline float __uint_as_float(const uint32_t word) { return emulated::from_word<float>((int) word); }
static inline uint32_t __float_as_uint(const float x) { return (uint32_t) emulated::to_word(x); }
static inline float __int_as_float(const int word) { return emulated::from_word<float>(word); }
template <typename T> static inline T __ldcg(const T * p) { return *p; }
template <typename T> static inline T __ldcs(const T * p) { return *p; }
static inline int ggml_cuda_dp4a(const int a, const int b, int c) {
    for (int i = 0; i < 32; i += 8) {
        c += (int8_t) (a >> i)*(int8_t) (b >> i);
    }
    return c;
}

template <int width = WARP_SIZE> static inline int warp_reduce_sum(int x) {
    for (int offset = width/2; offset > 0; offset >>= 1) {
        x += __shfl_xor_sync(0xFFFFFFFF, x, offset, width);
    }
    return x;
}
template <int width = WARP_SIZE> static inline float warp_reduce_sum(float x) {
    for (int offset = width/2; offset > 0; offset >>= 1) {
        x += __shfl_xor_sync(0xFFFFFFFF, x, offset, width);
    }
    return x;
}
static inline float warp_reduce_max(float x) {
    for (int offset = WARP_SIZE/2; offset > 0; offset >>= 1) {
        x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFF, x, offset));
    }
    return x;
}
enum class block_reduce_method { SUM };
template <block_reduce_method, unsigned block_size> static inline float block_reduce(float x, float * shared) {
    x = warp_reduce_sum(x);
    if (block_size > WARP_SIZE) {
        if (threadIdx.x % WARP_SIZE == 0) {
            shared[threadIdx.x/WARP_SIZE] = x;
        }
        __syncthreads();
        x = warp_reduce_sum(threadIdx.x % WARP_SIZE < block_size/WARP_SIZE ? shared[threadIdx.x % WARP_SIZE] : 0.0f);
    }
    return x;
}

template <int n, int alignment = 0> static inline void ggml_cuda_memcpy_1(void * dst, const void * src) {
    constexpr uintptr_t step = alignment == 0 ? n : alignment;
    for (const void * p : { (const void *) dst, src }) {
        if ((uintptr_t) p % step != 0 && !emulated::is_local(p)) {
            emulated::fail("a copy of %d bytes is not aligned: %p to %p", n, src, dst);
        }
    }
    memcpy(dst, src, n);
}

static inline uint3 init_fastdiv_values(const uint64_t d) {
    uint32_t L = 0;
    while (L < 32 && (uint32_t) 1 << L < d) {
        ++L;
    }
    return make_uint3((uint32_t) (((uint64_t) 1 << 32)*(((uint64_t) 1 << L) - d)/d + 1), L, (uint32_t) d);
}
static inline uint32_t fastdiv(const uint32_t n, const uint3 d)    { return (__umulhi(n, d.x) + n) >> d.y; }
static inline uint32_t fastmodulo(const uint32_t n, const uint3 d) { return n - fastdiv(n, d)*d.z; }
