// Commands that the RPC backend has with ours, and what they carry.

#pragma once

// Numbered after upstream's.
enum moegraph_cmd : uint8_t {
    MOEGRAPH_CMD_FEATURES = RPC_CMD_COUNT + 1, // answer: moegraph_features
    MOEGRAPH_CMD_STORE,                        // a graph: compute it and keep it
    MOEGRAPH_CMD_RUN,                          // moegraph_graph_id: compute a graph that is kept
    MOEGRAPH_CMD_FORGET,                       // moegraph_graph_id
    MOEGRAPH_CMD_OPTIMIZE,                     // a graph that has no memory yet; answer: the number of its dependencies
    MOEGRAPH_CMD_DEPS,                         // answer: those dependencies, as moegraph_dep_id
    MOEGRAPH_CMD_SET,                          // moegraph_part, then its bytes
    MOEGRAPH_CMD_GET,                          // moegraph_part; answer: its bytes
};

// Longer ones are uploads.
static constexpr size_t MOEGRAPH_SHORT = 64 * 1024;

#pragma pack(push, 1)
struct moegraph_features {
    uint64_t optimizes; // a bit for each device whose backend optimizes graphs
    uint64_t keeps;     // whether weights are kept by their hash
};

struct moegraph_graph_id {
    uint32_t device;
    uint64_t uid;
};

// Bytes of a tensor, in the order of its device's graphs.
struct moegraph_part {
    uint32_t   device;
    rpc_tensor tensor;
    uint64_t   offset;
    uint64_t   size;
};
#pragma pack(pop)

// A graph: upstream's message, | device | n_nodes | ids of nodes | n_tensors | tensors |, then | uid | buffers of weights |.
// Backends ask whether a buffer has weights, which no kernel writes; upstream's client keeps that for itself.
struct moegraph_graph_view {
    uint32_t           device    = 0;
    uint32_t           n_nodes   = 0;
    uint32_t           n_tensors = 0;
    const uint8_t    * nodes     = nullptr;
    const rpc_tensor * tensors   = nullptr;
    uint64_t           uid       = 0;

    std::vector<uint64_t> weights;

    // Returns false if the message is too short.
    bool read(const uint8_t * data, const size_t size) {
        const size_t header = 3*sizeof(uint32_t);
        if (size < header + sizeof(uid)) {
            return false;
        }
        memcpy(&device,  data, sizeof(device));
        memcpy(&n_nodes, data + sizeof(device), sizeof(n_nodes));
        nodes = data + 2*sizeof(uint32_t);
        const size_t at = n_nodes*sizeof(uint64_t);
        if (size < header + at + sizeof(uid)) {
            return false;
        }
        memcpy(&n_tensors, nodes + at, sizeof(n_tensors));
        tensors = (const rpc_tensor *) (nodes + at + sizeof(n_tensors));
        size_t end = header + at + n_tensors*sizeof(rpc_tensor);
        if (size < end + sizeof(uid)) {
            return false;
        }
        memcpy(&uid, data + end, sizeof(uid));
        end += sizeof(uid);
        weights.resize((size - end)/sizeof(uint64_t));
        memcpy(weights.data(), data + end, weights.size()*sizeof(uint64_t));
        return true;
    }

    uint64_t node(const uint32_t i) const {
        uint64_t id;
        memcpy(&id, nodes + i*sizeof(id), sizeof(id));
        return id;
    }
};
