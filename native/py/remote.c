#include "remote.h"

#include "ggml-rpc.h"
#include "moegraph-rpc.h"

#include <dlfcn.h>
#include <stddef.h>

// Not linked: a program that uses no other machine does not load the library.
static struct {
    __typeof__(ggml_backend_rpc_add_server) * add_server;
    __typeof__(moegraph_rpc_adopt)          * adopt;
    __typeof__(moegraph_rpc_close)          * close;
    __typeof__(moegraph_rpc_failure)        * failure;
    __typeof__(moegraph_rpc_count)          * count;
    __typeof__(moegraph_rpc_serve)          * serve;
} rpc;

const char * mg_remote_load(const char * path) {
    if (rpc.serve != NULL) {
        return NULL;
    }
    void * library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        return dlerror();
    }
    const struct { const char * name; void ** to; } functions[] = {
        { "ggml_backend_rpc_add_server", (void **) &rpc.add_server },
        { "moegraph_rpc_adopt",          (void **) &rpc.adopt },
        { "moegraph_rpc_close",          (void **) &rpc.close },
        { "moegraph_rpc_failure",        (void **) &rpc.failure },
        { "moegraph_rpc_count",          (void **) &rpc.count },
        { "moegraph_rpc_serve",          (void **) &rpc.serve },
    };
    for (size_t i = 0; i < sizeof(functions)/sizeof(functions[0]); i++) {
        *functions[i].to = dlsym(library, functions[i].name);
        if (*functions[i].to == NULL) {
            rpc.serve = NULL;
            return dlerror();
        }
    }
    return NULL;
}

int mg_remote_adopt(const char * endpoint, int fd) {
    if (!rpc.adopt(endpoint, fd)) {
        return 0;
    }
    ggml_backend_reg_t reg = rpc.add_server(endpoint);
    return reg == NULL ? 0 : (int) ggml_backend_reg_dev_count(reg);
}

void mg_remote_close(const char * endpoint) {
    rpc.close(endpoint);
}

ggml_backend_dev_t mg_remote_device(const char * endpoint, int index) {
    return ggml_backend_reg_dev_get(rpc.add_server(endpoint), (size_t) index);
}

int mg_remote_failure(const char * endpoint) {
    return rpc.failure(endpoint);
}

void mg_remote_count(const char * endpoint, struct mg_remote_counts * counts) {
    struct moegraph_rpc_counts found;
    rpc.count(endpoint, &found);
    *counts = (struct mg_remote_counts) { found.n_sent, found.n_received, found.n_graphs_sent, found.n_graphs_stored };
}

void mg_remote_serve(int fd, const char * cache_dir, ggml_backend_t * backends, int n_backends) {
    rpc.serve(fd, cache_dir, (size_t) n_backends, backends);
}
