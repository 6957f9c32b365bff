// Norms, weights and rotations of heads of Q and K, and the writes of K and V, on an emulated kernel, against float64.

#include "driver.h"
#include "moegraph-heads.cuh"

#include <algorithm>

static constexpr double MAX_ERROR = 3e-6;   // of the largest value, for floats; a half has another 2^-11
static constexpr double OF_ANGLE  = 1.5e-7; // more for each position, as angles are floats

struct heads_case {
    int  d, n_dims, n_head, n_head_kv, n_rows, mode;
    bool gated;    // each head of Q has as many values behind it that are not read
    bool factors;  // of frequencies
    bool in_place; // Q replaces what it is made of

    std::string str() const {
        return "heads d=" + std::to_string(d) + " dims=" + std::to_string(n_dims) + " heads=" + std::to_string(n_head) + "," +
            std::to_string(n_head_kv) + " rows=" + std::to_string(n_rows) + " mode=" + std::to_string(mode) +
            (gated ? " gated" : "") + (factors ? " factors" : "") + (in_place ? " in place" : "");
    }
};

static constexpr int   N_CACHE = 50;
static constexpr float EPS = 1e-6f, BASE = 1e5f, SCALE = 0.5f, FACTOR = 1.5f;

static std::vector<double> expected(const heads_case & c, const float * x, const floats & w, const int pos, const floats & factors) {
    std::vector<double> y(c.d);
    double squares = 0;
    for (int i = 0; i < c.d; ++i) {
        squares += (double) x[i]*x[i];
    }
    for (int i = 0; i < c.d; ++i) {
        y[i] = x[i]*w[i]/std::sqrt(squares/c.d + EPS);
    }
    for (int i = 0; i < c.n_dims/2; ++i) {
        const int    a     = c.mode == GGML_ROPE_TYPE_NEOX ? i : 2*i;
        const int    b     = c.mode == GGML_ROPE_TYPE_NEOX ? i + c.n_dims/2 : 2*i + 1;
        const double theta = SCALE*pos*std::pow((double) BASE, -2.0*i/c.n_dims)/(c.factors ? factors[i] : 1.0f);
        const double ya = y[a], yb = y[b];
        y[a] = FACTOR*(ya*std::cos(theta) - yb*std::sin(theta));
        y[b] = FACTOR*(ya*std::sin(theta) + yb*std::cos(theta));
    }
    return y;
}

static ggml_tensor * turned(tensors & t, const heads_case & c, ggml_tensor * x, ggml_tensor * w, ggml_tensor * pos,
        ggml_tensor * factors, void * data) {
    ggml_tensor * norm = t.place(ggml_rms_norm(t.ctx, x, EPS));
    ggml_tensor * mul  = t.place(ggml_mul(t.ctx, norm, w));
    ggml_tensor * out  = ggml_rope_ext(t.ctx, mul, pos, factors, c.n_dims, c.mode, 4096, BASE, SCALE, 0.0f, FACTOR, 32.0f, 1.0f);
    if (data == nullptr) {
        t.place(out);
    } else {
        out->data = data;
    }
    ggml_build_forward_expand(t.graph, out);
    return out;
}

static void check(const heads_case & c) {
    tensors t;
    const int d = c.d, wide = c.gated ? 2*d : d;
    const floats xq = normal((size_t) wide*c.n_head*c.n_rows, 1.0f), xk = normal((size_t) d*c.n_head_kv*c.n_rows, 1.0f);
    const floats xv = normal((size_t) d*c.n_head_kv*c.n_rows, 1.0f), wq = normal(d, 1.0f), wk = normal(d, 1.0f);
    floats factors = normal(std::max(1, c.n_dims/2), 0.1f);
    ints pos;
    std::vector<int64_t> places;
    for (float & f : factors) {
        f += 1.0f;
    }
    for (int r = 0; r < c.n_rows; ++r) {
        pos.push_back(37*r + 5);
        places.push_back(N_CACHE - 1 - 3*r);
    }
    const int n_kv = d*c.n_head_kv;
    const std::vector<uint16_t> before((size_t) n_kv*N_CACHE, 0x1234);
    ggml_tensor * q_full = t.leaf(GGML_TYPE_F32, { wide*c.n_head, c.n_rows }, xq.data());
    ggml_tensor * at     = t.leaf(GGML_TYPE_I32, { c.n_rows }, pos.data());
    ggml_tensor * to     = t.leaf(GGML_TYPE_I64, { c.n_rows }, places.data());
    ggml_tensor * ff     = c.factors ? t.leaf(GGML_TYPE_F32, { c.n_dims/2 }, factors.data()) : nullptr;
    ggml_tensor * w[2]   = { t.leaf(GGML_TYPE_F32, { d }, wq.data()), t.leaf(GGML_TYPE_F32, { d }, wk.data()) };
    ggml_tensor * k_pool = t.leaf(GGML_TYPE_F16, { n_kv, N_CACHE }, before.data());
    ggml_tensor * v_pool = t.leaf(GGML_TYPE_F16, { n_kv, N_CACHE }, before.data());
    for (ggml_tensor * x : { at, to }) {
        ggml_set_input(x);
    }
    for (ggml_tensor * x : w) {
        t.make_constant(x);
    }
    ggml_tensor * q_heads = ggml_view_3d(t.ctx, q_full, d, c.n_head, c.n_rows, 4*wide, q_full->nb[1], 0);
    ggml_tensor * k_heads = t.leaf(GGML_TYPE_F32, { d, c.n_head_kv, c.n_rows }, xk.data());
    ggml_tensor * v       = t.leaf(GGML_TYPE_F32, { n_kv, c.n_rows }, xv.data());
    ggml_build_forward_expand(t.graph, q_heads);
    ggml_tensor * q = turned(t, c, q_heads, w[0], at, ff, c.in_place ? q_heads->data : nullptr);
    ggml_tensor * k = turned(t, c, k_heads, w[1], at, ff, nullptr);
    ggml_build_forward_expand(t.graph, ggml_set_rows(t.ctx, k_pool, ggml_view_2d(t.ctx, k, n_kv, c.n_rows, 4*n_kv, 0), to));
    ggml_build_forward_expand(t.graph, ggml_set_rows(t.ctx, v_pool, ggml_view_2d(t.ctx, v, n_kv, c.n_rows, 4*n_kv, 0), to));

    std::string wrong;
    ggml_backend_cuda_context cuda;
    int first = 0;
    while (ggml_graph_node(t.graph, first)->op != GGML_OP_RMS_NORM) {
        ++first;
    }
    if (moegraph_heads_try(cuda, t.graph, first) != ggml_graph_n_nodes(t.graph) - 1 - first) {
        report(c.str(), "not one kernel");
        return;
    }
    const auto compare = [&](const std::vector<double> & y, const double error, const auto & got, const std::string & what) {
        double most = 0;
        for (const double x : y) {
            most = std::max(most, std::fabs(x));
        }
        for (int i = 0; i < d && wrong.empty(); ++i) {
            if (!(std::fabs(got(i) - y[i]) <= error*most)) {
                wrong = what + " value " + std::to_string(i) + ": " + std::to_string(got(i)) + ", should be " + std::to_string(y[i]);
            }
        }
    };
    std::vector<uint16_t> k_rest((const uint16_t *) k_pool->data, (const uint16_t *) k_pool->data + (size_t) n_kv*N_CACHE);
    std::vector<uint16_t> v_rest((const uint16_t *) v_pool->data, (const uint16_t *) v_pool->data + (size_t) n_kv*N_CACHE);
    for (int r = 0; r < c.n_rows; ++r) {
        for (int h = 0; h < c.n_head; ++h) {
            const float * mine = (const float *) q->data + (size_t) (r*c.n_head + h)*d;
            compare(expected(c, &xq[(size_t) (r*c.n_head + h)*wide], wq, pos[r], factors), MAX_ERROR + OF_ANGLE*pos[r],
                [&](const int i) { return mine[i]; }, "Q: row " + std::to_string(r) + " head " + std::to_string(h));
        }
        for (int h = 0; h < c.n_head_kv; ++h) {
            uint16_t * mine = &k_rest[(size_t) places[r]*n_kv + h*d];
            compare(expected(c, &xk[(size_t) (r*c.n_head_kv + h)*d], wk, pos[r], factors), MAX_ERROR + OF_ANGLE*pos[r] + 1.0/2048,
                [&](const int i) { return ggml_fp16_to_fp32(mine[i]); }, "K: row " + std::to_string(r) + " head " + std::to_string(h));
            std::fill(mine, mine + d, 0x1234);
        }
        for (int i = 0; i < n_kv; ++i) {
            uint16_t & mine = v_rest[(size_t) places[r]*n_kv + i];
            if (mine != ggml_fp32_to_fp16(xv[(size_t) r*n_kv + i]) && wrong.empty()) {
                wrong = "V: row " + std::to_string(r) + " value " + std::to_string(i);
            }
            mine = 0x1234;
        }
    }
    if (wrong.empty() && (k_rest != before || v_rest != before)) {
        wrong = "other rows of a cache";
    }
    for (int i = 0; i < d && wrong.empty(); ++i) {
        wrong = std::isnan(((const float *) k->data)[i]) ? "" : "K is written beside the cache";
    }
    report(c.str(), wrong);
}

int main() {
    int i = 0;
    for (const int d : { 64, 96, 128, 256 }) {
        for (const int n_dims : { d, d/4 }) {
            for (const int mode : { GGML_ROPE_TYPE_NEOX, GGML_ROPE_TYPE_NORMAL }) {
                for (const int n_rows : { 1, 2, 9 }) {
                    emulated::order = ++i % 3;
                    check({ d, n_dims, 4 + i % 3, 1 + i % 2, n_rows, mode, i % 2 == 0, i % 4 == 1, i % 4 == 3 });
                }
            }
        }
    }
    printf("all %d checks of heads: %d failed\n", n_run, n_failed);
    return n_failed != 0;
}
