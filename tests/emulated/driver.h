// What the programs that run emulated kernels share: tensors, counting.
#pragma once

#include "common.cuh"
#include "kernel_data.h"

#include <cstdio>
#include <cstdlib>
#include <string>

static int n_run = 0, n_failed = 0;

static void report(const std::string & name, const std::string & wrong) {
    n_run++;
    if (!wrong.empty()) {
        n_failed++;
        printf("FAIL %s: %s\n", name.c_str(), wrong.c_str());
    }
}

// Tensors in the memory of the emulated device.
class tensors {
public:
    tensors() : ctx(ggml_init({ 64*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true })), graph(ggml_new_graph(ctx)) {}
    ~tensors() {
        for (void * d : data) {
            emulated::release(d);
        }
        for (ggml_backend_buffer_t b : buffers) {
            ggml_backend_buffer_free(b);
        }
        ggml_free(ctx);
    }
    tensors(const tensors &) = delete;

    // values: what it holds, nullptr for NaN
    ggml_tensor * leaf(const ggml_type type, const std::vector<int64_t> & ne, const void * values) {
        ggml_tensor * t = ggml_new_tensor(ctx, type, (int) ne.size(), ne.data());
        place(t);
        if (values) {
            memcpy(t->data, values, ggml_nbytes(t));
        }
        return t;
    }
    ggml_tensor * place(ggml_tensor * t) {
        t->data = emulated::allocate(ggml_nbytes(t));
        data.push_back(t->data);
        return t;
    }
    // Says that no kernel writes t.
    void make_constant(ggml_tensor * t) {
        t->buffer = ggml_backend_cpu_buffer_from_ptr((void *) ((uintptr_t) t->data/64*64), ggml_nbytes(t) + 64);
        ggml_backend_buffer_set_usage(t->buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        buffers.push_back(t->buffer);
    }

    ggml_context * ctx;
    ggml_cgraph  * graph;

private:
    std::vector<void *>                data;
    std::vector<ggml_backend_buffer_t> buffers;
};
