// The recurrences of DeltaNet over states by slot, as chains and as trees of rows, on one device.
//
// Usage: deltanet [--device NAME] [--only TEXT] [--every N] [--time 1]
//   NAME is a ggml device, default: the first GPU. TEXT selects cases whose description contains it,
//   N every N-th of them. --time also prints how long the operations take for the shapes of a 35B-A3B model.
// Prints the failures and one line at the end; exit code 1 if a case failed, 2 on wrong usage.
//
// A chain must have the bits of llama.cpp's operation, and so must the states that it leaves; all other states stay. A
// row of a tree must have what llama.cpp's operation gives for the rows from its root on, on the same device and on the
// CPU. Each graph runs three times (directly, captured, replayed), with the results overwritten by NaN in between.

#include "kernel_checks.h"
#include "moegraph.h"

#include <array>
#include <climits>
#include <functional>

// Relative squared errors of one row. The GPU's fast exp is off by some 1e-7, once for each ancestor; the same kernel
// order on the same device leaves nothing; what is allowed is another choice of fused multiply-adds.
static constexpr double MAX_NMSE_CPU   = 1e-9;
static constexpr double MAX_NMSE_ALONE = 1e-12;
static constexpr int    GUARD          = 4096; // bytes around the result that must not change
static constexpr int    SPARE          = 2;    // slots that no sequence has

static ggml_backend_t cpu;
static long n_rows = 0, n_other_bits = 0; // compared with the path alone

enum tree { CHAIN, STAR, HEAP, FOREST, DEEP, BAD, N_TREE };
static const char * TREE_NAMES[] = { "chain", "star", "heap", "forest", "deep", "bad" };

// A slot for each sequence, in no order.
static ints make_slots(const int n_seqs) {
    ints slots;
    for (int i = 0; i < n_seqs + SPARE; ++i) {
        slots.insert(slots.begin() + rng() % (slots.size() + 1), i);
    }
    slots.resize(n_seqs);
    return slots;
}

// Parents of n rows for each of n_seqs sequences.
static ints make_parents(const tree kind, const int n, const int n_seqs) {
    static const int32_t wrong[] = { -3, INT_MIN, INT_MAX, 64, 1 << 20 };
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

static bool same_bits(const floats & a, const floats & b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size()*sizeof(float)) == 0;
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

    // The result of three runs and the pool after them. Empty if they differ, or if an input or memory beside the
    // result changed.
    std::array<floats, 2> run(const ggml_backend_t be, ggml_tensor * out, const ggml_tensor * pool = nullptr) {
        add_guard(1);
        ggml_cgraph * graph = ggml_new_graph(ctx);
        ggml_build_forward_expand(graph, out);
        ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, be);
        ggml_backend_buffer_clear(buffer, 0xFF);
        std::array<floats, 2> first;
        bool good = true;
        for (int pass = 0; pass < 3; ++pass) {
            for (size_t i = 0; i < leaves.size(); ++i) {
                ggml_backend_tensor_set(leaves[i], data[i], 0, ggml_nbytes(leaves[i]));
            }
            ggml_backend_tensor_memset(out, 0xFF, 0, ggml_nbytes(out));
            good = good && ggml_backend_graph_compute(be, graph) == GGML_STATUS_SUCCESS;
            std::array<floats, 2> now = { floats(ggml_nelements(out)), floats(pool ? ggml_nelements(pool) : 0) };
            ggml_backend_tensor_get(out, now[0].data(), 0, ggml_nbytes(out));
            if (pool) {
                ggml_backend_tensor_get(pool, now[1].data(), 0, ggml_nbytes(pool));
            }
            good  = good && (pass == 0 || (same_bits(now[0], first[0]) && same_bits(now[1], first[1])));
            first = now;
        }
        for (size_t i = 0; i < leaves.size() + 2; ++i) {
            ggml_tensor * t = i < 2 ? guard[i] : leaves[i - 2];
            std::vector<uint8_t> now(ggml_nbytes(t)), before(ggml_nbytes(t), 0xFF);
            if (i >= 2) {
                memcpy(before.data(), data[i - 2], before.size());
            }
            ggml_backend_tensor_get(t, now.data(), 0, now.size());
            good = good && (now == before || t == pool);
        }
        ggml_backend_buffer_free(buffer);
        return good ? first : std::array<floats, 2>();
    }
};

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

// Compares a chain and the pool that it leaves with what llama.cpp's operation gives: results, then states.
static void judge_chain(const std::string & name, const std::array<floats, 2> & got, const floats & want,
        const floats & pool, const ints & slots) {
    const size_t n_state = pool.size()/(slots.size() + SPARE);
    const size_t n       = want.size() - slots.size()*n_state;
    floats after = pool;
    for (size_t s = 0; s < slots.size() && n < want.size(); ++s) {
        std::copy_n(want.begin() + n + s*n_state, n_state, after.begin() + slots[s]*n_state);
    }
    n_run++;
    if (got[0].size() != n || memcmp(got[0].data(), want.data(), n*sizeof(float)) != 0 || !same_bits(got[1], after)) {
        n_failed++;
        printf("FAIL %s: %s\n", name.c_str(), got[0].empty() ? "no result, other bits in another run, or memory changed" :
            same_bits(got[1], after) ? "other bits" : "other states");
    }
}

struct delta_case {
    int  S, n_k, n_v, n, n_seqs;
    bool views;  // q, k, v lie in one tensor, as behind a convolution
    tree kind;

    std::string str() const {
        return std::string("delta ") + TREE_NAMES[kind] + " n=" + std::to_string(n) + " seqs=" + std::to_string(n_seqs) + " S=" +
            std::to_string(S) + " heads=" + std::to_string(n_k) + "/" + std::to_string(n_v) + (views ? " views" : "");
    }
};

struct delta_data {
    delta_case c;
    floats q, k, v, g, beta, pool;
    ints   slots;

    explicit delta_data(const delta_case & c) : c(c) {
        const size_t rows = (size_t) c.n*c.n_seqs;
        q     = normal(rows*c.n_k*c.S, 1.0f);
        k     = normal(rows*c.n_k*c.S, 1.0f/std::sqrt((float) c.S));
        v     = normal(rows*c.n_v*c.S, 1.0f);
        g     = normal(rows*c.n_v, 0.2f);
        beta  = normal(rows*c.n_v, 0.2f);
        pool  = normal((size_t) (c.n_seqs + SPARE)*c.n_v*c.S*c.S, 1.0f);
        slots = make_slots(c.n_seqs);
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
        r.c.n_seqs = 1;
        const auto take = [&](const floats & from, const int of, const int width) {
            floats to;
            for (const int row : rows) {
                const auto begin = from.begin() + ((size_t) of*c.n + row)*width;
                to.insert(to.end(), begin, begin + width);
            }
            return to;
        };
        r.q     = take(q, seq, c.n_k*c.S);
        r.k     = take(k, seq, c.n_k*c.S);
        r.v     = take(v, seq, c.n_v*c.S);
        r.g     = take(g, seq, c.n_v);
        r.beta  = take(beta, seq, c.n_v);
        r.slots = { slots[seq] };
        return r;
    }

    floats states() const {
        const size_t size = (size_t) c.n_v*c.S*c.S;
        floats result;
        for (const int32_t slot : slots) {
            result.insert(result.end(), pool.begin() + slot*size, pool.begin() + (slot + 1)*size);
        }
        return result;
    }

    enum op { UPSTREAM, OURS }; // llama.cpp's, with the states behind the results, or ours, with the pool
    std::array<floats, 2> run(const ggml_backend_t be, const op which, const ints * parents = nullptr) const {
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
            tq = g_.leaf(GGML_TYPE_F32, { c.S, c.n_k, c.n, c.n_seqs }, q.data());
            tk = g_.leaf(GGML_TYPE_F32, { c.S, c.n_k, c.n, c.n_seqs }, k.data());
            tv = g_.leaf(GGML_TYPE_F32, { c.S, c.n_v, c.n, c.n_seqs }, v.data());
        }
        ggml_tensor * tg = g_.leaf(GGML_TYPE_F32, { 1, c.n_v, c.n, c.n_seqs }, g.data());
        ggml_tensor * tb = g_.leaf(GGML_TYPE_F32, { 1, c.n_v, c.n, c.n_seqs }, beta.data());
        if (which == UPSTREAM) {
            const floats before = states();
            ggml_tensor * ts = g_.leaf(GGML_TYPE_F32, { c.S, c.S, c.n_v, c.n_seqs }, before.data());
            g_.add_guard(0);
            return g_.run(be, ggml_gated_delta_net(g_.ctx, tq, tk, tv, tg, tb, ts, 1));
        }
        ggml_tensor * tp = g_.leaf(GGML_TYPE_F32, { c.n_v*c.S*c.S, (int64_t) pool.size()/(c.n_v*c.S*c.S) }, pool.data());
        ggml_tensor * ts = g_.leaf(GGML_TYPE_I32, { c.n_seqs }, slots.data());
        ggml_tensor * tt = parents ? g_.leaf(GGML_TYPE_I32, { c.n, c.n_seqs }, parents->data()) : nullptr;
        g_.add_guard(0);
        return g_.run(be, moegraph_delta_net(g_.ctx, tq, tk, tv, tg, tb, tp, ts, tt, nullptr), tp);
    }
};

static void check_delta(const delta_case & c) {
    if (!selected(c.str())) {
        return;
    }
    const delta_data data(c);
    if (c.kind == CHAIN) {
        judge_chain(c.str(), data.run(backend, delta_data::OURS), data.run(backend, delta_data::UPSTREAM)[0], data.pool, data.slots);
    }
    if (c.n > MOEGRAPH_TREE_ROWS) {
        return;
    }
    const ints parents = make_parents(c.kind, c.n, c.n_seqs);
    const auto got = data.run(backend, delta_data::OURS, &parents);
    judge(c.str(), parents, c.n, c.n_seqs, c.n_v*c.S, c.S, same_bits(got[1], data.pool) ? got[0] : floats(),
        data.run(cpu, delta_data::OURS, &parents)[0],
        [&](const int seq, const ints & path) { return data.pick(seq, path).run(backend, delta_data::UPSTREAM)[0]; });
}

struct conv_case {
    int  n_channels, d_conv, n, n_seqs;
    bool silu;
    tree kind;

    std::string str() const {
        return std::string("conv ") + TREE_NAMES[kind] + " n=" + std::to_string(n) + " seqs=" + std::to_string(n_seqs) + " channels=" +
            std::to_string(n_channels) + " d_conv=" + std::to_string(d_conv) + (silu ? " silu" : "");
    }
};

struct conv_data {
    conv_case c;
    floats rows, w, pool; // rows [n_channels, n, n_seqs], pool [d_conv - 1, n_channels, n_slots]
    ints   slots;

    explicit conv_data(const conv_case & c) : c(c) {
        rows  = normal((size_t) c.n*c.n_channels*c.n_seqs, 1.0f);
        w     = normal((size_t) c.d_conv*c.n_channels, 0.5f);
        pool  = normal((size_t) (c.d_conv - 1)*c.n_channels*(c.n_seqs + SPARE), 1.0f);
        slots = make_slots(c.n_seqs);
    }

    conv_data pick(const int seq, const ints & picked) const {
        conv_data r = *this;
        r.c.n      = (int) picked.size();
        r.c.n_seqs = 1;
        r.slots    = { slots[seq] };
        r.rows.clear();
        for (const int row : picked) {
            const auto begin = rows.begin() + ((size_t) seq*c.n + row)*c.n_channels;
            r.rows.insert(r.rows.end(), begin, begin + c.n_channels);
        }
        return r;
    }

    // What llama.cpp's operation reads: for each sequence and channel its state, then its rows; last: only the new states.
    floats columns(const bool last) const {
        floats result;
        const int n_past = c.d_conv - 1;
        for (int seq = 0; seq < c.n_seqs; ++seq) {
            for (int channel = 0; channel < c.n_channels; ++channel) {
                const auto past = pool.begin() + ((size_t) slots[seq]*c.n_channels + channel)*n_past;
                floats all(past, past + n_past);
                for (int row = 0; row < c.n; ++row) {
                    all.push_back(rows[((size_t) seq*c.n + row)*c.n_channels + channel]);
                }
                result.insert(result.end(), last ? all.end() - n_past : all.begin(), all.end());
            }
        }
        return result;
    }

    enum op { UPSTREAM, OURS };
    std::array<floats, 2> run(const ggml_backend_t be, const op which, const ints * parents = nullptr) const {
        net g;
        const int64_t n_past = c.d_conv - 1;
        ggml_tensor * tw = g.leaf(GGML_TYPE_F32, { c.d_conv, c.n_channels }, w.data());
        if (which == UPSTREAM) {
            const floats x = columns(false);
            ggml_tensor * tx = g.leaf(GGML_TYPE_F32, { n_past + c.n, c.n_channels, c.n_seqs }, x.data());
            g.add_guard(0);
            ggml_tensor * out = ggml_ssm_conv(g.ctx, tx, tw);
            return g.run(be, c.silu ? ggml_silu(g.ctx, out) : out);
        }
        ggml_tensor * tr = g.leaf(GGML_TYPE_F32, { c.n_channels, c.n, c.n_seqs }, rows.data());
        ggml_tensor * tp = g.leaf(GGML_TYPE_F32, { n_past*c.n_channels, (int64_t) pool.size()/(n_past*c.n_channels) }, pool.data());
        ggml_tensor * ts = g.leaf(GGML_TYPE_I32, { c.n_seqs }, slots.data());
        ggml_tensor * tt = parents ? g.leaf(GGML_TYPE_I32, { c.n, c.n_seqs }, parents->data()) : nullptr;
        g.add_guard(0);
        ggml_tensor * out = moegraph_conv(g.ctx, tr, tw, tp, ts, tt, nullptr);
        return g.run(be, c.silu ? ggml_silu(g.ctx, out) : out, tp);
    }
};

static void check_conv(const conv_case & c) {
    if (!selected(c.str())) {
        return;
    }
    const conv_data data(c);
    if (c.kind == CHAIN) {
        floats want = data.run(backend, conv_data::UPSTREAM)[0];
        const floats states = data.columns(true);
        want.insert(want.end(), states.begin(), states.end());
        judge_chain(c.str(), data.run(backend, conv_data::OURS), want, data.pool, data.slots);
    }
    if (c.n > MOEGRAPH_TREE_ROWS) {
        return;
    }
    const ints parents = make_parents(c.kind, c.n, c.n_seqs);
    const auto got = data.run(backend, conv_data::OURS, &parents);
    judge(c.str(), parents, c.n, c.n_seqs, c.n_channels, 128, same_bits(got[1], data.pool) ? got[0] : floats(),
        data.run(cpu, conv_data::OURS, &parents)[0],
        [&](const int seq, const ints & path) { return data.pick(seq, path).run(backend, conv_data::UPSTREAM)[0]; });
}

static void check_all() {
    static const int widths[] = { 3, 5, 9, 15 };
    for (int kind = 0; kind < N_TREE; ++kind) {
        for (const int n : { 1, 2, 3, 4, 5, 8, 13, 16, 22, 23, 29, 30, 31, 32, 33, 47, 62, 63, 64 }) {
            const tree t = (tree) kind;
            check_delta({ 128, 4, 8, n, 1, true,  t });
            check_delta({ 128, 2, 2, n, 3, false, t });
            check_delta({  64, 2, 6, n, 2, true,  t });
            check_delta({  64, 1, 4, n, 4, false, t });
            check_delta({  32, 1, 3, n, 2, true,  t });
            check_delta({  16, 2, 4, n, 2, true,  t });
            check_conv({ 256, 4, n, 1, true,  t });
            check_conv({ 128, 4, n, 3, false, t });
            check_conv({ 128, widths[n % 4], n, 2, n % 3 == 0, t });
        }
    }
    check_delta({ 128, 16, 32, 23, 1, true, DEEP });
    check_delta({ 128, 16, 32, 64, 2, true, FOREST });
    check_conv({ 8192, 4, 23, 1, true, DEEP });
    check_conv({ 8192, 4, 64, 2, true, FOREST });
    for (const int n : { 65, 100, 513, 2048 }) {
        check_delta({ 128, 2, 4, n, 2, true, CHAIN });
        check_conv({ 256, 4, n, 2, n % 2 == 0, CHAIN });
    }
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
    static const int32_t slot = 0;
    printf("us: 128 x 128 states of 32 heads, 16 key heads; convolution of 8192 channels with its activation\n"
        "%6s %8s %12s %12s %12s %12s %12s %12s\n", "rows", "tree", "delta, llama", "chain", "tree", "conv, llama", "chain", "tree");
    for (const int n : { 1, 4, 8, 16, 23, 29, 32, 48, 64, 512, 2048 }) {
        for (const tree kind : { CHAIN, DEEP, HEAP }) {
            const bool is_tree = n <= MOEGRAPH_TREE_ROWS;
            if (!is_tree && kind != CHAIN) {
                continue;
            }
            const ints parents = make_parents(kind, n, 1);
            enum op { UPSTREAM, OURS_CHAIN, OURS_TREE };
            const auto more = [&](net & g, const op which, ggml_tensor ** slots, ggml_tensor ** tree) {
                *slots = g.leaf(GGML_TYPE_I32, { 1 }, &slot);
                ggml_set_input(*slots);
                *tree = which == OURS_TREE ? g.leaf(GGML_TYPE_I32, { n, 1 }, parents.data()) : nullptr;
            };
            const auto delta = [&](net & g, const op which) {
                ggml_tensor * q = g.leaf(GGML_TYPE_F32, { 128, 16, n, 1 }, nullptr);
                ggml_tensor * k = g.leaf(GGML_TYPE_F32, { 128, 16, n, 1 }, nullptr);
                ggml_tensor * v = g.leaf(GGML_TYPE_F32, { 128, 32, n, 1 }, nullptr);
                ggml_tensor * d = g.leaf(GGML_TYPE_F32, { 1, 32, n, 1 }, nullptr);
                if (which == UPSTREAM) {
                    return ggml_gated_delta_net(g.ctx, q, k, v, d, d, g.leaf(GGML_TYPE_F32, { 128, 128, 32, 1 }, nullptr), 1);
                }
                ggml_tensor * slots, * tree;
                more(g, which, &slots, &tree);
                return moegraph_delta_net(g.ctx, q, k, v, d, d, g.leaf(GGML_TYPE_F32, { 128*128*32, 1 }, nullptr), slots, tree, nullptr);
            };
            const auto conv = [&](net & g, const op which) {
                ggml_tensor * w = g.leaf(GGML_TYPE_F32, { 4, 8192 }, nullptr);
                if (which == UPSTREAM) {
                    return ggml_silu(g.ctx, ggml_ssm_conv(g.ctx, g.leaf(GGML_TYPE_F32, { n + 3, 8192, 1 }, nullptr), w));
                }
                ggml_tensor * slots, * tree;
                more(g, which, &slots, &tree);
                return ggml_silu(g.ctx, moegraph_conv(g.ctx, g.leaf(GGML_TYPE_F32, { 8192, n, 1 }, nullptr), w,
                    g.leaf(GGML_TYPE_F32, { 3*8192, 1 }, nullptr), slots, tree, nullptr));
            };
            printf("%6d %8s", n, TREE_NAMES[kind]);
            for (const op which : { UPSTREAM, OURS_CHAIN, OURS_TREE }) {
                const bool there = is_tree || which != OURS_TREE;
                printf(" %12.2f", there ? microseconds([&](net & g) { return delta(g, which); }) : NAN);
            }
            for (const op which : { UPSTREAM, OURS_CHAIN, OURS_TREE }) {
                const bool there = is_tree || which != OURS_TREE;
                printf(" %12.2f", there ? microseconds([&](net & g) { return conv(g, which); }) : NAN);
            }
            printf("\n");
            fflush(stdout);
        }
    }
}

int main(int argc, char ** argv) {
    bool timed = false;
    if (const int code = start(argc, argv, "deltanet", &timed)) {
        return code;
    }
    cpu     = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    check_all();
    if (timed) {
        print_times();
    }
    printf("all %d checks of DeltaNet on %s: %d failed; %ld of %ld rows without the bits of their path alone\n", n_run,
        ggml_backend_name(backend), n_failed, n_other_bits, n_rows);
    ggml_backend_free(backend);
    ggml_backend_free(cpu);
    return n_failed != 0 || n_run == 0;
}
