// Takes the place of upstream's mma.cuh: products of int8 tiles. Upstream hands registers over in the order of the PTX ISA.
#pragma once

#include "common.cuh"

namespace ggml_cuda_mma {

template <int I, int J, typename T> struct tile {
    static constexpr int ne = I*J/32;
    T x[ne] = {};
};

template <int n_halves>
static inline void emulated_product(int * d, const int * a, const int * b, const char * file, const int line) {
    emulated::warp & w = *emulated::here->mine;
    const int lane = emulated::here->lane;
    memcpy(w.in[lane], a, 2*n_halves*sizeof(int));
    memcpy(w.in[lane] + 2*n_halves, b, n_halves*sizeof(int));
    const auto multiply = [](emulated::warp & w, uint32_t) { emulated::multiply_tiles(w, n_halves); };
    emulated::wait_for_warp({ "mma", file, line, 0xFFFFFFFF, multiply });
    for (int l = 0; l < 4; ++l) {
        d[l] += w.out[lane][l];
    }
}

static inline void mma(tile<16, 8, int> & d, const tile<16, 4, int> & a, const tile<8, 4, int> & b,
        const char * file = __builtin_FILE(), const int line = __builtin_LINE()) {
    emulated_product<1>(d.x, a.x, b.x, file, line);
}

static inline void mma(tile<16, 8, int> & d, const tile<16, 8, int> & a, const tile<8, 8, int> & b,
        const char * file = __builtin_FILE(), const int line = __builtin_LINE()) {
    emulated_product<2>(d.x, a.x, b.x, file, line);
}

} // namespace ggml_cuda_mma
