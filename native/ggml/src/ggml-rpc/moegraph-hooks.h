// What ggml-rpc.cpp calls; moegraph-client.h and moegraph-server.h, which it includes at its end, define the rest.

#pragma once

#include "moegraph-endpoint.h"

#include "ggml-backend-impl.h"

#include <filesystem>
#include <fstream>

class rpc_server;
struct socket_t;

// Two tensors of a graph: the first keeps its memory until the second has been computed.
using moegraph_dep = std::pair<const ggml_tensor *, const ggml_tensor *>;

// The same, as places in the list of a message's tensors.
struct moegraph_dep_id {
    uint32_t tensor;
    uint32_t until;
};

// The graphs that a server has for its client.
struct moegraph_server_graphs {
    std::unordered_map<uint32_t, moegraph_graph_store> stored; // by device

    // If set, a graph is not computed but optimized, and this is what its backend asks for.
    std::vector<moegraph_dep> *  wanted = nullptr;
    std::vector<moegraph_dep_id> deps; // of the last one

    // A new graph. Its uid lets the backend replay it without comparing nodes. Nothing waits for its end: the inputs of the
    // next one come meanwhile.
    enum ggml_status compute(ggml_backend_t backend, ggml_cgraph * graph) {
        if (wanted == nullptr) {
            graph->uid = ggml_graph_next_uid();
            return ggml_backend_graph_compute_async(backend, graph);
        }
        struct ggml_backend_graph_optimize_params params = { add_dep, wanted };
        backend->iface.graph_optimize(backend, graph, &params);
        return GGML_STATUS_SUCCESS;
    }

    // Memory for bytes of the client. Large ones are used again, because new memory costs as much as a copy.
    std::vector<uint8_t> take(const size_t size) {
        std::vector<uint8_t> found;
        if (size > MOEGRAPH_LARGE && !spares.empty()) {
            found.swap(spares.back());
            spares.pop_back();
        }
        found.resize(size);
        return found;
    }

    // Bytes that a backend may still read.
    void hold(std::vector<uint8_t> && bytes, const std::vector<ggml_backend_t> & backends) {
        n_held += bytes.size();
        held.push_back(std::move(bytes));
        if (n_held > MOEGRAPH_MAX_HELD) {
            finish(backends);
        }
    }

    // Waits for what was begun. Upstream's commands do not.
    void finish(const std::vector<ggml_backend_t> & backends) {
        for (ggml_backend_t backend : backends) {
            ggml_backend_synchronize(backend);
        }
        for (auto & bytes : held) {
            if (bytes.size() > MOEGRAPH_LARGE && spares.size() < MOEGRAPH_MAX_SPARES) {
                spares.push_back(std::move(bytes));
            }
        }
        held.clear();
        n_held = 0;
    }

    void free_buffer(const uint64_t buffer) {
        for (auto & store : stored) {
            store.second.free_buffer(buffer);
        }
    }

private:
    static constexpr size_t MOEGRAPH_MAX_HELD = 32 * 1024 * 1024, MOEGRAPH_LARGE = 64 * 1024, MOEGRAPH_MAX_SPARES = 8;

    std::vector<std::vector<uint8_t>> held, spares;
    size_t                            n_held = 0;

    static void add_dep(void * wanted, ggml_tensor * tensor, ggml_tensor * until) {
        ((std::vector<moegraph_dep> *) wanted)->emplace_back(tensor, until);
    }
};

// Serves a command of ours. Returns false if the connection is to end.
static bool moegraph_serve(rpc_server & server, uint8_t cmd, const std::shared_ptr<socket_t> & sock);

// The most bytes of a message that sets a tensor.
static uint64_t moegraph_set_limit(const rpc_server & server);

// Keeps weights in a file, whole or not at all; without one the client sends them again.
static inline void moegraph_save(const std::filesystem::path & file, const void * data, const size_t size) {
    std::filesystem::path unfinished = file;
    unfinished += ".part";
    std::ofstream out(unfinished, std::ios::binary);
    out.write((const char *) data, (std::streamsize) size);
    out.close();
    std::error_code error;
    if (out.good()) {
        std::filesystem::rename(unfinished, file, error);
    }
    if (!out.good() || error) {
        GGML_LOG_WARN("cannot save '%s'\n", file.string().c_str());
        std::filesystem::remove(unfinished, error);
    }
}
