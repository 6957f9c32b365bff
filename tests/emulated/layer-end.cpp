// The end of a layer of one token, with a shared expert, on emulated kernels: against kernels of its parts, bit for bit.

#include "products.h"
#include "moegraph-context.cuh"
#include "moegraph-done.cuh"
#include "moegraph-layer-end.cuh"
#include "moegraph-norm.cuh"
#include "moegraph-one.cuh"
#include "moegraph-router.cuh"
#include "moegraph-rows.cuh"

struct end_case {
    ggml_type type;
    int       n, n_ff, n_used, n_shared; // values of a row, of its experts, and of the shared one
    bool      constant;

    std::string str() const {
        return std::string(ggml_type_name(type)) + " n=" + std::to_string(n) + " n_ff=" + std::to_string(n_ff) + " experts=" +
            std::to_string(n_used) + " shared=" + std::to_string(n_shared) + (constant ? " constant" : "") +
            " smem=" + std::to_string(emulated::shared_limit/1024) + " order=" + std::to_string(emulated::order);
    }
};

enum change { NONE, TURNED, READ }; // sums in the other order; another node reads the shared expert's down

struct layer {
    tensors       t;
    ggml_tensor * down, * weights, * moe, * glu, * shared, * product, * residual, * sum;
    ggml_backend_cuda_context cuda;

    layer(const end_case & c, const change changed = NONE) {
        rng.seed(c.n + c.n_ff + c.n_used + c.n_shared);
        const int n_expert = c.n_used + 3;
        const auto weight = [&](const ggml_type type, const int n_in, const int n_out, const int n_stack) {
            ggml_tensor * w = t.leaf(type, { n_in, n_out, n_stack }, random_weights(type, (size_t) n_out*n_stack, n_in).data());
            if (c.constant) {
                t.make_constant(w);
            }
            return w;
        };
        ints chosen(c.n_used);
        for (int i = 0; i < c.n_used; ++i) {
            chosen[i] = i == 1 ? -1 : i == 2 ? n_expert : (5*i + 1) % n_expert;
        }
        floats routing = normal(c.n_used, 0.5f);
        routing[1] = NAN;
        weights = t.leaf(GGML_TYPE_F32, { 1, c.n_used, 1 }, routing.data());
        ggml_tensor * act = t.leaf(GGML_TYPE_F32, { c.n_ff, c.n_used, 1 }, normal((size_t) c.n_ff*c.n_used, 0.7f).data());
        down = t.place(ggml_mul_mat_id(t.ctx, weight(c.type, c.n_ff, c.n, n_expert), act,
            t.leaf(GGML_TYPE_I32, { c.n_used, 1 }, chosen.data())));
        moe = append_expert_sum(t, t.place(ggml_mul(t.ctx, down, weights)));
        ggml_tensor * x = t.leaf(GGML_TYPE_F32, { c.n, 1 }, normal(c.n, 1.0f).data());
        ggml_tensor * up = t.place(ggml_mul_mat(t.ctx, weight(GGML_TYPE_Q8_0, c.n, c.n_shared, 1), x));
        ggml_build_forward_expand(t.graph, up);
        glu    = t.place(ggml_swiglu_split(t.ctx, t.place(ggml_mul_mat(t.ctx, weight(GGML_TYPE_Q8_0, c.n, c.n_shared, 1), x)), up));
        memcpy(glu->data, normal(c.n_shared, 0.7f).data(), ggml_nbytes(glu));
        shared = t.place(ggml_mul_mat(t.ctx, weight(GGML_TYPE_Q8_0, c.n_shared, c.n, 1), glu));
        product = t.place(ggml_mul_mat(t.ctx, t.leaf(GGML_TYPE_F32, { c.n, 1 }, normal(c.n, 0.03f).data()), x));
        ggml_tensor * out = t.place(ggml_mul(t.ctx, shared, t.place(ggml_sigmoid(t.ctx, product))));
        residual = t.leaf(GGML_TYPE_F32, { c.n, 1 }, normal(c.n, 1.0f).data());
        out = t.place(changed == TURNED ? ggml_add(t.ctx, out, moe) : ggml_add(t.ctx, moe, out));
        sum = t.place(ggml_add(t.ctx, out, residual));
        ggml_build_forward_expand(t.graph, sum);
        if (changed == READ) {
            ggml_build_forward_expand(t.graph, ggml_sum_rows(t.ctx, shared));
        }
        for (int i = 0; i < t.graph->n_nodes; ++i) {
            t.graph->nodes[i]->flags |= GGML_TENSOR_FLAG_COMPUTE;
        }
        moegraph_rows_begin(cuda, t.graph);
        CUDA_CHECK(cudaMalloc((void **) &moegraph_get_context(cuda).router.arrived, 16*1024));
        moegraph_get_context(cuda).router.gate_of = product; // as if the router had computed it
        *const_cast<float *>(moegraph_router_gate(cuda, product)) = 0.7f;
    }

    int at(const ggml_tensor * node) const {
        int i = 0;
        while (t.graph->nodes[i] != node) {
            ++i;
        }
        return i;
    }
    bool runs() { return moegraph_layer_end_try(cuda, t.graph, at(moe), down, nullptr, nullptr, weights, true); }
};

static void check(const end_case & c) {
    layer one(c), apart(c);
    std::string wrong;
    if (one.runs()) {
        wrong = "the shared expert's activations are not there yet";
    }
    moegraph_done_add(one.cuda, one.glu);
    for (int pass = 0; pass < 2 && wrong.empty(); ++pass) {
        if (pass == 1) {
            one.sum->data = one.residual->data; // as the allocator may do
        }
        if (!one.runs()) {
            wrong = "is not one kernel";
        }
        if (pass == 1) {
            continue;
        }
        GGML_ASSERT(moegraph_one_down(apart.cuda, apart.down, nullptr, nullptr, apart.weights, apart.moe, false));
        moegraph_rows_mul_mat(apart.cuda, apart.shared, nullptr, nullptr);
        GGML_ASSERT(moegraph_add_norm_try(apart.cuda, apart.t.graph, apart.at(apart.product)) == 4);
    }
    for (int i = 0; i < c.n && wrong.empty(); ++i) {
        const void * want = (const float *) apart.sum->data + i;
        if (memcmp((const float *) one.sum->data + i, want, sizeof(float)) != 0) {
            wrong = "row " + std::to_string(i) + " has other bits: " + std::to_string(((const float *) one.sum->data)[i]) + ", not " +
                std::to_string(*(const float *) want);
        }
    }
    for (int i = one.at(one.shared); i < one.t.graph->n_nodes && wrong.empty(); ++i) {
        wrong = moegraph_done_has(one.cuda, one.t.graph->nodes[i]) ? "" : "node " + std::to_string(i) + " would be computed again";
    }
    report(c.str(), wrong);
}

static void check_not(const char * what, layer & l) {
    moegraph_done_add(l.cuda, l.glu);
    report(std::string("not one kernel: ") + what, l.runs() ? "it is" : "");
}

int main() {
    int i = 0;
    for (const ggml_type type : { GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K, GGML_TYPE_MXFP4 }) {
        // of shared experts: lanes that share a row, several parts for a lane, rows that end anywhere
        for (const int n_shared : { 256, 512, 1024, 1408, 2048, 2816, 2880, 320 }) {
            emulated::order        = ++i % 3;
            emulated::early_copies = i % 4 == 0;
            emulated::shared_limit = i % 2 ? 99*1024 : 227*1024;
            const int n_ff = type == GGML_TYPE_MXFP4 && i % 5 == 0 ? 2880 : i % 3 == 0 ? 1536 : i % 3 == 1 ? 512 : 768;
            check({ type, i % 8 == 1 ? 2080 : 224, n_ff, n_ff > 1024 ? 4 : i % 2 ? 8 : 10, n_shared, i % 2 == 0 });
        }
    }
    emulated::shared_limit = 227*1024;
    const end_case usual = { GGML_TYPE_Q5_K, 192, 512, 8, 512, true };
    layer turned(usual, TURNED), read(usual, READ), ungated(usual);
    check_not("the shared expert before the routed ones", turned);
    check_not("another node reads the shared expert", read);
    moegraph_router_begin(ungated.cuda);
    check_not("the router has not computed the gate", ungated);
    printf("all %d checks of the end of a layer: %d failed\n", n_run, n_failed);
    return n_failed != 0;
}
