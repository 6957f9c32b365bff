// The CUDA language as plain C++, so that a kernel compiles for the host and runs there (emulator.cpp).
//
// A block's threads are fibers of one thread of the host. One runs until it waits for others: at a barrier, or for
// lanes of its warp. Blocks run one after the other. So there are no races, but a missing barrier shows: the order of
// threads is an option, and memory that nobody wrote is NaN.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ thread_local // all of it is filled with NaN before each block

// Memory that a launch chooses the size of: each name once in a program.
#define EMULATED_SHARED_MAX (100*1024)
#define EMULATED_SHARED(type, name)                                                         \
    alignas(16) thread_local type name[EMULATED_SHARED_MAX/sizeof(type)];                   \
    static const bool name##_registered = (emulated::add_shared(name), true)

#define EMULATED_VECTOR2(name, T, align)              \
    struct alignas(align) name { T x, y; };           \
    static inline name make_##name(T x, T y) { return { x, y }; }
#define EMULATED_VECTOR3(name, T, align)              \
    struct alignas(align) name { T x, y, z; };        \
    static inline name make_##name(T x, T y, T z) { return { x, y, z }; }
#define EMULATED_VECTOR4(name, T, align)              \
    struct alignas(align) name { T x, y, z, w; };     \
    static inline name make_##name(T x, T y, T z, T w) { return { x, y, z, w }; }
EMULATED_VECTOR2(int2,   int,      8)
EMULATED_VECTOR4(int4,   int,      16)
EMULATED_VECTOR2(uint2,  uint32_t, 8)
EMULATED_VECTOR3(uint3,  uint32_t, 4)
EMULATED_VECTOR4(uint4,  uint32_t, 16)
EMULATED_VECTOR2(float2, float,    8)
EMULATED_VECTOR4(float4, float,    16)
EMULATED_VECTOR4(char4,  int8_t,   4)

struct dim3 {
    uint32_t x, y, z;
    dim3(uint32_t x = 1, uint32_t y = 1, uint32_t z = 1) : x(x), y(y), z(z) {}
};

namespace emulated {

constexpr int LANES = 32;
constexpr int WORDS = 6; // that a lane gives to an operation of its warp

struct warp;

// What a lane waits for. All lanes of the mask must come to the same place with the same mask; then finish runs once.
struct operation {
    const char * name;
    const char * file;
    int          line;
    uint32_t     mask;
    void      (* finish)(warp &, uint32_t mask);
};

struct fiber;

struct warp {
    fiber * lanes[LANES];
    int     in[LANES][WORDS];
    int     out[LANES][WORDS];
};

struct place {
    uint3 thread;
    uint3 block;
    dim3  block_size;
    dim3  grid_size;
    int   lane;
    warp * mine;
};
extern place * here; // of the fiber that runs

void wait_for_warp(const operation & op);
// Returns the sum of value over the block's threads.
int  wait_for_block(int value, const char * name, const char * file, int line);

// The product of tiles of int8 that the lanes of a warp hold: in has 2*n_halves words of A (16 rows) and n_halves of B (8
// columns), of 16*n_halves values each; out gets 4 of the 16 x 8 sums. Which element a lane holds is in the PTX ISA, at
// mma.m16n8k16 and mma.m16n8k32 for .s8.
void multiply_tiles(warp & w, int n_halves);

// cp.async.cg.shared.global of 16 bytes, of which n are read, and its groups. Until the thread waits for the group, there
// is NaN. With early_copies it arrives at once.
void copy(char * dst, const char * src, int n);
void commit_copies();
void wait_for_copies(size_t n_groups); // but for the last ones
extern bool early_copies;

// Whether p is in the variables of the thread that runs, which would be registers.
bool is_local(const void * p);

void add_shared(void * array);
struct launch_params {
    const char * file; // where it is launched
    int          line;
    const void * kernel;
    dim3         grid, block;
    size_t       shared;
};
void launch(const launch_params & params, const std::function<void()> & thread);
void limit_shared(const void * kernel, size_t bytes); // as cudaFuncSetAttribute

// Memory of the device: NaN, between pages that nobody may touch.
void * allocate(size_t bytes);
void   release(void * data);

// Of the device.
extern size_t shared_limit;
// In which order threads run: 0 first to last, 1 last to first, more: shuffled by this seed.
extern unsigned order;

[[noreturn]] void fail(const char * format, ...) __attribute__((format(printf, 1, 2)));

template <typename T> static inline int to_word(const T x) {
    static_assert(sizeof(T) == sizeof(int), "values of 4 bytes");
    int word;
    memcpy(&word, &x, sizeof(word));
    return word;
}
template <typename T> static inline T from_word(const int word) {
    T x;
    memcpy(&x, &word, sizeof(x));
    return x;
}

// in: the value, the lane that it comes from
template <typename T>
T shuffle(const uint32_t mask, const T value, const int source, const char * name, const char * file, const int line) {
    warp & w = *here->mine;
    w.in[here->lane][0] = to_word(value);
    w.in[here->lane][1] = source;
    wait_for_warp({ name, file, line, mask, [](warp & w, const uint32_t mask) {
        for (int lane = 0; lane < LANES; ++lane) {
            if (mask >> lane & 1) {
                const int from = w.in[lane][1];
                if (!(mask >> from & 1)) {
                    fail("lane %d reads from lane %d, which is not in the mask %08x", lane, from, mask);
                }
                w.out[lane][0] = w.in[from][0];
            }
        }
    } });
    return from_word<T>(w.out[here->lane][0]);
}

} // namespace emulated

#define threadIdx (emulated::here->thread)
#define blockIdx  (emulated::here->block)
#define blockDim  (emulated::here->block_size)
#define gridDim   (emulated::here->grid_size)

#define __syncthreads()        ((void) emulated::wait_for_block(0, "__syncthreads", __FILE__, __LINE__))
#define __syncthreads_or(x)    (emulated::wait_for_block((x) != 0, "__syncthreads_or", __FILE__, __LINE__) != 0)
#define __syncthreads_count(x) (emulated::wait_for_block((x) != 0, "__syncthreads_count", __FILE__, __LINE__))

static inline void __syncwarp(const uint32_t mask = 0xFFFFFFFF,
        const char * file = __builtin_FILE(), const int line = __builtin_LINE()) {
    emulated::wait_for_warp({ "__syncwarp", file, line, mask, [](emulated::warp &, uint32_t) {} });
}

template <typename T>
static inline T __shfl_sync(const uint32_t mask, const T value, const int lane, const int width = 32,
        const char * file = __builtin_FILE(), const int line = __builtin_LINE()) {
    const int first = emulated::here->lane/width*width;
    return emulated::shuffle(mask, value, first + (lane & (width - 1)), "__shfl_sync", file, line);
}

template <typename T>
static inline T __shfl_xor_sync(const uint32_t mask, const T value, const int bits, const int width = 32,
        const char * file = __builtin_FILE(), const int line = __builtin_LINE()) {
    const int lane = emulated::here->lane, other = lane ^ bits;
    // lanes of later segments cannot be reached, those of earlier ones can
    return emulated::shuffle(mask, value, other/width <= lane/width ? other : lane, "__shfl_xor_sync", file, line);
}

template <typename T>
static inline T __shfl_up_sync(const uint32_t mask, const T value, const int by, const int width = 32,
        const char * file = __builtin_FILE(), const int line = __builtin_LINE()) {
    const int lane = emulated::here->lane;
    return emulated::shuffle(mask, value, lane % width >= by ? lane - by : lane, "__shfl_up_sync", file, line);
}

template <typename T>
static inline T __shfl_down_sync(const uint32_t mask, const T value, const int by, const int width = 32,
        const char * file = __builtin_FILE(), const int line = __builtin_LINE()) {
    const int lane = emulated::here->lane;
    return emulated::shuffle(mask, value, lane % width + by < width ? lane + by : lane, "__shfl_down_sync", file, line);
}

static inline uint32_t __reduce_max_sync(const uint32_t mask, uint32_t x) {
    for (int bits = 16; bits > 0; bits /= 2) {
        const uint32_t other = __shfl_xor_sync(mask, x, bits);
        x = other > x ? other : x;
    }
    return x;
}

static inline uint32_t __reduce_min_sync(const uint32_t mask, const uint32_t x) {
    return ~__reduce_max_sync(mask, ~x);
}

static inline uint32_t __ballot_sync(const uint32_t mask, const bool here) {
    uint32_t x = here ? 1u << emulated::here->lane : 0;
    for (int bits = 16; bits > 0; bits /= 2) {
        x |= __shfl_xor_sync(mask, x, bits);
    }
    return x;
}

static inline int __popc(const uint32_t x) { return __builtin_popcount(x); }

template <typename T> static inline T atomicAdd(T * at, const T x) {
    const T before = *at;
    *at += x;
    return before;
}

// The compiler option -ffp-contract=off sees to it that nothing else is contracted.
static inline float __fmaf_rn(const float a, const float b, const float c) { return fmaf(a, b, c); }
static inline float __fmul_rn(const float a, const float b) { return a*b; }
static inline uint32_t __funnelshift_rc(const uint32_t low, const uint32_t high, const uint32_t n) {
    return (uint32_t) (((uint64_t) high << 32 | low) >> (n < 32 ? n : 32));
}
static inline uint32_t __funnelshift_r(const uint32_t low, const uint32_t high, const uint32_t n) {
    return (uint32_t) (((uint64_t) high << 32 | low) >> (n & 31));
}
static inline uint32_t __byte_perm(const uint32_t a, const uint32_t b, const uint32_t which) {
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
        result |= (uint32_t) (((uint64_t) b << 32 | a) >> 8*(which >> 4*i & 7) & 0xFF) << 8*i;
    }
    return result;
}
static inline float __fadd_rn(const float a, const float b) { return a + b; }
static inline float rsqrtf(const float x) { return 1.0f/sqrtf(x); }

static inline uint32_t __umulhi(const uint32_t a, const uint32_t b) { return (uint64_t) a*b >> 32; }

#define EMULATED_MIN_MAX(T)                                            \
    static inline T min(const T a, const T b) { return b < a ? b : a; } \
    static inline T max(const T a, const T b) { return a < b ? b : a; }
EMULATED_MIN_MAX(int)
EMULATED_MIN_MAX(unsigned)
EMULATED_MIN_MAX(long)
EMULATED_MIN_MAX(long long)
