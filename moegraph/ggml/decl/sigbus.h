// Watched mappings (documented in ../sigbus.h).

struct mg_watch;

struct mg_watch * mg_watch(const void * start, size_t size);
void    mg_unwatch(struct mg_watch * watch);
int32_t mg_watch_faults(void);
int64_t mg_watch_fault(const struct mg_watch * watch);
