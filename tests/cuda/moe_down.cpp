// The end of the routed experts of a few tokens on one device: down product, routing weights, sum over the experts.
//
// Usage: moe_down [--device NAME] [--only TEXT] [--every N] [--time 1]
//   NAME is a ggml device, default: the first GPU. TEXT selects cases whose description contains it,
//   N every N-th of them. --time 1 prints times behind the checks.
// Prints the failures and one line at the end; exit code 1 if a case failed, 2 on wrong usage.
//
// Every element is compared with float64, of the activations that the device has computed. The same nodes also run
// as single kernels: where the product's rows are marked as output, nothing can be fused with it. The one kernel may
// not be less exact than those, and the rows, which it does not write, show whether it has run.
// Each graph runs three times (directly, captured, replayed), with the results overwritten by NaN in between.

#include "kernel_checks.h"

// Error over what rounding the activations to 8 bits explains; 1 is expected, but scales and sums are rounded to half
// precision, which weighs most in small cases: all rows share that error.
static constexpr double MAX_RATIO = 30;

static const ggml_type TYPES[] = { GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q6_K };

struct moe_case {
    ggml_type type;
    int       n_ff, n_embd;
    int       n_expert, n_used, n; // n: tokens
    bool      whole;    // with gate, up and activation in front, and banks that count as constant
    pattern   ids;
    bool      fused;    // whether it should be one kernel

    std::string str() const {
        return std::string(ggml_type_name(type)) + " n_ff=" + std::to_string(n_ff) + " n_embd=" +
            std::to_string(n_embd) + " experts=" + std::to_string(n_expert) + "/" + std::to_string(n_used) + " n=" +
            std::to_string(n) + (whole ? " whole " : " ") + PATTERN_NAMES[ids];
    }
};

static constexpr int N_IN = 256; // of gate and up in front

// The nodes from the activations on: rows [n_embd, n_used, n] and their weighted sum.
struct tail {
    ggml_tensor * rows;
    ggml_tensor * out;
};

static tail append(
        weights_net & g, ggml_tensor * down, ggml_tensor * act, ggml_tensor * ids, ggml_tensor * routing, const bool apart) {
    tail r;
    r.rows = ggml_mul_mat_id(g.ctx, down, act, ids);
    if (apart) {
        ggml_set_output(r.rows);
    }
    ggml_tensor * weighted = ggml_mul(g.ctx, r.rows, routing);
    ggml_build_forward_expand(g.graph, weighted);
    std::vector<ggml_tensor *> views;
    for (int e = 0; e < ids->ne[0]; ++e) {
        views.push_back(ggml_view_2d(
            g.ctx, weighted, weighted->ne[0], weighted->ne[2], weighted->nb[2], e*weighted->nb[1]));
        ggml_build_forward_expand(g.graph, views.back());
    }
    r.out = views[0];
    for (size_t e = 1; e < views.size(); ++e) {
        r.out = ggml_add(g.ctx, r.out, views[e]);
        ggml_build_forward_expand(g.graph, r.out);
    }
    return r;
}

static floats read(const ggml_tensor * t) {
    floats v(ggml_nelements(t));
    ggml_backend_tensor_get(t, v.data(), 0, ggml_nbytes(t));
    return v;
}

struct outcome {
    floats act, out;
    bool   same  = true; // in all three runs
    bool   fused = true; // in all three runs
};

// The data of a case: both ways of running it get the same.
struct moe_data {
    std::vector<uint8_t> down, gate, up;
    floats               x, routing;
    ints ids;
};

static int extra_rows(const moe_case & c) {
    return c.ids == STRIDED ? 16 : 0; // behind each expert, they do not belong to it
}

static outcome compute(const moe_case & c, const moe_data & data, const bool apart) {
    weights_net g;
    ggml_tensor * stack = ggml_new_tensor_3d(g.weights, c.type, c.n_ff, c.n_embd + extra_rows(c), c.n_expert);
    ggml_tensor * down  = stack;
    if (extra_rows(c)) {
        down = ggml_view_3d(g.weights, stack, c.n_ff, c.n_embd, c.n_expert, stack->nb[1], stack->nb[2], 0);
    }
    ggml_tensor * table   = ggml_new_tensor_2d(g.ctx, GGML_TYPE_I32, c.n_expert, c.n);
    ggml_tensor * ids     = ggml_view_2d(g.ctx, table, c.n_used, c.n, table->nb[1], 0);
    ggml_tensor * routing = ggml_new_tensor_3d(g.ctx, GGML_TYPE_F32, 1, c.n_used, c.n);
    ggml_tensor * x       = c.whole ? ggml_new_tensor_3d(g.ctx, GGML_TYPE_F32, N_IN, 1, c.n) :
        ggml_new_tensor_3d(g.ctx, GGML_TYPE_F32, c.n_ff, c.n_used, c.n);
    ggml_tensor * gate = nullptr, * up = nullptr, * act;
    if (c.whole) {
        gate = ggml_new_tensor_3d(g.weights, c.type, N_IN, c.n_ff, c.n_expert);
        up   = ggml_new_tensor_3d(g.weights, c.type, N_IN, c.n_ff, c.n_expert);
        ggml_tensor * u = ggml_mul_mat_id(g.ctx, up, x, ids);
        act = ggml_swiglu_split(g.ctx, ggml_mul_mat_id(g.ctx, gate, x, ids), u);
    } else {
        act = ggml_scale(g.ctx, x, 2.0f);
    }
    const tail t = append(g, down, act, ids, routing, apart);
    g.place(c.whole);
    const auto set = [](ggml_tensor * tensor, const auto & v) {
        ggml_backend_tensor_set(tensor, v.data(), 0, ggml_nbytes(tensor));
    };
    set(stack, data.down);
    set(table, data.ids);
    set(routing, data.routing);
    set(x, data.x);
    if (c.whole) {
        set(gate, data.gate);
        set(up, data.up);
    }
    outcome r;
    for (int pass = 0; pass < 3; ++pass) {
        for (ggml_tensor * tensor : { act, t.rows, t.out }) {
            ggml_backend_tensor_memset(tensor, 0xFF, 0, ggml_nbytes(tensor));
        }
        if (ggml_backend_graph_compute(backend, g.graph) != GGML_STATUS_SUCCESS) {
            r.same = false;
            return r;
        }
        const floats out = read(t.out), rows = read(t.rows);
        r.fused = r.fused && std::all_of(rows.begin(), rows.end(), [](const float v) { return std::isnan(v); });
        r.same  = r.same && (pass == 0 || memcmp(out.data(), r.out.data(), out.size()*sizeof(float)) == 0);
        r.out   = out;
    }
    r.act = read(act);
    return r;
}

// Sum over the elements of the squared error, and of what rounding the activations to 8 bits explains of it.
struct judged {
    double fused = 0, apart = 0, explained = 0;
    int    n_bad = 0;
};

static judged judge(const moe_case & c, const moe_data & data, const outcome & fused, const outcome & apart) {
    const size_t stride = (size_t) (c.n_embd + extra_rows(c))*c.n_ff;
    floats weights(stride*c.n_expert);
    ggml_get_type_traits(c.type)->to_float(data.down.data(), weights.data(), weights.size());
    judged j;
    for (int t = 0; t < c.n; ++t) {
        for (int i = 0; i < c.n_embd; ++i) {
            double want = 0;
            bool   any  = false;
            for (int s = 0; s < c.n_used; ++s) {
                const int e = data.ids[(size_t) t*c.n_expert + s];
                if (e < 0 || e >= c.n_expert) {
                    continue;
                }
                any = true;
                const double  r = data.routing[t*c.n_used + s];
                const float * w = &weights[e*stride + (size_t) i*c.n_ff];
                const float * y = &fused.act[(size_t) (t*c.n_used + s)*c.n_ff];
                double value = 0, variance = 0;
                for (int b = 0; b < c.n_ff; b += 32) {
                    double largest = 0, squares = 0;
                    for (int l = b; l < b + 32; ++l) {
                        value   += (double) w[l]*y[l];
                        squares += (double) w[l]*w[l];
                        largest  = std::max(largest, (double) std::fabs(y[l]));
                    }
                    variance += squares*(largest/127)*(largest/127)/12;
                }
                want        += r*value;
                j.explained += r*r*variance;
            }
            const float got = fused.out[(size_t) t*c.n_embd + i], single = apart.out[(size_t) t*c.n_embd + i];
            j.n_bad += !(std::fabs(got) <= 1e30f) || (!any && got != 0.0f);
            j.fused += (got - want)*(got - want);
            j.apart += (single - want)*(single - want);
        }
    }
    return j;
}

static void check(const moe_case & c) {
    if (!selected(c.str())) {
        return;
    }
    moe_data data;
    data.down = random_weights(c.type, (size_t) (c.n_embd + extra_rows(c))*c.n_expert, c.n_ff);
    if (c.whole) {
        data.gate = random_weights(c.type, (size_t) c.n_ff*c.n_expert, N_IN);
        data.up   = random_weights(c.type, (size_t) c.n_ff*c.n_expert, N_IN);
    }
    data.x       = normal((size_t) (c.whole ? N_IN : c.n_ff*c.n_used)*c.n, 1.0f);
    data.routing = normal((size_t) c.n_used*c.n, 0.5f);
    data.ids     = choose(c.ids, c.n_expert, c.n, c.n_used, c.n_expert);
    for (size_t i = 0; i < data.x.size(); i += 97) {
        data.x[i] *= 5;
    }
    const outcome fused = compute(c, data, false), apart = compute(c, data, true);
    if (!fused.same || !apart.same) {
        report(c.str(), false, "a run failed or gave other bits");
        return;
    }
    if (fused.fused != c.fused || apart.fused) {
        report(c.str(), false, fused.fused ? "the rows are not written" : "it is not one kernel");
        return;
    }
    const judged j = judge(c, data, fused, apart);
    // the sum of a block is added up in another order, and for Q4_0 its rounding to half precision may fall either way
    const double allowed = (c.type == GGML_TYPE_Q4_0 ? 2 : 1.05)*j.apart + 1e-9*j.explained;
    const bool   passed  = j.n_bad == 0 && fused.act == apart.act && j.fused <= allowed &&
        (j.fused <= MAX_RATIO*j.explained || j.fused <= j.apart); // half sums of Q4_0 are not explained
    report(c.str(), passed, std::to_string(j.n_bad) + " elements not finite or not zero, error over rounding " +
        std::to_string(j.fused/j.explained) + ", apart " + std::to_string(j.apart/j.explained));
}

static void check_all() {
    for (const ggml_type type : TYPES) {
        check({ type, 512, 2048, 16, 8, 1, true, DISTINCT, true });
        for (int ids = 0; ids < N_PATTERN; ++ids) {
            for (const bool whole : { false, true }) {
                for (const int n : { 1, 2, 3, 4, 5 }) {
                    check({ type, 512, 200, 20, 8, n, whole, (pattern) ids, n <= 4 });
                }
                check({ type, 256, 72, 5, 4, 1, whole, (pattern) ids, true });
                check({ type, 768, 97, 20, 10, 1, whole, (pattern) ids, true });
                check({ type, 1280, 33, 6, 2, 3, whole, (pattern) ids, true });
                check({ type, 512, 40, 17, 15, 2, whole, (pattern) ids, true });
            }
        }
    }
}

// Microseconds of the experts of one layer (without gate, up and activation: of their end) in a graph of many. Each
// reads other experts, so that the weights come from memory: together they are several times what a cache holds.
static double microseconds(const ggml_type type, const int n, const bool whole, const bool apart) {
    constexpr int n_embd = 2048, n_ff = 512, n_expert = 256, n_used = 8, n_stacks = 8, n_ops = 128;
    weights_net g(n_ops);
    ggml_tensor * down[n_stacks], * gate[n_stacks], * up[n_stacks];
    for (int i = 0; i < n_stacks; ++i) {
        down[i] = ggml_new_tensor_3d(g.weights, type, n_ff, n_embd, n_expert);
        gate[i] = whole ? ggml_new_tensor_3d(g.weights, GGML_TYPE_Q4_K, n_embd, n_ff, n_expert) : nullptr;
        up[i]   = whole ? ggml_new_tensor_3d(g.weights, GGML_TYPE_Q4_K, n_embd, n_ff, n_expert) : nullptr;
    }
    ggml_tensor * x       = ggml_new_tensor_3d(g.ctx, GGML_TYPE_F32, n_embd, 1, n);
    ggml_tensor * leaf    = ggml_new_tensor_3d(g.ctx, GGML_TYPE_F32, n_ff, n_used, n);
    ggml_tensor * routing = ggml_new_tensor_3d(g.ctx, GGML_TYPE_F32, 1, n_used, n);
    std::vector<ggml_tensor *> tables;
    for (int op = 0; op < n_ops; ++op) {
        tables.push_back(ggml_new_tensor_2d(g.ctx, GGML_TYPE_I32, n_used, n));
        ggml_tensor * act = leaf;
        if (whole) {
            ggml_tensor * u = ggml_mul_mat_id(g.ctx, up[op % n_stacks], x, tables[op]);
            act = ggml_swiglu_split(g.ctx, ggml_mul_mat_id(g.ctx, gate[op % n_stacks], x, tables[op]), u);
        }
        append(g, down[op % n_stacks], act, tables[op], routing, apart);
    }
    g.place(true);
    ggml_backend_buffer_clear(g.buffers[0], 0x11); // small scales
    for (ggml_tensor * t : { x, leaf, routing }) {
        const floats v = normal(ggml_nelements(t), 0.5f);
        ggml_backend_tensor_set(t, v.data(), 0, ggml_nbytes(t));
    }
    for (int op = 0; op < n_ops; ++op) {
        ints ids((size_t) n_used*n);
        for (size_t i = 0; i < ids.size(); ++i) {
            ids[i] = (int) (op/n_stacks*ids.size() + i)*37 % n_expert; // 37: all experts once before one comes again
        }
        ggml_backend_tensor_set(tables[op], ids.data(), 0, ggml_nbytes(tables[op]));
    }
    std::vector<double> times;
    for (int i = 0; i < 25; ++i) {
        const int64_t begin = ggml_time_us();
        ggml_backend_graph_compute(backend, g.graph);
        ggml_backend_synchronize(backend);
        times.push_back((double) (ggml_time_us() - begin)/n_ops);
    }
    std::sort(times.begin() + 3, times.end()); // the first ones run directly and capture
    return times[3 + (times.size() - 3)/2];
}

static void print_times() {
    printf("us: 256 experts, 8 used, n_embd 2048, n_ff 512; whole: with Q4_K gate + up + SwiGLU in front\n");
    printf("%6s %6s %10s %10s %12s %12s %12s\n", "type", "tokens", "apart", "one", "GB/s of one", "whole apart",
        "whole one");
    for (const ggml_type type : TYPES) {
        for (const int n : { 1, 2, 4 }) {
            const double us[] = {
                microseconds(type, n, false, true), microseconds(type, n, false, false),
                microseconds(type, n, true, true),  microseconds(type, n, true, false),
            };
            const double bytes = (double) ggml_row_size(type, 512)*2048*8*n;
            printf("%6s %6d %10.2f %10.2f %12.0f %12.2f %12.2f\n", ggml_type_name(type), n, us[0], us[1],
                bytes/us[1]/1e3, us[2], us[3]);
            fflush(stdout);
        }
    }
}

int main(int argc, char ** argv) {
    bool timed = false;
    if (const int code = start(argc, argv, "moe_down", &timed)) {
        return code;
    }
    check_all();
    if (timed) {
        print_times();
    }
    printf("all %d checks of the experts' end on %s: %d failed\n", n_run, ggml_backend_name(backend), n_failed);
    ggml_backend_free(backend);
    return n_failed != 0;
}
