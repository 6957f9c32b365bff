// A mapped file that is cut short, or whose disk fails, answers a read with SIGBUS. For watched mappings that
// becomes zeros and a note instead of the end of the process.
//
// Threads: mg_watch and mg_unwatch from any thread; the signal may arrive in any thread, several at once.

#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

struct mg_watch;

// Watch a mapping of `size` bytes from `start` on; NULL when too many are watched or no handler can be installed.
// From a fault on, the mapping reads as zeros from the faulting page to its end: whatever made that page
// unreadable, cut off the rest too, and one mapping takes one fault instead of one a page. Other faults go to
// the handler that was there before.
struct mg_watch * mg_watch(const void * start, size_t size);

// Watch no longer; call it before the mapping goes away. The last one puts the former handler back.
void mg_unwatch(struct mg_watch * watch);

// Faults of all watched mappings so far: cheap to compare after every pass.
int32_t mg_watch_faults(void);

// Byte of the mapping that could not be read first, or -1.
int64_t mg_watch_fault(const struct mg_watch * watch);

#ifdef __cplusplus
}
#endif
