// Reading a mapped file that was truncated, or whose disk fails, raises SIGBUS. In a watched mapping the read returns
// zeros and the fault is recorded; the process does not end.
//
// Threads: any thread may call these functions. The signal may arrive in any thread, and in several at once.

#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct mg_watch;

// Watch a mapping of `size` bytes from `start` on. NULL if too many are watched or no handler can be installed. After a
// fault, the mapping reads as zeros from the faulting page to its end: the rest is most likely unreadable too, and one
// mapping then takes one fault and not one per page. Other faults go to the handler that was installed before.
struct mg_watch * mg_watch(const void * start, size_t size);

// Stop watching; call it before unmapping. The last call restores the previous handler.
void mg_unwatch(struct mg_watch * watch);

// Number of faults in all watched mappings so far; cheap enough to compare after every pass.
int32_t mg_watch_faults(void);

// Offset in bytes of the first fault in the mapping, or -1.
int64_t mg_watch_fault(const struct mg_watch * watch);

#ifdef __cplusplus
}
#endif
