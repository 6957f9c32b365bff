#pragma once

#include "common.cuh"
#include "moegraph-attn.h"

// Keys and values of moegraph_attn: loads from the pool, and their fragments for products of halves on tensor cores.
//
// A product takes 16 elements of the head (keys) or 16 positions (values) at a time; which 16 is free as long as both
// factors agree. So a thread takes elements that lie side by side, and the queries follow that order.

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

// Two halves minus two others: exact here, as quants are small integers on top of a power of two.
static __device__ __forceinline__ uint32_t moegraph_attn_minus(const uint32_t x, const uint32_t y) {
    return moegraph_attn_bits(__hsub2(moegraph_attn_half2(x), moegraph_attn_half2(y)));
}

static __device__ __forceinline__ uint32_t moegraph_attn_times(const uint32_t x, const uint32_t y) {
    return moegraph_attn_bits(__hmul2(moegraph_attn_half2(x), moegraph_attn_half2(y)));
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

// Bytes of a head in a row of the pool.
template <ggml_type type, int d> static constexpr __host__ __device__ int moegraph_attn_row_bytes() {
    return type == GGML_TYPE_F16 ? 2*d : type == GGML_TYPE_Q8_0 ? d/32*34 : d/32*18;
}

// Which element of the head a thread of a quad has in a step of the product with the keys: i < 2 in the first register
// of the fragment, i >= 2 in the second.
template <ggml_type type, int d>
static constexpr __host__ __device__ int moegraph_attn_k_element(const int step, const int quad, const int i) {
    if (type == GGML_TYPE_F16) { // 16 bytes are two steps
        return 32*(step/2) + 8*quad + 4*(step % 2) + i;
    }
    if (type == GGML_TYPE_Q8_0) {
        return d/4*quad + 4*step + i;
    }
    // Q4_0: four bytes are two steps, low nibbles first; bytes 0 and 2, then 1 and 3
    const int word = step/2 + d/32*quad; // of the quants in the row: a quarter of them, d/32 words, per thread
    return 32*(word/4) + 4*(word % 4) + 16*(step % 2) + (i == 1 ? 2 : i == 2 ? 1 : i);
}

// Which element of the head is row g (half 0) or g + 8 (half 1) of tile m in a warp's slice of the values.
template <ggml_type type, int d>
static constexpr __host__ __device__ int moegraph_attn_v_element(
        const int warp, const int m, const int half, const int g) {
    if (type == GGML_TYPE_Q4_0) {
        return d == 256 ? 32*warp + 2*g + m + 16*half : 32*(warp/2) + 8*(warp % 2) + g + 16*half;
    }
    return d == 256 ? 32*warp + 4*g + 2*m + half : 16*warp + 2*g + half;
}

// Quants become halves by way of 1024 + n, whose bits are 0x6400 + n.
constexpr uint32_t MOEGRAPH_ATTN_1024 = 0x64006400;
constexpr uint32_t MOEGRAPH_ATTN_1152 = 0x64806480; // 1024 + 128
constexpr uint32_t MOEGRAPH_ATTN_1032 = 0x64086408; // 1024 + 8

// Two bytes at 0 and 16, both offset by 128.
static __device__ __forceinline__ uint32_t moegraph_attn_from_q8(const uint32_t bytes) {
    return moegraph_attn_minus((bytes & 0x00FF00FF) | MOEGRAPH_ATTN_1024, MOEGRAPH_ATTN_1152);
}

// Two nibbles at 0 and 16.
static __device__ __forceinline__ uint32_t moegraph_attn_from_q4(const uint32_t nibbles) {
    return moegraph_attn_minus((nibbles & 0x000F000F) | MOEGRAPH_ATTN_1024, MOEGRAPH_ATTN_1032);
}

// The 16 keys of a warp: thread lane has parts of keys lane/4 and lane/4 + 8.
//
// Quantized: two blocks are 2*n_words + 1 words, the first scale in front, the second in the upper half of the word
// between. A thread has one or two blocks, or half of one; the words of an even block are shifted by half a word.
template <ggml_type type, int d> struct moegraph_attn_k {
    static constexpr int n_words  = type == GGML_TYPE_Q8_0 ? 8 : 4; // quants of a block
    static constexpr int n_blocks = d == 256 ? 2 : 1;
    static constexpr int n        = d == 64 ? n_words/2 : n_words;  // of those, in a thread

    uint32_t raw[2][n_blocks][n + 1];
    uint32_t scale[2][n_blocks]; // the word that has it

    static __device__ __forceinline__ int block_of(const int b) {
        const int quad = threadIdx.x % 4;
        return d == 64 ? quad/2 : n_blocks*quad + b;
    }

    __device__ __forceinline__ void load(const char * row0, const char * row1) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int b = 0; b < n_blocks; ++b) {
                const int block = block_of(b);
                const uint32_t * words = (const uint32_t *) (i == 0 ? row0 : row1) + block/2*(2*n_words + 1) +
                    block % 2*n_words;
                const int first = d == 64 ? threadIdx.x % 2*n : 0;
#pragma unroll
                for (int j = 0; j <= n; ++j) {
                    raw[i][b][j] = words[first + j];
                }
                scale[i][b] = d == 64 ? words[0] : raw[i][b][0];
            }
        }
    }

    __device__ __forceinline__ void unpack(const int step, uint32_t a[4]) const {
        const int at = type == GGML_TYPE_Q8_0 ? step : step/2;
        const int b  = at/n;
        const int j  = at % n;
        const bool odd = block_of(b) % 2 == 1;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32_t x = odd ? raw[i][b][j + 1] : __funnelshift_r(raw[i][b][j], raw[i][b][j + 1], 16);
            const uint32_t d2 = __byte_perm(scale[i][b], 0, odd ? 0x3232 : 0x1010);
            if (type == GGML_TYPE_Q8_0) {
                x ^= 0x80808080;
                a[i]     = moegraph_attn_from_q8(__byte_perm(x, 0, 0x4140));
                a[i + 2] = moegraph_attn_from_q8(__byte_perm(x, 0, 0x4342));
            } else {
                x >>= step % 2*4;
                a[i]     = moegraph_attn_from_q4(x);
                a[i + 2] = moegraph_attn_from_q4(x >> 8);
            }
            a[i]     = moegraph_attn_times(a[i], d2);
            a[i + 2] = moegraph_attn_times(a[i + 2], d2);
        }
    }
};

template <int d> struct moegraph_attn_k<GGML_TYPE_F16, d> {
    uint4 raw[2][d/32];

    __device__ __forceinline__ void load(const char * row0, const char * row1) {
#pragma unroll
        for (int c = 0; c < d/32; ++c) {
            raw[0][c] = ((const uint4 *) row0)[4*c + threadIdx.x % 4];
            raw[1][c] = ((const uint4 *) row1)[4*c + threadIdx.x % 4];
        }
    }

    __device__ __forceinline__ void unpack(const int step, uint32_t a[4]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            a[i]     = step % 2 == 0 ? raw[i][step/2].x : raw[i][step/2].z;
            a[i + 2] = step % 2 == 0 ? raw[i][step/2].y : raw[i][step/2].w;
        }
    }
};

// The values of a tile of 128 positions. A warp multiplies a slice of 32 elements (d = 256) or 16. Quantized, its parts
// are too small for loads of their own: the block copies whole rows, through registers, to shared memory.
template <ggml_type type, int d> struct moegraph_attn_v {
    static constexpr bool staged  = true;
    static constexpr int  n_m     = d == 256 ? 2 : 1;
    static constexpr int  n_bytes = moegraph_attn_row_bytes<type, d>();
    static constexpr int  n_parts = type == GGML_TYPE_Q8_0 ? 17 : 9; // of 4, 8 or 16 bytes, as rows are aligned
    static constexpr int  n_loads = (128*n_parts + 255)/256;         // per thread

    using small = typename std::conditional<d == 128, uint2, uint32_t>::type;
    using part  = typename std::conditional<d == 256, uint4, small>::type;
    static_assert(n_parts*sizeof(part) == n_bytes, "a row is whole parts");

    part raw[n_loads];

    // at: rows of the pool; positions from n on, rounded up to 16, are not read
    __device__ __forceinline__ void load(const char * base, const int64_t stride, const int * at, const int n) {
#pragma unroll
        for (int i = 0; i < n_loads; ++i) {
            const int x   = i*256 + threadIdx.x;
            const int pos = x/n_parts;
            if (pos < 128 && pos/16*16 < n) {
                raw[i] = ((const part *) (base + at[pos]*stride))[x - pos*n_parts];
            }
        }
    }

    __device__ __forceinline__ void stage(char * smem, const int n) const {
#pragma unroll
        for (int i = 0; i < n_loads; ++i) {
            const int x   = i*256 + threadIdx.x;
            const int pos = x/n_parts;
            if (pos < 128 && pos/16*16 < n) {
                ((part *) smem)[x] = raw[i];
            }
        }
    }

    // Positions 16*i to 16*i + 15.
    __device__ __forceinline__ void unpack(const char * smem, const int i, uint32_t a[][4]) const {
        const int warp = threadIdx.x/32;
        const int g    = threadIdx.x % 32/4;
        const int quad = threadIdx.x % 4;
        const int block = d == 256 ? warp : warp/2;
        const int first = block*(type == GGML_TYPE_Q8_0 ? 34 : 18);
        uint32_t x[4], scales[2];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const char * row = smem + (16*i + 2*quad + j % 2 + j/2*8)*n_bytes + first;
            const uint32_t scale = *(const uint16_t *) row;
            scales[j/2] = j % 2 == 0 ? scale : scales[j/2] | scale << 16;
            if (type == GGML_TYPE_Q8_0 && d == 256) {
                const uint16_t * qs = (const uint16_t *) (row + 2) + 2*g;
                x[j] = qs[0] | (uint32_t) qs[1] << 16;
            } else if (type == GGML_TYPE_Q8_0) {
                x[j] = *((const uint16_t *) (row + 2) + warp % 2*8 + g);
            } else if (d == 256) {
                x[j] = *((const uint16_t *) (row + 2) + g);
            } else {
                x[j] = *((const uint8_t *) (row + 2) + warp % 2*8 + g);
            }
        }
#pragma unroll
        for (int m = 0; m < n_m; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) { // positions 2*quad and the next, then eight further
                if (type == GGML_TYPE_Q8_0) {
                    const uint32_t y0 = x[2*h] ^ 0x80808080, y1 = x[2*h + 1] ^ 0x80808080;
                    a[m][2*h]     = moegraph_attn_from_q8(__byte_perm(y0, y1, m == 0 ? 0x4400 : 0x6622));
                    a[m][2*h + 1] = moegraph_attn_from_q8(__byte_perm(y0, y1, m == 0 ? 0x5511 : 0x7733));
                } else {
                    const uint32_t y = __byte_perm(x[2*h], x[2*h + 1], m == 0 ? 0x4400 : 0x5511);
                    a[m][2*h]     = moegraph_attn_from_q4(y);
                    a[m][2*h + 1] = moegraph_attn_from_q4(y >> 4);
                }
                a[m][2*h]     = moegraph_attn_times(a[m][2*h], scales[h]);
                a[m][2*h + 1] = moegraph_attn_times(a[m][2*h + 1], scales[h]);
            }
        }
    }
};

template <int d> struct moegraph_attn_v<GGML_TYPE_F16, d> {
    static constexpr bool staged  = false;
    static constexpr int  n_m     = d == 256 ? 2 : 1;
    static constexpr int  n_bytes = 0; // in shared memory

    uint32_t raw[8][4][n_m];

    __device__ __forceinline__ void load(const char * base, const int64_t stride, const int * at, const int n) {
        const int warp = threadIdx.x/32;
        const int g    = threadIdx.x % 32/4;
        const int quad = threadIdx.x % 4;
        if (warp >= d/(16*n_m)) {
            return;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (16*i < n) {
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const char * row = base + at[16*i + 2*quad + j % 2 + j/2*8]*stride + 32*n_m*warp;
                    if (d == 256) {
                        const uint2 x = ((const uint2 *) row)[g];
                        raw[i][j][0] = x.x;
                        raw[i][j][n_m - 1] = x.y;
                    } else {
                        raw[i][j][0] = ((const uint32_t *) row)[g];
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void stage(char * smem, const int n) const {
        GGML_UNUSED_VARS(smem, n);
    }

    __device__ __forceinline__ void unpack(const char * smem, const int i, uint32_t a[][4]) const {
        GGML_UNUSED(smem);
#pragma unroll
        for (int m = 0; m < n_m; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                a[m][2*h]     = __byte_perm(raw[i][2*h][m], raw[i][2*h + 1][m], 0x5410);
                a[m][2*h + 1] = __byte_perm(raw[i][2*h][m], raw[i][2*h + 1][m], 0x7632);
            }
        }
    }
};
