// Products of a few rows on one device, every element against float64.
//
// Usage: few_rows [--device NAME] [--only TEXT] [--every N]
//   NAME is a ggml device, default: the first GPU. TEXT selects cases whose description contains it,
//   N every N-th of them.
// Prints the failures and one line at the end; exit code 1 if a case failed, 2 on wrong usage.
//
// The kernels round activations to 8 bits, nothing else. How large the error from that is follows from the
// weights and activations of each element: a case fails when the error is more than it can explain, in sum
// over the elements, which is a much narrower bound than one relative to the result.
// Each graph runs three times (directly, captured, replayed), with the results overwritten by NaN in between.

#include "kernel_checks.h"

// Error over what rounding explains; 1 is expected. Wider or narrower products than those of our kernels run on
// upstream's, which also round scales and sums to half precision.
static constexpr double MAX_RATIO       = 2.5;
static constexpr double MAX_RATIO_OTHER = 10;

static const ggml_type TYPES[] = { GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K };

// One row's product, and the variance of its error from rounding x to 8 bits in blocks of 32.
struct exact {
    double value    = 0;
    double variance = 0;
};

static exact product(const float * w, const float * x, const int k) {
    exact r;
    for (int b = 0; b < k; b += 32) {
        double largest = 0, squares = 0;
        for (int i = b; i < std::min(b + 32, k); ++i) {
            r.value += (double) w[i]*x[i];
            squares += (double) w[i]*w[i];
            largest  = std::max(largest, (double) std::fabs(x[i]));
        }
        r.variance += squares*(largest/127)*(largest/127)/12;
    }
    return r;
}

// up*silu(gate), errors propagated
static exact swiglu(const exact & up, const exact & gate) {
    const double sig = 1/(1 + std::exp(-gate.value)), silu = gate.value*sig, slope = sig*(1 + gate.value*(1 - sig));
    const double of_gate = slope*slope*gate.variance;
    return { up.value*silu, silu*silu*up.variance + (up.value*up.value + up.variance)*of_gate };
}

struct product_net : weights_net {
    // The contents of `outs` after three runs that must agree to the bit; empty if they do not.
    std::vector<floats> run(const std::vector<ggml_tensor *> & outs) const {
        std::vector<floats> results;
        for (int pass = 0; pass < 3; ++pass) {
            for (ggml_tensor * t : outs) {
                ggml_backend_tensor_memset(t, 0xFF, 0, ggml_nbytes(t));
            }
            if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
                return {};
            }
            for (size_t i = 0; i < outs.size(); ++i) {
                floats v(ggml_nelements(outs[i]));
                ggml_backend_tensor_get(outs[i], v.data(), 0, ggml_nbytes(outs[i]));
                if (pass == 0) {
                    results.push_back(v);
                } else if (memcmp(results[i].data(), v.data(), v.size()*sizeof(float)) != 0) {
                    return {};
                }
            }
        }
        return results;
    }
};

struct product_case {
    ggml_type type;
    int       m, k;
    int       n_expert, n_used; // 0: dense
    int       n;
    bool      one_y;            // MUL_MAT_ID: all slots of a token read the same row
    bool      glu;
    pattern   ids;
    bool      constant;         // weights may be read ahead of the preceding kernel

    bool grouped() const { return n_expert > 0; }
    int  n_stack() const { return grouped() ? n_expert : 1; }
    int  n_y()     const { return grouped() && !one_y ? n_used : 1; }
    int  pitch()   const { return ids == STRIDED ? n_expert : n_used; }
    std::string str() const {
        return std::string(grouped() ? "experts " : "dense ") + ggml_type_name(type) + " m=" + std::to_string(m) + " k=" +
            std::to_string(k) + " experts=" + std::to_string(n_expert) + "/" + std::to_string(n_used) + " n=" + std::to_string(n) +
            (one_y ? " one_y" : "") + (glu ? " glu" : "") + (constant ? " constant " : " ") + PATTERN_NAMES[ids];
    }
};

// Compares rows of results [n rows of m] with exact ones; says what is wrong.
struct judge {
    double max_ratio;
    double error = 0, explained = 0;
    size_t n = 0, n_bad = 0;

    explicit judge(const bool ours) : max_ratio(ours ? MAX_RATIO : MAX_RATIO_OTHER) {}
    void element(const float got, const exact & want) {
        n++;
        if (!(std::fabs(got) <= 1e30f)) {
            n_bad++;
            return;
        }
        error     += (got - want.value)*(got - want.value);
        explained += want.variance;
    }
    void zero(const float got) {
        n_bad += got != 0.0f;
    }
    bool passed() const {
        return n_bad == 0 && (n == 0 || error <= explained*(max_ratio + 12/std::sqrt((double) n)));
    }
    std::string str() const {
        return std::to_string(n_bad) + " elements not finite or not zero, error over rounding " + std::to_string(error/explained);
    }
};

// Whether the newest code of this build is for devices with asynchronous copies; without, ours starts at nine rows.
static bool has_async_copies() {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    auto features = (ggml_backend_get_features_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_get_features");
    int newest = 0;
    for (auto f = features ? features(reg) : nullptr; f && f->name; ++f) {
        for (const char * at = strcmp(f->name, "ARCHS") == 0 ? f->value : nullptr; at; at = strchr(at, ',')) {
            newest = std::max(newest, atoi(at += *at == ','));
        }
    }
    return newest == 0 || newest >= 800;
}

static void check_product(const product_case & c) {
    if (!selected(c.str())) {
        return;
    }
    product_net g;
    const int extra = c.ids == STRIDED ? 16 : 0; // rows behind each expert that do not belong to it
    ggml_tensor * stacks[2], * parts[2];
    for (int i = 0; i < 1 + c.glu; ++i) {
        stacks[i] = ggml_new_tensor_3d(g.weights, c.type, c.k, c.m + extra, c.n_stack());
        parts[i]  = extra ? ggml_view_3d(g.ctx, stacks[i], c.k, c.m, c.n_stack(), stacks[i]->nb[1], stacks[i]->nb[2], 0) : stacks[i];
    }
    ggml_tensor * input = ggml_new_tensor_3d(g.ctx, GGML_TYPE_F32, c.k, c.grouped() ? c.n_y() : c.n, c.grouped() ? c.n : 1);
    ggml_tensor * x     = ggml_scale(g.ctx, input, 2.0f);
    ggml_tensor * table = nullptr, * ids = nullptr;
    if (c.grouped()) {
        table = ggml_new_tensor_2d(g.ctx, GGML_TYPE_I32, c.pitch(), c.n);
        ids   = ggml_view_2d(g.ctx, table, c.n_used, c.n, table->nb[1], 0);
    }
    const auto multiply = [&](ggml_tensor * w) { return c.grouped() ? ggml_mul_mat_id(g.ctx, w, x, ids) : ggml_mul_mat(g.ctx, w, x); };
    ggml_tensor * gate = c.glu ? multiply(parts[1]) : nullptr;
    ggml_tensor * out  = multiply(parts[0]);
    if (c.glu) {
        out = ggml_swiglu_split(g.ctx, gate, out);
    }
    ggml_build_forward_expand(g.graph, out);
    g.place(c.constant);

    std::vector<uint8_t> quants[2];
    for (int i = 0; i < 1 + c.glu; ++i) {
        quants[i] = random_weights(c.type, (size_t) (c.m + extra)*c.n_stack(), c.k);
        ggml_backend_tensor_set(stacks[i], quants[i].data(), 0, quants[i].size());
    }
    floats values = normal(ggml_nelements(input), 0.5f);
    for (size_t i = 0; i < values.size(); i += 97) {
        values[i] *= 5;
    }
    ggml_backend_tensor_set(input, values.data(), 0, ggml_nbytes(input));
    const ints chosen = c.grouped() ? choose(c.ids, c.pitch(), c.n, c.n_used, c.n_expert) : ints();
    if (c.grouped()) {
        ggml_backend_tensor_set(table, chosen.data(), 0, ggml_nbytes(table));
    }
    for (float & v : values) {
        v *= 2;
    }

    const std::vector<floats> got = g.run({ out });
    if (got.empty()) {
        report(c.str(), false, "a run failed or gave other bits");
        return;
    }
    const auto to_float = ggml_get_type_traits(c.type)->to_float;
    floats rows[2];
    for (int p = 0; p < 1 + c.glu; ++p) {
        rows[p].resize((size_t) (c.m + extra)*c.n_stack()*c.k);
        to_float(quants[p].data(), rows[p].data(), rows[p].size());
    }
    const int n_slots = c.n*c.n_used;
    const bool fit    = c.grouped() ? n_slots <= 65536 : c.n <= 32;
    judge j(fit && c.n >= (has_async_copies() ? (c.grouped() ? 5 : 1) : 9));
    for (int r = 0; r < c.n*(c.grouped() ? c.n_used : 1); ++r) {
        const int t = c.grouped() ? r/c.n_used : r, slot = c.grouped() ? r % c.n_used : 0;
        const int e = c.grouped() ? chosen[(size_t) t*c.pitch() + slot] : 0;
        const float * xr = values.data() + (size_t) (t*c.n_y() + slot % c.n_y())*c.k;
        for (int i = 0; i < c.m; ++i) {
            const float result = got[0][(size_t) r*c.m + i];
            if (e < 0 || e >= c.n_stack()) {
                j.zero(result);
                continue;
            }
            exact want[2];
            for (int p = 0; p < 1 + c.glu; ++p) {
                want[p] = product(&rows[p][((size_t) e*(c.m + extra) + i)*c.k], xr, c.k);
            }
            j.element(result, c.glu ? swiglu(want[0], want[1]) : want[0]);
        }
    }
    report(c.str(), j.passed(), j.str());
}

typedef std::vector<std::pair<ggml_type, int>> matrices;

// Residual sum of two or three terms, rms_norm, weights, and products of the result that share its quantized form.
static void check_block(const int n, const int n_embd, const int n_terms, const matrices & mats) {
    const std::string name = "block n=" + std::to_string(n) + " n_embd=" + std::to_string(n_embd) + " terms=" + std::to_string(n_terms);
    if (!selected(name)) {
        return;
    }
    product_net g;
    std::vector<ggml_tensor *> weights, terms, outs;
    for (const auto & m : mats) {
        weights.push_back(ggml_new_tensor_2d(g.weights, m.first, n_embd, m.second));
    }
    ggml_tensor * scale = ggml_new_tensor_1d(g.weights, GGML_TYPE_F32, n_embd);
    for (int i = 0; i < n_terms; ++i) {
        terms.push_back(ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, n_embd, n));
    }
    ggml_tensor * sum = ggml_add(g.ctx, terms[0], terms[1]);
    if (n_terms == 3) {
        sum = ggml_add(g.ctx, terms[2], sum);
    }
    ggml_tensor * x = ggml_mul(g.ctx, ggml_rms_norm(g.ctx, sum, 1e-6f), scale);
    outs = { sum, x };
    ggml_build_forward_expand(g.graph, x);
    for (ggml_tensor * w : weights) {
        outs.push_back(ggml_mul_mat(g.ctx, w, x));
        ggml_build_forward_expand(g.graph, outs.back());
    }
    g.place(true);

    std::vector<floats> rows(mats.size());
    for (size_t i = 0; i < mats.size(); ++i) {
        const size_t size = (size_t) n_embd*mats[i].second;
        if (mats[i].first == GGML_TYPE_F32) {
            rows[i] = normal(size, 0.1f);
            ggml_backend_tensor_set(weights[i], rows[i].data(), 0, size*sizeof(float));
        } else {
            const std::vector<uint8_t> q = random_weights(mats[i].first, mats[i].second, n_embd);
            ggml_backend_tensor_set(weights[i], q.data(), 0, q.size());
            rows[i].resize(size);
            ggml_get_type_traits(mats[i].first)->to_float(q.data(), rows[i].data(), size);
        }
    }
    const floats scales = normal(n_embd, 1.0f);
    ggml_backend_tensor_set(scale, scales.data(), 0, ggml_nbytes(scale));
    floats want_sum((size_t) n*n_embd, 0.0f), want_x(want_sum.size());
    for (ggml_tensor * t : terms) {
        const floats v = normal(want_sum.size(), 1.0f);
        ggml_backend_tensor_set(t, v.data(), 0, ggml_nbytes(t));
        for (size_t i = 0; i < v.size(); ++i) {
            want_sum[i] += v[i];
        }
    }
    const std::vector<floats> got = g.run(outs);
    if (got.empty()) {
        report(name, false, "a run failed or gave other bits");
        return;
    }
    double off = 0;
    for (int r = 0; r < n; ++r) {
        double squares = 0;
        for (int i = 0; i < n_embd; ++i) {
            squares += (double) want_sum[r*n_embd + i]*want_sum[r*n_embd + i];
        }
        for (int i = 0; i < n_embd; ++i) {
            const int at = r*n_embd + i;
            want_x[at] = want_sum[at]*scales[i]/std::sqrt(squares/n_embd + 1e-6);
            const double d = std::max(std::fabs(got[0][at] - want_sum[at]), std::fabs(got[1][at] - want_x[at]));
            off = d <= off ? off : d; // NaN stays
        }
    }
    report(name, off < 1e-4, "sum or norm off by " + std::to_string(off));
    for (size_t m = 0; m < mats.size(); ++m) {
        judge j(n <= 32 && n_embd % 256 == 0);
        for (int r = 0; r < n; ++r) {
            for (int i = 0; i < mats[m].second; ++i) {
                exact want = product(&rows[m][(size_t) i*n_embd], &want_x[(size_t) r*n_embd], n_embd);
                if (mats[m].first == GGML_TYPE_F32) {
                    want.variance = 1e-6*n_embd*0.01; // upstream's float products may round to TF32
                }
                j.element(got[2 + m][(size_t) r*mats[m].second + i], want);
            }
        }
        report(name + " matrix " + std::to_string(m), j.passed(), j.str());
    }
}

// Ties go to the first index, NaN never wins.
static void check_argmax(const int n, const int n_rows) {
    const std::string name = "argmax " + std::to_string(n) + " x " + std::to_string(n_rows);
    if (!selected(name)) {
        return;
    }
    product_net g;
    ggml_new_tensor_1d(g.weights, GGML_TYPE_F32, 1);
    ggml_tensor * x   = ggml_new_tensor_2d(g.ctx, GGML_TYPE_F32, n, n_rows);
    ggml_tensor * out = ggml_argmax(g.ctx, x);
    ggml_build_forward_expand(g.graph, out);
    g.place(false);
    floats v = normal((size_t) n*n_rows, 1.0f);
    std::vector<int> want(n_rows, 0);
    for (int r = 0; r < n_rows; ++r) {
        float * row = v.data() + (size_t) r*n;
        if (r % 3 == 1) {
            row[rng() % n] = row[rng() % n] = 50.0f;
        } else if (r % 3 == 2) {
            std::fill(row, row + n, -3.0f);
        }
        row[1 + rng() % (n - 1)] = NAN;
        for (int i = 0; i < n; ++i) {
            want[r] = row[i] > row[want[r]] ? i : want[r];
        }
    }
    ggml_backend_tensor_set(x, v.data(), 0, ggml_nbytes(x));
    const std::vector<floats> got = g.run({ out });
    bool same = !got.empty();
    for (int r = 0; same && r < n_rows; ++r) {
        int32_t index;
        memcpy(&index, &got[0][r], sizeof(index));
        same = index == want[r];
    }
    report(name, same, "another index, or other bits in another run");
}

static void check_all() {
    for (const int n : { 1, 2, 5, 8, 9, 16, 23, 32, 40 }) {
        for (const int n_terms : { 2, 3 }) {
            check_block(n, 2048, n_terms, { { GGML_TYPE_Q8_0, 256 }, { GGML_TYPE_Q8_0, 96 }, { GGML_TYPE_Q8_0, 32 }, { GGML_TYPE_Q8_0, 33 },
                { GGML_TYPE_Q8_0, 16 }, { GGML_TYPE_F32, 256 }, { GGML_TYPE_F32, 1 } });
            check_block(n, 512, n_terms, { { GGML_TYPE_Q4_K, 100 }, { GGML_TYPE_Q4_K, 16 }, { GGML_TYPE_F32, 3 }, { GGML_TYPE_Q6_K, 17 },
                { GGML_TYPE_Q6_K, 31 } });
            check_block(n, 800, n_terms, { { GGML_TYPE_Q8_0, 100 }, { GGML_TYPE_F32, 33 } });
        }
    }
    for (const int n_rows : { 1, 3, 16, 64 }) {
        check_argmax(n_rows > 16 ? 20001 : 248320, n_rows);
    }
    for (const ggml_type type : TYPES) {
        check_product({ type, 66000, 256, 0, 0, 1, false, false, DISTINCT, true });
        check_product({ type, 2048, 4096, 0, 0, 16, false, false, DISTINCT, true });
        for (const int n : { 1, 2, 3, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33 }) {
            check_product({ type, 200, 512, 0, 0, n, false, false, DISTINCT, n % 2 == 0 });
            check_product({ type, 70, 1280, 0, 0, n, false, true, DISTINCT, n % 2 == 1 });
            check_product({ type, 1, 256, 0, 0, n, false, false, DISTINCT, true });
        }
        for (int ids = 0; ids < N_PATTERN; ++ids) {
            for (const int n : { 2, 5, 9, 16, 32, 64, 65 }) {
                check_product({ type, 32, 2048, 40, 8, n, true, true, (pattern) ids, true });
                check_product({ type, 96, 512, 40, 8, n, false, false, (pattern) ids, n % 2 == 0 });
                check_product({ type, 72, 256, 5, 4, n, true, false, (pattern) ids, false });
                check_product({ type, 33, 768, 300, 10, n, false, true, (pattern) ids, true });
            }
            for (const int n : { 100, 500, 2000 }) {
                check_product({ type, 24, 256, 256, 8, n, true, true, (pattern) ids, true });
                check_product({ type, 17, 512, 128, 8, n, false, false, (pattern) ids, n % 2 == 0 });
            }
        }
    }
}

int main(int argc, char ** argv) {
    if (const int code = start(argc, argv, "few_rows")) {
        return code;
    }
    check_all();
    printf("all %d checks of few rows on %s: %d failed\n", n_run, ggml_backend_name(backend), n_failed);
    ggml_backend_free(backend);
    return n_failed != 0;
}
