// The two ends of connections that were made by the caller, by name.

#pragma once

#include "moegraph-stored-graphs.h"

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

class moegraph_endpoint {
public:
    // Gives a connected socket a name, which can be used only once.
    static moegraph_endpoint & add(const std::string & name, int fd);

    // An endpoint of another name has failed.
    static moegraph_endpoint & find(const std::string & name);

    // One thread writes and one reads. Sends bytes with those that follow, or at `flush`.
    bool write(const void * data, size_t size);
    bool flush();
    bool read(void * data, size_t size);

    // Ends the connection, for good. Returns false.
    bool fail(int code);
    int  failure() const { return failed; }

    // Closes the socket, once no thread uses it.
    void release();

    // What the server has said: a bit for each device whose backend optimizes graphs; whether it keeps weights by hash.
    uint64_t optimizes = 0;
    bool     keeps     = false;

    moegraph_known_graphs graphs;
    std::atomic<uint64_t> n_sent = 0, n_received = 0, n_graphs_sent = 0, n_graphs_stored = 0;

private:
    bool write_all(const uint8_t * data, size_t size);
    size_t read_some(uint8_t * data, size_t size);

    int                  fd = -1;
    std::atomic<int>     failed = 0;
    std::vector<uint8_t> out;        // not written yet
    std::vector<uint8_t> in;         // read from the socket, from in_begin to in_end not used yet
    size_t               in_begin = 0, in_end = 0;
};
