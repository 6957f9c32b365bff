// Graphs that a server of the RPC backend stores for its client, by device and uid.
//
// Client and server keep the same books in the same order of commands, so the client knows what is stored without asking.
// The client decides what is forgotten; the server ends the connection of one that wants more than the limit.

#pragma once

#include "ggml-impl.h"

#include <cstdint>
#include <list>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

// For each device, in bytes of the server's memory. No message of a graph is larger.
static constexpr size_t MOEGRAPH_STORED_SIZE = 256ull * 1024 * 1024;

static inline size_t moegraph_stored_size(size_t n_nodes, size_t n_tensors) {
    return ggml_tensor_overhead()*(n_nodes + n_tensors) + ggml_graph_overhead_custom(n_nodes, false);
}

// The buffers that serialized tensors are in, as the server knows them.
template <typename Tensor>
static std::unordered_set<uint64_t> moegraph_buffers_of(const Tensor * tensors, size_t n_tensors) {
    std::unordered_set<uint64_t> found;
    for (size_t i = 0; i < n_tensors; i++) {
        if (tensors[i].buffer != 0) {
            found.insert(tensors[i].buffer);
        }
    }
    return found;
}

// The client's book. Buffers may be freed by any thread.
class moegraph_known_graphs {
public:
    // Whether the server has this graph, which becomes the one used last.
    bool use(uint32_t device, uint64_t uid) {
        std::lock_guard<std::mutex> lock(mutex);
        for (auto it = graphs.begin(); it != graphs.end(); ++it) {
            if (it->device == device && it->uid == uid) {
                graphs.splice(graphs.end(), graphs, it);
                return true;
            }
        }
        return false;
    }

    static bool fits(size_t size) {
        return size <= MOEGRAPH_STORED_SIZE;
    }

    // Adds a graph that fits. Returns those of its device that the server has to forget first: the ones that were not
    // used for longest.
    std::vector<uint64_t> add(uint32_t device, uint64_t uid, size_t size, std::unordered_set<uint64_t> buffers) {
        std::lock_guard<std::mutex> lock(mutex);
        std::vector<uint64_t> forgotten;
        size_t total = size;
        for (const auto & graph : graphs) {
            total += graph.device == device ? graph.size : 0;
        }
        for (auto it = graphs.begin(); total > MOEGRAPH_STORED_SIZE;) {
            if (it->device != device) {
                ++it;
                continue;
            }
            total -= it->size;
            forgotten.push_back(it->uid);
            it = graphs.erase(it);
        }
        graphs.push_back({device, uid, size, std::move(buffers)});
        return forgotten;
    }

    // The server frees a buffer, and with it the graphs that use it.
    void free_buffer(uint64_t buffer) {
        std::lock_guard<std::mutex> lock(mutex);
        graphs.remove_if([buffer](const known_graph & graph) { return graph.buffers.count(buffer) != 0; });
    }

private:
    struct known_graph {
        uint32_t                     device;
        uint64_t                     uid;
        size_t                       size;
        std::unordered_set<uint64_t> buffers;
    };
    std::mutex             mutex;
    std::list<known_graph> graphs; // the one used last comes last
};

// The server's book, of one device.
class moegraph_graph_store {
public:
    struct stored_graph {
        std::vector<uint8_t>         memory; // of the graph and its tensors
        ggml_cgraph                * graph;
        std::unordered_set<uint64_t> buffers;
    };

    bool has_room(uint64_t uid, size_t size) const {
        return graphs.count(uid) == 0 && size <= MOEGRAPH_STORED_SIZE - total;
    }

    // Keeps a graph there is room for; its nodes stay where they are.
    void add(uint64_t uid, stored_graph && stored) {
        total += stored.memory.size();
        graphs.emplace(uid, std::move(stored));
    }

    ggml_cgraph * find(uint64_t uid) const {
        auto it = graphs.find(uid);
        return it == graphs.end() ? nullptr : it->second.graph;
    }

    // A graph that is not there went with a buffer.
    void forget(uint64_t uid) {
        auto it = graphs.find(uid);
        if (it != graphs.end()) {
            total -= it->second.memory.size();
            graphs.erase(it);
        }
    }

    void free_buffer(uint64_t buffer) {
        for (auto it = graphs.begin(); it != graphs.end();) {
            if (it->second.buffers.count(buffer) != 0) {
                total -= it->second.memory.size();
                it = graphs.erase(it);
            } else {
                ++it;
            }
        }
    }

private:
    std::unordered_map<uint64_t, stored_graph> graphs;
    size_t                                     total = 0;
};
