// The client's side of what we add to the RPC backend. A part of ggml-rpc.cpp, which includes it at its end.

#include "moegraph-messages.h"
#include "moegraph-rpc.h"

// A part whose bytes are where the caller has them; the caller waits until they are sent.
struct moegraph_borrowed {
    moegraph_part part;
    const void  * data;
};

static constexpr int MOEGRAPH_BORROWED = 255; // never sent

static bool moegraph_write(const socket_ptr & sock, const uint8_t cmd, const size_t size) {
    return sock->send_data(&cmd, sizeof(cmd)) && sock->send_data(&size, sizeof(size));
}

// Requests go out as they come, and another thread reads the answers: several reads take one round trip, and what comes
// after a read does not wait for its answer.
void rpc_dispatcher::work() {
    rpc_msg_queue sent;
    const socket_ptr sock = this->sock; // the destructor gives its own up while this runs
    const auto read_answer = [this, &sock](const rpc_msg & msg) {
        uint64_t size;
        if (!sock->recv_data(&size, sizeof(size))) {
            return false;
        }
        return size == msg.output_size ? sock->recv_data(msg.output, size) : endpoint->fail(EPROTO);
    };
    std::thread reader([&] {
        rpc_msg_ptr msg;
        while (sent.pop(&msg)) {
            if (msg->output && !read_answer(*msg)) {
                memset(msg->output, 0, msg->output_size);
            }
            msg->completion.set_value();
            msg = nullptr;
        }
    });
    rpc_msg_ptr msg;
    while (running) {
        if (queue.empty()) {
            sock->flush();
        }
        if (!queue.pop(&msg)) {
            break;
        }
        if ((int) msg->cmd == MOEGRAPH_BORROWED) {
            const auto & set = *(const moegraph_borrowed *) msg->input.get();
            (void) (moegraph_write(sock, MOEGRAPH_CMD_SET, sizeof(set.part) + set.part.size)
                && sock->send_data(&set.part, sizeof(set.part)) && sock->send_data(set.data, set.part.size));
        } else if (msg->cmd != RPC_CMD_NONE) {
            (void) (moegraph_write(sock, (uint8_t) msg->cmd, msg->input_size)
                && sock->send_data(msg->input.get(), msg->input_size));
        }
        sent.push(msg);
    }
    sent.interrupt();
    reader.join();
}

template <typename T>
static void moegraph_send(const ggml_backend_rpc_context & ctx, const moegraph_cmd cmd, const T & request) {
    ctx.dispatcher->send_async((rpc_cmd) cmd, std::make_shared<T>(request), sizeof(T));
}

using moegraph_message = std::shared_ptr<std::vector<uint8_t>>;

static moegraph_message moegraph_message_of(const ggml_backend_rpc_context & ctx, const ggml_cgraph * graph) {
    size_t n = 0;
    std::unique_ptr<uint8_t[]> upstreams(serialize_graph(ctx.device, graph, ctx.dispatcher, &n));
    auto message = std::make_shared<std::vector<uint8_t>>(upstreams.get(), upstreams.get() + n);
    const auto append = [&](const uint64_t word) {
        const auto * bytes = (const uint8_t *) &word;
        message->insert(message->end(), bytes, bytes + sizeof(word));
    };
    append(graph->uid);
    moegraph_graph_view view;
    GGML_ASSERT(view.read(message->data(), message->size()));
    std::unordered_set<uint64_t> weights;
    for (uint32_t i = 0; i < view.n_tensors; ++i) {
        const rpc_tensor & sent = view.tensors[i];
        if (sent.buffer != 0 && ((const ggml_tensor *) sent.id)->buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS) {
            weights.insert(sent.buffer);
        }
    }
    for (const uint64_t buffer : weights) {
        append(buffer);
    }
    return message;
}

static void moegraph_send_graph(const ggml_backend_rpc_context & ctx, const int cmd, const moegraph_message & message) {
    ctx.dispatcher->send_async((rpc_cmd) cmd, {message, message->data()}, message->size());
}

// Records that the server will store a graph, and has it forget others for that. Returns whether it can.
static bool moegraph_make_room(const ggml_backend_rpc_context & ctx, const moegraph_graph_view & view) {
    const size_t size = moegraph_stored_size(view.n_nodes, view.n_tensors);
    if (view.uid == 0 || !moegraph_known_graphs::fits(size)) {
        return false;
    }
    auto buffers = moegraph_buffers_of(view.tensors, view.n_tensors);
    for (const uint64_t old : ctx.dispatcher->endpoint->graphs.add(ctx.device, view.uid, size, std::move(buffers))) {
        moegraph_send(ctx, MOEGRAPH_CMD_FORGET, moegraph_graph_id{ctx.device, old});
    }
    return true;
}

static enum ggml_status moegraph_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    const auto & ctx = *(ggml_backend_rpc_context *) backend->context;
    moegraph_endpoint & endpoint = *ctx.dispatcher->endpoint;
    if (graph->n_nodes == 0) {
        return GGML_STATUS_SUCCESS;
    }
    if (endpoint.failure() != 0) {
        GGML_LOG_ERROR("%s failed before\n", ctx.name.c_str());
        return GGML_STATUS_FAILED;
    }
    if (graph->uid != 0 && endpoint.graphs.use(ctx.device, graph->uid)) {
        ++endpoint.n_graphs_stored;
        moegraph_send(ctx, MOEGRAPH_CMD_RUN, moegraph_graph_id{ctx.device, graph->uid});
        return GGML_STATUS_SUCCESS;
    }
    ++endpoint.n_graphs_sent;
    const auto message = moegraph_message_of(ctx, graph);
    moegraph_graph_view view;
    GGML_ASSERT(view.read(message->data(), message->size()));
    moegraph_send_graph(ctx, moegraph_make_room(ctx, view) ? (int) MOEGRAPH_CMD_STORE : RPC_CMD_GRAPH_COMPUTE, message);
    return GGML_STATUS_SUCCESS;
}

// Has the server's backend say which tensors must keep their memory for its fused kernels: we allocate it.
static void moegraph_graph_optimize(
        ggml_backend_t backend, ggml_cgraph * graph, struct ggml_backend_graph_optimize_params * params) {
    const auto & ctx = *(ggml_backend_rpc_context *) backend->context;
    if (graph->n_nodes == 0 || !(ctx.dispatcher->endpoint->optimizes >> ctx.device & 1)) {
        return;
    }
    const auto message = moegraph_message_of(ctx, graph);
    uint64_t n = 0;
    ctx.dispatcher->send((rpc_cmd) MOEGRAPH_CMD_OPTIMIZE, {message, message->data()}, message->size(), &n, sizeof(n));
    moegraph_graph_view view;
    // more would be nonsense
    if (n == 0 || !view.read(message->data(), message->size()) || n > 1024ull*view.n_tensors) {
        return;
    }
    std::vector<moegraph_dep_id> deps(n);
    ctx.dispatcher->send((rpc_cmd) MOEGRAPH_CMD_DEPS, nullptr, 0, deps.data(), n*sizeof(moegraph_dep_id));
    if (ctx.dispatcher->endpoint->failure() != 0) {
        return;
    }
    for (const auto & dep : deps) {
        if (dep.tensor < view.n_tensors && dep.until < view.n_tensors) {
            params->add_alloc_dep(params->user_data, (ggml_tensor *) view.tensors[dep.tensor].id,
                (ggml_tensor *) view.tensors[dep.until].id);
        }
    }
}

static void moegraph_set(const std::shared_ptr<rpc_dispatcher> & dispatcher, const moegraph_part & part, const void * data) {
    if (part.size > MOEGRAPH_SHORT) {
        const auto set = std::make_shared<moegraph_borrowed>(moegraph_borrowed{part, data});
        dispatcher->send((rpc_cmd) MOEGRAPH_BORROWED, set, sizeof(*set));
        return;
    }
    auto message = std::make_shared<std::vector<uint8_t>>(sizeof(part) + part.size);
    memcpy(message->data(), &part, sizeof(part));
    memcpy(message->data() + sizeof(part), data, part.size);
    dispatcher->send_async((rpc_cmd) MOEGRAPH_CMD_SET, {message, message->data()}, message->size());
}

static void moegraph_set_tensor_async(
        ggml_backend_t backend, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    const auto & ctx = *(ggml_backend_rpc_context *) backend->context;
    if (rpc_use_hash_cache(tensor, size)) {
        ggml_backend_rpc_set_tensor_async(backend, tensor, data, offset, size);
    } else {
        moegraph_set(ctx.dispatcher, {ctx.device, serialize_tensor(tensor), offset, size}, data);
    }
}

static void moegraph_get_tensor_async(
        ggml_backend_t backend, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    const auto & ctx = *(ggml_backend_rpc_context *) backend->context;
    auto part = std::make_shared<moegraph_part>(moegraph_part{ctx.device, serialize_tensor(tensor), offset, size});
    ctx.dispatcher->send_async((rpc_cmd) MOEGRAPH_CMD_GET, part, sizeof(*part), data, size);
}

// After a failure ggml would abort, because a base is NULL.
static void * moegraph_buffer_get_base(ggml_backend_buffer_t buffer) {
    void * base = ggml_backend_rpc_buffer_get_base(buffer);
    return base ? base : (void *) (uintptr_t) 4096;
}

// After a failure it would be 0.
static size_t moegraph_get_alignment(ggml_backend_buffer_type_t buft) {
    return std::max<size_t>(ggml_backend_rpc_buffer_type_get_alignment(buft), 1);
}

static const bool moegraph_is_hooked = [] {
    ggml_backend_rpc_interface.set_tensor_async          = moegraph_set_tensor_async;
    ggml_backend_rpc_interface.get_tensor_async          = moegraph_get_tensor_async;
    ggml_backend_rpc_interface.graph_compute             = moegraph_graph_compute;
    ggml_backend_rpc_interface.graph_optimize            = moegraph_graph_optimize;
    ggml_backend_rpc_buffer_interface.get_base           = moegraph_buffer_get_base;
    ggml_backend_rpc_buffer_type_interface.get_alignment = moegraph_get_alignment;
    return true;
}();

// Dispatchers of open endpoints: there is no second connection, so they outlive what uses them. Not destroyed when the
// process ends, so that it ends without waiting for their threads.
struct moegraph_kept_dispatchers {
    std::lock_guard<std::mutex> lock;
    std::unordered_map<std::string, std::shared_ptr<rpc_dispatcher>> & all;

    moegraph_kept_dispatchers() : lock(mutex()), all(map()) {}

private:
    static std::mutex & mutex() {
        static auto * mutex = new std::mutex;
        return *mutex;
    }

    static std::unordered_map<std::string, std::shared_ptr<rpc_dispatcher>> & map() {
        static auto * map = new std::unordered_map<std::string, std::shared_ptr<rpc_dispatcher>>;
        return *map;
    }
};

ggml_backend_reg_t moegraph_rpc_adopt(const char * name, const int fd) {
    moegraph_endpoint & endpoint = moegraph_endpoint::add(name, fd);
    auto dispatcher = get_dispatcher(name);
    moegraph_features features = {};
    dispatcher->send((rpc_cmd) MOEGRAPH_CMD_FEATURES, nullptr, 0, &features, sizeof(features));
    endpoint.optimizes = features.optimizes;
    endpoint.keeps     = features.keeps != 0;
    {
        moegraph_kept_dispatchers kept;
        kept.all[name] = std::move(dispatcher);
    }
    return endpoint.failure() == 0 ? ggml_backend_rpc_add_server(name) : nullptr;
}

void moegraph_rpc_close(const char * name) {
    std::shared_ptr<rpc_dispatcher> ended; // after the lock
    moegraph_kept_dispatchers kept;
    auto it = kept.all.find(name);
    if (it != kept.all.end()) {
        ended = std::move(it->second);
        kept.all.erase(it);
    }
}

int moegraph_rpc_failure(const char * name) {
    return moegraph_endpoint::find(name).failure();
}

void moegraph_rpc_count(const char * name, struct moegraph_rpc_counts * counts) {
    const moegraph_endpoint & endpoint = moegraph_endpoint::find(name);
    *counts = { endpoint.n_sent, endpoint.n_received, endpoint.n_graphs_sent, endpoint.n_graphs_stored };
}
