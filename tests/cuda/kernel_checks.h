// What the programs that check kernels share: options, counting, experts of tokens.
#pragma once

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"

#include "../helpers/kernel_data.h"

#include <cstdio>
#include <cstdlib>
#include <string>

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

// Which experts the tokens of a case choose. STRIDED: distinct ones, of banks with rows behind each expert.
enum pattern { DISTINCT, REPEATED, SOME_ABSENT, ALL_ABSENT, ALL_EQUAL, TOO_LARGE, STRIDED, N_PATTERN };
[[maybe_unused]] static const char * PATTERN_NAMES[] = {
    "distinct", "repeated", "some absent", "all absent", "all equal", "too large", "strided"
};

[[maybe_unused]] static ints choose(
        const pattern which, const int pitch, const int n, const int n_used, const int n_expert) {
    ints ids((size_t) pitch*n, 0);
    choose_experts(ids, pitch, n, n_used, n_expert, [&](const int i, const ints & order) -> int32_t {
        const int id = order[i % n_expert];
        switch (which) {
            case REPEATED:    return i % 3 == 0 ? order[0] : (i % 2 ? 0 : id);
            case SOME_ABSENT: return rng() % 3 == 0 ? -1 : id;
            case ALL_ABSENT:  return -1;
            case ALL_EQUAL:   return n_expert/2;
            case TOO_LARGE:   return rng() % 3 == 0 ? n_expert + (int32_t) (rng() % 1000000) : id;
            default:          return id;
        }
    });
    return ids;
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
