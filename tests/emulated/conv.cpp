// The short convolution of DeltaNet as chains and trees of rows, on emulated kernels, against float64.

#include "driver.h"
#include "moegraph.h"
#include "moegraph-conv.cuh"

#include <algorithm>

static constexpr double MAX_ERROR = 2e-6; // of the sum of the products' absolute values

enum kind { CHAIN, LENGTHS, TREE };
static const char * KINDS[] = { "chain", "lengths", "tree" };

struct conv_case {
    int  d_conv, n_channels, n, n_seqs;
    kind rows;
    bool silu;

    std::string str() const {
        return std::string("conv ") + KINDS[rows] + " width=" + std::to_string(d_conv) + " channels=" + std::to_string(n_channels) +
            " n=" + std::to_string(n) + " seqs=" + std::to_string(n_seqs) + (silu ? " silu" : "");
    }
};

static void check(const conv_case & c) {
    tensors t;
    const int n_slots = c.n_seqs + 1, n_past = c.d_conv - 1, spare = 8; // channels that rows are apart
    const floats rows = normal((size_t) (c.n_channels + spare)*c.n*c.n_seqs, 1.0f), w = normal((size_t) c.d_conv*c.n_channels, 1.0f);
    floats pool = normal((size_t) n_past*c.n_channels*n_slots, 1.0f);
    ints slots, lengths, parents;
    for (int s = 0; s < c.n_seqs; ++s) {
        slots.push_back(s % 3 == 1 ? (s % 2 ? -1 : n_slots) : n_slots - 1 - s);
        lengths.push_back(s == 0 ? c.n + 2 : (int) (rng() % (c.n + 1)));
        for (int i = 0; i < c.n; ++i) {
            parents.push_back(rng() % 8 == 0 ? MOEGRAPH_PADDING : (int) (rng() % (i + 1)) - 1);
        }
    }
    ggml_tensor * wide = t.leaf(GGML_TYPE_F32, { c.n_channels + spare, c.n, c.n_seqs }, rows.data());
    ggml_tensor * x    = ggml_view_3d(t.ctx, wide, c.n_channels, c.n, c.n_seqs, wide->nb[1], wide->nb[2], 0);
    ggml_tensor * p    = t.leaf(GGML_TYPE_F32, { n_past*c.n_channels, n_slots }, pool.data());
    ggml_tensor * tree = c.rows == TREE ? t.leaf(GGML_TYPE_I32, { c.n, c.n_seqs }, parents.data()) : nullptr;
    ggml_tensor * lens = c.rows == LENGTHS ? t.leaf(GGML_TYPE_I32, { c.n_seqs }, lengths.data()) : nullptr;
    ggml_tensor * out  = t.place(moegraph_conv(t.ctx, x, t.leaf(GGML_TYPE_F32, { c.d_conv, c.n_channels }, w.data()), p,
        t.leaf(GGML_TYPE_I32, { c.n_seqs }, slots.data()), tree, lens));
    GGML_ASSERT(moegraph_conv_supported(out));
    ggml_backend_cuda_context cuda;
    moegraph_conv(cuda, out, out, c.silu);

    std::string wrong;
    for (int s = 0; s < c.n_seqs; ++s) {
        const bool there = slots[s] >= 0 && slots[s] < n_slots;
        const int  n     = c.rows == LENGTHS ? std::min(lengths[s], c.n) : c.n;
        const int * mine = &parents[s*c.n];
        for (int channel = 0; channel < c.n_channels; ++channel) {
            const auto value = [&](const int row) { return rows[(size_t) (s*c.n + row)*(c.n_channels + spare) + channel]; };
            float * past = &pool[there ? ((size_t) slots[s]*c.n_channels + channel)*n_past : 0];
            const auto parent = [&](const int row) {
                return c.rows != TREE ? row - 1 : mine[row] >= 0 && mine[mine[row]] == MOEGRAPH_PADDING ? -1 : mine[row];
            };
            for (int i = 0; i < c.n; ++i) {
                double sum = 0, size = 0;
                const bool has = there && i < n && !(c.rows == TREE && mine[i] == MOEGRAPH_PADDING);
                for (int j = c.d_conv - 1, row = i, front = n_past; j >= 0 && has; --j) {
                    const double term = (row >= 0 ? value(row) : past[--front])*(double) w[(size_t) channel*c.d_conv + j];
                    sum  += term;
                    size += std::fabs(term);
                    row   = row >= 0 ? parent(row) : -1;
                }
                if (c.silu) {
                    sum = sum/(1 + std::exp(-sum));
                }
                const float got = ((const float *) out->data)[(size_t) (s*c.n + i)*c.n_channels + channel];
                if (!(std::fabs(got - sum) <= MAX_ERROR*size) && wrong.empty()) {
                    wrong = "sequence " + std::to_string(s) + " row " + std::to_string(i) + " channel " + std::to_string(channel) + ": " +
                        std::to_string(got) + ", should be " + std::to_string(sum);
                }
            }
            if (there && c.rows != TREE) {
                floats all(past, past + n_past);
                for (int i = 0; i < n; ++i) {
                    all.push_back(value(i));
                }
                std::copy(all.end() - n_past, all.end(), past);
            }
        }
    }
    if (wrong.empty() && memcmp(p->data, pool.data(), ggml_nbytes(p)) != 0) {
        wrong = "other states";
    }
    report(c.str(), wrong);
}

int main() {
    int i = 0;
    for (const int d_conv : { 3, 4, 5, 9, 15 }) {
        for (const int n : { 1, 2, 8, 31, 32, 33, 64, 70 }) {
            for (const kind rows : { CHAIN, LENGTHS, TREE }) {
                if (rows != TREE || n <= MOEGRAPH_TREE_ROWS) {
                    emulated::order = ++i % 3;
                    check({ d_conv, i % 2 ? 130 : 96, n, 1 + i % 4, rows, i % 5 == 0 });
                }
            }
        }
    }
    printf("all %d checks of the convolution: %d failed\n", n_run, n_failed);
    return n_failed != 0;
}
