#define _GNU_SOURCE // MAP_ANONYMOUS, madvise

#include "pages.h"

#include "ggml-cuda/moegraph-pin.h"

#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#define HUGE_PAGE ((size_t) 2 << 20)

// libggml-cuda has them; a build for the CPU has no such library, and then they are NULL.
#pragma weak moegraph_pin
#pragma weak moegraph_unpin

struct mg_pages {
    void * mapped;
    size_t n_mapped;
    void * data;
    size_t size;
    bool   pinned;
};

struct mg_pages * mg_pages_new(size_t size) {
    struct mg_pages * pages = (struct mg_pages *) malloc(sizeof(struct mg_pages));
    if (pages == NULL || size == 0 || size > SIZE_MAX/2) {
        free(pages);
        return NULL;
    }
    const size_t n_mapped = size + HUGE_PAGE;
    char * mapped = (char *) mmap(NULL, n_mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) {
        free(pages);
        return NULL;
    }
    char * data = (char *) (((uintptr_t) mapped + HUGE_PAGE - 1) & ~(uintptr_t) (HUGE_PAGE - 1));
    // advice only: without huge pages all of this works, more slowly
#ifdef MADV_HUGEPAGE
    (void) madvise(data, size, MADV_HUGEPAGE);
#endif
#ifdef MADV_DONTFORK
    (void) madvise(mapped, n_mapped, MADV_DONTFORK);
#endif
    *pages = (struct mg_pages) { mapped, n_mapped, data, size, false };
    return pages;
}

void * mg_pages_data(const struct mg_pages * pages) {
    return pages->data;
}

bool mg_pages_pin(struct mg_pages * pages, ggml_backend_t backend) {
    if (!pages->pinned && moegraph_pin != NULL) {
        pages->pinned = moegraph_pin(backend, pages->data, pages->size);
    }
    return pages->pinned;
}

void mg_pages_free(struct mg_pages * pages) {
    if (pages->pinned) {
        moegraph_unpin(pages->data);
    }
    munmap(pages->mapped, pages->n_mapped);
    free(pages);
}
