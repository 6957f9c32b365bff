// The step, the delta rule and the gated norm of one token as one kernel: bits, states and places as by their own kernels.

#include "driver.h"
#include "moegraph.h"
#include "moegraph-deltanet.cuh"
#include "moegraph-recurrence.cuh"
#include "moegraph-rows-types.cuh"

static constexpr int D = 128;

// In place of that of moegraph-rows-prepare.cu: where the last product reads quantized rows.
static void * quantized = nullptr;

void * moegraph_rows_reserve(ggml_backend_cuda_context &, const ggml_tensor *) { return quantized; }

struct step_case {
    int  n_k, n_v, n_seqs;
    bool gated; // a gated norm follows
    bool input; // slots may be read early
    bool absent;

    std::string str() const {
        return "step heads=" + std::to_string(n_k) + "/" + std::to_string(n_v) + " seqs=" + std::to_string(n_seqs) +
            (gated ? " gated" : "") + (input ? " input" : "") + (absent ? " absent" : "") + " order=" + std::to_string(emulated::order);
    }
};

struct step_data {
    floats qkv, w, alpha, beta, dt, a, z, f, windows, states;
    ints   slots;
};

// The nodes of a layer between its products.
struct step_graph {
    tensors t;
    ggml_tensor * windows, * states, * gate, * delta, * out;

    step_graph(const step_case & c, const step_data & d) {
        ggml_context * ctx = t.ctx;
        const int64_t n_k = c.n_k, n_v = c.n_v, n_seqs = c.n_seqs, n_slots = n_seqs + 2, n_channels = (2*n_k + n_v)*D;
        const auto leaf = [&](const std::vector<int64_t> & ne, const floats & x) { return t.leaf(GGML_TYPE_F32, ne, x.data()); };
        windows = leaf({ 3*n_channels, n_slots }, d.windows);
        states  = leaf({ D*D*n_v, n_slots }, d.states);
        ggml_tensor * slots = t.leaf(GGML_TYPE_I32, { n_seqs }, d.slots.data());
        ggml_tensor * w     = leaf({ 4, n_channels }, d.w);
        if (c.input) {
            ggml_set_input(slots);
            t.make_constant(w);
        }
        const auto add = [&](ggml_tensor * node) {
            ggml_build_forward_expand(t.graph, node);
            return node;
        };
        ggml_tensor * beta = add(ggml_sigmoid(ctx, leaf({ 1, n_v, 1, n_seqs }, d.beta)));
        ggml_tensor * sum  = ggml_add(ctx, leaf({ n_v, 1, n_seqs }, d.alpha), leaf({ n_v }, d.dt));
        gate = add(ggml_mul(ctx, ggml_softplus(ctx, sum), leaf({ n_v }, d.a)));
        ggml_tensor * conv = ggml_silu(ctx, moegraph_conv(ctx, leaf({ n_channels, 1, n_seqs }, d.qkv), w, windows, slots, nullptr, nullptr));
        const auto heads = [&](const int64_t n, const int64_t first) {
            return ggml_view_4d(ctx, conv, D, n, 1, n_seqs, D*sizeof(float), conv->nb[1], conv->nb[2], first*D*sizeof(float));
        };
        const auto normed = [&](ggml_tensor * x) { return add(ggml_scale(ctx, ggml_rms_norm(ctx, x, 1e-6f/D), 1/std::sqrt((float) D))); };
        ggml_tensor * q = normed(heads(n_k, 0));
        ggml_tensor * k = normed(heads(n_k, n_k));
        delta = add(moegraph_delta_net(ctx, q, k, heads(n_v, 2*n_k), ggml_reshape_4d(ctx, gate, 1, n_v, 1, n_seqs), beta, states, slots,
            nullptr, nullptr));
        out = delta;
        if (c.gated) {
            ggml_tensor * norm = ggml_mul(ctx, ggml_rms_norm(ctx, delta, 1e-6f), leaf({ D }, d.f));
            out = add(ggml_mul(ctx, norm, ggml_silu(ctx, leaf({ D, n_v, 1, n_seqs }, d.z))));
        }
        for (int i = 0; i < t.graph->n_nodes; ++i) {
            ggml_tensor * node = t.graph->nodes[i];
            node->flags |= GGML_TENSOR_FLAG_COMPUTE;
            if (node->view_src) {
                node->data = (char *) node->view_src->data + node->view_offs;
            } else {
                t.place(node);
            }
        }
    }
    int index(const ggml_tensor * node) const {
        int i = 0;
        while (t.graph->nodes[i] != node) {
            ++i;
        }
        return i;
    }
    floats of(const ggml_tensor * x) const {
        const float * values = (const float *) x->data;
        return floats(values, values + ggml_nelements(x));
    }
};

static bool same(const floats & a, const floats & b) {
    return memcmp(a.data(), b.data(), a.size()*sizeof(float)) == 0;
}

// Two tokens: the second needs counts that are 0 again.
static void check(const step_case & c) {
    const size_t n_channels = (size_t) (2*c.n_k + c.n_v)*D;
    step_data d;
    d.windows = normal(3*n_channels*(c.n_seqs + 2), 1.0f);
    d.states  = normal((size_t) D*D*c.n_v*(c.n_seqs + 2), 1.0f);
    d.w       = normal(4*n_channels, 1.0f);
    d.dt      = normal(c.n_v, 1.0f);
    d.a       = normal(c.n_v, 1.0f);
    d.f       = normal(D, 1.0f);
    for (float & x : d.a) {
        x = -std::fabs(x);
    }
    for (int s = 0; s < c.n_seqs; ++s) {
        d.slots.push_back(c.absent && s % 2 == 0 ? (s ? c.n_seqs + 2 : -1) : c.n_seqs + 1 - s);
    }
    ggml_backend_cuda_context cuda;
    std::string wrong;
    for (int token = 0; token < 2 && wrong.empty(); ++token) {
        d.qkv   = normal(n_channels*c.n_seqs, 1.0f);
        d.z     = normal((size_t) c.n_v*D*c.n_seqs, 1.0f);
        d.alpha = normal(c.n_v*c.n_seqs, 8.0f);
        d.beta  = normal(c.n_v*c.n_seqs, 1.0f);
        step_graph one(c, d), apart(c, d);
        const size_t n_bytes = d.z.size()/32*sizeof(moegraph_block_y);
        void * rows[] = { emulated::allocate(n_bytes), emulated::allocate(n_bytes) };
        quantized = rows[0];
        const int n = moegraph_deltanet_input_try(cuda, one.t.graph, 0);
        if (n != one.t.graph->n_nodes - 1 || !std::isnan(one.of(one.gate)[0])) {
            wrong = "not one kernel";
            break;
        }
        const int at = apart.index(apart.delta);
        quantized = rows[1];
        ggml_cgraph step = ggml_graph_view(apart.t.graph, 0, at);
        step.use_counts       = apart.t.graph->use_counts;
        step.visited_hash_set = apart.t.graph->visited_hash_set;
        GGML_ASSERT(moegraph_deltanet_input_try(cuda, &step, 0) > 0);
        moegraph_delta_net(cuda, apart.delta);
        if (c.gated) {
            GGML_ASSERT(moegraph_gated_norm_try(cuda, apart.t.graph, at + 1) > 0);
        }
        wrong = !same(one.of(one.delta), apart.of(apart.delta)) ? "other results" :
            !same(one.of(one.out), apart.of(apart.out)) ? "another gated norm" :
            c.gated && memcmp(rows[0], rows[1], n_bytes) != 0 ? "another quantized row" :
            !same(one.of(one.windows), apart.of(apart.windows)) ? "other windows" :
            !same(one.of(one.states), apart.of(apart.states)) ? "other states" : "";
        d.windows = one.of(one.windows);
        d.states  = one.of(one.states);
        emulated::release(rows[0]);
        emulated::release(rows[1]);
    }
    report(c.str(), wrong);
}

int main() {
    for (const bool gated : { false, true }) {
        for (const bool absent : { false, true }) {
            emulated::order = 2*gated + absent;
            check({ 1, 1, 1, gated, false, absent });
            check({ 2, 4, 2, gated, true, absent });
            check({ 1, 3, 4, gated, !gated, absent });
        }
    }
    printf("all %d checks of the step: %d failed\n", n_run, n_failed);
    return n_failed != 0;
}
