// Half precision for kernels on the host. ggml-common.h includes this for blocks with halves.
#pragma once

#include "emulator.h"

#include "ggml.h"

struct half {
    uint16_t bits;
};
struct alignas(4) half2 {
    half x, y;
};

static inline float __half2float(const half h) { return ggml_fp16_to_fp32(h.bits); }
static inline half  __float2half(const float x) { return { ggml_fp32_to_fp16(x) }; }

static inline float2 __half22float2(const half2 h) { return { __half2float(h.x), __half2float(h.y) }; }
static inline half2  make_half2(const float x, const float y) { return { __float2half(x), __float2half(y) }; }
