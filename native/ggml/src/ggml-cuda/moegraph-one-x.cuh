#pragma once

#include "moegraph-rows-kernel.cuh"

// How the kernels of one row read weights: a lane multiplies 64 values, a part of a row, with its part of the activations.

constexpr int MOEGRAPH_ONE_VALUES = 64;

// Spelled out: bits must not depend on what the compiler contracts for some number of rows.
static __device__ __forceinline__ float moegraph_one_two(const float a, const float b, const float c, const float d) {
    return __fmaf_rn(c, d, __fmul_rn(a, b));
}

template <int n> static __device__ __forceinline__ void moegraph_words(int * w, const int4 * p) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
        const int4 v = p[i];
        w[4*i] = v.x, w[4*i + 1] = v.y, w[4*i + 2] = v.z, w[4*i + 3] = v.w;
    }
}

// What a lane has of the activations: two blocks, words in the order of the values.
struct moegraph_one_y {
    int   q[16];
    float d[2];
    float s[2];

    // w: the words of a block. there: whether the lane has a part of the row.
    __device__ __forceinline__ void set(const int b, const int * w, const bool there) {
        d[b] = there ? __int_as_float(w[0]) : 0.0f;
        s[b] = there ? __int_as_float(w[1]) : 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            q[8*b + i] = w[2 + (i < 4 ? 2*i : 2*i - 7)];
        }
    }
    __device__ __forceinline__ void load(const moegraph_block_y * y, const int part, const bool there) {
        int w[20];
        moegraph_words<5>(w, (const int4 *) (y + 2*part));
        set(0, w, there);
        set(1, w + 10, there);
    }
};

// How a lane multiplies its part of a row. Q4_K and Q5_K: from registers, as parts begin at 16 bytes.
template <ggml_type type> struct moegraph_one_x {
    static constexpr bool registers = true, five = type == GGML_TYPE_Q5_K;
    static constexpr int  bytes = moegraph_x<type>::bytes;
    typedef moegraph_one_y y_t;

    int4 head, high[2], low[2];

    __device__ __forceinline__ void load(const char * row, const int part) {
        const char * b = row + part/4*bytes;
        const char * q = b + (five ? 48 : 16) + 32*(part % 4);
        head = moegraph_load_16(b);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            low[i] = moegraph_load_16(q + 16*i);
            if constexpr (five) {
                high[i] = moegraph_load_16(b + 16 + 16*i);
            }
        }
    }
    __device__ __forceinline__ float dot(const y_t & y, const int part) const {
        const int j = part % 4;
        const uint32_t u0 = head.y, u1 = head.z, u2 = head.w;
        const uint32_t sc = (j < 2 ? u0 & 0x3F3F3F3F : (u2 & 0x0F0F0F0F)        | ((u0 >> 2) & 0x30303030)) >> 16*(j % 2);
        const uint32_t mn = (j < 2 ? u1 & 0x3F3F3F3F : ((u2 >> 4) & 0x0F0F0F0F) | ((u1 >> 2) & 0x30303030)) >> 16*(j % 2);
        const float2   dm = __half22float2(*(const half2 *) &head.x);
        int q[8], h[8], sums[2] = { 0, 0 };
        moegraph_words<2>(q, low);
        if constexpr (five) {
            moegraph_words<2>(h, high);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint32_t a = q[i] & 0x0F0F0F0F, b = (q[i] >> 4) & 0x0F0F0F0F;
            if constexpr (five) {
                a |= ((uint32_t) h[i] >> 2*j << 4) & 0x10101010;
                b |= ((uint32_t) h[i] >> 2*j << 3) & 0x10101010;
            }
            sums[0] = ggml_cuda_dp4a(a, y.q[i],     sums[0]);
            sums[1] = ggml_cuda_dp4a(b, y.q[8 + i], sums[1]);
        }
        const float x = moegraph_one_two(__fmul_rn(sc & 0xFF, y.d[0]), sums[0], __fmul_rn(sc >> 8 & 0xFF, y.d[1]), sums[1]);
        const float m = moegraph_one_two(mn & 0xFF, y.s[0], mn >> 8 & 0xFF, y.s[1]);
        return moegraph_one_two(dm.x, x, -dm.y, m);
    }
};

// 68 bytes a part, from words of shared memory, in which the first block lies two bytes off. So its activations do, too.
template <> struct moegraph_one_x<GGML_TYPE_Q8_0> {
    static constexpr bool registers = false;
    static constexpr int  part_bytes = 68;
    struct y_t {
        int   q[17];
        float d[2];
        __device__ __forceinline__ void load(const moegraph_block_y * y, const int part, const bool there) {
            moegraph_one_y o;
            o.load(y, part, there);
#pragma unroll
            for (int i = 0; i < 9; ++i) {
                q[i] = __funnelshift_r(i > 0 ? o.q[i - 1] : 0, i < 8 ? o.q[i] : 0, 16);
            }
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                q[9 + i] = o.q[8 + i];
            }
            d[0] = o.d[0];
            d[1] = o.d[1];
        }
    };
    static __device__ __forceinline__ float dot(const char * row, const y_t & y, const int part) {
        const int * w  = (const int *) (row + 68*part);
        const int   w0 = w[0], w8 = w[8];
        int sums[2] = { 0, 0 };
#pragma unroll
        for (int i = 0; i < 9; ++i) {
            sums[0] = ggml_cuda_dp4a(w[i], y.q[i], sums[0]);
        }
#pragma unroll
        for (int i = 9; i < 17; ++i) {
            sums[1] = ggml_cuda_dp4a(w[i], y.q[i], sums[1]);
        }
        return moegraph_one_two(__fmul_rn(moegraph_load_half((const char *) &w0),     y.d[0]), sums[0],
                                __fmul_rn(moegraph_load_half((const char *) &w8 + 2), y.d[1]), sums[1]);
    }
};

// A part is two blocks that share bytes: those at 32*p and at 32*p + 64 of half a superblock. Superblocks begin at any
// even byte. The 32 that each value is too large is taken off as the first term of the sums.
template <> struct moegraph_one_x<GGML_TYPE_Q6_K> {
    static constexpr bool registers = false;
    struct y_t : moegraph_one_y {
        int off[4];
        __device__ __forceinline__ void load(const moegraph_block_y * y, const int part, const bool there) {
#pragma unroll
            for (int b = 0; b < 2; ++b) { // a block of 40 bytes lies in 48 that begin at 16
                const int odd = part % 2;
                int w[12];
                moegraph_words<3>(w, (const int4 *) ((const char *) (y + part/2*4 + 2*b + odd) - 8*odd));
#pragma unroll
                for (int i = 0; i < 10; ++i) {
                    w[i] = odd ? w[i + 2] : w[i];
                }
                set(b, w, there);
            }
#pragma unroll
            for (int h = 0; h < 4; ++h) {
                off[h] = 0;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    off[h] = ggml_cuda_dp4a(0x01010101, q[4*h + i], off[h]);
                }
                off[h] *= -32;
            }
        }
    };
    static __device__ __forceinline__ float dot(const char * row, const y_t & y, const int part) {
        const char * b   = row + part/4*210;
        const int    odd = (int) ((uintptr_t) b & 2), p = part % 2;
        const int  * ql  = (const int *) (b - odd + 32*(part % 4));
        const int  * qh  = (const int *) (b - odd + 128 + 32*(part % 4/2));
        int sums[4] = { y.off[0], y.off[1], y.off[2], y.off[3] };
        uint32_t l0 = ql[0], h0 = qh[0];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint32_t l1 = ql[i + 1], h1 = qh[i + 1];
            const uint32_t l  = __funnelshift_r(l0, l1, 8*odd), h = __funnelshift_r(h0, h1, 8*odd) >> 2*p;
            sums[i/4]     = ggml_cuda_dp4a((l & 0x0F0F0F0F)        | ((h << 4) & 0x30303030), y.q[i],     sums[i/4]);
            sums[2 + i/4] = ggml_cuda_dp4a(((l >> 4) & 0x0F0F0F0F) | (h & 0x30303030),        y.q[8 + i], sums[2 + i/4]);
            l0 = l1, h0 = h1;
        }
        const int8_t * sc = (const int8_t *) b + 192 + 8*(part % 4/2) + 2*p;
        return __fmul_rn(moegraph_load_half(b + 208),
            moegraph_one_two(y.d[0], sc[0]*sums[0] + sc[1]*sums[1], y.d[1], sc[4]*sums[2] + sc[5]*sums[3]));
    }
};

// 34 bytes a part, from words of shared memory; a part begins at any even byte. The activations lie as the numbers do.
template <> struct moegraph_one_x<GGML_TYPE_MXFP4> {
    static constexpr bool registers = false;
    static constexpr int  part_bytes = 34;
    struct y_t {
        int   q[16];
        float d[2];
        __device__ __forceinline__ void load(const moegraph_block_y * y, const int part, const bool there) {
            moegraph_one_y o;
            o.load(y, part, there);
#pragma unroll
            for (int b = 0; b < 2; ++b) {
                d[b] = o.d[b];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    q[8*b + 2*i]     = __byte_perm(o.q[8*b + i], o.q[8*b + 4 + i], 0x5140);
                    q[8*b + 2*i + 1] = __byte_perm(o.q[8*b + i], o.q[8*b + 4 + i], 0x7362);
                }
            }
        }
    };
    static __device__ __forceinline__ float scale(const uint32_t e) { // 2^(e - 128)
        return __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    }
    static __device__ __forceinline__ int eight(const uint32_t w, const int * y, const int sum) { // the numbers, doubled
        const uint32_t m = w & 0x77777777, s = 0x32103210 | (w & 0x88888888) >> 1;
        const int a = __byte_perm(__byte_perm(0x03020100, 0x0C080604, m), __byte_perm(0xFDFEFF00, 0xF4F8FAFC, m), s);
        const int b = __byte_perm(__byte_perm(0x03020100, 0x0C080604, m >> 16),
            __byte_perm(0xFDFEFF00, 0xF4F8FAFC, m >> 16), s >> 16);
        return ggml_cuda_dp4a(b, y[1], ggml_cuda_dp4a(a, y[0], sum));
    }
    static __device__ __forceinline__ float dot(const char * row, const y_t & y, const int part) {
        const char * p   = row + part_bytes*part;
        const int    off = (int) ((uintptr_t) p & 2);
        const int  * w   = (const int *) (p - off);
        uint32_t u[9];
#pragma unroll
        for (int i = 0; i < 9; ++i) {
            u[i] = w[i];
        }
        int sums[2] = { 0, 0 };
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32_t a = __funnelshift_rc(u[i],     u[i + 1], 8*(off + 1));
            const uint32_t b = __funnelshift_rc(u[4 + i], u[5 + i], 8*(off + 2));
            sums[0] = eight(a, y.q + 2*i,     sums[0]);
            sums[1] = eight(b, y.q + 8 + 2*i, sums[1]);
        }
        return moegraph_one_two(__fmul_rn(scale(u[0] >> 8*off & 0xFF), y.d[0]), sums[0],
                                __fmul_rn(scale(u[4] >> 8*(off + 1) & 0xFF), y.d[1]), sums[1]);
    }
};

template <> struct moegraph_one_x<MOEGRAPH_TYPE_Q8_0_ODD> : moegraph_one_x<GGML_TYPE_Q8_0> {};

// Copies rows that lie one behind the other to shared memory, by a warp. Behind them must be room for 15 bytes; the copy
// begins at the same byte of 16 as the rows.
static __device__ __forceinline__ void moegraph_one_copy(char * s, const char * rows, const int bytes) {
    const int off = (int) ((uintptr_t) rows & 15), n = off + bytes;
    for (int i = 16*threadIdx.x; i < n; i += 16*32) {
        moegraph_copy_16(s + i, rows - off + i, min(16, n - i));
    }
}

static constexpr __host__ __device__ int moegraph_one_piece_bytes(const int bytes) {
    return (bytes + 15 + 15 + 4)/16*16; // and a word that is read behind the rows
}

// The sum over each n lanes, in all of them.
template <int n> static __device__ __forceinline__ float moegraph_one_sum(float v) {
#pragma unroll
    for (int step = n/2; step >= 1; step /= 2) {
        v = __fadd_rn(v, __shfl_xor_sync(0xFFFFFFFF, v, step, 32));
    }
    return v;
}
