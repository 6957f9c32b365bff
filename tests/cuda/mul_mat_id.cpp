// MUL_MAT_ID with absent and repeated ids on one device, every row against plain F32 products.
//
// Usage: mul_mat_id [--device NAME] [--only TEXT] [--every N]
//   NAME is a ggml device, or CPU_REPACK for the CPU with repacked weights; default: the first GPU, else CPU.
//   TEXT selects cases whose description contains it, N every N-th of them.
// Prints one line per type; exit code 1 if a case failed, 2 on wrong usage.
//
// The expected row of (token, slot, expert) comes from one F32 product per type over the dequantized
// weights of all experts. It does not pass through MUL_MAT_ID, so no backend is its own judge.

#include "ggml.h"
#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

static constexpr int N_EXPERT = 24; // experts of the large stack
static constexpr int N_SMALL  = 3;  // ... and of one that is smaller than the number of experts used
static constexpr int N_USED   = 8;
static constexpr int N_ROWS   = 128;
static constexpr int GUARD    = 4096; // bytes around dst that must not change

// Relative squared error of one row: 8-bit activations reach several 1e-4, a wrong row is off by 1 or more.
static constexpr double MAX_NMSE = 1e-3;

static const ggml_type TYPES[] = {
    GGML_TYPE_F32,    GGML_TYPE_F16,    GGML_TYPE_BF16,  GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, GGML_TYPE_Q2_K,  GGML_TYPE_Q3_K,
    GGML_TYPE_Q4_K,   GGML_TYPE_Q5_K,   GGML_TYPE_Q6_K,  GGML_TYPE_IQ4_NL, GGML_TYPE_IQ4_XS, GGML_TYPE_MXFP4,
};
static const int TOKENS[] = {1, 2, 3, 5, 8, 9, 16, 17, 32, 64, 200, 512};

enum pattern { FULL, SOME, ALL, TOKEN, ONE, EQUAL, REPEAT, SMALL, SKEW, N_PATTERN };
static const char * PATTERN_NAMES[] = {"full", "some", "all", "token", "one", "equal", "repeat", "small", "skew"};

struct ctx_deleter { void operator()(ggml_context * c) const { ggml_free(c); } };
struct buf_deleter { void operator()(ggml_backend_buffer_t b) const { ggml_backend_buffer_free(b); } };
struct be_deleter  { void operator()(ggml_backend_t b) const { ggml_backend_free(b); } };
typedef std::unique_ptr<ggml_context, ctx_deleter>                                  ctx_ptr;
typedef std::unique_ptr<std::remove_pointer<ggml_backend_buffer_t>::type, buf_deleter> buf_ptr;
typedef std::unique_ptr<std::remove_pointer<ggml_backend_t>::type, be_deleter>      be_ptr;

static ctx_ptr new_context() {
    return ctx_ptr(ggml_init({64*ggml_tensor_overhead() + 4*ggml_graph_overhead(), nullptr, true}));
}

[[noreturn]] static void fail(const std::string & text) {
    fprintf(stderr, "mul_mat_id: %s\n", text.c_str());
    exit(2);
}

struct device {
    be_ptr                     backend;
    be_ptr                     cpu;
    ggml_backend_buffer_type_t buft;         // activations
    ggml_backend_buffer_type_t buft_weights;
    bool                       repack = false;
};

// Both stacks of one projection for one type on the device, and the exact products.
struct stack {
    ggml_tensor * large = nullptr; // [k, N_ROWS, N_EXPERT]
    ggml_tensor * small = nullptr; // [k, N_ROWS, N_SMALL]
    std::vector<float> product;    // [N_ROWS, N_EXPERT, n_src]
};

struct weights {
    int     k     = 0;
    int     n_src = 0;             // rows of activations
    std::vector<float> src;        // [k, n_src], row of (token, slot) = token*N_USED + slot
    stack   proj[2];               // up, gate
    ctx_ptr ctx;
    buf_ptr buffer;
};

struct test_case {
    ggml_type type;
    int       n_tokens;
    pattern   ids;
    bool      bcast;  // one row of src1 for all experts of a token
    int       n_rows; // N_ROWS, or fewer as a view with gaps between experts
    int       k;
    bool      glu;    // gate and up product with activation, fused on CUDA for few tokens
    bool      offload; // weights in host memory, copied by the scheduler

    std::string str() const {
        return std::string(ggml_type_name(type)) + " n_tokens=" + std::to_string(n_tokens) + " ids=" + PATTERN_NAMES[ids] +
            " bcast=" + std::to_string(bcast) + " m=" + std::to_string(n_rows) + " k=" + std::to_string(k) +
            (glu ? " glu" : "") + (offload ? " offload" : "");
    }
};

static void fill_uniform(std::vector<float> & v, std::mt19937 & rng) {
    std::uniform_real_distribution<float> dist(-1.0f, 1.0f);
    for (float & x : v) {
        x = dist(rng);
    }
}

// What the graph of mul_mat computes on the CPU in F32: [n_cols of w, n_cols of x].
static std::vector<float> exact_product(ggml_backend_t cpu, int k, std::vector<float> & w, std::vector<float> & x) {
    ctx_ptr ctx = new_context();
    ggml_tensor * a = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, k, w.size()/k);
    ggml_tensor * b = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, k, x.size()/k);
    ggml_tensor * y = ggml_mul_mat(ctx.get(), a, b);
    ggml_cgraph * gf = ggml_new_graph(ctx.get());
    ggml_build_forward_expand(gf, y);
    buf_ptr buffer(ggml_backend_alloc_ctx_tensors(ctx.get(), cpu));
    ggml_backend_tensor_set(a, w.data(), 0, w.size()*sizeof(float));
    ggml_backend_tensor_set(b, x.data(), 0, x.size()*sizeof(float));
    if (ggml_backend_graph_compute(cpu, gf) != GGML_STATUS_SUCCESS) {
        fail("the CPU could not compute the expected products");
    }
    std::vector<float> out(ggml_nelements(y));
    ggml_backend_tensor_get(y, out.data(), 0, out.size()*sizeof(float));
    return out;
}

static std::vector<uint8_t> quantized(ggml_type type, int k, const std::vector<float> & values) {
    std::vector<uint8_t> data(ggml_row_size(type, k)*(values.size()/k));
    ggml_quantize_chunk(type, values.data(), data.data(), 0, values.size()/k, k, nullptr);
    return data;
}

// Whether the device multiplies by weights of this type where it wants to keep them.
static bool supported(const device & dev, ggml_type type) {
    ctx_ptr ctx = new_context();
    ggml_tensor * as  = ggml_new_tensor_3d(ctx.get(), type, 256, N_ROWS, N_EXPERT);
    ggml_tensor * b   = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, 256, 1, 2);
    ggml_tensor * ids = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, N_USED, 2);
    ggml_tensor * out = ggml_mul_mat_id(ctx.get(), as, b, ids);
    buf_ptr empty(ggml_backend_buft_alloc_buffer(dev.buft_weights, 0));
    as->buffer = empty.get();
    return ggml_backend_supports_op(dev.backend.get(), out);
}

static weights make_weights(const device & dev, ggml_type type, int k, int n_src, bool host) {
    std::mt19937 rng(7 + type + k);
    weights w;
    w.k     = k;
    w.n_src = n_src;
    w.src.resize((size_t) k*n_src);
    fill_uniform(w.src, rng);

    w.ctx = new_context();
    for (stack & s : w.proj) {
        s.large = ggml_new_tensor_3d(w.ctx.get(), type, k, N_ROWS, N_EXPERT);
        s.small = ggml_new_tensor_3d(w.ctx.get(), type, k, N_ROWS, N_SMALL);
    }
    w.buffer.reset(host ? ggml_backend_alloc_ctx_tensors_from_buft(w.ctx.get(), ggml_backend_cpu_buffer_type())
                        : ggml_backend_alloc_ctx_tensors_from_buft(w.ctx.get(), dev.buft_weights));
    if (!w.buffer) {
        fail("no memory for weights");
    }
    ggml_backend_buffer_set_usage(w.buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);

    for (stack & s : w.proj) {
        std::vector<float> values((size_t) k*N_ROWS*N_EXPERT);
        fill_uniform(values, rng);
        const std::vector<uint8_t> data = quantized(type, k, values);
        if (type != GGML_TYPE_F32) {
            ggml_get_type_traits(type)->to_float(data.data(), values.data(), values.size());
        }
        s.product = exact_product(dev.cpu.get(), k, values, w.src);
        ggml_backend_tensor_set(s.large, data.data(), 0, ggml_nbytes(s.large));
        ggml_backend_tensor_set(s.small, data.data(), 0, ggml_nbytes(s.small));
    }
    return w;
}

static std::vector<int32_t> make_ids(pattern p, int n_tokens, std::mt19937 & rng) {
    static const int32_t absent[] = {-1, -1, -7, INT_MIN, N_EXPERT, N_EXPERT + 5, INT_MAX};
    const auto any   = [&](int n) { return (int32_t) (rng() % n); };
    const auto maybe = [&](int percent, int32_t id) { return (int) (rng() % 100) < percent ? absent[rng() % 7] : id; };

    std::vector<int32_t> ids(n_tokens*N_USED);
    const int32_t equal = any(N_EXPERT);
    for (int t = 0; t < n_tokens; ++t) {
        int32_t perm[N_EXPERT];
        for (int e = 0; e < N_EXPERT; ++e) {
            perm[e] = e;
        }
        for (int i = 0; i < N_USED; ++i) {
            std::swap(perm[i], perm[i + any(N_EXPERT - i)]);
            int32_t & id = ids[t*N_USED + i];
            switch (p) {
                case FULL:   id = perm[i];                                       break;
                case SOME:   id = maybe(40, perm[i]);                            break;
                case ALL:    id = absent[rng() % 7];                             break;
                case TOKEN:  id = t % 2 == 0 ? -1 : perm[i];                     break;
                case ONE:    id = -1;                                            break;
                case EQUAL:  id = equal;                                         break;
                case REPEAT: id = any(N_EXPERT);                                 break;
                case SMALL:  id = maybe(20, any(N_SMALL));                       break;
                case SKEW:   id = maybe(10, any(2) ? 0 : any(N_EXPERT));         break;
                default:     fail("unknown pattern");
            }
        }
    }
    if (p == ONE) {
        ids[rng() % ids.size()] = equal;
    }
    return ids;
}

// One graph: inputs, products, memory with guards around the result.
struct run {
    ctx_ptr ctx = new_context();
    ggml_tensor * ids_memory;
    ggml_tensor * src1;
    ggml_tensor * out;
    ggml_tensor * guard[2];
    ggml_cgraph * gf;

    run(const weights & w, const test_case & tc) {
        const int ids_stride = tc.n_rows == N_ROWS ? N_USED : N_USED + 5;
        ids_memory = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, ids_stride, tc.n_tokens);
        src1       = ggml_new_tensor_3d(ctx.get(), GGML_TYPE_F32, w.k, tc.bcast ? 1 : N_USED, tc.n_tokens);
        guard[0]   = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I8, GUARD);
        ggml_set_input(ids_memory);
        ggml_set_input(src1);

        ggml_tensor * ids = ids_stride == N_USED ? ids_memory :
            ggml_view_2d(ctx.get(), ids_memory, N_USED, tc.n_tokens, ids_memory->nb[1], 0);

        const auto product = [&](const stack & s) {
            ggml_tensor * as = tc.ids == SMALL ? s.small : s.large;
            if (tc.n_rows != N_ROWS) {
                as = ggml_view_3d(ctx.get(), as, w.k, tc.n_rows, as->ne[2], as->nb[1], as->nb[2], 0);
            }
            return ggml_mul_mat_id(ctx.get(), as, src1, ids);
        };
        if (tc.glu) {
            ggml_tensor * gate = product(w.proj[1]);
            out = ggml_swiglu_split(ctx.get(), gate, product(w.proj[0]));
        } else {
            out = product(w.proj[0]);
        }
        ggml_set_output(out);
        guard[1] = ggml_new_tensor_1d(ctx.get(), GGML_TYPE_I8, GUARD);
        gf = ggml_new_graph(ctx.get());
        ggml_build_forward_expand(gf, out);
    }

    void set_inputs(const weights & w, const test_case & tc, const std::vector<int32_t> & ids) {
        for (int t = 0; t < tc.n_tokens; ++t) {
            ggml_backend_tensor_set(ids_memory, &ids[t*N_USED], t*ids_memory->nb[1], N_USED*sizeof(int32_t));
            ggml_backend_tensor_set(src1, &w.src[(size_t) t*N_USED*w.k], t*src1->nb[2], src1->ne[1]*src1->nb[1]);
        }
    }

    bool guards_intact() {
        for (ggml_tensor * g : guard) {
            std::vector<uint8_t> bytes(GUARD);
            ggml_backend_tensor_get(g, bytes.data(), 0, GUARD);
            for (uint8_t b : bytes) {
                if (b != 0xA5) {
                    return false;
                }
            }
        }
        return true;
    }
};

// Return what is wrong with the result, empty if nothing.
static std::string judge(const weights & w, const test_case & tc, const std::vector<int32_t> & ids, const std::vector<float> & y) {
    const int n_expert = tc.ids == SMALL ? N_SMALL : N_EXPERT;
    for (size_t i = 0; i < ids.size(); ++i) {
        const float * row = &y[i*tc.n_rows];
        const std::string where = "token " + std::to_string(i/N_USED) + " slot " + std::to_string(i % N_USED) +
            " id " + std::to_string(ids[i]);
        if (ids[i] < 0 || ids[i] >= n_expert) {
            for (int r = 0; r < tc.n_rows; ++r) {
                if (row[r] != 0.0f) {
                    return where + ": row " + std::to_string(r) + " is " + std::to_string(row[r]) + ", not zero";
                }
            }
            continue;
        }
        const size_t src = tc.bcast ? i/N_USED*N_USED : i;
        const float * up   = &w.proj[0].product[(src*N_EXPERT + ids[i])*N_ROWS];
        const float * gate = &w.proj[1].product[(src*N_EXPERT + ids[i])*N_ROWS];
        double error = 0.0, norm = 0.0;
        for (int r = 0; r < tc.n_rows; ++r) {
            const double expected = tc.glu ? up[r]*gate[r]/(1.0 + exp(-gate[r])) : up[r];
            error += (row[r] - expected)*(row[r] - expected);
            norm  += expected*expected;
        }
        if (!(error <= MAX_NMSE*norm)) {
            return where + ": NMSE " + std::to_string(error/norm);
        }
    }
    return "";
}

static bool run_case(const device & dev, const weights & w, const test_case & tc) {
    std::mt19937 rng(1000*tc.n_tokens + tc.ids);
    const std::vector<int32_t> ids = make_ids(tc.ids, tc.n_tokens, rng);
    run r(w, tc);
    std::vector<float> y(ggml_nelements(r.out));
    std::string wrong;

    if (tc.offload) {
        ggml_backend_t backends[] = {dev.backend.get(), dev.cpu.get()};
        ggml_backend_sched_t sched = ggml_backend_sched_new(backends, nullptr, 2, 128, false, true);
        if (!ggml_backend_sched_alloc_graph(sched, r.gf)) {
            fail(tc.str() + ": no memory");
        }
        r.set_inputs(w, tc, ids);
        ggml_backend_sched_graph_compute(sched, r.gf);
        ggml_backend_tensor_get(r.out, y.data(), 0, ggml_nbytes(r.out));
        ggml_backend_sched_free(sched);
    } else {
        buf_ptr buffer(ggml_backend_alloc_ctx_tensors_from_buft(r.ctx.get(), dev.buft));
        if (!buffer) {
            fail(tc.str() + ": no memory");
        }
        ggml_backend_buffer_clear(buffer.get(), 0xFF); // NaN in every float
        for (ggml_tensor * g : r.guard) {
            ggml_backend_tensor_memset(g, 0xA5, 0, GUARD);
        }
        r.set_inputs(w, tc, ids);
        if (ggml_backend_graph_compute(dev.backend.get(), r.gf) != GGML_STATUS_SUCCESS) {
            wrong = "graph_compute failed";
        }
        ggml_backend_tensor_get(r.out, y.data(), 0, ggml_nbytes(r.out));
        if (wrong.empty() && !r.guards_intact()) {
            wrong = "memory beside dst was written";
        }
    }
    if (wrong.empty()) {
        wrong = judge(w, tc, ids, y);
    }
    if (!wrong.empty()) {
        printf("FAIL %s: %s\n", tc.str().c_str(), wrong.c_str());
    }
    return wrong.empty();
}

static std::vector<test_case> make_cases(const device & dev, ggml_type type) {
    std::vector<test_case> cases;
    const bool gpu = ggml_backend_dev_type(ggml_backend_get_device(dev.backend.get())) == GGML_BACKEND_DEVICE_TYPE_GPU;
    for (int n_tokens : TOKENS) {
        for (int p = 0; p < N_PATTERN; ++p) {
            for (bool bcast : {true, false}) {
                cases.push_back({type, n_tokens, (pattern) p, bcast, N_ROWS, 256, false, false});
                if (!dev.repack) {
                    cases.push_back({type, n_tokens, (pattern) p, bcast, 82, 256, false, false});
                }
                if (n_tokens <= 32) {
                    cases.push_back({type, n_tokens, (pattern) p, bcast, N_ROWS, 2048, false, false});
                }
            }
            if (n_tokens <= 16 && !dev.repack) {
                cases.push_back({type, n_tokens, (pattern) p, true, N_ROWS,  256, true, false});
                cases.push_back({type, n_tokens, (pattern) p, true, N_ROWS, 2048, true, false});
            }
        }
        if (gpu && (n_tokens == 32 || n_tokens == 64)) { // the scheduler offloads from 32 tokens on
            for (pattern p : {FULL, SOME, ALL, ONE, EQUAL}) {
                cases.push_back({type, n_tokens, p, true, N_ROWS, 256, false, true});
            }
        }
    }
    return cases;
}

static device open_device(std::string name) {
    device dev;
    dev.repack = name == "CPU_REPACK";
    ggml_backend_dev_t found = nullptr;
    if (name.empty()) {
        found = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU);
        name  = found ? ggml_backend_dev_name(found) : "CPU";
    }
    found = ggml_backend_dev_by_name(dev.repack ? "CPU" : name.c_str());
    if (!found) {
        fail("no device " + name);
    }
    dev.backend.reset(ggml_backend_dev_init(found, nullptr));
    dev.cpu.reset(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    if (!dev.backend || !dev.cpu) {
        fail("cannot open " + name);
    }
    dev.buft = dev.buft_weights = ggml_backend_get_default_buffer_type(dev.backend.get());
    if (dev.repack) {
        const auto get_extra = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(
            ggml_backend_dev_backend_reg(found), "ggml_backend_dev_get_extra_bufts");
        ggml_backend_buffer_type_t * bufts = get_extra ? get_extra(found) : nullptr;
        for (dev.buft_weights = nullptr; bufts && *bufts; ++bufts) {
            if (name == ggml_backend_buft_name(*bufts)) {
                dev.buft_weights = *bufts;
            }
        }
        if (!dev.buft_weights) {
            fail("this build has no repacked weights");
        }
    }
    printf("device %s\n", name.c_str());
    return dev;
}

int main(int argc, char ** argv) {
    ggml_log_set([](ggml_log_level level, const char * text, void *) {
        if (level >= GGML_LOG_LEVEL_WARN && level != GGML_LOG_LEVEL_CONT) {
            fputs(text, stderr);
        }
    }, nullptr);
    std::map<std::string, std::string> args = {{"--device", ""}, {"--only", ""}, {"--every", "1"}};
    for (int i = 1; i < argc; i += 2) {
        if (!args.count(argv[i]) || i + 1 == argc) {
            fail("usage: mul_mat_id [--device NAME] [--only TEXT] [--every N]");
        }
        args[argv[i]] = argv[i + 1];
    }
    const int every = std::max(1, atoi(args["--every"].c_str()));
    const device dev = open_device(args["--device"]);

    int n_case = 0;
    int n_all[2] = {0, 0}; // failed, passed
    for (ggml_type type : TYPES) {
        if (!supported(dev, type)) {
            printf("%-7s not supported here\n", ggml_type_name(type));
            continue;
        }
        std::map<std::pair<int, bool>, weights> made; // (k, in host memory)
        int n[2] = {0, 0};
        for (const test_case & tc : make_cases(dev, type)) {
            if (tc.str().find(args["--only"]) == std::string::npos || n_case++ % every != 0) {
                continue;
            }
            const std::pair<int, bool> key = {tc.k, tc.offload};
            if (!made.count(key)) {
                made[key] = make_weights(dev, type, tc.k, N_USED*(tc.k == 256 ? 512 : 32), tc.offload);
            }
            n[run_case(dev, made[key], tc)]++;
        }
        if (n[0] + n[1] > 0) {
            printf("%-7s %5d passed %5d failed\n", ggml_type_name(type), n[1], n[0]);
        }
        n_all[0] += n[0];
        n_all[1] += n[1];
    }
    printf("%-7s %5d passed %5d failed\n", "all", n_all[1], n_all[0]);
    return n_all[0] > 0 || n_all[1] == 0;
}
