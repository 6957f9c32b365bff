// DeltaNet and its convolution over trees of rows on one device, against the CPU and against every path alone.
//
// Usage: tree [--device NAME] [--only TEXT] [--every N] [--time 1]
//   NAME is a ggml device, default: the first GPU. TEXT selects cases whose description contains it,
//   N every N-th of them. --time also prints how long the operations take for the shapes of a 35B-A3B model.
// Prints the failures and one line at the end; exit code 1 if a case failed, 2 on wrong usage.
//
// A row must have what the plain operation gives for the rows from its root on, on the same device and on the CPU.
// Each graph runs three times (directly, captured, replayed), with the results overwritten by NaN in between.

#include "kernel_checks.h"
#include "moegraph.h"

#include <climits>
#include <functional>

// Relative squared errors of one row. The GPU's fast exp is off by some 1e-7, once for each ancestor; the same kernel
// order on the same device leaves nothing; what is allowed is another choice of fused multiply-adds.
static constexpr double MAX_NMSE_CPU   = 1e-9;
static constexpr double MAX_NMSE_ALONE = 1e-12;
static constexpr int    GUARD          = 4096; // bytes around the result that must not change

typedef std::vector<int32_t> ints;

static ggml_backend_t cpu;
static long n_rows = 0, n_other_bits = 0; // compared with the path alone

enum tree { CHAIN, STAR, HEAP, FOREST, DEEP, BAD, N_TREE };
static const char * TREE_NAMES[] = { "chain", "star", "heap", "forest", "deep", "bad" };

// Parents of n rows for each of n_seqs sequences.
static ints make_parents(const tree kind, const int n, const int n_seqs) {
    static const int32_t wrong[] = { -2, INT_MIN, INT_MAX, 64, 1 << 20 };
    ints parents;
    for (int s = 0; s < n_seqs; ++s) {
        for (int i = 0; i < n; ++i) {
            const int32_t any = (int32_t) (rng() % (i + 1)) - 1;
            switch (kind) {
                case CHAIN:  parents.push_back(i - 1);                                                   break;
                case STAR:   parents.push_back(i == 0 ? -1 : 0);                                         break;
                case HEAP:   parents.push_back(i/2 - 1);                                                 break;
                case FOREST: parents.push_back(any);                                                     break;
                case DEEP:   parents.push_back(i == 0 ? -1 : std::max(0, i - 1 - (int) (rng() % 3)));    break;
                default:     parents.push_back(rng() % 4 ? any : rng() % 2 ? i : wrong[rng() % 5]);      break;
            }
        }
    }
    return parents;
}

static ints path_of(const ints & parents, const int n, const int seq, int row) {
    ints path;
    while (row >= 0) {
        path.insert(path.begin(), row);
        const int32_t p = parents[seq*n + row];
        row = p < row ? std::max(p, -1) : -1;
    }
    return path;
}

// A graph under construction: leaves get their data when it runs.
struct net {
    ggml_context *             ctx;
    std::vector<ggml_tensor *> leaves;
    std::vector<const void *>  data;
    ggml_tensor *              guard[2];

    net() {
        const ggml_init_params params = { 256*ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true };
        ctx = ggml_init(params);
    }
    ~net() { ggml_free(ctx); }

    ggml_tensor * leaf(const ggml_type type, const std::vector<int64_t> & ne, const void * values) {
        leaves.push_back(ggml_new_tensor(ctx, type, (int) ne.size(), ne.data()));
        data.push_back(values);
        return leaves.back();
    }
    void add_guard(const int i) { guard[i] = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, GUARD); }

    // The result of three runs, or empty if they differ, an input changed or memory beside the result did.
    floats run(const ggml_backend_t be, ggml_tensor * out) {
        add_guard(1);
        ggml_cgraph * graph = ggml_new_graph(ctx);
        ggml_build_forward_expand(graph, out);
        ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, be);
        ggml_backend_buffer_clear(buffer, 0xFF);
        for (size_t i = 0; i < leaves.size(); ++i) {
            ggml_backend_tensor_set(leaves[i], data[i], 0, ggml_nbytes(leaves[i]));
        }
        floats first(ggml_nelements(out));
        bool good = true;
        for (int pass = 0; pass < 3; ++pass) {
            ggml_backend_tensor_memset(out, 0xFF, 0, ggml_nbytes(out));
            good = good && ggml_backend_graph_compute(be, graph) == GGML_STATUS_SUCCESS;
            floats v(first.size());
            ggml_backend_tensor_get(out, v.data(), 0, ggml_nbytes(out));
            good  = good && (pass == 0 || memcmp(v.data(), first.data(), v.size()*sizeof(float)) == 0);
            first = v;
        }
        for (size_t i = 0; i < leaves.size() + 2; ++i) {
            ggml_tensor * t = i < 2 ? guard[i] : leaves[i - 2];
            std::vector<uint8_t> now(ggml_nbytes(t)), before(ggml_nbytes(t), 0xFF);
            if (i >= 2) {
                memcpy(before.data(), data[i - 2], before.size());
            }
            ggml_backend_tensor_get(t, now.data(), 0, now.size());
            good = good && now == before;
        }
        ggml_backend_buffer_free(buffer);
        return good ? first : floats();
    }
};

static double nmse(const float * got, const float * want, const int n) {
    double error = 0, norm = 0;
    for (int i = 0; i < n; ++i) {
        error += ((double) got[i] - want[i])*((double) got[i] - want[i]);
        norm  += (double) want[i]*want[i];
    }
    return error/std::max(norm, 1e-30);
}

// Compares rows of `width` floats in blocks of `block`: with the CPU's, and some of them with their paths alone.
static void judge(const std::string & name, const ints & parents, const int n, const int n_seqs, const int width, const int block,
        const floats & got, const floats & of_cpu, const std::function<floats(int, const ints &)> & alone) {
    std::string wrong = got.size() < (size_t) n*n_seqs*width || of_cpu.size() < (size_t) n*n_seqs*width ?
        "no result, other bits in another run, or memory changed beside it" : "";
    const auto compare = [&](const float * a, const float * b, const double limit, const std::string & what) {
        for (int i = 0; i < width && wrong.empty(); i += block) {
            const double e = nmse(a + i, b + i, block);
            if (!(e <= limit)) {
                wrong = what + ": NMSE " + std::to_string(e*1e12) + "e-12 at " + std::to_string(i);
            }
        }
    };
    for (int row = 0; row < n*n_seqs && wrong.empty(); ++row) {
        compare(&got[(size_t) row*width], &of_cpu[(size_t) row*width], MAX_NMSE_CPU, "row " + std::to_string(row) + " and the CPU");
    }
    for (int seq = 0; seq < n_seqs && wrong.empty(); ++seq) {
        for (const int row : { n - 1, (int) (rng() % n), (int) (rng() % n) }) {
            const ints   path = path_of(parents, n, seq, row);
            const floats want = alone(seq, path);
            for (size_t i = 0; i < path.size() && wrong.empty(); ++i) {
                const float * mine = &got[((size_t) seq*n + path[i])*width];
                compare(mine, &want[i*width], MAX_NMSE_ALONE, "row " + std::to_string(path[i]) + " and its path alone");
                n_rows++;
                n_other_bits += memcmp(mine, &want[i*width], width*sizeof(float)) != 0;
            }
        }
    }
    n_run++;
    if (!wrong.empty()) {
        n_failed++;
        printf("FAIL %s: %s\n", name.c_str(), wrong.c_str());
    }
}

struct delta_case {
    int  S, n_k, n_v, n, n_seqs;
    int  share;  // sequences that have q and k in common
    bool views;  // q, k, v lie in one tensor, as behind a convolution
    tree kind;

    std::string str() const {
        return std::string("delta ") + TREE_NAMES[kind] + " n=" + std::to_string(n) + " seqs=" + std::to_string(n_seqs) + " S=" +
            std::to_string(S) + " heads=" + std::to_string(n_k) + "/" + std::to_string(n_v) + " share=" + std::to_string(share) +
            (views ? " views" : "");
    }
};

struct delta_data {
    delta_case c;
    floats q, k, v, g, beta, state;

    explicit delta_data(const delta_case & c) : c(c) {
        const size_t rows = (size_t) c.n*c.n_seqs;
        q     = normal(rows/c.share*c.n_k*c.S, 1.0f);
        k     = normal(rows/c.share*c.n_k*c.S, 1.0f/std::sqrt((float) c.S));
        v     = normal(rows*c.n_v*c.S, 1.0f);
        g     = normal(rows*c.n_v, 0.2f);
        beta  = normal(rows*c.n_v, 0.2f);
        state = normal((size_t) c.n_seqs*c.n_v*c.S*c.S, 1.0f);
        for (float & x : g) {
            x = -std::fabs(x);
        }
        for (float & x : beta) {
            x = 1.0f/(1.0f + std::exp(-x));
        }
    }

    // One sequence with some of the rows.
    delta_data pick(const int seq, const ints & rows) const {
        delta_data r = *this;
        r.c.n      = (int) rows.size();
        r.c.n_seqs = r.c.share = 1;
        const auto take = [&](const floats & from, const int of, const int width) {
            floats to;
            for (const int row : rows) {
                const auto begin = from.begin() + ((size_t) of*c.n + row)*width;
                to.insert(to.end(), begin, begin + width);
            }
            return to;
        };
        r.q     = take(q, seq/c.share, c.n_k*c.S);
        r.k     = take(k, seq/c.share, c.n_k*c.S);
        r.v     = take(v, seq, c.n_v*c.S);
        r.g     = take(g, seq, c.n_v);
        r.beta  = take(beta, seq, c.n_v);
        const size_t size = (size_t) c.n_v*c.S*c.S;
        r.state = floats(state.begin() + seq*size, state.begin() + (seq + 1)*size);
        return r;
    }

    floats run(const ggml_backend_t be, const ints * parents) const {
        net g_;
        ggml_tensor * tq, * tk, * tv;
        floats joined;
        if (c.views) {
            const int    widths[] = { c.n_k*c.S, c.n_k*c.S, c.n_v*c.S };
            const size_t width    = widths[0] + widths[1] + widths[2];
            for (int row = 0; row < c.n*c.n_seqs; ++row) {
                int part = 0;
                for (const floats * x : { &q, &k, &v }) {
                    const auto begin = x->begin() + (size_t) row*widths[part];
                    joined.insert(joined.end(), begin, begin + widths[part++]);
                }
            }
            ggml_tensor * x = g_.leaf(GGML_TYPE_F32, { (int64_t) width, c.n, c.n_seqs }, joined.data());
            const auto view = [&](const int heads, const int offset) {
                return ggml_view_4d(g_.ctx, x, c.S, heads, c.n, c.n_seqs, 4*c.S, x->nb[1], x->nb[2], 4*offset);
            };
            tq = view(c.n_k, 0);
            tk = view(c.n_k, widths[0]);
            tv = view(c.n_v, widths[0] + widths[1]);
        } else {
            tq = g_.leaf(GGML_TYPE_F32, { c.S, c.n_k, c.n, c.n_seqs/c.share }, q.data());
            tk = g_.leaf(GGML_TYPE_F32, { c.S, c.n_k, c.n, c.n_seqs/c.share }, k.data());
            tv = g_.leaf(GGML_TYPE_F32, { c.S, c.n_v, c.n, c.n_seqs }, v.data());
        }
        ggml_tensor * tg = g_.leaf(GGML_TYPE_F32, { 1, c.n_v, c.n, c.n_seqs }, g.data());
        ggml_tensor * tb = g_.leaf(GGML_TYPE_F32, { 1, c.n_v, c.n, c.n_seqs }, beta.data());
        ggml_tensor * ts = g_.leaf(GGML_TYPE_F32, { c.S, c.S, c.n_v, c.n_seqs }, state.data());
        ggml_tensor * tp = parents ? g_.leaf(GGML_TYPE_I32, { c.n, c.n_seqs }, parents->data()) : nullptr;
        g_.add_guard(0);
        return g_.run(be, tp ? moegraph_gated_delta_net_tree(g_.ctx, tq, tk, tv, tg, tb, ts, tp)
                             : ggml_gated_delta_net(g_.ctx, tq, tk, tv, tg, tb, ts, 1));
    }
};

static void check_delta(const delta_case & c) {
    if (!selected(c.str())) {
        return;
    }
    const delta_data data(c);
    const ints parents = make_parents(c.kind, c.n, c.n_seqs);
    judge(c.str(), parents, c.n, c.n_seqs, c.n_v*c.S, c.S, data.run(backend, &parents), data.run(cpu, &parents),
        [&](const int seq, const ints & path) { return data.pick(seq, path).run(backend, nullptr); });
}

enum activation { NONE, SILU, BIAS_SILU, N_ACTIVATION };
static const char * ACTIVATION_NAMES[] = { "", " silu", " bias silu" };

struct conv_case {
    int        n_channels, d_conv, n, n_seqs;
    activation act;
    tree       kind;

    std::string str() const {
        return std::string("conv ") + TREE_NAMES[kind] + " n=" + std::to_string(n) + " seqs=" + std::to_string(n_seqs) + " channels=" +
            std::to_string(n_channels) + " d_conv=" + std::to_string(d_conv) + ACTIVATION_NAMES[act];
    }
};

struct conv_data {
    conv_case c;
    floats x, w, bias;

    explicit conv_data(const conv_case & c) : c(c) {
        x    = normal((size_t) (c.d_conv - 1 + c.n)*c.n_channels*c.n_seqs, 1.0f);
        w    = normal((size_t) c.d_conv*c.n_channels, 0.5f);
        bias = normal(c.n_channels, 0.5f);
    }

    conv_data pick(const int seq, const ints & rows) const {
        conv_data r = *this;
        r.c.n      = (int) rows.size();
        r.c.n_seqs = 1;
        r.x.clear();
        const int front = c.d_conv - 1, n_cols = front + c.n;
        for (int channel = 0; channel < c.n_channels; ++channel) {
            const auto begin = x.begin() + ((size_t) seq*c.n_channels + channel)*n_cols;
            r.x.insert(r.x.end(), begin, begin + front);
            for (const int row : rows) {
                r.x.push_back(begin[front + row]);
            }
        }
        return r;
    }

    floats run(const ggml_backend_t be, const ints * parents) const {
        net g;
        ggml_tensor * tx = g.leaf(GGML_TYPE_F32, { c.d_conv - 1 + c.n, c.n_channels, c.n_seqs }, x.data());
        ggml_tensor * tw = g.leaf(GGML_TYPE_F32, { c.d_conv, c.n_channels }, w.data());
        ggml_tensor * tb = c.act == BIAS_SILU ? g.leaf(GGML_TYPE_F32, { c.n_channels }, bias.data()) : nullptr;
        ggml_tensor * tp = parents ? g.leaf(GGML_TYPE_I32, { c.n, c.n_seqs }, parents->data()) : nullptr;
        g.add_guard(0);
        ggml_tensor * out = tp ? moegraph_ssm_conv_tree(g.ctx, tx, tw, tp) : ggml_ssm_conv(g.ctx, tx, tw);
        if (tb) {
            out = ggml_add(g.ctx, out, tb);
        }
        return g.run(be, c.act == NONE ? out : ggml_silu(g.ctx, out));
    }
};

static void check_conv(const conv_case & c) {
    if (!selected(c.str())) {
        return;
    }
    const conv_data data(c);
    const ints parents = make_parents(c.kind, c.n, c.n_seqs);
    judge(c.str(), parents, c.n, c.n_seqs, c.n_channels, 128, data.run(backend, &parents), data.run(cpu, &parents),
        [&](const int seq, const ints & path) { return data.pick(seq, path).run(backend, nullptr); });
}

static void check_all() {
    static const int widths[] = { 3, 5, 9, 15 };
    for (int kind = 0; kind < N_TREE; ++kind) {
        for (const int n : { 1, 2, 3, 4, 5, 8, 13, 16, 22, 23, 29, 30, 31, 32, 33, 47, 62, 63, 64 }) {
            const tree t = (tree) kind;
            check_delta({ 128, 4, 8, n, 1, 1, true,  t });
            check_delta({ 128, 2, 2, n, 3, 1, false, t });
            check_delta({  64, 2, 6, n, 2, 1, true,  t });
            check_delta({  64, 1, 4, n, 4, 2, false, t });
            check_delta({  32, 1, 3, n, 2, 1, true,  t });
            check_delta({  16, 2, 4, n, 2, 1, true,  t });
            check_conv({ 256, 4, n, 1, SILU,      t });
            check_conv({ 128, 4, n, 3, NONE,      t });
            check_conv({ 384, 4, n, 2, BIAS_SILU, t });
            check_conv({ 128, widths[n % 4], n, 2, (activation) (n % N_ACTIVATION), t });
        }
    }
    check_delta({ 128, 16, 32, 23, 1, 1, true, DEEP });
    check_delta({ 128, 16, 32, 64, 2, 1, true, FOREST });
    check_conv({ 8192, 4, 23, 1, SILU, DEEP });
    check_conv({ 8192, 4, 64, 2, SILU, FOREST });
}

// Microseconds of one operation: the difference between graphs of many and of few.
static double microseconds(const std::function<ggml_tensor *(net &)> & build) {
    const auto seconds = [&](const int n_ops) {
        net g;
        ggml_cgraph * graph = ggml_new_graph(g.ctx);
        for (int i = 0; i < n_ops; ++i) {
            ggml_build_forward_expand(graph, build(g));
        }
        ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(g.ctx, backend);
        ggml_backend_buffer_clear(buffer, 0);
        for (size_t i = 0; i < g.leaves.size(); ++i) {
            if (g.data[i]) {
                ggml_backend_tensor_set(g.leaves[i], g.data[i], 0, ggml_nbytes(g.leaves[i]));
            }
        }
        double best = 1e9;
        for (int i = 0; i < 30; ++i) {
            const int64_t begin = ggml_time_us();
            ggml_backend_graph_compute(backend, graph);
            ggml_backend_synchronize(backend);
            best = std::min(best, (double) (ggml_time_us() - begin));
        }
        ggml_backend_buffer_free(buffer);
        return best;
    };
    return (seconds(22) - seconds(2))/20;
}

static void print_times() {
    printf("us: 128 x 128 states of 32 heads, 16 key heads; 8192 channels\n%6s %8s %12s %12s %12s %12s\n", "rows", "tree",
        "delta plain", "delta tree", "conv plain", "conv tree");
    for (const int n : { 1, 4, 8, 16, 23, 29, 32, 48, 64 }) {
        for (const tree kind : { CHAIN, DEEP, HEAP }) {
            const ints parents = make_parents(kind, n, 1);
            const auto delta = [&](net & g, const bool with_parents) {
                ggml_tensor * q = g.leaf(GGML_TYPE_F32, { 128, 16, n, 1 }, nullptr);
                ggml_tensor * k = g.leaf(GGML_TYPE_F32, { 128, 16, n, 1 }, nullptr);
                ggml_tensor * v = g.leaf(GGML_TYPE_F32, { 128, 32, n, 1 }, nullptr);
                ggml_tensor * d = g.leaf(GGML_TYPE_F32, { 1, 32, n, 1 }, nullptr);
                ggml_tensor * s = g.leaf(GGML_TYPE_F32, { 128, 128, 32, 1 }, nullptr);
                return with_parents ?
                    moegraph_gated_delta_net_tree(g.ctx, q, k, v, d, d, s, g.leaf(GGML_TYPE_I32, { n, 1 }, parents.data())) :
                    ggml_gated_delta_net(g.ctx, q, k, v, d, d, s, 1);
            };
            const auto conv = [&](net & g, const bool with_parents) {
                ggml_tensor * x = g.leaf(GGML_TYPE_F32, { n + 3, 8192, 1 }, nullptr);
                ggml_tensor * w = g.leaf(GGML_TYPE_F32, { 4, 8192 }, nullptr);
                return ggml_silu(g.ctx, with_parents ?
                    moegraph_ssm_conv_tree(g.ctx, x, w, g.leaf(GGML_TYPE_I32, { n, 1 }, parents.data())) : ggml_ssm_conv(g.ctx, x, w));
            };
            const double us[] = {
                microseconds([&](net & g) { return delta(g, false); }), microseconds([&](net & g) { return delta(g, true); }),
                microseconds([&](net & g) { return conv(g, false); }),  microseconds([&](net & g) { return conv(g, true); }),
            };
            printf("%6d %8s %12.2f %12.2f %12.2f %12.2f\n", n, TREE_NAMES[kind], us[0], us[1], us[2], us[3]);
            fflush(stdout);
        }
    }
}

int main(int argc, char ** argv) {
    bool timed = false;
    if (const int code = start(argc, argv, "tree", &timed)) {
        return code;
    }
    cpu     = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    check_all();
    if (timed) {
        print_times();
    }
    printf("all %d checks of trees on %s: %d failed; %ld of %ld rows without the bits of their path alone\n", n_run,
        ggml_backend_name(backend), n_failed, n_other_bits, n_rows);
    ggml_backend_free(backend);
    ggml_backend_free(cpu);
    return n_failed != 0 || n_run == 0;
}
