// A token's experts in slots: the router looks them up, and the launch of gate and up fetches what is missing, on emulated
// kernels. Against a layer whose experts are all there, bit for bit; the slots against the rule of moegraph_fetch_rows.

#include "products.h"
#include "moegraph-context.cuh"
#include "moegraph-done.cuh"
#include "moegraph-fetch.cuh"
#include "moegraph-layer-end.cuh"
#include "moegraph-moe.cuh"
#include "moegraph-one.cuh"
#include "moegraph-publish.cuh"
#include "moegraph-router.cuh"
#include "moegraph-rows.cuh"

#include "moegraph.h"

#include <set>

struct fetch_case {
    ggml_type type, type_down;
    int  n, n_ff, n_experts, n_used, n_slots;
    int  n_missing; // of the chosen experts
    int  n_needed;  // victims that hold chosen ones
    int  n_free;    // victims that hold none
    bool fits;      // gate and up can fetch
    bool replay;    // ids are not the router's
    bool told;      // to the host
    bool twice;     // the first id is the second, too

    std::string str() const {
        return std::string(ggml_type_name(type)) + "/" + ggml_type_name(type_down) + " n=" + std::to_string(n) + " n_ff=" +
            std::to_string(n_ff) + " experts=" + std::to_string(n_used) + "/" + std::to_string(n_experts) + " slots=" +
            std::to_string(n_slots) + " missing=" + std::to_string(n_missing) + " needed=" + std::to_string(n_needed) + " free=" +
            std::to_string(n_free) + (replay ? " replay" : "") + " order=" + std::to_string(emulated::order);
    }
};

// Norm, router, experts and a shared expert. With slots, if there are some; otherwise all experts are where slots would come from.
struct layer {
    tensors       t;
    ggml_tensor * ids, * weights, * told = nullptr, * fetch = nullptr, * from, * to = nullptr;
    ggml_tensor * table = nullptr, * victims = nullptr, * up, * gate, * glu, * down, * moe, * product, * sum;
    size_t        up_at, down_at, n_bytes;
    ggml_backend_cuda_context cuda;

    layer(const fetch_case & c, const bool slots, const ints & replay) {
        rng.seed(c.n + c.n_ff + c.n_used + c.n_experts);
        const auto leaf = [&](const ggml_type type, const std::vector<int64_t> & ne, const void * values) {
            ggml_tensor * w = t.leaf(type, ne, values);
            t.make_constant(w);
            return w;
        };
        const auto matrix = [&](const ggml_type type, const int n_in, const int n_out) {
            return leaf(type, { n_in, n_out }, random_weights(type, n_out, n_in).data());
        };
        const size_t half = ggml_row_size(c.type, c.n)*c.n_ff, last = ggml_row_size(c.type_down, c.n_ff)*c.n;
        up_at   = (half + 127)/128*128;
        down_at = (up_at + half + 127)/128*128;
        n_bytes = (down_at + last + 127)/128*128;
        std::vector<uint8_t> packed(n_bytes*c.n_experts);
        for (int e = 0; e < c.n_experts; ++e) {
            const auto put = [&](const size_t at, const std::vector<uint8_t> & rows) {
                memcpy(&packed[e*n_bytes + at], rows.data(), rows.size());
            };
            put(0, random_weights(c.type, c.n_ff, c.n));
            put(up_at, random_weights(c.type, c.n_ff, c.n));
            put(down_at, random_weights(c.type_down, c.n, c.n_ff));
        }
        from = leaf(GGML_TYPE_F32, { (int64_t) n_bytes/4, c.n_experts }, packed.data());
        ggml_tensor * residual = t.leaf(GGML_TYPE_F32, { c.n, 1 }, normal(c.n, 1.0f).data());
        ggml_tensor * normed = t.place(ggml_mul(t.ctx, t.place(ggml_rms_norm(t.ctx, residual, 1e-6f)),
            leaf(GGML_TYPE_F32, { c.n }, normal(c.n, 1.0f).data())));
        ggml_build_forward_expand(t.graph, normed);
        const floats w = normal((size_t) c.n*c.n_experts, 1.5f/std::sqrt((float) c.n));
        ggml_tensor * scores = t.place(ggml_soft_max(t.ctx,
            t.place(ggml_mul_mat(t.ctx, leaf(GGML_TYPE_F32, { c.n, c.n_experts }, w.data()), normed))));
        ggml_tensor * sorted = t.place(ggml_argsort(t.ctx, scores, GGML_SORT_ORDER_DESC));
        ids     = ggml_view_2d(t.ctx, sorted, c.n_used, 1, sorted->nb[1], 0);
        weights = t.place(ggml_get_rows(t.ctx, ggml_reshape_3d(t.ctx, scores, 1, c.n_experts, 1), ids));
        ggml_build_forward_expand(t.graph, weights);
        ids = replay.empty() ? ids : t.leaf(GGML_TYPE_I32, { c.n_used, 1 }, replay.data());
        ggml_tensor * bank = from, * chosen = ids;
        if (slots) {
            if (c.told) {
                told = moegraph_publish(t.ctx, ids, leaf(GGML_TYPE_I32, { c.n_used, 1 }, nullptr));
                told->data = told->src[1]->data;
                ggml_build_forward_expand(t.graph, told);
            }
            table   = leaf(GGML_TYPE_I32, { 1, c.n_experts }, nullptr);
            victims = leaf(GGML_TYPE_I32, { 2, std::min(c.n_used, c.n_slots) }, nullptr);
            bank    = to = leaf(GGML_TYPE_F32, { (int64_t) n_bytes/4, c.n_slots }, nullptr);
            fetch   = t.place(moegraph_fetch_rows(t.ctx, table, ggml_reshape_1d(t.ctx, ids, c.n_used), victims, from, to));
            chosen  = ggml_reshape_2d(t.ctx, fetch, c.n_used, 1);
        }
        const auto stack = [&](const ggml_type type, const int n_in, const int n_out, const size_t at) {
            ggml_tensor * s = ggml_new_tensor_3d(t.ctx, type, n_in, n_out, bank->ne[1]);
            s->nb[2]  = n_bytes;
            s->nb[3]  = n_bytes*bank->ne[1];
            s->data   = (char *) bank->data + at;
            s->buffer = bank->buffer;
            return s;
        };
        ggml_tensor * x = ggml_reshape_3d(t.ctx, normed, c.n, 1, 1);
        up   = t.place(ggml_mul_mat_id(t.ctx, stack(c.type, c.n, c.n_ff, up_at), x, chosen));
        gate = t.place(ggml_mul_mat_id(t.ctx, stack(c.type, c.n, c.n_ff, 0), x, chosen));
        ggml_build_forward_expand(t.graph, up);
        glu  = t.place(ggml_swiglu_split(t.ctx, gate, up));
        down = t.place(ggml_mul_mat_id(t.ctx, stack(c.type_down, c.n_ff, c.n, down_at), glu, chosen));
        moe = append_expert_sum(t, t.place(ggml_mul(t.ctx, down, weights)));
        ggml_tensor * s_up = t.place(ggml_mul_mat(t.ctx, matrix(GGML_TYPE_Q8_0, c.n, 256), normed));
        ggml_build_forward_expand(t.graph, s_up);
        ggml_tensor * s_gate = t.place(ggml_mul_mat(t.ctx, matrix(GGML_TYPE_Q8_0, c.n, 256), normed));
        ggml_tensor * s_glu  = t.place(ggml_swiglu_split(t.ctx, s_gate, s_up));
        ggml_tensor * s_down = t.place(ggml_mul_mat(t.ctx, matrix(GGML_TYPE_Q8_0, 256, c.n), s_glu));
        ggml_build_forward_expand(t.graph, s_down);
        product = t.place(ggml_mul_mat(t.ctx, leaf(GGML_TYPE_F32, { c.n, 1 }, normal(c.n, 0.03f).data()), normed));
        ggml_tensor * out = t.place(ggml_mul(t.ctx, s_down, t.place(ggml_sigmoid(t.ctx, product))));
        sum = t.place(ggml_add(t.ctx, t.place(ggml_add(t.ctx, moe, out)), residual));
        ggml_build_forward_expand(t.graph, sum);
        for (int i = 0; i < t.graph->n_nodes; ++i) {
            t.graph->nodes[i]->flags |= GGML_TENSOR_FLAG_COMPUTE;
        }
        moegraph_get_context(cuda).next_shared = { s_up, s_gate, s_glu, s_down, product };
    }

    int at(const ggml_tensor * node) const {
        int i = 0;
        while (t.graph->nodes[i] != node) {
            ++i;
        }
        return i;
    }
    // As an evaluation does. Returns what is wrong.
    std::string run() {
        moegraph_done_clear(cuda);
        moegraph_rows_begin(cuda, t.graph);
        moegraph_router_begin(cuda);
        if (moegraph_router_try(cuda, t.graph, 0) != at(weights)) {
            return "the router is not one kernel";
        }
        if (fetch != nullptr && !moegraph_done_has(cuda, fetch)) {
            moegraph_fetch_rows(cuda, fetch);
        }
        moegraph_rows_mul_mat(cuda, up, gate, glu);
        return moegraph_layer_end_try(cuda, t.graph, at(moe), down, nullptr, nullptr, weights, true) ? "" :
            "the end of the layer is not one kernel";
    }
};

static std::string difference(const fetch_case & c) {
    ints replay;
    for (int k = 0; c.replay && k < c.n_used; ++k) {
        replay.push_back((7*(k == 1 && c.twice ? 0 : k) + 3) % c.n_experts);
    }
    layer all(c, false, replay), one(c, true, replay);
    std::string wrong = all.run();
    if (!wrong.empty()) {
        return wrong + " (all experts there)";
    }
    const int32_t * ids = (const int32_t *) all.ids->data;
    const std::set<int> chosen(ids, ids + c.n_used);
    ints table(c.n_experts, -1), owner(c.n_slots, -1);
    int slot = c.n_free; // these are free
    for (int k = c.n_missing; k < c.n_used; ++k, ++slot) {
        table[ids[k]] = slot;
        owner[slot] = ids[k];
    }
    for (int e = 0; slot < c.n_slots; ++e) {
        if (chosen.count(e) == 0) {
            table[e] = slot;
            owner[slot++] = e;
        }
    }
    ints victims; // some that are needed first, free ones, one outside of the slots, others
    const int n_victims = (int) one.victims->ne[1];
    const auto add = [&](const int row, const int held) {
        if ((int) victims.size() < 2*n_victims) {
            victims.push_back(row);
            victims.push_back(held);
        }
    };
    for (int i = 0; i < c.n_needed; ++i) {
        add(c.n_free + i, owner[c.n_free + i]);
    }
    for (int i = 0; i < c.n_free; ++i) {
        add(i, -1);
    }
    if (c.n_needed > 0) {
        add(c.n_slots, -1);
    }
    for (int s = c.n_slots - 1; (int) victims.size() < 2*n_victims; --s) {
        add(s, s >= 0 ? owner[s] : -1);
    }
    // the rule
    ints slots(c.n_used), fetched(c.n_used, -1);
    int next = 0;
    for (int k = 0; k < c.n_used; ++k) {
        slots[k] = table[ids[k]];
        for (int j = 0; j < k && slots[k] < 0; ++j) {
            slots[k] = ids[j] == ids[k] ? slots[j] : -1;
        }
        for (; slots[k] < 0 && next < n_victims; ++next) {
            const int row = victims[2*next], held = victims[2*next + 1];
            if (row >= 0 && row < c.n_slots && (held < 0 || chosen.count(held) == 0)) {
                slots[k]   = row;
                fetched[k] = ids[k];
                ++next;
                break;
            }
        }
    }
    memcpy(one.table->data, table.data(), ggml_nbytes(one.table));
    memcpy(one.victims->data, victims.data(), ggml_nbytes(one.victims));
    const auto expert = [&](const int e) { return (const char *) one.from->data + e*one.n_bytes; };
    const auto in     = [&](const int s) { return (char *) one.to->data + s*one.n_bytes; };
    for (int run = 0; run < 2; ++run) { // the second starts with what the first has left
        memset(one.to->data, 0, ggml_nbytes(one.to));
        for (int s = 0; s < c.n_slots; ++s) {
            if (owner[s] >= 0) {
                memcpy(in(s), expert(owner[s]), one.n_bytes);
            }
        }
        if (!(wrong = one.run()).empty()) {
            return wrong;
        }
        if (!moegraph_done_has(one.cuda, one.fetch) ||
                (moegraph_router_slots(one.cuda, one.fetch) != nullptr) != c.fits) {
            return "the experts are not fetched as they should be";
        }
        if (one.told && (!moegraph_done_has(one.cuda, one.told) || memcmp(one.told->data, ids, ggml_nbytes(one.told)) != 0)) {
            return "the host is not told the ids";
        }
        ints now = owner;
        for (int k = 0; k < c.n_used; ++k) {
            const int found = ((const int32_t *) one.fetch->data)[k];
            if (found != slots[k]) {
                return "choice " + std::to_string(k) + " has slot " + std::to_string(found) + ", should have " + std::to_string(slots[k]);
            }
            if (fetched[k] >= 0) {
                now[slots[k]] = fetched[k];
            }
        }
        for (int s = 0; s < c.n_slots; ++s) {
            if (now[s] >= 0 && memcmp(in(s), expert(now[s]), one.n_bytes) != 0) {
                return "slot " + std::to_string(s) + " holds other bytes";
            }
        }
        const bool whole = std::find(slots.begin(), slots.end(), -1) == slots.end();
        if (whole && memcmp(one.glu->data, all.glu->data, ggml_nbytes(one.glu)) != 0) {
            return "gate and up have other bits";
        }
        if (whole && memcmp(one.sum->data, all.sum->data, ggml_nbytes(one.sum)) != 0) {
            return "the layer has other bits";
        }
    }
    return "";
}

int main() {
    int i = 0;
    const auto check = [&](fetch_case c) {
        emulated::order        = ++i % 3;
        emulated::early_copies = i % 4 == 0;
        report(c.str(), difference(c));
    };
    emulated::shared_limit = 227*1024;
    const ggml_type types[] = { GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, GGML_TYPE_Q8_0, GGML_TYPE_Q6_K };
    for (const ggml_type type : types) {
        for (const int n_missing : { 0, 1, 4, 8 }) {
            const ggml_type down = type == GGML_TYPE_Q8_0 ? GGML_TYPE_Q8_0 : n_missing % 2 ? GGML_TYPE_Q6_K : GGML_TYPE_Q5_K;
            check({ type, down, 2048, 256, 64, 8, 24, n_missing, n_missing < 4 ? 3 : 0, n_missing == 4 ? 2 : 0, true, i % 3 == 2, true });
        }
    }
    check({ GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, 2048, 256, 128, 10, 10, 10, 0, 10, true, false, true });  // all slots are free
    check({ GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, 2048, 256, 64, 8, 24, 6, 2, 4, true, false, true });      // a victim lacks
    check({ GGML_TYPE_Q6_K, GGML_TYPE_Q6_K, 1536, 256, 64, 8, 24, 3, 2, 0, false, false, false });    // rows end within 16 bytes
    check({ GGML_TYPE_Q4_K, GGML_TYPE_Q5_K, 2048, 256, 64, 8, 24, 3, 2, 0, true, true, true, true }); // an id twice
    printf("all %d checks of fetching experts: %d failed\n", n_run, n_failed);
    return n_failed != 0;
}
