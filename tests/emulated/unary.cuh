// Takes the place of upstream's unary.cuh: the activations of a GLU.
#pragma once

#include "common.cuh"

static inline float ggml_cuda_op_silu_single(const float x) {
    return x/(1.0f + expf(-x));
}
static inline float ggml_cuda_op_gelu_single(const float x) {
    return 0.5f*x*(1.0f + tanhf(0.79788456080286535587989211986876f*x*(1.0f + 0.044715f*x*x)));
}
static inline float ggml_cuda_op_swiglu_oai_single(float x, float g) {
    x = fminf(x, 7.0f);
    g = fmaxf(fminf(g, 7.0f), -7.0f);
    return x/(1.0f + expf(-x*1.702f))*(1.0f + g);
}
static inline float ggml_cuda_op_swiglu_clamp_single(const float gate, const float up, const float limit) {
    return ggml_cuda_op_silu_single(fminf(gate, limit))*fmaxf(fminf(up, limit), -limit);
}
