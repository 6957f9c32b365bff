#pragma once

#include "common.cuh"

#include <array>
#include <unordered_set>
#include <vector>

// Two events that fork a stream from the main one and join it again.
struct moegraph_fork_events {
    cudaEvent_t fork = nullptr;
    cudaEvent_t join = nullptr;

    // Creates the events at the first call. Returns whether this was the first.
    bool create();
    ~moegraph_fork_events();
};

// What has been quantized or listed in this evaluation, for the products that read the same tensor. The buffers stay
// where they are as long as the context lives, because captured graphs read them.
struct moegraph_rows_state {
    static constexpr int N_CACHED = 8;

    struct entry {
        std::array<int64_t, 6> key = {}; // first: address of the tensor that was computed or given, 0: holds nothing
        void *  data = nullptr;
        size_t  size = 0;
        int64_t used = 0;
    };
    entry   y[N_CACHED];
    entry   groups[2];
    entry   q8_1[2];
    const entry * pinned = nullptr; // of y: a branch reads it, so nothing on the main stream may write it
    int64_t clock = 0;
    std::vector<void *> retired; // outgrown buffers that captured graphs may still use
    std::unordered_set<const ggml_tensor *> changed; // written in place in this evaluation
    std::unordered_set<const ggml_tensor *> wanted;  // read by a product of few rows in this evaluation
    std::unordered_set<const ggml_tensor *> wanted_q8_1; // read by the experts of one token

    ~moegraph_rows_state();
};

// How many blocks of a head have arrived: 0 between launches.
struct moegraph_step_state {
    static constexpr int N_COUNTS = 2048;

    unsigned * arrived = nullptr;

    ~moegraph_step_state();
};

// What the blocks of a router share. It stays where it is, because captured graphs use it.
struct moegraph_router_state {
    unsigned * arrived = nullptr; // blocks of the launch that runs; behind it are logits, gate and slots
    const ggml_tensor * gate_of = nullptr; // the node that the gate is the result of
    ggml_tensor       * fetch   = nullptr; // the look-up of slots whose result is there, too; gate and up are to fetch

    ~moegraph_router_state();
};

// A shared expert: SwiGLU of gate and up, the product behind it, and the product of one value whose sigmoid scales that.
struct moegraph_shared_expert {
    ggml_tensor * up   = nullptr;
    ggml_tensor * gate = nullptr;
    ggml_tensor * glu  = nullptr;
    ggml_tensor * down = nullptr;
    const ggml_tensor * scale = nullptr; // or nullptr
};

// What our kernels keep for a backend context. The context owns it and frees it.
struct moegraph_context {
    explicit moegraph_context(int device) : device(device) {}
    ~moegraph_context();

    int device;
    moegraph_fork_events branch;  // moegraph-branch.cu
    moegraph_shared_expert next_shared; // of the branch that follows in this evaluation, nullptr if there is none
    std::unordered_set<const ggml_tensor *> done; // moegraph-done.cuh
    moegraph_fork_events publish; // moegraph-publish.cu
    moegraph_rows_state  rows;    // moegraph-rows-prepare.cu
    moegraph_router_state router; // moegraph-router.cu
    moegraph_step_state  step;    // moegraph-delta-step.cu
};

// The state of a context; creates it at the first call.
moegraph_context & moegraph_get_context(ggml_backend_cuda_context & ctx);
