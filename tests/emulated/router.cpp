// The router of one row, on emulated kernels, against float64.

#include "driver.h"
#include "moegraph-router.cuh"

static constexpr double MAX_ERROR = 2e-5; // of a score or weight, relative; of weights of 0 to 1, absolute

static constexpr float MIN_SUM = 6e-5f; // that weights are divided by

struct router_case {
    int   n, n_experts, n_used;
    bool  sigmoid, biased, normed;
    float scale; // 0: none
    bool  ties;  // of the experts of a class

    static int class_of(const int expert) { return expert % 32/8; } // neighbours, and some that one lane has

    std::string str() const {
        return "router n=" + std::to_string(n) + " experts=" + std::to_string(n_used) + "/" + std::to_string(n_experts) +
            (sigmoid ? " sigmoid" : "") + (biased ? " biased" : "") + (normed ? " normed" : "") + " scale=" +
            std::to_string(scale) + (ties ? " ties" : "") + " order=" + std::to_string(emulated::order);
    }
};

struct choice {
    std::vector<double> by, weights; // of all experts: what the choice goes by, and what weights are made of
};

static choice scores_of(const router_case & c, const floats & w, const float * x, const floats & bias) {
    choice r;
    double sum = 0;
    for (int e = 0; e < c.n_experts; ++e) {
        double logit = 0;
        for (int i = 0; i < c.n; ++i) {
            logit += (double) w[(size_t) e*c.n + i]*x[i];
        }
        r.weights.push_back(c.sigmoid ? 1/(1 + std::exp(-logit)) : std::exp(logit));
        sum += r.weights.back();
    }
    for (int e = 0; e < c.n_experts; ++e) {
        r.weights[e] /= c.sigmoid ? 1 : sum;
        r.by.push_back(r.weights[e] + (c.biased ? bias[e] : 0));
    }
    return r;
}

// What is wrong with ids and weights, "" if nothing is.
static std::string fault(const router_case & c, const choice & r, const int32_t * ids, const float * weights) {
    std::vector<double> by = r.by;
    double sum = 0;
    for (int k = 0; k < c.n_used; ++k) {
        if (ids[k] < 0 || ids[k] >= c.n_experts || by[ids[k]] < -1e30) {
            return "choice " + std::to_string(k) + " is " + std::to_string(ids[k]);
        }
        const double best = *std::max_element(by.begin(), by.end());
        if (by[ids[k]] < best - MAX_ERROR*std::fabs(best)) {
            return "choice " + std::to_string(k) + " is worse than another";
        }
        for (int e = 0; c.ties && e < ids[k]; ++e) {
            if (c.class_of(e) == c.class_of(ids[k]) && by[e] > -1e30) {
                return "of equal experts " + std::to_string(e) + " and " + std::to_string(ids[k]) + " the second is chosen";
            }
        }
        by[ids[k]] = -1e31;
        sum += r.weights[ids[k]];
    }
    for (int k = 0; k < c.n_used; ++k) {
        const double wanted = r.weights[ids[k]]/(c.normed ? std::max(sum, (double) MIN_SUM) : 1)*(c.scale != 0 ? c.scale : 1);
        if (!(std::fabs(weights[k] - wanted) <= MAX_ERROR*wanted)) {
            return "weight " + std::to_string(k) + " is " + std::to_string(weights[k]) + ", should be " + std::to_string(wanted);
        }
    }
    return "";
}

static void check(const router_case & c) {
    tensors t;
    floats w = normal((size_t) c.n*c.n_experts, 1.5f/std::sqrt((float) c.n)), bias = normal(c.n_experts, 0.1f);
    for (int e = 0; c.ties && e < c.n_experts; ++e) {
        std::copy_n(w.begin() + (size_t) 8*c.class_of(e)*c.n, c.n, w.begin() + (size_t) e*c.n);
        bias[e] = bias[8*c.class_of(e)];
    }
    ggml_tensor * matrix = t.leaf(GGML_TYPE_F32, { c.n, c.n_experts }, w.data());
    t.make_constant(matrix);
    ggml_tensor * x       = t.leaf(GGML_TYPE_F32, { c.n, 1 }, nullptr);
    ggml_tensor * logits  = t.place(ggml_mul_mat(t.ctx, matrix, x));
    ggml_tensor * scores  = t.place(c.sigmoid ? ggml_sigmoid(t.ctx, logits) : ggml_soft_max(t.ctx, logits));
    ggml_tensor * by      = c.biased ?
        t.place(ggml_add(t.ctx, scores, t.leaf(GGML_TYPE_F32, { c.n_experts }, bias.data()))) : scores;
    ggml_tensor * sorted  = t.place(ggml_argsort(t.ctx, by, GGML_SORT_ORDER_DESC));
    ggml_tensor * ids     = ggml_view_2d(t.ctx, sorted, c.n_used, 1, sorted->nb[1], 0);
    ggml_tensor * weights = t.place(ggml_get_rows(t.ctx, ggml_reshape_3d(t.ctx, scores, 1, c.n_experts, 1), ids));
    if (c.normed) {
        ggml_tensor * row = ggml_reshape_2d(t.ctx, weights, c.n_used, 1);
        ggml_tensor * sum = t.place(ggml_clamp(t.ctx, t.place(ggml_sum_rows(t.ctx, row)), MIN_SUM, INFINITY));
        weights = ggml_reshape_3d(t.ctx, t.place(ggml_div(t.ctx, row, sum)), 1, c.n_used, 1);
    }
    if (c.scale != 0) {
        weights = t.place(ggml_scale(t.ctx, weights, c.scale));
    }
    ggml_build_forward_expand(t.graph, weights);

    ggml_backend_cuda_context cuda;
    std::string wrong;
    for (int run = 0; run < 2 && wrong.empty(); ++run) { // the second starts with what the first has left
        const floats values = normal(c.n, 1.0f);
        memcpy(x->data, values.data(), ggml_nbytes(x));
        if (moegraph_router_try(cuda, t.graph, 0) != ggml_graph_n_nodes(t.graph) - 1) {
            wrong = "not one kernel";
            break;
        }
        wrong = fault(c, scores_of(c, w, values.data(), bias), (const int32_t *) ids->data, (const float *) weights->data);
    }
    report(c.str(), wrong);
}

int main() {
    int i = 0;
    for (const int n_experts : { 64, 128, 256, 512 }) {
        for (const int n : { 512, 1536, 2048, 4096 }) {
            for (const int n_used : { 1, 8, 32 }) {
                emulated::order = ++i % 3;
                check({ n, n_experts, n_used, i % 2 == 0, i % 4 > 1, i % 3 != 0, i % 5 == 0 ? 2.5f : 0.0f, i % 7 < 2 });
            }
        }
    }
    printf("all %d checks of the router: %d failed\n", n_run, n_failed);
    return n_failed != 0;
}
