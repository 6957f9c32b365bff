#include "emulator.h"

#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <link.h>
#include <map>
#include <numeric>
#include <random>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include <vector>

namespace emulated {

static constexpr size_t STACK = 256*1024;
static constexpr int    NAN_BYTE = 0xFF;
static constexpr size_t SHARED_WITHOUT_LIMIT = 48*1024; // that a launch may have if nothing raises it

enum state { READY, AT_WARP, AT_BLOCK, DONE };
static const char * STATES[] = { "runs", "waits for its warp", "waits for the block", "has ended" };

struct pending_copy {
    char *       dst;
    const char * src;
    int          n;
};

struct fiber {
    place      at;
    state      now;
    operation  op;    // what it waits for, or last waited for
    int        value; // that it gives to a barrier of the block
    bool       started;
    jmp_buf    resumed;
    ucontext_t first;
    std::deque<std::vector<pending_copy>> copies; // groups, the last one is not committed yet
};

place *  here         = nullptr;
size_t   shared_limit = 99*1024;
unsigned order        = 0;
bool     early_copies = false;

static fiber *              running;
static jmp_buf              scheduler;
static ucontext_t           scheduler_first;
static const std::function<void()> * body;
static launch_params        launched;
static int                  sum_of_block;
static std::vector<fiber *> pool;
static std::vector<fiber *> threads; // of the block, by number
static std::vector<void *> & dynamic_shared() {
    static std::vector<void *> arrays;
    return arrays;
}
static std::map<const void *, size_t> limits;

void fail(const char * format, ...) {
    va_list args;
    va_start(args, format);
    fflush(stdout);
    fprintf(stderr, "emulator: ");
    if (here != nullptr) {
        const uint3 b = here->block, t = here->thread;
        fprintf(stderr, "kernel of %s:%d: block (%u, %u, %u), thread (%u, %u, %u): ", launched.file, launched.line,
            b.x, b.y, b.z, t.x, t.y, t.z);
    }
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    _exit(3);
}

static void on_fault(const int number, siginfo_t * info, void *) {
    if (number == SIGILL || number == SIGTRAP) { // what -fsanitize has found
        fail("an index beyond an array, or an address that is not aligned");
    }
    fail("reads or writes outside of all memory, at %p", info->si_addr);
}

// ---- fibers

static void leave() {
    if (_setjmp(running->resumed) == 0) {
        _longjmp(scheduler, 1);
    }
}

static void run_fiber() {
    while (true) {
        (*body)();
        running->now = DONE;
        leave();
    }
}

static void resume(fiber & f) {
    running = &f;
    here    = &f.at;
    if (_setjmp(scheduler) == 0) {
        if (f.started) {
            _longjmp(f.resumed, 1);
        }
        f.started = true;
        swapcontext(&scheduler_first, &f.first);
    }
    here = nullptr;
}

static fiber * new_fiber() {
    const size_t page = sysconf(_SC_PAGESIZE);
    char * stack = (char *) mmap(nullptr, page + STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (stack == MAP_FAILED || mprotect(stack, page, PROT_NONE) != 0) {
        fail("no memory for a stack");
    }
    fiber * f = new fiber();
    getcontext(&f->first);
    f->first.uc_stack.ss_sp   = stack + page;
    f->first.uc_stack.ss_size = STACK;
    f->first.uc_link          = nullptr;
    makecontext(&f->first, run_fiber, 0);
    return f;
}

bool is_local(const void * p) {
    const char * stack = (const char *) running->first.uc_stack.ss_sp;
    return p >= stack && p < stack + STACK;
}

void wait_for_warp(const operation & op) {
    if (!(op.mask >> here->lane & 1)) {
        fail("%s:%d: %s with a mask %08x that leaves out its own lane %d", op.file, op.line, op.name, op.mask, here->lane);
    }
    running->op  = op;
    running->now = AT_WARP;
    leave();
}

int wait_for_block(const int value, const char * name, const char * file, const int line) {
    running->op    = { name, file, line, 0, nullptr };
    running->value = value;
    running->now   = AT_BLOCK;
    leave();
    return sum_of_block;
}

// ---- copies

static void finish_copy(const pending_copy & c) {
    memset(c.dst, 0, 16);
    memcpy(c.dst, c.src, c.n);
}

void copy(char * dst, const char * src, const int n) {
    if ((uintptr_t) dst % 16 != 0 || (uintptr_t) src % 16 != 0) {
        fail("an asynchronous copy is not aligned: %p to %p", src, dst);
    }
    if (early_copies) {
        finish_copy({ dst, src, n });
        return;
    }
    memset(dst, NAN_BYTE, 16);
    running->copies.back().push_back({ dst, src, n });
}

void commit_copies() {
    running->copies.emplace_back();
}

void wait_for_copies(const size_t n_groups) {
    while (running->copies.size() > n_groups + 1) {
        for (const pending_copy & c : running->copies.front()) {
            finish_copy(c);
        }
        running->copies.pop_front();
    }
}

// ---- blocks

[[noreturn]] static void report_stuck() {
    fprintf(stderr, "emulator: threads wait for others that do not come to the same place:\n");
    std::map<std::string, std::vector<size_t>> places;
    for (size_t i = 0; i < threads.size(); ++i) {
        const fiber & f = *threads[i];
        std::string text = STATES[f.now];
        if (f.now != DONE) {
            char mask[16];
            snprintf(mask, sizeof(mask), "%08x", f.op.mask);
            text += std::string(": ") + f.op.name + " at " + f.op.file + ":" + std::to_string(f.op.line) +
                (f.now == AT_WARP ? std::string(", mask ") + mask : "");
        }
        places[text].push_back(i);
    }
    for (const auto & p : places) {
        fprintf(stderr, "  %zu threads, %zu to %zu: %s\n", p.second.size(), p.second.front(), p.second.back(), p.first.c_str());
    }
    here = &threads[0]->at;
    fail("deadlock");
}

// Finishes the operations that all their lanes wait for. Returns whether there was one.
static bool finish_operations(warp & w) {
    bool any = false;
    for (int lane = 0; lane < LANES; ++lane) {
        const fiber * f = w.lanes[lane];
        if (f == nullptr || f->now != AT_WARP) {
            continue;
        }
        const operation op = f->op;
        bool all = true;
        for (int l = 0; l < LANES && all; ++l) {
            const fiber * other = w.lanes[l];
            all = !(op.mask >> l & 1) || (other != nullptr && other->now == AT_WARP && other->op.finish == op.finish &&
                other->op.mask == op.mask && other->op.line == op.line && other->op.file == op.file);
        }
        if (all) {
            here = &w.lanes[lane]->at;
            op.finish(w, op.mask);
            here = nullptr;
            for (int l = 0; l < LANES; ++l) {
                if (op.mask >> l & 1) {
                    w.lanes[l]->now = READY;
                }
            }
            any = true;
        }
    }
    return any;
}

// Whether all threads wait at one barrier; then they go on.
static bool finish_barrier() {
    int sum = 0;
    for (const fiber * f : threads) {
        const operation & op = threads[0]->op;
        if (f->now != AT_BLOCK || f->op.line != op.line || f->op.file != op.file || f->op.name != op.name) {
            return false;
        }
        sum += f->value;
    }
    for (fiber * f : threads) {
        f->now = READY;
    }
    sum_of_block = sum;
    return true;
}

static void arrange(std::vector<int> & numbers, std::minstd_rand & rng) {
    std::iota(numbers.begin(), numbers.end(), 0);
    if (order == 1) {
        std::reverse(numbers.begin(), numbers.end());
    } else if (order > 1) {
        std::shuffle(numbers.begin(), numbers.end(), rng);
    }
}

static void run_block(std::vector<warp> & warps, std::minstd_rand & rng) {
    std::vector<int> turn(warps.size()), lanes(LANES);
    while (true) {
        arrange(turn, rng);
        arrange(lanes, rng);
        for (const int i : turn) {
            warp & w = warps[i];
            do {
                for (const int lane : lanes) {
                    if (w.lanes[lane] != nullptr && w.lanes[lane]->now == READY) {
                        resume(*w.lanes[lane]);
                    }
                }
            } while (finish_operations(w));
        }
        if (std::all_of(threads.begin(), threads.end(), [](const fiber * f) { return f->now == DONE; })) {
            return;
        }
        if (!finish_barrier()) {
            report_stuck();
        }
    }
}

// ---- tiles

void multiply_tiles(warp & w, const int n_halves) {
    int8_t a[16][32], b[8][32];
    const int n = 16*n_halves;
    for (int lane = 0; lane < LANES; ++lane) {
        for (int half = 0; half < n_halves; ++half) {
            const int at = 16*half + lane % 4*4;
            memcpy(&a[lane/4 + 0][at], &w.in[lane][2*half + 0], 4);
            memcpy(&a[lane/4 + 8][at], &w.in[lane][2*half + 1], 4);
            memcpy(&b[lane/4][at], &w.in[lane][2*n_halves + half], 4);
        }
    }
    for (int lane = 0; lane < LANES; ++lane) {
        for (int l = 0; l < 4; ++l) {
            const int8_t * row = a[lane/4 + 8*(l/2)], * column = b[lane % 4*2 + l % 2];
            int sum = 0;
            for (int k = 0; k < n; ++k) {
                sum += row[k]*column[k];
            }
            w.out[lane][l] = sum;
        }
    }
}

// ---- shared memory

// All __shared__ variables are thread_local, those of the program lie together.
static std::pair<char *, size_t> find_shared() {
    std::pair<char *, size_t> found = { nullptr, 0 };
    dl_iterate_phdr([](dl_phdr_info * info, size_t, void * result) {
        for (int i = 0; i < info->dlpi_phnum; ++i) {
            if (info->dlpi_phdr[i].p_type == PT_TLS && info->dlpi_tls_data != nullptr) {
                *(std::pair<char *, size_t> *) result = { (char *) info->dlpi_tls_data, info->dlpi_phdr[i].p_memsz };
            }
        }
        return 1; // the program comes first
    }, &found);
    return found;
}

static size_t count_written(const char * data, const size_t n) {
    return n - std::count(data, data + n, (char) NAN_BYTE);
}

static bool is_written(const char * data, const size_t n) {
    return n > 0 && (data[0] != (char) NAN_BYTE || memcmp(data, data + 1, n - 1) != 0);
}

static void check_shared(const size_t bytes) {
    for (void * array : dynamic_shared()) {
        if (is_written((char *) array + bytes, EMULATED_SHARED_MAX - bytes)) {
            fail("writes behind the %zu bytes of shared memory that it was launched with", bytes);
        }
    }
}

// Static shared memory counts too, also where a kernel may have as much dynamic memory as it likes.
static void check_static(const std::pair<char *, size_t> & all) {
    size_t written = count_written(all.first, all.second);
    for (void * array : dynamic_shared()) {
        written -= count_written((char *) array, EMULATED_SHARED_MAX);
    }
    const auto   limit   = limits.find(launched.kernel);
    const size_t dynamic = limit == limits.end() ? launched.shared : limit->second;
    const size_t most    = limit == limits.end() ? SHARED_WITHOUT_LIMIT : shared_limit;
    if (written + dynamic > most) {
        fail("%zu or more bytes of static shared memory and %zu others are more than %zu", written, dynamic, most);
    }
}

void add_shared(void * array) {
    dynamic_shared().push_back(array);
}

void limit_shared(const void * kernel, const size_t bytes) {
    limits[kernel] = bytes;
}

void launch(const launch_params & params, const std::function<void()> & thread) {
    const dim3   grid = params.grid, block = params.block;
    const size_t shared = params.shared, limit = limits.count(params.kernel) ? limits[params.kernel] : SHARED_WITHOUT_LIMIT;
    const size_t n = (size_t) block.x*block.y*block.z;
    launched = params;
    body     = &thread;
    if (n == 0 || n > 1024 || grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.y > 65535 || grid.z > 65535) {
        fail("%s:%d: a grid of %u x %u x %u blocks of %u x %u x %u threads", params.file, params.line, grid.x, grid.y,
            grid.z, block.x, block.y, block.z);
    }
    if (shared > EMULATED_SHARED_MAX || shared > limit) {
        fail("%s:%d: %zu bytes of shared memory, the limit is %zu", params.file, params.line, shared, limit);
    }
    static const bool handled = [] {
        static char stack[64*1024];
        const stack_t other = { stack, 0, sizeof(stack) };
        sigaltstack(&other, nullptr);
        struct sigaction action = {};
        action.sa_sigaction = on_fault;
        action.sa_flags     = SA_SIGINFO | SA_ONSTACK;
        bool done = true;
        for (const int number : { SIGSEGV, SIGBUS, SIGILL, SIGTRAP }) {
            done = sigaction(number, &action, nullptr) == 0 && done;
        }
        return done;
    }();
    if (!handled) {
        fail("no handler for faults");
    }
    const std::pair<char *, size_t> all = find_shared();
    while (pool.size() < n) {
        pool.push_back(new_fiber());
    }
    threads.assign(pool.begin(), pool.begin() + n);
    std::minstd_rand rng(order);
    std::vector<warp> warps((n + LANES - 1)/LANES);
    for (uint32_t z = 0; z < grid.z; ++z) {
        for (uint32_t y = 0; y < grid.y; ++y) {
            for (uint32_t x = 0; x < grid.x; ++x) {
                memset(all.first, NAN_BYTE, all.second);
                for (uint32_t i = 0; i < n; ++i) {
                    const uint32_t rest = i/block.x;
                    const uint3    thread_at = { i % block.x, rest % block.y, rest/block.y };
                    warp & w = warps[i/LANES];
                    w.lanes[i % LANES] = threads[i];
                    threads[i]->at  = { thread_at, { x, y, z }, block, grid, (int) (i % LANES), &w };
                    threads[i]->now = READY;
                    threads[i]->copies.assign(1, {});
                }
                run_block(warps, rng);
                here = &threads[0]->at;
                check_shared(shared);
                if (x + y + z == 0) {
                    check_static(all);
                }
                here = nullptr;
            }
        }
    }
}

// ---- memory of the device

struct allocation { char * pages; size_t size; };
static std::map<void *, allocation> & allocations() {
    static std::map<void *, allocation> all;
    return all;
}

void * allocate(const size_t bytes) {
    const size_t page = sysconf(_SC_PAGESIZE);
    const size_t used = (bytes + 15)/16*16; // ends at a page that may not be touched
    const size_t n    = (used + page - 1)/page*page;
    char * pages = (char *) mmap(nullptr, n + 2*page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED || mprotect(pages, page, PROT_NONE) != 0 || mprotect(pages + page + n, page, PROT_NONE) != 0) {
        fail("no memory");
    }
    memset(pages + page, NAN_BYTE, n);
    void * data = pages + page + n - used;
    allocations()[data] = { pages, n + 2*page };
    return data;
}

void release(void * data) {
    const auto found = allocations().find(data);
    if (data == nullptr) {
        return;
    }
    if (found == allocations().end()) {
        fail("releases what was not allocated");
    }
    munmap(found->second.pages, found->second.size);
    allocations().erase(found);
}

} // namespace emulated
