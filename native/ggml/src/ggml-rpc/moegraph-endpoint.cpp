// Takes the place of transport.cpp: socket_t is an end of a connection that the caller has made.

#include "moegraph-endpoint.h"

#include "transport.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

// A message of a token and its neighbours take one system call; longer ones are not copied for that.
static constexpr size_t MOEGRAPH_BUFFER_SIZE = 64 * 1024;

// Never freed, so that a process ends without waiting for the threads that use them.
static std::unordered_map<std::string, moegraph_endpoint *> & moegraph_endpoints() {
    static auto * endpoints = new std::unordered_map<std::string, moegraph_endpoint *>;
    return *endpoints;
}

static std::mutex & moegraph_endpoints_mutex() {
    static auto * mutex = new std::mutex;
    return *mutex;
}

moegraph_endpoint & moegraph_endpoint::add(const std::string & name, const int fd) {
    const int yes = 1;
    (void) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes)); // fails where there is no TCP
    auto * added = new moegraph_endpoint;
    added->fd = fd;
    added->in.resize(MOEGRAPH_BUFFER_SIZE);
    std::lock_guard<std::mutex> lock(moegraph_endpoints_mutex());
    moegraph_endpoints()[name] = added;
    return *added;
}

moegraph_endpoint & moegraph_endpoint::find(const std::string & name) {
    static auto * none = new moegraph_endpoint;
    std::lock_guard<std::mutex> lock(moegraph_endpoints_mutex());
    auto it = moegraph_endpoints().find(name);
    if (it != moegraph_endpoints().end()) {
        return *it->second;
    }
    none->fail(ENOTCONN);
    return *none;
}

bool moegraph_endpoint::fail(const int code) {
    int none = 0;
    if (failed.compare_exchange_strong(none, code != 0 ? code : EIO) && fd >= 0) {
        shutdown(fd, SHUT_RDWR); // not closed: the other thread may be using it
    }
    return false;
}

bool moegraph_endpoint::write_all(const uint8_t * data, const size_t size) {
    for (size_t done = 0; done < size;) {
        const ssize_t n = send(fd, data + done, size - done, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return fail(errno);
        }
        done += (size_t) n;
    }
    n_sent += size;
    return true;
}

bool moegraph_endpoint::write(const void * data, const size_t size) {
    if (failed) {
        return false;
    }
    const auto * bytes = (const uint8_t *) data;
    if (out.size() + size <= MOEGRAPH_BUFFER_SIZE) {
        out.insert(out.end(), bytes, bytes + size);
        return true;
    }
    return flush() && write_all(bytes, size);
}

bool moegraph_endpoint::flush() {
    if (failed || !write_all(out.data(), out.size())) {
        return false;
    }
    out.clear();
    return true;
}

// 0: failed
size_t moegraph_endpoint::read_some(uint8_t * data, const size_t size) {
    while (true) {
        const ssize_t n = recv(fd, data, size, 0);
        if (n > 0) {
            n_received += (size_t) n;
            return (size_t) n;
        }
        if (n == 0 || errno != EINTR) {
            fail(n == 0 ? ECONNRESET : errno);
            return 0;
        }
    }
}

bool moegraph_endpoint::read(void * data, size_t size) {
    auto * to = (uint8_t *) data;
    while (size > 0 && !failed) {
        const size_t n = std::min(size, in_end - in_begin);
        if (n > 0) {
            memcpy(to, in.data() + in_begin, n);
            in_begin += n;
        } else if (size >= in.size()) {
            const size_t n_read = read_some(to, size);
            to += n_read;
            size -= n_read;
            continue;
        } else {
            in_begin = 0;
            in_end = read_some(in.data(), in.size());
        }
        to += n;
        size -= n;
    }
    return size == 0;
}

void moegraph_endpoint::release() {
    fail(ENOTCONN);
    if (fd >= 0) {
        close(fd);
    }
    fd = -1;
    in = {};
    in_begin = in_end = 0;
}

struct socket_t::impl {
    moegraph_endpoint & endpoint;

    explicit impl(moegraph_endpoint & endpoint) : endpoint(endpoint) {}

    ~impl() {
        endpoint.release();
    }
};

socket_t::socket_t(std::unique_ptr<impl> p) : pimpl(std::move(p)) {}
socket_t::~socket_t() = default;

socket_ptr socket_t::connect(const char * host, const int port) {
    auto & endpoint = moegraph_endpoint::find(std::string(host) + ":" + std::to_string(port));
    return socket_ptr(new socket_t(std::make_unique<impl>(endpoint)));
}

bool socket_t::send_data(const void * data, const size_t size) {
    return pimpl->endpoint.write(data, size);
}

bool socket_t::recv_data(void * data, const size_t size) {
    return pimpl->endpoint.read(data, size);
}

bool socket_t::flush() {
    return pimpl->endpoint.flush();
}

// Nothing else than a stream of bytes is negotiated, and nobody listens.
void socket_t::get_caps(uint8_t * local_caps) {
    memset(local_caps, 0, RPC_CONN_CAPS_SIZE);
}

void socket_t::update_caps(const uint8_t *) {}

socket_ptr socket_t::create_server(const char *, int) {
    return nullptr;
}

socket_ptr socket_t::accept() {
    return nullptr;
}

bool rpc_transport_init() {
    return true;
}

void rpc_transport_shutdown() {}
