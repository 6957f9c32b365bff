// What becomes of the partial sums of attention: their sum, the gate and the quantized row, on an emulated kernel, against
// float64. The partial sums are made here.

#include "driver.h"
#include "moegraph-attn.cuh"
#include "moegraph-attn-plan.cuh"
#include "moegraph-rows-types.cuh"

#include <algorithm>

static constexpr double MAX_ERROR = 2e-6; // of the largest value of a head
static constexpr int    PAGE = 16, N_PAGES = 160;

struct attn_case {
    int  d, n_head, n_head_kv;
    ints n_keys; // of each row; 0: padding
    bool gated, quantized;

    std::string str() const {
        std::string text = "sums d=" + std::to_string(d) + " heads=" + std::to_string(n_head) + "," + std::to_string(n_head_kv) + " keys=";
        for (const int n : n_keys) {
            text += std::to_string(n) + " ";
        }
        return text + (gated ? "gated " : "") + (quantized ? "quantized" : "");
    }
};

static std::vector<moegraph_block_y> blocks; // empty: nobody wants the row
static std::vector<double>           sums;   // of each row, head and element

void * moegraph_rows_reserve(ggml_backend_cuda_context &, const ggml_tensor *) { return blocks.empty() ? nullptr : blocks.data(); }

// Takes the place of the kernel that computes partial sums; keeps in sums what they add up to.
template <int d> void moegraph_attn_launch(ggml_backend_cuda_context &, const moegraph_attn_args & args) {
    for (int r = 0; r < args.n_rows; ++r) {
        const int n_keys = args.rows[r*MOEGRAPH_ATTN_WORDS + MOEGRAPH_ATTN_N_KEYS];
        for (int h = 0; h < args.n_head; ++h) {
            const int    size = moegraph_attn_split_size(args, n_keys), n = (n_keys + size - 1)/size;
            const floats x = normal((size_t) n*d, 1.0f), most = normal(n, 3.0f), weight = normal(n, 1.0f);
            double total = 0;
            std::vector<double> all(d, 0.0);
            for (int i = 0; i < n; ++i) {
                const int64_t at  = (int64_t) (r*args.n_head + h)*args.n_splits + i;
                const float   sum = 1000.0f*std::fabs(weight[i]) + 1.0f;
                args.max_sum[at]  = make_float2(most[i], sum);
                total += std::exp((double) most[i])*sum;
                for (int e = 0; e < d; ++e) {
                    const uint16_t bits = ggml_fp32_to_fp16(x[(size_t) i*d + e]);
                    if (args.refined) {
                        ((float *) args.partial)[at*d + e] = x[(size_t) i*d + e];
                    } else {
                        ((uint16_t *) args.partial)[at*d + e] = bits;
                    }
                    all[e] += std::exp((double) most[i])*(args.refined ? x[(size_t) i*d + e] : ggml_fp16_to_fp32(bits)*(double) sum);
                }
            }
            for (int e = 0; e < d; ++e) {
                sums.push_back(n_keys > 0 ? all[e]/total : 0.0);
            }
        }
    }
}
template void moegraph_attn_launch<64>(ggml_backend_cuda_context &, const moegraph_attn_args &);
template void moegraph_attn_launch<128>(ggml_backend_cuda_context &, const moegraph_attn_args &);
template void moegraph_attn_launch<256>(ggml_backend_cuda_context &, const moegraph_attn_args &);

static std::string check_block(const moegraph_block_y & y, const float * x) {
    int sum = 0;
    for (int i = 0; i < 32; ++i) {
        const int q = y.qs[8*(i/4 % 4) + 4*(i/16) + i % 4];
        sum += q;
        if (std::fabs(q*y.d - x[i]) > 0.501f*y.d) {
            return "quantized " + std::to_string(q*y.d) + ", should be " + std::to_string(x[i]);
        }
    }
    return std::fabs(y.s - sum*y.d) <= 1e-5f*std::fabs(y.s) ? "" : "a sum of quants";
}

static void check(const attn_case & c) {
    tensors t;
    const int d = c.d, n_rows = (int) c.n_keys.size(), n = d*c.n_head;
    ints words((size_t) MOEGRAPH_ATTN_WORDS*n_rows, 0), pages(N_PAGES, 0);
    for (int r = 0; r < n_rows; ++r) {
        words[(size_t) r*MOEGRAPH_ATTN_WORDS + MOEGRAPH_ATTN_N_KEYS] = c.n_keys[r];
    }
    const floats q_gate = normal((size_t) 2*n*n_rows, 2.0f);
    ggml_tensor * full = t.leaf(GGML_TYPE_F32, { 2*n, n_rows }, q_gate.data());
    ggml_tensor * pool = t.leaf(GGML_TYPE_F16, { d*c.n_head_kv, PAGE }, nullptr);
    ggml_tensor * q    = ggml_view_3d(t.ctx, full, d, c.n_head, n_rows, 8*d, full->nb[1], 0);
    ggml_tensor * gate = ggml_view_3d(t.ctx, full, d, c.n_head, n_rows, 8*d, full->nb[1], 4*d);
    ggml_tensor * attn = moegraph_attn(t.ctx, q, pool, pool, t.leaf(GGML_TYPE_I32, { N_PAGES, 1 }, pages.data()),
        t.leaf(GGML_TYPE_I32, { MOEGRAPH_ATTN_WORDS, n_rows }, words.data()), PAGE, 1.0f);
    attn->data = emulated::allocate(moegraph_attn_alloc_size(attn));
    ggml_build_forward_expand(t.graph, attn);
    ggml_tensor * out = attn;
    if (c.gated) {
        ggml_tensor * cont = t.place(ggml_cont_2d(t.ctx, gate, n, n_rows));
        out = ggml_mul(t.ctx, attn, t.place(ggml_sigmoid(t.ctx, cont)));
        out->data = attn->data;
        ggml_build_forward_expand(t.graph, out);
    }
    blocks.assign(c.quantized ? (size_t) n*n_rows/32 : 0, {});
    sums.clear();
    ggml_backend_cuda_context cuda;
    std::string wrong;
    const int first = 1; // behind the view of q
    const int n_fused = moegraph_attn_try(cuda, t.graph, first);
    if (n_fused != (c.gated ? ggml_graph_n_nodes(t.graph) - 1 - first : 0)) {
        wrong = "covers " + std::to_string(n_fused) + " nodes";
    } else if (!c.gated) {
        moegraph_attn(cuda, attn);
    }
    const float * got = (const float *) out->data;
    for (int at = 0; at < n*n_rows && wrong.empty(); at += d) {
        double most = 0;
        for (int e = 0; e < d; ++e) {
            most = std::max(most, std::fabs(sums[at + e]));
        }
        for (int e = 0; e < d && wrong.empty(); ++e) {
            const double x = sums[at + e]/(c.gated ? 1 + std::exp(-(double) q_gate[(size_t) 2*at + d + e]) : 1);
            if (!(std::fabs(got[at + e] - x) <= MAX_ERROR*most)) {
                wrong = "head " + std::to_string(at/d) + " element " + std::to_string(e) + ": " + std::to_string(got[at + e]) +
                    ", should be " + std::to_string(x);
            }
        }
    }
    for (size_t i = 0; i < blocks.size() && wrong.empty(); ++i) {
        wrong = check_block(blocks[i], got + 32*i);
    }
    report(c.str(), wrong);
    emulated::release(attn->data);
}

int main() {
    const std::vector<ints> rows = { { 1 }, { 33, 0, 700 }, { 2048 }, { 2400, 31 } };
    int i = 0;
    for (const attn_case & shape : std::vector<attn_case>{ { 64, 8, 2 }, { 128, 8, 2 }, { 256, 16, 2 }, { 256, 4, 1 } }) {
        for (const ints & n_keys : rows) {
            for (const bool gated : { true, false }) {
                emulated::order = ++i % 3;
                check({ shape.d, shape.n_head, shape.n_head_kv, n_keys, gated, i % 3 != 0 });
            }
        }
    }
    ints many(130, 3); // two launches
    many[129] = 70;
    check({ 64, 2, 1, many, true, true });
    printf("all %d checks of attention's sums: %d failed\n", n_run, n_failed);
    return n_failed != 0;
}
