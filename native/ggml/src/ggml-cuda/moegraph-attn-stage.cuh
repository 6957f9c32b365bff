#pragma once

#include "moegraph-attn-plan.cuh"

// Keys and values of moegraph_attn on their way to tensor cores: 64 rows of a head a time, in shared memory, as halves.
//
// Rows of halves are copied to where they are read; quantized rows are copied as they are, then become halves. Eight
// halves are a chunk. Chunks of a row are swapped so that one chunk of eight rows, which are read together, lies in
// different banks.

constexpr int MOEGRAPH_ATTN_WARPS   = 8;
constexpr int MOEGRAPH_ATTN_THREADS = 32*MOEGRAPH_ATTN_WARPS;
constexpr int MOEGRAPH_ATTN_TILE    = 64; // positions
constexpr int MOEGRAPH_ATTN_COLS    = 8;  // of one product

enum { MOEGRAPH_ATTN_K, MOEGRAPH_ATTN_V };

// Where a chunk of a row lies in the row.
static __device__ __forceinline__ int moegraph_attn_swap(const int row, const int chunk) {
    return chunk ^ (row & 7);
}

// Bytes of a head in a row of the pool.
static constexpr __host__ __device__ int moegraph_attn_head_bytes(const ggml_type type, const int d) {
    return type == GGML_TYPE_F16 ? 2*d : type == GGML_TYPE_Q8_0 ? d/32*34 : d/32*18;
}

// Copies a tile's rows in parts of n_bytes. Lane i < 8 of each warp knows where row warp + 8*i is in the pool.
template <ggml_type type, int d>
static __device__ __forceinline__ void moegraph_attn_copy_rows(
        const char * base, const uint32_t stride, const int at, const int n, char * slot) {
    constexpr int n_bytes = type == GGML_TYPE_F16 ? 16 : d/16; // as rows are aligned
    constexpr int n_parts = moegraph_attn_head_bytes(type, d)/n_bytes;
    constexpr int n_rows  = 32/n_parts; // that a warp copies at once
    const int warp = threadIdx.x/32;
    const int lane = threadIdx.x % 32;
    const int mine = lane/n_parts;
    const int x    = lane - mine*n_parts;
#pragma unroll
    for (int i = 0; i < 8; i += n_rows) {
        const int from = __shfl_sync(0xFFFFFFFF, at, (i + mine) % 8);
        const int row  = warp + 8*(i + mine);
        if (mine < n_rows && i + mine < 8 && row < n) {
            char * to = slot + row*(n_parts*n_bytes) +
                (type == GGML_TYPE_F16 ? moegraph_attn_swap(row, x) : x)*n_bytes;
            moegraph_attn_copy<n_bytes>(to, base + (uint64_t) (uint32_t) from*stride + x*n_bytes);
        }
    }
}

template <int d>
static __device__ __forceinline__ void moegraph_attn_copy_tile(
        const moegraph_attn_args & args, const int part, const int head_kv, const int at, const int n, char * slot) {
    const char *   base   = args.data[part] + head_kv*args.head[part];
    const uint32_t stride = args.stride[part];
    switch (args.type[part]) {
        case GGML_TYPE_F16:
            return moegraph_attn_copy_rows<GGML_TYPE_F16, d>(base, stride, at, n, slot);
        case GGML_TYPE_Q8_0:
            return moegraph_attn_copy_rows<GGML_TYPE_Q8_0, d>(base, stride, at, n, slot);
        default:
            return moegraph_attn_copy_rows<GGML_TYPE_Q4_0, d>(base, stride, at, n, slot);
    }
}

// Two quants with 0x64 in front are the halves 1024 + n. offset: 1024 and what the quants are offset by, twice.
static __device__ __forceinline__ uint32_t moegraph_attn_scaled(
        const uint32_t quants, const uint32_t offset, const uint32_t scale) {
    const half2 x = __hsub2(moegraph_attn_half2(quants), moegraph_attn_half2(offset));
    return moegraph_attn_bits(__hmul2(x, moegraph_attn_half2(scale)));
}

// A thread has half of a block's quants, 16 or 8 bytes. They start in the middle of a word in every other block.
template <ggml_type type, int d>
static __device__ __forceinline__ void moegraph_attn_convert_rows(const char * slot, char * halves, const int n) {
    constexpr int n_words = type == GGML_TYPE_Q8_0 ? 4 : 2;
    constexpr int n_bytes = moegraph_attn_head_bytes(type, d);
#pragma unroll 2
    for (int i = threadIdx.x; i < MOEGRAPH_ATTN_TILE*(d/16); i += MOEGRAPH_ATTN_THREADS) {
        const int row  = i/(d/16);
        const int x    = i % (d/16);
        if (row >= n) {
            break;
        }
        const char *     block = slot + row*n_bytes + x/2*(n_bytes/(d/32));
        const uint32_t   scale = *(const uint16_t *) block*0x10001u;
        const bool       odd   = (uintptr_t) block % 4 != 0;
        const uint32_t * words = (const uint32_t *) (block + (odd ? 2 : 0)) + x % 2*n_words;
        uint32_t q[n_words + 1];
#pragma unroll
        for (int j = 0; j < n_words; ++j) {
            q[j] = words[j];
        }
        q[n_words] = odd ? 0 : words[n_words];
#pragma unroll
        for (int j = 0; j < n_words; ++j) {
            q[j] = __funnelshift_r(q[j], q[j + 1], odd ? 0 : 16);
        }
        uint4 low, high;
        if (type == GGML_TYPE_Q8_0) { // eight quants, then eight more
            uint32_t h[8];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const uint32_t two = __byte_perm(
                    q[j/2 % n_words] ^ 0x80808080, 0x64, j % 2 == 0 ? 0x4140 : 0x4342);
                h[j] = moegraph_attn_scaled(two, 0x64806480, scale);
            }
            low  = make_uint4(h[0], h[1], h[2], h[3]);
            high = make_uint4(h[4], h[5], h[6], h[7]);
        } else { // low nibbles are the first half of a block
            uint32_t h[2][4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint32_t two = __byte_perm(q[j/2], 0, j % 2 == 0 ? 0x4140 : 0x4342);
                h[0][j] = moegraph_attn_scaled((two & 0x000F000F) | 0x64006400, 0x64086408, scale);
                h[1][j] = moegraph_attn_scaled((two >> 4 & 0x000F000F) | 0x64006400, 0x64086408, scale);
            }
            low  = make_uint4(h[0][0], h[0][1], h[0][2], h[0][3]);
            high = make_uint4(h[1][0], h[1][1], h[1][2], h[1][3]);
        }
        uint4 * to = (uint4 *) halves + row*(d/8);
        const int chunk = type == GGML_TYPE_Q8_0 ? 2*x : x/2*4 + x % 2;
        to[moegraph_attn_swap(row, chunk)] = low;
        to[moegraph_attn_swap(row, chunk + (type == GGML_TYPE_Q8_0 ? 1 : 2))] = high;
    }
}

template <int d>
static __device__ __forceinline__ void moegraph_attn_convert_tile(
        const ggml_type type, const char * slot, char * halves, const int n) {
    if (type == GGML_TYPE_Q8_0) {
        moegraph_attn_convert_rows<GGML_TYPE_Q8_0, d>(slot, halves, n);
    } else {
        moegraph_attn_convert_rows<GGML_TYPE_Q4_0, d>(slot, halves, n);
    }
}
