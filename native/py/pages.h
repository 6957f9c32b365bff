// Large blocks of host memory, filled by several threads and then pinned for a device.
//
// Threads: any thread may pin a block; one thread makes and frees it.

#pragma once

#include "ggml-backend.h"

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

struct mg_pages;

// Address space of `size` bytes that read as zeros. It takes memory when it is written, in huge pages if the system has
// them: then filling takes a fifth of the time, and pinning needs far fewer steps. A forked child does not get it. NULL
// if the system refuses.
struct mg_pages * mg_pages_new(size_t size);

// The first byte, aligned to a huge page.
void * mg_pages_data(const struct mg_pages * pages);

// Page-lock all of it, once; the device of `backend` can then read it. False if that is refused, or if the libraries were
// built without CUDA.
bool mg_pages_pin(struct mg_pages * pages, ggml_backend_t backend);

// Unpin and free. No copy from it may be under way.
void mg_pages_free(struct mg_pages * pages);

#ifdef __cplusplus
}
#endif
