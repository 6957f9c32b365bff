// What the programs share that check kernels on a GPU and emulated ones: random data, and how far off results are.
#pragma once

#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

typedef std::vector<float>   floats;
typedef std::vector<int32_t> ints;

static std::mt19937 rng(1);

static inline floats normal(const size_t n, const float sigma) {
    std::normal_distribution<float> d(0.0f, sigma);
    floats v(n);
    for (float & x : v) {
        x = d(rng);
    }
    return v;
}

// Random quants with scales that make rows of length k have values near 1/sqrt(k).
static inline std::vector<uint8_t> random_weights(const ggml_type type, const size_t n_rows, const int k) {
    std::vector<uint8_t> q(ggml_row_size(type, k)*n_rows);
    for (uint8_t & b : q) {
        b = (uint8_t) rng();
    }
    std::uniform_real_distribution<float> uniform(0.2f, 1.2f);
    for (size_t block = 0; block < q.size(); block += ggml_type_size(type)) {
        const float d = uniform(rng)/std::sqrt((float) k);
        const auto put = [&](const size_t offset, const float value) {
            const ggml_fp16_t h = ggml_fp32_to_fp16(value);
            memcpy(&q[block + offset], &h, sizeof(h));
        };
        switch (type) {
            case GGML_TYPE_Q4_0: put(0, d/4);      break;
            case GGML_TYPE_Q8_0: put(0, d/70);     break;
            case GGML_TYPE_Q6_K: put(208, d/1200); break;
            case GGML_TYPE_MXFP4: q[block] = 120 + q[block] % 4; break;
            default:             put(0, d/150); put(2, d/30); break;
        }
    }
    return q;
}

// Writes n_used experts for each of n tokens, which lie pitch apart in ids: distinct ones in random order, or what
// change(i, order) makes of the token's number i. order: all experts, as the token's are taken from them.
template <typename Change>
static void choose_experts(ints & ids, const int pitch, const int n, const int n_used, const int n_expert, const Change & change) {
    ints order(n_expert);
    std::iota(order.begin(), order.end(), 0);
    for (int t = 0; t < n; ++t) {
        std::shuffle(order.begin(), order.end(), rng);
        for (int i = 0; i < n_used; ++i) {
            ids[(size_t) t*pitch + i] = change(i, order);
        }
    }
}

// The squared error of n values relative to those that are wanted.
static inline double nmse(const float * got, const float * want, const size_t n) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < n; ++i) {
        error += ((double) got[i] - want[i])*((double) got[i] - want[i]);
        norm  += (double) want[i]*want[i];
    }
    return error/std::max(norm, 1e-30);
}
