#pragma once

#include "moegraph-rows-types.cuh"

// How the kernels read each weight type.

static __device__ __forceinline__ int moegraph_load_b2(const char * p) {
    const uint16_t * p16 = (const uint16_t *) p;
    return (int) (p16[0] | ((uint32_t) p16[1] << 16));
}

static __device__ __forceinline__ int moegraph_load_b4(const char * p) {
    return *(const int *) p;
}

static __device__ __forceinline__ int moegraph_load_b1(const char * p) {
    const uint32_t * p32 = (const uint32_t *) (p - ((uintptr_t) p & 3));
    return (int) __funnelshift_r(p32[0], p32[1], 8*((uintptr_t) p & 3));
}

static __device__ __forceinline__ float moegraph_load_half(const char * p) {
    return __half2float(*(const half *) p);
}

// The packed scales and minimums of Q4_K and Q5_K.
struct moegraph_head_k {
    float    d;
    float    dmin;
    uint32_t sc[2];
    uint32_t mn[2];

    __device__ __forceinline__ void load(const char * s) {
        const int4   h  = *(const int4 *) s;
        const float2 dm = __half22float2(*(const half2 *) &h.x);
        const uint32_t u0 = h.y;
        const uint32_t u1 = h.z;
        const uint32_t u2 = h.w;
        d     = dm.x;
        dmin  = dm.y;
        sc[0] = u0 & 0x3F3F3F3F;
        mn[0] = u1 & 0x3F3F3F3F;
        sc[1] = ( u2       & 0x0F0F0F0F) | ((u0 >> 2) & 0x30303030);
        mn[1] = ((u2 >> 4) & 0x0F0F0F0F) | ((u1 >> 2) & 0x30303030);
    }
    __device__ __forceinline__ float scale(const int k) const {
        return d * (float) ((sc[k/4] >> (8*(k%4))) & 0xFF);
    }
    __device__ __forceinline__ float minimum(const int k) const {
        return dmin * (float) ((mn[k/4] >> (8*(k%4))) & 0xFF);
    }
};

struct moegraph_head_none {
    __device__ __forceinline__ void load(const char *) {}
};

// Per type: bytes of a chunk of a row, 16-byte vectors that cover it wherever it starts, pitch in shared memory
// (rows 0..7 start in different banks), whether there are minimums, and whether a chunk may start off 16 bytes.
// quants: the 8 values of lane c in sub-block k. scale: h tells the halves of a sub-block apart where they differ.
template <ggml_type type> struct moegraph_x;

template <> struct moegraph_x<GGML_TYPE_Q4_0> {
    static constexpr int  bytes = 144, vecs = 9, pitch = 144;
    static constexpr bool has_min = false, halves = false, unaligned = false;
    typedef moegraph_head_none head;
    static __device__ __forceinline__ void quants(const char * s, const int k, const int c, int * q) {
        const int w = moegraph_load_b2(s + 18*k + 2 + 4*c);
        q[0] = (((w >> 0) & 0x0F0F0F0F) + 0x78787878u) ^ 0x80808080u;
        q[1] = (((w >> 4) & 0x0F0F0F0F) + 0x78787878u) ^ 0x80808080u;
    }
    static __device__ __forceinline__ float scale(const head &, const char * s, const int k, const int) {
        return moegraph_load_half(s + 18*k);
    }
};

template <> struct moegraph_x<GGML_TYPE_Q8_0> {
    static constexpr int  bytes = 272, vecs = 17, pitch = 272;
    static constexpr bool has_min = false, halves = false, unaligned = false;
    typedef moegraph_head_none head;
    static __device__ __forceinline__ void quants(const char * s, const int k, const int c, int * q) {
        q[0] = moegraph_load_b2(s + 34*k +  2 + 4*c);
        q[1] = moegraph_load_b2(s + 34*k + 18 + 4*c);
    }
    static __device__ __forceinline__ float scale(const head &, const char * s, const int k, const int) {
        return moegraph_load_half(s + 34*k);
    }
};

template <> struct moegraph_x<MOEGRAPH_TYPE_Q8_0_ODD> : moegraph_x<GGML_TYPE_Q8_0> {
    static constexpr int  vecs = 18, pitch = 304;
    static constexpr bool unaligned = true;
};

template <> struct moegraph_x<GGML_TYPE_MXFP4> {
    static constexpr int  bytes = 136, vecs = 10, pitch = 176;
    static constexpr bool has_min = false, halves = false, unaligned = true;
    typedef moegraph_head_none head;
    // Twice the values of four of these numbers, in the low halves of bits. The highest bit is the sign.
    static __device__ __forceinline__ uint32_t four(const uint32_t w) {
        const uint32_t plus  = __byte_perm(0x03020100, 0x0C080604, w & 0x7777);
        const uint32_t minus = __byte_perm(0xFDFEFF00, 0xF4F8FAFC, w & 0x7777);
        return __byte_perm(plus, minus, 0x3210 | (w & 0x8888) >> 1);
    }
    static __device__ __forceinline__ void quants(const char * s, const int k, const int c, int * q) {
        const uint32_t w = moegraph_load_b1(s + 17*k + 1 + 4*c);
        const uint32_t a = four(w), b = four(w >> 16);
        q[0] = __byte_perm(a, b, 0x6420);
        q[1] = __byte_perm(a, b, 0x7531);
    }
    static __device__ __forceinline__ float scale(const head &, const char * s, const int k, const int) {
        const uint32_t e    = (uint8_t) s[17*k];
        const uint32_t bits = e < 2 ? 0x00200000u << e : (e - 1) << 23; // 2^(e - 128)
        float x;
        memcpy(&x, &bits, sizeof(x));
        return x;
    }
};

template <> struct moegraph_x<GGML_TYPE_Q4_K> {
    static constexpr int  bytes = 144, vecs = 9, pitch = 144;
    static constexpr bool has_min = true, halves = false, unaligned = false;
    typedef moegraph_head_k head;
    static __device__ __forceinline__ void quants(const char * s, const int k, const int c, int * q) {
        const char * p = s + 16 + 32*(k/2) + 4*c;
        q[0] = (moegraph_load_b4(p)      >> (4*(k%2))) & 0x0F0F0F0F;
        q[1] = (moegraph_load_b4(p + 16) >> (4*(k%2))) & 0x0F0F0F0F;
    }
    static __device__ __forceinline__ float scale(const head & h, const char *, const int k, const int) {
        return h.scale(k);
    }
};

template <> struct moegraph_x<GGML_TYPE_Q5_K> {
    static constexpr int  bytes = 176, vecs = 11, pitch = 176;
    static constexpr bool has_min = true, halves = false, unaligned = false;
    typedef moegraph_head_k head;
    static __device__ __forceinline__ void quants(const char * s, const int k, const int c, int * q) {
        const char * p = s + 48 + 32*(k/2) + 4*c;
        const int h0 = moegraph_load_b4(s + 16 + 4*c) >> k;
        const int h1 = moegraph_load_b4(s + 32 + 4*c) >> k;
        q[0] = ((moegraph_load_b4(p)      >> (4*(k%2))) & 0x0F0F0F0F) | ((h0 << 4) & 0x10101010);
        q[1] = ((moegraph_load_b4(p + 16) >> (4*(k%2))) & 0x0F0F0F0F) | ((h1 << 4) & 0x10101010);
    }
    static __device__ __forceinline__ float scale(const head & h, const char *, const int k, const int) {
        return h.scale(k);
    }
};

template <> struct moegraph_x<GGML_TYPE_Q6_K> {
    static constexpr int  bytes = 210, vecs = 14, pitch = 240;
    static constexpr bool has_min = false, halves = true, unaligned = true;
    typedef moegraph_head_none head;
    static __device__ __forceinline__ int value(const char * ql, const char * qh, const int t) {
        const int lo = (moegraph_load_b2(ql + 32*(t%2)) >> (4*(t/2))) & 0x0F0F0F0F;
        const int hi = (moegraph_load_b2(qh) >> (2*t)) & 0x03030303;
        return ((lo | (hi << 4)) + 0x60606060u) ^ 0x80808080u;
    }
    static __device__ __forceinline__ void quants(const char * s, const int k, const int c, int * q) {
        const char * ql = s +       64*(k/4) + 4*c;
        const char * qh = s + 128 + 32*(k/4) + 4*c;
        q[0] = value(ql,      qh,      k%4);
        q[1] = value(ql + 16, qh + 16, k%4);
    }
    static __device__ __forceinline__ float scale(const head &, const char * s, const int k, const int h) {
        return moegraph_load_half(s + 208) * (float) *(const int8_t *) (s + 192 + 8*(k/4) + 2*(k%4) + h);
    }
};
