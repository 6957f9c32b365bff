// What the programs that check kernels share: options, counting, random numbers.
#pragma once

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

typedef std::vector<float> floats;

static std::mt19937   rng(1);
static ggml_backend_t backend;

static int         every = 1;
static std::string only;
static int         n_seen = 0, n_run = 0, n_failed = 0;

static bool selected(const std::string & name) {
    if (name.find(only) == std::string::npos) {
        return false;
    }
    return n_seen++ % every == 0;
}

[[maybe_unused]] static void report(const std::string & name, const bool passed, const std::string & detail) {
    n_run++;
    if (!passed) {
        n_failed++;
        printf("FAIL %s: %s\n", name.c_str(), detail.c_str());
    }
}

static floats normal(const size_t n, const float sigma) {
    std::normal_distribution<float> d(0.0f, sigma);
    floats v(n);
    for (float & x : v) {
        x = d(rng);
    }
    return v;
}

// Random quants with scales that make rows of length k have values near 1/sqrt(k).
[[maybe_unused]] static std::vector<uint8_t> random_weights(const ggml_type type, const size_t n_rows, const int k) {
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
            default:             put(0, d/150); put(2, d/30); break;
        }
    }
    return q;
}

// A graph with its tensors: weights in one buffer, the rest in another.
struct weights_net {
    ggml_context *        weights;
    ggml_context *        ctx;
    ggml_cgraph *         graph;
    ggml_backend_buffer_t buffers[2] = { nullptr, nullptr };

    explicit weights_net(const int n_ops = 1) {
        const size_t n = 64 + 64*n_ops;
        const ggml_init_params params = {
            n*ggml_tensor_overhead() + ggml_graph_overhead_custom(n, false), nullptr, true };
        weights = ggml_init(params);
        ctx     = ggml_init(params);
        graph   = ggml_new_graph_custom(ctx, n, false);
    }
    void place(const bool constant) {
        buffers[0] = ggml_backend_alloc_ctx_tensors(weights, backend);
        buffers[1] = ggml_backend_alloc_ctx_tensors(ctx, backend);
        if (constant) {
            ggml_backend_buffer_set_usage(buffers[0], GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        }
    }
    ~weights_net() {
        ggml_backend_buffer_free(buffers[0]);
        ggml_backend_buffer_free(buffers[1]);
        ggml_free(weights);
        ggml_free(ctx);
    }
};

// Reads the options and opens the device: [--device NAME] [--only TEXT] [--every N] and, if timed is given, [--time 1].
// Returns the exit code for wrong ones, or 0.
static int start(const int argc, char ** argv, const char * name, bool * timed = nullptr) {
    std::string device;
    for (int i = 1; i < argc; i += 2) {
        const std::string option = argv[i];
        const bool known = option == "--device" || option == "--only" || option == "--every" || (timed && option == "--time");
        if (i + 1 >= argc || !known) {
            fprintf(stderr, "%s: usage: %s [--device NAME] [--only TEXT] [--every N]%s\n", name, name, timed ? " [--time 1]" : "");
            return 2;
        }
        if (option == "--device") {
            device = argv[i + 1];
        } else if (option == "--only") {
            only = argv[i + 1];
        } else if (option == "--every") {
            every = std::max(1, atoi(argv[i + 1]));
        } else {
            *timed = atoi(argv[i + 1]) != 0;
        }
    }
    ggml_backend_load_all();
    ggml_backend_dev_t dev = device.empty() ? ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU) :
        ggml_backend_dev_by_name(device.c_str());
    if (dev == nullptr) {
        fprintf(stderr, "%s: no device %s\n", name, device.empty() ? "with kernels to test" : device.c_str());
        return 2;
    }
    backend = ggml_backend_dev_init(dev, nullptr);
    return 0;
}
