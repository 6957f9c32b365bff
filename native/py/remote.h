// ggml's RPC backend, loaded when it is first needed: devices of a worker, and the worker's side of a connection.

#pragma once

#include "ggml-backend.h"

#ifdef __cplusplus
extern "C" {
#endif

// Load libggml-rpc from `path`. NULL, or what the dynamic linker says.
const char * mg_remote_load(const char * path);

// Use a connected socket as the connection to an endpoint of a new name, NAME:NUMBER. Returns how many devices it
// has; 0 if the exchange failed. Time limits are those of the socket (SO_RCVTIMEO, SO_SNDTIMEO).
int mg_remote_adopt(const char * endpoint, int fd);

// Close that socket when the last backend and buffer of the endpoint have been freed.
void mg_remote_close(const char * endpoint);
ggml_backend_dev_t mg_remote_device(const char * endpoint, int index);

// 0, or the errno of the exchange that failed. Later ones fail at once: reads give zeros, graphs a failed status.
int mg_remote_failure(const char * endpoint);

// What the connection has carried: bytes in both directions, graphs sent, and stored graphs computed again.
struct mg_remote_counts {
    uint64_t n_sent;
    uint64_t n_received;
    uint64_t n_graphs_sent;
    uint64_t n_graphs_stored;
};

void mg_remote_count(const char * endpoint, struct mg_remote_counts * counts);

// Serve one client on a connected socket until it leaves. cache_dir: where weights are kept, or NULL.
void mg_remote_serve(int fd, const char * cache_dir, ggml_backend_t * backends, int n_backends);

#ifdef __cplusplus
}
#endif
