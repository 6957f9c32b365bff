// The likeliest token and the sums that check its row, on emulated kernels.

#include "driver.h"
#include "moegraph-argmax.cuh"

static void check(const int n_parts, const int n_per_part, const int n_hidden, const int n_rows, const int n_equal) {
    tensors t;
    const int n = n_parts*n_per_part;
    floats logits = normal((size_t) n*n_rows, 1.0f), hidden = normal((size_t) n_hidden*n_rows, 1.0f);
    ints expected;
    for (int r = 0; r < n_rows; ++r) { // the first of equal ones is the argmax
        int first = n;
        for (int i = 0; i < n_equal; ++i) {
            const int at = (int) (rng() % n);
            first = std::min(first, at);
            logits[(size_t) r*n + at] = 100.0f;
        }
        expected.push_back(first);
    }
    ggml_tensor * x     = t.leaf(GGML_TYPE_F32, { n, n_rows }, logits.data());
    ggml_tensor * best  = t.place(ggml_argmax(t.ctx, x));
    ggml_tensor * row   = t.place(ggml_sum_rows(t.ctx, t.leaf(GGML_TYPE_F32, { n_hidden, n_rows }, hidden.data())));
    ggml_tensor * parts = t.place(ggml_sum_rows(t.ctx, ggml_reshape_3d(t.ctx, x, n_per_part, n_parts, n_rows)));
    ggml_tensor * all   = t.place(ggml_sum_rows(t.ctx, ggml_reshape_2d(t.ctx, parts, n_parts, n_rows)));
    ggml_tensor * sum   = t.place(ggml_add(t.ctx, row, all));
    ggml_build_forward_expand(t.graph, best);
    ggml_build_forward_expand(t.graph, sum);

    ggml_backend_cuda_context cuda;
    std::string wrong;
    if (moegraph_argmax_try(cuda, t.graph, 0) != ggml_graph_n_nodes(t.graph) - 1) {
        wrong = "not one kernel";
    }
    for (int r = 0; r < n_rows && wrong.empty(); ++r) {
        double total = 0, size = 0;
        for (int i = 0; i < n + n_hidden; ++i) {
            const double v = i < n ? logits[(size_t) r*n + i] : hidden[(size_t) r*n_hidden + i - n];
            total += v;
            size  += std::fabs(v);
        }
        if (((const int32_t *) best->data)[r] != expected[r]) {
            wrong = "row " + std::to_string(r) + ": " + std::to_string(((const int32_t *) best->data)[r]) + ", should be " +
                std::to_string(expected[r]);
        } else if (!(std::fabs(((const float *) sum->data)[r] - total) <= 1e-6*size)) {
            wrong = "row " + std::to_string(r) + ": a sum of " + std::to_string(((const float *) sum->data)[r]) + ", should be " +
                std::to_string(total);
        }
    }
    report("argmax n=" + std::to_string(n) + " rows=" + std::to_string(n_rows), wrong);
}

int main() {
    int i = 0;
    for (const int n_parts : { 128, 151, 256, 485 }) {
        for (const int n_rows : { 1, 2, 5 }) {
            emulated::order = ++i % 3;
            check(n_parts, 128 + i, i % 2 ? 64 : 2048, n_rows, 1 + 4*(i % 3));
        }
    }
    printf("all %d checks of argmax: %d failed\n", n_run, n_failed);
    return n_failed != 0;
}
