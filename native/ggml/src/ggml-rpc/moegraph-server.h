// The server's side of what we add to the RPC backend. A part of ggml-rpc.cpp, which includes it at its end.

#include "moegraph-messages.h"
#include "moegraph-rpc.h"

struct moegraph_session {
    rpc_server       & server;
    const socket_ptr & sock;

    bool serve(const uint8_t cmd) {
        std::vector<uint8_t> graph;
        moegraph_graph_id    id;
        moegraph_part        part;
        switch (cmd) {
            case MOEGRAPH_CMD_FEATURES: return recv_msg(sock, nullptr, 0) && features();
            case MOEGRAPH_CMD_STORE:    return recv_msg(sock, graph, MOEGRAPH_STORED_SIZE) && store(graph);
            case MOEGRAPH_CMD_RUN:      return recv_msg(sock, &id, sizeof(id)) && run(id);
            case MOEGRAPH_CMD_FORGET:   return recv_msg(sock, &id, sizeof(id)) && forget(id);
            case MOEGRAPH_CMD_OPTIMIZE: return recv_msg(sock, graph, MOEGRAPH_STORED_SIZE) && optimize(graph);
            case MOEGRAPH_CMD_DEPS:     return recv_msg(sock, nullptr, 0)
                    && send_msg(sock, server.graphs.deps.data(), server.graphs.deps.size()*sizeof(moegraph_dep_id));
            case MOEGRAPH_CMD_SET:      return set();
            case MOEGRAPH_CMD_GET:      return recv_msg(sock, &part, sizeof(part)) && get(part);
        }
        GGML_LOG_ERROR("Unknown command: %d\n", cmd);
        return false;
    }

    // A message to set a tensor has no more bytes of data than the largest buffer.
    static uint64_t set_limit(const rpc_server & server) {
        size_t largest = 0;
        for (ggml_backend_buffer_t buffer : server.buffers) {
            largest = std::max(largest, ggml_backend_buffer_get_size(buffer));
        }
        return sizeof(rpc_tensor) + sizeof(uint8_t) + sizeof(uint64_t) + largest;
    }

private:
    bool features() {
        moegraph_features found = { 0, server.cache_dir != nullptr };
        for (size_t i = 0; i < server.backends.size() && i < 64; ++i) {
            found.optimizes |= (uint64_t) (server.backends[i]->iface.graph_optimize != nullptr) << i;
        }
        return send_msg(sock, &found, sizeof(found));
    }

    bool read(const std::vector<uint8_t> & message, moegraph_graph_view & view) {
        if (!view.read(message.data(), message.size()) || view.device >= server.backends.size()) {
            return false;
        }
        for (const uint64_t weights : view.weights) {
            auto * buffer = (ggml_backend_buffer_t) weights;
            if (server.buffers.count(buffer) == 0) {
                return false;
            }
            ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        }
        return true;
    }

    bool store(const std::vector<uint8_t> & message) {
        moegraph_graph_view view;
        if (!read(message, view)) {
            return false;
        }
        moegraph_graph_store & store = server.graphs.stored[view.device];
        if (!store.has_room(view.uid, moegraph_stored_size(view.n_nodes, view.n_tensors))) {
            GGML_LOG_ERROR("[%s] no room for graph %" PRIu64 "\n", __func__, view.uid);
            return false;
        }
        if (!server.graph_compute(message)) {
            return false;
        }
        rpc_server::stored_graph & computed = server.stored_graphs[view.device];
        store.add(view.uid, {std::move(computed.buffer), computed.graph, moegraph_buffers_of(view.tensors, view.n_tensors)});
        computed = {};
        return true;
    }

    bool run(const moegraph_graph_id & id) {
        ggml_cgraph * graph = id.device < server.backends.size() ? server.graphs.stored[id.device].find(id.uid) : nullptr;
        if (graph == nullptr) {
            GGML_LOG_ERROR("[%s] graph %" PRIu64 " is not stored\n", __func__, id.uid);
            return false;
        }
        return ggml_backend_graph_compute_async(server.backends[id.device], graph) == GGML_STATUS_SUCCESS;
    }

    bool forget(const moegraph_graph_id & id) {
        server.graphs.stored[id.device].forget(id.uid);
        return true;
    }

    // Memory is taken once it is known that the tensor has so many bytes. They are kept until the backend has them.
    bool set() {
        uint64_t      size;
        moegraph_part part;
        if (!sock->recv_data(&size, sizeof(size)) || size < sizeof(part) || !sock->recv_data(&part, sizeof(part))
                || part.size != size - sizeof(part)) {
            return false;
        }
        return with(part, [&](ggml_backend_t backend, ggml_tensor * tensor) {
            auto       bytes = server.graphs.take(part.size);
            const bool ok    = sock->recv_data(bytes.data(), bytes.size());
            if (ok) {
                ggml_backend_tensor_set_async(backend, tensor, bytes.data(), part.offset, part.size);
            }
            server.graphs.hold(std::move(bytes), server.backends);
            return ok;
        });
    }

    bool get(const moegraph_part & part) {
        return with(part, [&](ggml_backend_t backend, ggml_tensor * tensor) {
            std::vector<uint8_t> answer(part.size);
            ggml_backend_tensor_get_async(backend, tensor, answer.data(), part.offset, part.size);
            server.graphs.finish(server.backends);
            return send_msg(sock, answer.data(), answer.size());
        });
    }

    // Calls `use` for the tensor of a part that lies in its buffer; returns what it returns, else false.
    template <typename Use>
    bool with(const moegraph_part & part, const Use & use) {
        ggml_context_ptr ctx { ggml_init({ ggml_tensor_overhead(), nullptr, true }) };
        ggml_tensor * tensor = server.deserialize_tensor(ctx.get(), &part.tensor);
        if (tensor == nullptr || tensor->buffer == nullptr || part.device >= server.backends.size()) {
            GGML_LOG_ERROR("[%s] no such tensor\n", __func__);
            return false;
        }
        const uint64_t at   = part.tensor.data - (uint64_t) ggml_backend_buffer_get_base(tensor->buffer);
        const uint64_t size = ggml_backend_buffer_get_size(tensor->buffer);
        if (at > size || part.offset > size - at || part.size > size - at - part.offset) {
            GGML_LOG_ERROR("[%s] not in the buffer\n", __func__);
            return false;
        }
        return use(server.backends[part.device], tensor);
    }

    bool optimize(const std::vector<uint8_t> & message) {
        moegraph_graph_view       view;
        std::vector<moegraph_dep> wanted;
        if (!read(message, view) || server.backends[view.device]->iface.graph_optimize == nullptr) {
            return false;
        }
        server.graphs.wanted = &wanted;
        const bool made_it = server.graph_compute(message);
        server.graphs.wanted = nullptr;
        if (!made_it) {
            return false;
        }
        rpc_server::stored_graph & made = server.stored_graphs[view.device];
        server.graphs.deps = numbered(wanted, view, made.graph);
        made = {};
        const uint64_t n = server.graphs.deps.size();
        return send_msg(sock, &n, sizeof(n));
    }

    // What the client calls the tensors of a graph that was made from its message.
    static std::vector<moegraph_dep_id> numbered(
            const std::vector<moegraph_dep> & wanted, const moegraph_graph_view & view, const ggml_cgraph * graph) {
        std::unordered_map<uint64_t, uint32_t> places; // by id
        for (uint32_t i = 0; i < view.n_tensors; ++i) {
            places.emplace(view.tensors[i].id, i);
        }
        std::unordered_map<const ggml_tensor *, uint32_t>     numbers;
        std::vector<std::pair<const ggml_tensor *, uint64_t>> open;
        for (uint32_t i = 0; i < view.n_nodes; ++i) {
            open.emplace_back(graph->nodes[i], view.node(i));
        }
        while (!open.empty()) {
            const auto [tensor, id] = open.back();
            open.pop_back();
            if (tensor == nullptr || !numbers.emplace(tensor, places.at(id)).second) {
                continue;
            }
            const rpc_tensor & sent = view.tensors[places.at(id)];
            for (int i = 0; i < GGML_MAX_SRC; ++i) {
                open.emplace_back(tensor->src[i], sent.src[i]);
            }
            open.emplace_back(tensor->view_src, sent.view_src);
        }
        std::vector<moegraph_dep_id> found;
        for (const auto & dep : wanted) {
            // upstream may look one node past the end
            if (numbers.count(dep.first) && numbers.count(dep.second)) {
                found.push_back({numbers[dep.first], numbers[dep.second]});
            }
        }
        return found;
    }
};

static uint64_t moegraph_set_limit(const rpc_server & server) {
    return moegraph_session::set_limit(server);
}

static bool moegraph_serve(rpc_server & server, const uint8_t cmd, const socket_ptr & sock) {
    return moegraph_session{server, sock}.serve(cmd);
}

void moegraph_rpc_serve(const int fd, const char * cache_dir, const size_t n_backends, ggml_backend_t * backends) {
    moegraph_endpoint::add("client:0", fd);
    rpc_serve_client(std::vector<ggml_backend_t>(backends, backends + n_backends), cache_dir,
        socket_t::connect("client", 0));
}
