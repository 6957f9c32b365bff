#include "sigbus.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#define MAX_WATCHES 2048

// A free entry has end == 0. The handler reads end, start, and end again, so that an entry that is being changed does
// not match.
struct mg_watch {
    _Atomic uintptr_t start;
    _Atomic uintptr_t end;
    _Atomic int64_t   fault;
};

static struct mg_watch  watches[MAX_WATCHES];
static atomic_int       n_used;  // entries from here on were never used
static _Atomic int32_t  n_faults;
static uintptr_t        page_size;

static pthread_mutex_t  lock = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction previous;
static int              n_watched;
static int              is_installed;

static struct mg_watch * find(uintptr_t address) {
    const int n = atomic_load(&n_used);
    for (int i = 0; i < n; i++) {
        const uintptr_t end   = atomic_load(&watches[i].end);
        const uintptr_t start = atomic_load(&watches[i].start);
        if (end != 0 && start <= address && address < end && atomic_load(&watches[i].end) == end) {
            return &watches[i];
        }
    }
    return NULL;
}

static void pass_on(int number, siginfo_t * info, void * context) {
    if (previous.sa_flags & SA_SIGINFO) {
        previous.sa_sigaction(number, info, context);
    } else if (previous.sa_handler == SIG_IGN && info->si_code <= 0) {
        return;  // sent by a process: may be ignored; a fault may not
    } else if (previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN) {
        // pending until this handler returns; then it ends the process
        signal(number, SIG_DFL);
        raise(number);
    } else {
        previous.sa_handler(number);
    }
}

// Uses only what is safe in a signal handler: lock-free atomics and plain system calls.
static void on_sigbus(int number, siginfo_t * info, void * context) {
    const int saved = errno;
    const uintptr_t address = (uintptr_t) info->si_addr;
    struct mg_watch * watch = info->si_code > 0 ? find(address) : NULL;
    if (watch != NULL) {
        const uintptr_t page = address & ~(page_size - 1);
        const uintptr_t end  = (atomic_load(&watch->end) + page_size - 1) & ~(page_size - 1);
        const void * zeros = mmap((void *) page, end - page, PROT_READ,
            MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
        if (zeros != MAP_FAILED) {
            int64_t none = -1;
            atomic_compare_exchange_strong(&watch->fault, &none, (int64_t) (address - atomic_load(&watch->start)));
            atomic_fetch_add(&n_faults, 1);
            errno = saved;
            return;
        }
    }
    pass_on(number, info, context);
    errno = saved;
}

static int install(void) {
    struct sigaction action = { 0 };
    action.sa_sigaction = on_sigbus;
    action.sa_flags     = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    sigemptyset(&action.sa_mask);
    page_size = (uintptr_t) sysconf(_SC_PAGESIZE);
    return sigaction(SIGBUS, &action, &previous) == 0;
}

// If another handler was installed after ours, it may call ours, so ours has to stay.
static void uninstall(void) {
    struct sigaction now;
    if (sigaction(SIGBUS, NULL, &now) == 0 && (now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_sigbus) {
        sigaction(SIGBUS, &previous, NULL);
        is_installed = 0;
    }
}

struct mg_watch * mg_watch(const void * start, size_t size) {
    struct mg_watch * found = NULL;
    pthread_mutex_lock(&lock);
    if (!is_installed) {
        is_installed = install();
    }
    for (int i = 0; is_installed && found == NULL && i < MAX_WATCHES; i++) {
        if (atomic_load(&watches[i].end) == 0) {
            found = &watches[i];
            atomic_store(&found->start, (uintptr_t) start);
            atomic_store(&found->fault, -1);
            atomic_store(&found->end, (uintptr_t) start + size);
            if (i >= atomic_load(&n_used)) {
                atomic_store(&n_used, i + 1);
            }
            n_watched++;
        }
    }
    pthread_mutex_unlock(&lock);
    return found;
}

void mg_unwatch(struct mg_watch * watch) {
    pthread_mutex_lock(&lock);
    atomic_store(&watch->end, 0);
    if (--n_watched == 0) {
        uninstall();
    }
    pthread_mutex_unlock(&lock);
}

int32_t mg_watch_faults(void) {
    return atomic_load(&n_faults);
}

int64_t mg_watch_fault(const struct mg_watch * watch) {
    return atomic_load(&watch->fault);
}
