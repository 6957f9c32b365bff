// The RPC backend over connections that the caller has made: it decides how client and server find and trust each other,
// and no port of RPC is open anywhere.

#pragma once

#include "ggml-backend.h"

#ifdef __cplusplus
extern "C" {
#endif

// What a connection has carried: bytes in both directions, graphs sent, and stored graphs computed again.
struct moegraph_rpc_counts {
    uint64_t n_sent;
    uint64_t n_received;
    uint64_t n_graphs_sent;
    uint64_t n_graphs_stored;
};

// Use a connected socket as the connection to an endpoint of a new name, NAME:NUMBER. Returns the server's devices, or
// NULL if it has not answered. `close` closes the socket when the last backend and buffer of the endpoint have been freed.
GGML_BACKEND_API ggml_backend_reg_t moegraph_rpc_adopt(const char * endpoint, int fd);
GGML_BACKEND_API void moegraph_rpc_close(const char * endpoint);

// 0, or the errno of the exchange that failed. Every later one fails at once: a graph has a failed status, an allocation
// is NULL, and what would be read is 0. With SO_RCVTIMEO and SO_SNDTIMEO on the socket, EAGAIN means that the server did
// not answer in time.
GGML_BACKEND_API int  moegraph_rpc_failure(const char * endpoint);
GGML_BACKEND_API void moegraph_rpc_count(const char * endpoint, struct moegraph_rpc_counts * counts);

// Serve one client on a connected socket; returns when the client has left.
GGML_BACKEND_API void moegraph_rpc_serve(int fd, const char * cache_dir, size_t n_backends, ggml_backend_t * backends);

#ifdef __cplusplus
}
#endif
