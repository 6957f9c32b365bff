// Products of quantized weights with a few rows, dense and by expert, on emulated kernels, against float64.
//
// The reference rounds activations to 8 bits as the kernels do, so what is left is the rounding of sums.

#include "products.h"
#include "moegraph-context.cuh"
#include "moegraph-done.cuh"
#include "moegraph-one.cuh"
#include "moegraph-rows.cuh"
#include "moegraph.h"

// Of the sum of the products' absolute values.
static constexpr double MAX_ERROR = 2e-6;

// More are supported or not, but what is supported must run.
static constexpr int MANY_EXPERTS = 4000;

enum pattern { MIXED, POPULAR, ABSENT, WRONG };
static const char * PATTERNS[] = { "mixed", "popular", "absent", "wrong" };

struct product_case {
    ggml_type type;
    int       m, k, n_expert, n_used, n; // n_expert 0: dense
    bool      glu;
    bool      broadcast; // one row of activations for each token, not one for each of its experts
    pattern   ids;
    bool      constant;

    bool grouped() const { return n_expert > 0; }
    int  n_stack() const { return grouped() ? n_expert : 1; }
    int  n_y()     const { return grouped() && !broadcast ? n_used : 1; }
    int  pitch()   const { return n_used + 3; } // of ids

    std::string str() const {
        return std::string(ggml_type_name(type)) + " m=" + std::to_string(m) + " k=" + std::to_string(k) + " n=" + std::to_string(n) +
            (grouped() ? " experts=" + std::to_string(n_used) + "/" + std::to_string(n_expert) + " " + PATTERNS[ids] : "") +
            (glu ? " glu" : "") + (broadcast ? " broadcast" : "") + (constant ? " constant" : "") + " shared=" +
            std::to_string(emulated::shared_limit/1024) + " order=" + std::to_string(emulated::order);
    }
};

// Experts of each token; NaN's bits, which are none, lie between the tokens.
static ints choose(const product_case & c) {
    ints ids((size_t) c.n*c.pitch(), -1);
    choose_experts(ids, c.pitch(), c.n, c.n_used, c.n_expert, [&](const int i, const ints & order) -> int32_t {
        if (c.ids == ABSENT || (c.ids == MIXED && rng() % 8 == 0)) {
            return -1;
        }
        if (c.ids == WRONG && rng() % 3 == 0) {
            static const int none[] = { INT_MIN, -2, INT_MAX, 1 << 20 };
            return rng() % 2 ? none[rng() % 4] : c.n_expert;
        }
        if (c.ids == POPULAR && (i == 0 || rng() % 4 == 0)) {
            return c.n_expert - 1; // also several times in a token
        }
        return order[i % c.n_expert];
    });
    return ids;
}

struct quantized {
    std::vector<double> x;
    explicit quantized(const floats & values) : x(values.size()) {
        for (size_t b = 0; b < values.size(); b += 32) {
            float largest = 0;
            for (int i = 0; i < 32; ++i) {
                largest = std::max(largest, std::fabs(values[b + i]));
            }
            for (int i = 0; i < 32; ++i) {
                x[b + i] = largest > 0 ? (double) (largest/127.0f)*std::round(values[b + i]*(127.0f/largest)) : 0;
            }
        }
    }
};

struct exact {
    double value = 0;
    double size  = 0; // sum of the absolute values
};

static exact product(const float * w, const double * x, const int k) {
    exact r;
    for (int i = 0; i < k; ++i) {
        r.value += w[i]*x[i];
        r.size  += std::fabs(w[i]*x[i]);
    }
    return r;
}

static exact swiglu(const exact & up, const exact & gate) {
    const double sig = 1/(1 + std::exp(-gate.value)), silu = gate.value*sig, slope = sig*(1 + gate.value*(1 - sig));
    return { up.value*silu, std::fabs(silu)*up.size + std::fabs(up.value*slope)*gate.size + std::fabs(up.value*silu) };
}

// stream: other streams than the first quantize into a pool
static void check_product(const product_case & c, const int stream = 0) {
    tensors t;
    floats  rows[2];
    ggml_tensor * w[2] = { nullptr, nullptr };
    for (int p = 0; p < 1 + c.glu; ++p) {
        const std::vector<uint8_t> q = random_weights(c.type, (size_t) c.m*c.n_stack(), c.k);
        w[p] = t.leaf(c.type, { c.k, c.m, c.n_stack() }, q.data());
        if (c.constant) {
            t.make_constant(w[p]);
        }
        rows[p].resize((size_t) c.m*c.n_stack()*c.k);
        ggml_get_type_traits(c.type)->to_float(q.data(), rows[p].data(), rows[p].size());
    }
    floats values = normal((size_t) c.k*c.n_y()*c.n, 0.7f);
    std::fill_n(values.begin() + values.size()/64*32, 32, 0.0f);
    const std::vector<int64_t> shape = c.grouped() ? std::vector<int64_t>{ c.k, c.n_y(), c.n } : std::vector<int64_t>{ c.k, c.n };
    ggml_tensor * x = t.leaf(GGML_TYPE_F32, shape, values.data());
    const ints chosen = c.grouped() ? choose(c) : ints();
    ggml_tensor * ids = nullptr;
    if (c.grouped()) {
        ggml_tensor * table = t.leaf(GGML_TYPE_I32, { c.pitch(), c.n }, chosen.data());
        ids = ggml_view_2d(t.ctx, table, c.n_used, c.n, table->nb[1], 0);
    }
    const auto multiply = [&](ggml_tensor * m) {
        return t.place(c.grouped() ? ggml_mul_mat_id(t.ctx, m, x, ids) : ggml_mul_mat(t.ctx, m, x));
    };
    ggml_tensor * up = multiply(w[0]), * gate = nullptr, * out = up;
    if (c.glu) {
        gate = multiply(w[1]);
        out  = t.place(ggml_swiglu_split(t.ctx, gate, up));
    }
    ggml_build_forward_expand(t.graph, out);

    ggml_backend_cuda_context cuda;
    cuda.curr_stream_no = stream;
    if (!moegraph_rows_supported(up, gate, 900)) {
        // upstream computes it by default
        const bool other = c.type == GGML_TYPE_Q4_0 || c.type == GGML_TYPE_MXFP4 || c.k % 256 != 0 || !c.broadcast;
        const bool by_default = c.grouped() && ((c.type == GGML_TYPE_MXFP4 && c.n*c.n_used > 512) || (other && c.n == 1));
        report(c.str(), c.n_expert > MANY_EXPERTS || by_default ? "" : "is not supported");
        return;
    }
    moegraph_rows_begin(cuda, t.graph);
    std::string wrong;
    const quantized y(values);
    for (int pass = 0; pass < 2 && wrong.empty(); ++pass) { // what is quantized and listed may be remembered
        memset(out->data, 0xFF, ggml_nbytes(out));
        moegraph_rows_mul_mat(cuda, up, gate, c.glu ? out : nullptr);
        const float * got = (const float *) out->data;
        for (int r = 0; r < c.n*(c.grouped() ? c.n_used : 1) && wrong.empty(); ++r) {
            const int token = c.grouped() ? r/c.n_used : r, slot = c.grouped() ? r % c.n_used : 0;
            const int e = c.grouped() ? chosen[(size_t) token*c.pitch() + slot] : 0;
            const double * xr = &y.x[(size_t) (token*c.n_y() + slot % c.n_y())*c.k];
            for (int i = 0; i < c.m && wrong.empty(); ++i) {
                const float result = got[(size_t) r*c.m + i];
                exact want[2];
                for (int p = 0; p < 1 + c.glu && e >= 0 && e < c.n_stack(); ++p) {
                    want[p] = product(&rows[p][((size_t) e*c.m + i)*c.k], xr, c.k);
                }
                const exact all = c.glu ? swiglu(want[0], want[1]) : want[0];
                if (!(std::fabs(result - all.value) <= MAX_ERROR*all.size)) {
                    wrong = "token " + std::to_string(token) + " slot " + std::to_string(slot) + " expert " + std::to_string(e) + " row " +
                        std::to_string(i) + ": " + std::to_string(result) + ", should be " + std::to_string(all.value) + ", error " +
                        std::to_string(std::fabs(result - all.value)/all.size*1e6) + "e-6";
                }
            }
        }
    }
    report(c.str(), wrong);
}

// Products of the same activations in one launch.
static void check_group(const ggml_type type, const int n) {
    tensors t;
    const int k = 512, sizes[] = { 40, 17, 96 };
    const floats values = normal((size_t) k*n, 0.7f);
    const quantized y(values);
    ggml_tensor * x = t.leaf(GGML_TYPE_F32, { k, n }, values.data());
    std::vector<floats> rows;
    std::vector<ggml_tensor *> outs;
    for (const int m : sizes) {
        const std::vector<uint8_t> q = random_weights(type, m, k);
        rows.emplace_back((size_t) m*k);
        ggml_get_type_traits(type)->to_float(q.data(), rows.back().data(), rows.back().size());
        outs.push_back(t.place(ggml_mul_mat(t.ctx, t.leaf(type, { k, m }, q.data()), x)));
        ggml_build_forward_expand(t.graph, outs.back());
    }
    for (int i = 0; i < t.graph->n_nodes; ++i) {
        t.graph->nodes[i]->flags |= GGML_TENSOR_FLAG_COMPUTE;
    }
    ggml_backend_cuda_context cuda;
    moegraph_rows_begin(cuda, t.graph);
    std::string wrong = moegraph_rows_try_group(cuda, t.graph, 0) == 2 ? "" : "three products are not one launch";
    for (int p = 0; p < 3 && wrong.empty(); ++p) {
        for (int i = 0; i < n*sizes[p]; ++i) {
            const exact  want = product(&rows[p][(size_t) (i % sizes[p])*k], &y.x[(size_t) (i/sizes[p])*k], k);
            const double got  = ((const float *) outs[p]->data)[i];
            if (!(std::fabs(got - want.value) <= MAX_ERROR*want.size)) {
                wrong = "product " + std::to_string(p) + " element " + std::to_string(i);
            }
        }
    }
    report(std::string("group ") + ggml_type_name(type) + " n=" + std::to_string(n), wrong);
}

// The same with a bias behind each product, of one row.
static void check_biased_group(const ggml_type type, const int k) {
    tensors t;
    const int sizes[] = { 40, 1700 };
    const floats values = normal(k, 0.7f), bias = normal(sizes[1], 1.0f);
    const quantized y(values);
    ggml_tensor * x = t.leaf(GGML_TYPE_F32, { k }, values.data()), * outs[2], * b[2];
    floats rows[2];
    for (int p = 0; p < 2; ++p) {
        const std::vector<uint8_t> q = random_weights(type, sizes[p], k);
        rows[p].resize((size_t) sizes[p]*k);
        ggml_get_type_traits(type)->to_float(q.data(), rows[p].data(), rows[p].size());
        outs[p] = t.place(ggml_mul_mat(t.ctx, t.leaf(type, { k, sizes[p] }, q.data()), x));
        ggml_build_forward_expand(t.graph, outs[p]);
    }
    for (int p = 0; p < 2; ++p) {
        b[p] = t.leaf(GGML_TYPE_F32, { sizes[p] }, bias.data());
        t.make_constant(b[p]);
        outs[p] = t.place(ggml_add(t.ctx, outs[p], b[p]));
        ggml_build_forward_expand(t.graph, outs[p]);
    }
    for (int i = 0; i < t.graph->n_nodes; ++i) {
        t.graph->nodes[i]->flags |= GGML_TENSOR_FLAG_COMPUTE;
    }
    ggml_backend_cuda_context cuda;
    moegraph_rows_begin(cuda, t.graph);
    std::string wrong = moegraph_rows_try_group(cuda, t.graph, 0) == 3 ? "" : "two products and their biases are not one launch";
    for (int p = 0; p < 2 && wrong.empty(); ++p) {
        for (int i = 0; i < sizes[p]; ++i) {
            const exact  want = product(&rows[p][(size_t) i*k], y.x.data(), k);
            const double got  = ((const float *) outs[p]->data)[i];
            if (!(std::fabs(got - want.value - bias[i]) <= MAX_ERROR*(want.size + std::fabs(bias[i])))) {
                wrong = "product " + std::to_string(p) + " element " + std::to_string(i);
            }
        }
    }
    report(std::string("group with biases ") + ggml_type_name(type) + " k=" + std::to_string(k), wrong);
}

// A residual behind a product of one row, with a reshape between: the bits of a sum of its own. Not behind several rows, nor
// where another node reads the product.
static void check_residual(const ggml_type type, const int k, const int m, const int n, const bool in_place, const bool read) {
    tensors t;
    const floats values = normal((size_t) k*n, 0.7f), residual = normal((size_t) m*n, 1.0f);
    ggml_tensor * w       = t.leaf(type, { k, m }, random_weights(type, m, k).data());
    ggml_tensor * product = t.place(ggml_mul_mat(t.ctx, w, t.leaf(GGML_TYPE_F32, { k, n }, values.data())));
    ggml_tensor * x       = t.leaf(GGML_TYPE_F32, { m, n }, residual.data());
    ggml_tensor * sum     = ggml_add(t.ctx, ggml_reshape_2d(t.ctx, product, m, n), x);
    in_place ? (void) (sum->data = x->data) : (void) t.place(sum);
    ggml_build_forward_expand(t.graph, sum);
    if (read) {
        ggml_build_forward_expand(t.graph, ggml_sum_rows(t.ctx, product));
    }
    for (int i = 0; i < t.graph->n_nodes; ++i) {
        t.graph->nodes[i]->flags |= GGML_TENSOR_FLAG_COMPUTE;
    }
    ggml_backend_cuda_context cuda;
    moegraph_rows_begin(cuda, t.graph);
    const int covered = moegraph_rows_try_group(cuda, t.graph, 0);
    std::string wrong = covered == (n == 1 && !read ? 2 : 0) ? "" : "covers " + std::to_string(covered) + " nodes";
    if (covered == 2 && wrong.empty()) {
        moegraph_rows_mul_mat(cuda, product, nullptr, nullptr);
        for (int i = 0; i < m && wrong.empty(); ++i) {
            const float want = ((const float *) product->data)[i] + residual[i];
            if (memcmp(&want, (const float *) sum->data + i, sizeof(float)) != 0) {
                wrong = "row " + std::to_string(i) + " has other bits";
            }
        }
    }
    report(std::string("residual ") + ggml_type_name(type) + " k=" + std::to_string(k) + " m=" + std::to_string(m) + " n=" +
        std::to_string(n) + (in_place ? " in place" : "") + (read ? " read" : ""), wrong);
}

// Gate, up and GLU of a token's experts and of a shared expert of the same row in one launch: the bits of two launches. Not if
// its down would be a launch of its own, because the router has not computed what gates it.
static void check_shared(const ggml_type type, const int k, const int m, const int m_shared, const ggml_type type_shared,
        const bool gated = true) {
    const int n_used = 3, n_expert = 7;
    const bool fuses = type_shared == GGML_TYPE_Q8_0 && type != GGML_TYPE_MXFP4 && k <= 4096 && gated;
    const ints chosen = { 5, -1, 2 };
    const floats values = normal(k, 0.7f);
    floats found[2][2];
    std::string wrong;
    for (int together = 0; together < 2; ++together) {
        rng.seed(k + m);
        tensors t;
        const auto matrix = [&](const ggml_type of, const int rows, const int n) {
            ggml_tensor * w = t.leaf(of, { k, rows, n }, random_weights(of, (size_t) rows*n, k).data());
            t.make_constant(w);
            return w;
        };
        ggml_tensor * x   = t.leaf(GGML_TYPE_F32, { k }, values.data()), * ids = t.leaf(GGML_TYPE_I32, { n_used, 1 }, chosen.data());
        ggml_tensor * row = ggml_reshape_3d(t.ctx, x, k, 1, 1);
        ggml_tensor * up   = t.place(ggml_mul_mat_id(t.ctx, matrix(type, m, n_expert), row, ids));
        ggml_tensor * gate = t.place(ggml_mul_mat_id(t.ctx, matrix(type, m, n_expert), row, ids));
        ggml_tensor * glu  = t.place(ggml_swiglu_split(t.ctx, gate, up));
        moegraph_shared_expert s;
        s.up   = t.place(ggml_mul_mat(t.ctx, matrix(type_shared, m_shared, 1), x));
        s.gate = t.place(ggml_mul_mat(t.ctx, matrix(type_shared, m_shared, 1), x));
        s.glu  = t.place(ggml_swiglu_split(t.ctx, s.gate, s.up));
        ggml_build_forward_expand(t.graph, glu);
        ggml_build_forward_expand(t.graph, s.glu);
        ggml_backend_cuda_context cuda;
        moegraph_rows_begin(cuda, t.graph);
        if (together) {
            s.down  = s.up; // of which only the type counts here
            s.scale = x;
            moegraph_get_context(cuda).router.gate_of = gated ? s.scale : nullptr;
            moegraph_get_context(cuda).next_shared = s;
        }
        moegraph_rows_mul_mat(cuda, up, gate, glu);
        const bool done = moegraph_done_has(cuda, s.up) && moegraph_done_has(cuda, s.gate) && moegraph_done_has(cuda, s.glu);
        if (done != (together && fuses)) {
            wrong = done ? "are one launch" : "are not one launch";
        }
        if (!done) {
            moegraph_rows_mul_mat(cuda, s.up, s.gate, s.glu);
        }
        found[together][0].assign((float *) glu->data, (float *) glu->data + n_used*m);
        found[together][1].assign((float *) s.glu->data, (float *) s.glu->data + m_shared);
    }
    for (int i = 0; i < 2 && wrong.empty(); ++i) {
        if (memcmp(found[0][i].data(), found[1][i].data(), found[0][i].size()*sizeof(float)) != 0) {
            wrong = i ? "the shared expert has other bits" : "the experts have other bits";
        }
    }
    report(std::string("shared expert ") + ggml_type_name(type_shared) + " m=" + std::to_string(m_shared) + " beside " +
        ggml_type_name(type) + " m=" + std::to_string(m) + " k=" + std::to_string(k) + (gated ? "" : " not gated"), wrong);
}

// Experts of one token with biases: gate, up and GLU; and down alone, and with all that is behind it.
static void check_biased_experts(const ggml_type type, const int k, const int m, const int n_used) {
    tensors t;
    const int n_expert = n_used + 3;
    ints chosen(n_used);
    for (int i = 0; i < n_used; ++i) {
        chosen[i] = i == 1 ? -1 : i == 2 ? n_expert : (5*i + 1) % n_expert;
    }
    const auto there = [&](const int slot) { return chosen[slot] >= 0 && chosen[slot] < n_expert; };
    const std::vector<uint8_t> q = random_weights(type, (size_t) m*n_expert, k);
    floats rows((size_t) m*n_expert*k);
    ggml_get_type_traits(type)->to_float(q.data(), rows.data(), rows.size());
    ggml_tensor * w = t.leaf(type, { k, m, n_expert }, q.data()), * ids = t.leaf(GGML_TYPE_I32, { n_used, 1 }, chosen.data());
    const floats bias = normal((size_t) (m + 5)*n_expert, 1.0f), scale = normal(n_used, 1.0f);
    floats weights = normal(n_used, 0.5f), values = normal((size_t) k*n_used, 0.7f);
    weights[1] = weights[2] = NAN;
    ggml_tensor * wide = t.leaf(GGML_TYPE_F32, { m + 5, n_expert }, bias.data());
    ggml_tensor * b = ggml_view_2d(t.ctx, wide, m, n_expert, wide->nb[1], 0);
    const auto want = [&](const quantized & y, const int slot, const int i) {
        return product(&rows[((size_t) chosen[slot]*m + i)*k], &y.x[y.x.size() > (size_t) k ? (size_t) slot*k : 0], k);
    };
    const std::string name = std::string(ggml_type_name(type)) + " m=" + std::to_string(m) + " k=" + std::to_string(k) + " experts=" +
        std::to_string(n_used) + " shared=" + std::to_string(emulated::shared_limit/1024) + " order=" + std::to_string(emulated::order);

    ggml_tensor * x  = t.leaf(GGML_TYPE_F32, { k, 1, 1 }, values.data());
    const auto biased = [&] {
        ggml_tensor * a = t.place(ggml_mul_mat_id(t.ctx, w, x, ids));
        return t.place(ggml_add_id(t.ctx, a, b, ids));
    };
    ggml_tensor * up = biased(), * gate = biased(), * glu = t.place(ggml_swiglu_oai(t.ctx, gate, up, 1.702f, 7.0f));
    ggml_build_forward_expand(t.graph, up);
    ggml_build_forward_expand(t.graph, glu);
    for (int i = 0; i < t.graph->n_nodes; ++i) {
        t.graph->nodes[i]->flags |= GGML_TENSOR_FLAG_COMPUTE;
    }
    ggml_backend_cuda_context cuda;
    moegraph_rows_begin(cuda, t.graph);
    std::string wrong = moegraph_rows_try_biased(cuda, t.graph, 0) == t.graph->n_nodes - 1 ? "" : "gate and up are not one launch";
    const quantized one(floats(values.begin(), values.begin() + k)), y(values);
    for (int r = 0; r < n_used*m && wrong.empty(); ++r) {
        double expected = 0, size = 0;
        if (there(r/m)) {
            const exact e = want(one, r/m, r % m);
            const double v = e.value + bias[(size_t) chosen[r/m]*(m + 5) + r % m];
            const double g = std::min(v, 7.0), u = std::max(-7.0, std::min(v, 7.0));
            expected = g/(1 + std::exp(-1.702*g))*(1 + u);
            size = 10*(e.size + std::fabs(v) + 1);
        }
        if (!(std::fabs(((const float *) glu->data)[r] - expected) <= MAX_ERROR*size)) {
            wrong = "slot " + std::to_string(r/m) + " row " + std::to_string(r % m);
        }
    }
    report("gate and up with biases " + name, wrong);

    ggml_tensor * act  = t.leaf(GGML_TYPE_F32, { k, n_used, 1 }, values.data());
    ggml_tensor * down = t.place(ggml_mul_mat_id(t.ctx, w, act, ids)), * sum = t.leaf(GGML_TYPE_F32, { m }, nullptr);
    ggml_tensor * ws = t.leaf(GGML_TYPE_F32, { 1, n_used }, weights.data()), * sc = t.leaf(GGML_TYPE_F32, { 1, n_used }, scale.data());
    wrong = moegraph_one_down(cuda, down, nullptr, nullptr, nullptr, down, false) &&
        moegraph_one_down(cuda, down, b, sc, ws, sum, true) ? "" : "is not supported";
    for (int i = 0; i < m && wrong.empty(); ++i) {
        float all = 0.0f;
        for (int slot = 0; slot < n_used; ++slot) {
            const float got = ((const float *) down->data)[(size_t) slot*m + i];
            const exact e   = there(slot) ? want(y, slot, i) : exact();
            if (!(std::fabs(got - e.value) <= MAX_ERROR*e.size)) {
                wrong = "slot " + std::to_string(slot) + " row " + std::to_string(i) + ": " + std::to_string(got);
            }
            all += there(slot) ? (got + bias[(size_t) chosen[slot]*(m + 5) + i])*scale[slot]*weights[slot] : 0.0f;
        }
        if (wrong.empty() && memcmp(&all, (const float *) sum->data + i, sizeof(float)) != 0) {
            wrong = "the sum of row " + std::to_string(i) + " has other bits";
        }
    }
    report("down " + name, wrong);
}

// Marked products: each row has the bits that it has alone.
static void check_apart(const product_case & c) {
    tensors t;
    ggml_tensor * w[2] = { nullptr, nullptr };
    for (int p = 0; p < 1 + c.glu; ++p) {
        w[p] = t.leaf(c.type, { c.k, c.m, c.n_stack() }, random_weights(c.type, (size_t) c.m*c.n_stack(), c.k).data());
    }
    const floats values = normal((size_t) c.k*c.n_y()*c.n, 0.7f);
    const ints   chosen = c.grouped() ? choose(c) : ints();
    const int    n_out  = c.m*(c.grouped() ? c.n_used : 1); // of a row
    std::string  wrong;
    const auto run = [&](const int first, const int n) {
        const float * from = values.data() + (size_t) first*c.k*c.n_y();
        const std::vector<int64_t> shape = c.grouped() ? std::vector<int64_t>{ c.k, c.n_y(), n } : std::vector<int64_t>{ c.k, n };
        ggml_tensor * x = t.leaf(GGML_TYPE_F32, shape, from), * ids = nullptr;
        if (c.grouped()) {
            ggml_tensor * table = t.leaf(GGML_TYPE_I32, { c.pitch(), n }, chosen.data() + (size_t) first*c.pitch());
            ids = ggml_view_2d(t.ctx, table, c.n_used, n, table->nb[1], 0);
        }
        const auto multiply = [&](ggml_tensor * m) {
            return t.place(c.grouped() ? ggml_mul_mat_id(t.ctx, m, x, ids) : ggml_mul_mat(t.ctx, m, x));
        };
        ggml_tensor * up = multiply(w[0]), * gate = c.glu ? multiply(w[1]) : nullptr;
        ggml_tensor * out = c.glu ? t.place(ggml_swiglu_split(t.ctx, gate, up)) : up;
        ggml_cgraph * graph = ggml_new_graph_custom(t.ctx, 16, false);
        ggml_build_forward_expand(graph, out);
        moegraph_keep_rows_apart(graph);
        ggml_backend_cuda_context cuda;
        if (!moegraph_rows_supported(up, gate, 900)) {
            wrong = "is not supported";
            return floats((size_t) n_out*n);
        }
        moegraph_rows_begin(cuda, graph);
        moegraph_rows_mul_mat(cuda, up, gate, c.glu ? out : nullptr);
        const float * got = (const float *) out->data;
        return floats(got, got + (size_t) n_out*n);
    };
    const floats together = run(0, c.n);
    for (const int row : { 0, 1, c.n/2, c.n - 1 }) {
        const floats alone = run(row, 1);
        if (wrong.empty() && memcmp(alone.data(), together.data() + (size_t) row*n_out, n_out*sizeof(float)) != 0) {
            wrong = "row " + std::to_string(row) + " has other bits alone";
        }
    }
    report("apart " + c.str(), wrong);
}

// Float weights: the product, and each row has the bits that it has alone.
static void check_f32(const int m, const int k, const int n) {
    tensors t;
    const floats rows = normal((size_t) m*k, 0.7f), values = normal((size_t) k*n, 0.7f);
    ggml_tensor * w = t.leaf(GGML_TYPE_F32, { k, m }, rows.data());
    std::string wrong;
    const auto run = [&](const int first, const int n) {
        ggml_tensor * x   = t.leaf(GGML_TYPE_F32, { k, n }, values.data() + (size_t) first*k);
        ggml_tensor * out = t.place(ggml_mul_mat(t.ctx, w, x));
        ggml_cgraph * graph = ggml_new_graph_custom(t.ctx, 16, false);
        ggml_build_forward_expand(graph, out);
        moegraph_keep_rows_apart(graph);
        ggml_backend_cuda_context cuda;
        if (!moegraph_rows_f32_supported(out)) {
            wrong = "is not supported";
            return floats((size_t) m*n);
        }
        moegraph_rows_f32_mul_mat(cuda, out);
        const float * got = (const float *) out->data;
        return floats(got, got + (size_t) m*n);
    };
    const floats together = run(0, n);
    for (int r = 0; r < n && wrong.empty(); ++r) {
        const std::vector<double> xr(values.begin() + (size_t) r*k, values.begin() + (size_t) (r + 1)*k);
        for (int i = 0; i < m && wrong.empty(); ++i) {
            const exact want = product(&rows[(size_t) i*k], xr.data(), k);
            if (!(std::fabs(together[(size_t) r*m + i] - want.value) <= MAX_ERROR*want.size)) {
                wrong = "row " + std::to_string(r) + " element " + std::to_string(i);
            }
        }
    }
    for (const int r : { 0, 1, n/2, n - 1 }) {
        if (wrong.empty() && memcmp(run(r, 1).data(), together.data() + (size_t) r*m, m*sizeof(float)) != 0) {
            wrong = "row " + std::to_string(r) + " has other bits alone";
        }
    }
    report("f32 m=" + std::to_string(m) + " k=" + std::to_string(k) + " n=" + std::to_string(n), wrong);
}

int main() {
    int i = 0;
    emulated::shared_limit = 99*1024; // a kernel keeps the limit of its first launch
    for (emulated::order = 0; emulated::order < 3; ++emulated::order) {
        emulated::early_copies = emulated::order == 2;
        check_f32(33, 2048, 3);
        check_f32(20, 1536, 40);
    }
    emulated::order = 1;
    check_f32(250, 1028, 130); // tiles that are full and tiles that are not, of weight rows, activation rows and values
    emulated::early_copies = false;
    for (const ggml_type type : { GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_MXFP4 }) {
        // rows that end within a chunk, of types that may
        const auto end_of = [&](const int k) {
            return type == GGML_TYPE_MXFP4 || (type == GGML_TYPE_Q8_0 && i % 2) ? k - 32*(i % 8) : k;
        };
        const auto next = [&] {
            emulated::order        = ++i % 3;
            emulated::early_copies = i % 4 == 0;
            emulated::shared_limit = i % 2 ? 99*1024 : 227*1024; // consumer cards, H100
            return i;
        };
        for (const int n : { 1, 7, 8, 9, 16, 17, 32 }) {
            next();
            check_product({ type, 70, end_of(n % 2 ? 768 : 256), 0, 0, n, n % 3 == 0, false, MIXED, n % 2 == 0 }, n == 9);
        }
        // one row, of which a lane has one part or more, and warps with 2, 4 and 8 rows of weights
        for (const bool glu : { false, true }) {
            for (const auto & [m, k] : { std::pair(13, 4608), std::pair(900, 256), std::pair(1601, 256), std::pair(21, 1792) }) {
                next();
                check_product({ type, m, end_of(k), 0, 0, 1, glu, false, MIXED, i % 2 == 0 });
            }
            for (const pattern ids : { MIXED, POPULAR, ABSENT, WRONG }) {
                next();
                const bool many = ids == MIXED;
                check_product({ type, many ? 203 : 19, end_of(many ? 256 : 2816), 9, 4, 1, glu, ids != POPULAR, ids, i % 2 == 0 }, ids == WRONG);
            }
        }
        for (const int k : { 256, 512, 768 }) { // on a branch, blocks quantize rows of up to 512 values for themselves
            check_product({ type, 203, k, 0, 0, 1, false, false, MIXED, true }, 1);
        }
        next();
        check_group(type, 1);
        if (type != GGML_TYPE_Q4_0) { // parts of a row: 8, 16, 24 and 48 at most
            const bool odd = type == GGML_TYPE_MXFP4 || type == GGML_TYPE_Q8_0;
            check_biased_group(type, odd ? 2880 : 2048);
            for (const int m : { 33, 1700 }) {
                check_residual(type, odd ? 2880 : 2048, m, 1, m == 33, false);
                check_residual(type, 4096, m, 1, m != 33, false);
            }
            check_shared(type, 2048, 203, 33, GGML_TYPE_Q8_0);
            check_shared(type, 2816, 19, 900, GGML_TYPE_Q8_0);
            check_shared(type, 2048, 19, 40, GGML_TYPE_Q6_K);
            check_shared(type, 8192, 9, 20, GGML_TYPE_Q8_0);
            check_shared(type, 2048, 19, 40, GGML_TYPE_Q8_0, false);
            check_residual(type, odd ? 2880 : 2048, 40, 1, false, true);
            check_residual(type, odd ? 2880 : 2048, 40, 2, false, false);
            for (const int k : odd ? ints{ 320, 704, 1472, 2880 } : ints{ 512, 768, 1536 }) {
                if (type == GGML_TYPE_MXFP4 || k < 1600) {
                    next();
                    check_biased_experts(type, k, k > 1600 ? 70 : 203, k > 1500 ? 4 : 8);
                }
            }
        }
        next();
        check_product({ type, 1, end_of(2560), 0, 0, 3, false, false, MIXED, true });
        check_group(type, 12);
        for (const pattern ids : { MIXED, POPULAR, ABSENT, WRONG }) {
            for (const bool glu : { false, true }) {
                // few slots
                check_product({ type, 33, end_of(next() % 2 ? 256 : 1280), 9, 4, 11, glu, i % 3 == 0, ids, i % 2 == 0 }, i % 5 == 0);
                // many: on average 4 to 34 rows an expert
                check_product({ type, glu ? 24 : 100, end_of(glu ? 256 : 768), 16, 4, 136, glu, next() % 3 != 0, ids, i % 2 == 0 }, i % 5 == 0);
            }
        }
        for (const int n : { 5, 32, 33, 70 }) {
            next();
            emulated::shared_limit = 99*1024; // a kernel keeps the limit of its first launch
            check_apart({ type, 70, end_of(n % 2 ? 2048 : 1280), 0, 0, n, n % 5 == 0, false, MIXED, true });
        }
        for (const int n : { 11, 136 }) { // few slots, many
            next();
            emulated::shared_limit = 99*1024;
            check_apart({ type, 24, end_of(2048), 16, 4, n, n == 136, true, MIXED, true });
            check_apart({ type, 40, end_of(512), 16, 4, n, false, false, POPULAR, true });
        }
        next();
        check_product({ type, 17, 256, 300, 8, 65, true, true, MIXED, true });
        check_product({ type, 64, 512, 600, 6, 100, false, false, POPULAR, true });
        next();
        check_product({ type, 24, 256, 512, 10, 30, true, true, MIXED, true }); // few slots, many experts
    }
    for (const int n_expert : { MANY_EXPERTS, MANY_EXPERTS + 88, MANY_EXPERTS + 96 }) {
        check_product({ GGML_TYPE_Q4_0, 1, 256, n_expert, 8, 70, false, true, MIXED, true });
    }
    printf("all %d checks of products: %d failed\n", n_run, n_failed);
    return n_failed != 0;
}
