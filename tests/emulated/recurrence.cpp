// The gated delta rule of DeltaNet as chains and trees of rows, on emulated kernels.
//
// Rows of a chain must have the bits of the kernel for short chains, which gets them in pieces, and what float64 gives,
// and so must the states that it leaves. All other states stay, and rows of a tree have the bits of their path alone.

#include "driver.h"
#include "moegraph.h"
#include "moegraph-recurrence.cuh"

#include <algorithm>

// Of a piece of a chain: the kernel for long chains computes none so short.
static constexpr int MAX_PIECE = MOEGRAPH_LONG_CHAIN - 1;

// Relative squared error of a row or state.
static constexpr double MAX_NMSE = 1e-11;

struct delta_case {
    int  S, n_k, n_v, n, n_seqs;
    bool views;  // q, k and v lie in one tensor, as behind a convolution
    bool ragged; // sequences have lengths
    bool absent; // some sequences have no slot
};

struct delta_data {
    delta_case c;
    floats q, k, v, gate, beta, pool;
    ints   slots, lengths;
    int    n_slots;

    explicit delta_data(const delta_case & c) : c(c), n_slots(c.n_seqs + 2) {
        const size_t rows = (size_t) c.n*c.n_seqs;
        q    = normal(rows*c.n_k*c.S, 1.0f);
        k    = normal(rows*c.n_k*c.S, 0.7f/std::sqrt((float) c.S));
        v    = normal(rows*c.n_v*c.S, 1.0f);
        gate = normal(rows*c.n_v, 0.5f);
        beta = normal(rows*c.n_v, 0.3f);
        for (float & x : gate) {
            x = -std::fabs(x);
        }
        for (float & x : beta) {
            x = 1/(1 + std::exp(-x));
        }
        pool = normal((size_t) n_slots*c.n_v*c.S*c.S, 1.0f);
        for (int i = 0; i < n_slots; ++i) {
            slots.insert(slots.begin() + rng() % (slots.size() + 1), i);
        }
        slots.resize(c.n_seqs);
        for (int s = 0; s < c.n_seqs; ++s) {
            if (c.absent && s % 3 != 1) {
                slots[s] = s % 3 == 0 ? -1 : n_slots;
            }
            static const int beyond[] = { -3, 0, 1, 7 };
            lengths.push_back(!c.ragged ? c.n : s < c.n_seqs - 1 ? (int) (rng() % (c.n + 1)) : c.n + beyond[rng() % 4]);
        }
    }
    bool there(const int s) const { return slots[s] >= 0 && slots[s] < n_slots; }
    int  rows(const int s)  const { return there(s) ? std::max(0, std::min(c.n, lengths[s])) : 0; }
    size_t n_state() const { return (size_t) c.n_v*c.S*c.S; }

    // These rows of a sequence, alone.
    delta_data part(const int seq, const ints & which) const {
        delta_data p = *this;
        p.c.n      = (int) which.size();
        p.c.n_seqs = 1;
        p.slots    = { slots[seq] };
        const auto take = [&](floats & to, const floats & from, const int width) {
            to.clear();
            for (const int row : which) {
                const auto first = from.begin() + (size_t) (seq*c.n + row)*width;
                to.insert(to.end(), first, first + width);
            }
        };
        take(p.q, q, c.n_k*c.S);
        take(p.k, k, c.n_k*c.S);
        take(p.v, v, c.n_v*c.S);
        take(p.gate, gate, c.n_v);
        take(p.beta, beta, c.n_v);
        return p;
    }
};

struct delta_result {
    floats out, pool;
};

// Runs the operation: without parents as a chain, with lengths if they are wanted.
static delta_result run(const delta_data & d, const ints * parents, const bool lengths) {
    const delta_case & c = d.c;
    tensors t;
    const int64_t S = c.S, n_k = c.n_k, n_v = c.n_v, n = c.n, n_seqs = c.n_seqs;
    ggml_tensor * q, * k, * v;
    if (c.views) {
        const int64_t width = (2*n_k + n_v)*S + 4;
        floats all((size_t) width*n*n_seqs, NAN);
        for (int64_t r = 0; r < n*n_seqs; ++r) {
            std::copy_n(d.q.begin() + r*n_k*S, n_k*S, all.begin() + r*width);
            std::copy_n(d.k.begin() + r*n_k*S, n_k*S, all.begin() + r*width + n_k*S);
            std::copy_n(d.v.begin() + r*n_v*S, n_v*S, all.begin() + r*width + 2*n_k*S);
        }
        ggml_tensor * x = t.leaf(GGML_TYPE_F32, { width, n, n_seqs }, all.data());
        const auto view = [&](const int64_t heads, const int64_t offset) {
            return ggml_view_4d(t.ctx, x, S, heads, n, n_seqs, S*sizeof(float), x->nb[1], x->nb[2], offset*sizeof(float));
        };
        q = view(n_k, 0);
        k = view(n_k, n_k*S);
        v = view(n_v, 2*n_k*S);
    } else {
        q = t.leaf(GGML_TYPE_F32, { S, n_k, n, n_seqs }, d.q.data());
        k = t.leaf(GGML_TYPE_F32, { S, n_k, n, n_seqs }, d.k.data());
        v = t.leaf(GGML_TYPE_F32, { S, n_v, n, n_seqs }, d.v.data());
    }
    ggml_tensor * gate  = t.leaf(GGML_TYPE_F32, { 1, n_v, n, n_seqs }, d.gate.data());
    ggml_tensor * beta  = t.leaf(GGML_TYPE_F32, { 1, n_v, n, n_seqs }, d.beta.data());
    ggml_tensor * pool  = t.leaf(GGML_TYPE_F32, { S*S*n_v, d.n_slots }, d.pool.data());
    ggml_tensor * slots = t.leaf(GGML_TYPE_I32, { n_seqs }, d.slots.data());
    if (c.views) {
        ggml_set_input(slots);
    }
    ggml_tensor * tree = parents ? t.leaf(GGML_TYPE_I32, { n, n_seqs }, parents->data()) : nullptr;
    ggml_tensor * lens = lengths ? t.leaf(GGML_TYPE_I32, { n_seqs }, d.lengths.data()) : nullptr;
    ggml_tensor * out  = t.place(moegraph_delta_net(t.ctx, q, k, v, gate, beta, pool, slots, tree, lens));
    GGML_ASSERT(moegraph_delta_net_supported(out));
    ggml_backend_cuda_context cuda;
    moegraph_delta_net(cuda, out);
    const float * values = (const float *) out->data, * states = (const float *) pool->data;
    return { floats(values, values + ggml_nelements(out)), floats(states, states + d.pool.size()) };
}

static ints count_up(const int begin, const int end) {
    ints rows;
    for (int i = begin; i < end; ++i) {
        rows.push_back(i);
    }
    return rows;
}

// The results of a path of a sequence's rows by the kernel for short chains, and the pool behind it.
static delta_result in_pieces(const delta_data & d, const int seq, const ints & path) {
    delta_result all = { {}, d.pool };
    for (size_t begin = 0; begin < path.size();) {
        const size_t size = std::min<size_t>(path.size() - begin, 1 + begin*5 % MAX_PIECE);
        delta_data piece = d.part(seq, ints(path.begin() + begin, path.begin() + begin + size));
        piece.pool = all.pool;
        const delta_result r = run(piece, nullptr, false);
        all.out.insert(all.out.end(), r.out.begin(), r.out.end());
        all.pool = r.pool;
        begin += size;
    }
    return all;
}

// The same in float64.
static delta_result exact(const delta_data & d, const int seq, const ints & path) {
    const int S = d.c.S, n_v = d.c.n_v, n_k = d.c.n_k;
    delta_result all = { floats(path.size()*n_v*S), d.pool };
    for (int head = 0; head < n_v; ++head) {
        for (int column = 0; column < S; ++column) {
            float * state = &all.pool[d.slots[seq]*d.n_state() + ((size_t) head*S + column)*S];
            std::vector<double> s(state, state + S);
            for (size_t i = 0; i < path.size(); ++i) {
                const size_t  row   = (size_t) seq*d.c.n + path[i];
                const float * q     = &d.q[(row*n_k + head % n_k)*S];
                const float * k     = &d.k[(row*n_k + head % n_k)*S];
                const double  decay = std::exp((double) d.gate[row*n_v + head]);
                double dot = 0, result = 0;
                for (int e = 0; e < S; ++e) {
                    dot += s[e]*k[e];
                }
                const double delta = (d.v[(row*n_v + head)*S + column] - decay*dot)*d.beta[row*n_v + head];
                for (int e = 0; e < S; ++e) {
                    s[e]    = decay*s[e] + k[e]*delta;
                    result += s[e]*q[e];
                }
                all.out[(i*n_v + head)*S + column] = (float) (result/std::sqrt((double) S));
            }
            std::copy(s.begin(), s.end(), state);
        }
    }
    return all;
}

static std::string name_of(const char * kind, const delta_case & c) {
    return std::string(kind) + " S=" + std::to_string(c.S) + " heads=" + std::to_string(c.n_k) + "/" + std::to_string(c.n_v) + " n=" +
        std::to_string(c.n) + " seqs=" + std::to_string(c.n_seqs) + (c.views ? " views" : "") + (c.ragged ? " lengths" : "") +
        (c.absent ? " absent" : "") + " order=" + std::to_string(emulated::order);
}

static void check_chain(const delta_case & c) {
    const delta_data   d   = delta_data(c);
    const delta_result got = run(d, nullptr, c.ragged);
    const size_t width = (size_t) c.n_v*c.S;
    floats pool = d.pool;
    std::string wrong;
    for (int seq = 0; seq < c.n_seqs && wrong.empty(); ++seq) {
        const ints    rows = count_up(0, d.rows(seq));
        const float * mine = &got.out[seq*c.n*width];
        for (size_t i = rows.size()*width; i < c.n*width; ++i) {
            if (mine[i] != 0.0f) {
                wrong = "sequence " + std::to_string(seq) + ": results of rows that it does not have";
            }
        }
        if (rows.empty()) {
            continue;
        }
        const delta_result want = in_pieces(d, seq, rows), real = exact(d, seq, rows);
        for (size_t i = 0; i < rows.size()*width && wrong.empty(); ++i) {
            if (memcmp(mine + i, &want.out[i], sizeof(float)) != 0) {
                wrong = "sequence " + std::to_string(seq) + " row " + std::to_string(i/width) + " element " + std::to_string(i % width) + ": " +
                    std::to_string(mine[i]) + ", a short chain has " + std::to_string(want.out[i]);
            }
        }
        const size_t state = d.slots[seq]*d.n_state();
        std::copy_n(want.pool.begin() + state, d.n_state(), pool.begin() + state);
        for (size_t i = 0; i < rows.size() && wrong.empty(); ++i) {
            if (!(nmse(mine + i*width, &real.out[i*width], width) < MAX_NMSE)) {
                wrong = "sequence " + std::to_string(seq) + " row " + std::to_string(i) + " is not that of float64";
            }
        }
        if (wrong.empty() && !(nmse(&got.pool[state], &real.pool[state], d.n_state()) < MAX_NMSE)) {
            wrong = "sequence " + std::to_string(seq) + ": the state is not that of float64";
        }
    }
    if (wrong.empty() && memcmp(pool.data(), got.pool.data(), pool.size()*sizeof(float)) != 0) {
        wrong = "other states";
    }
    report(name_of("chain", c), wrong);
}

static void check_tree(const delta_case & c) {
    const delta_data d = delta_data(c);
    ints parents;
    for (int seq = 0; seq < c.n_seqs; ++seq) {
        for (int i = 0; i < c.n; ++i) {
            const int any = (int) (rng() % (i + 1)) - 1;
            parents.push_back(seq % 2 ? (i + 1)/2 - 1 : rng() % 8 == 0 ? -2 : any);
        }
    }
    const delta_result got = run(d, &parents, false);
    const size_t width = (size_t) c.n_v*c.S;
    std::string wrong = memcmp(got.pool.data(), d.pool.data(), d.pool.size()*sizeof(float)) != 0 ? "the pool changed" : "";
    for (int seq = 0; seq < c.n_seqs; ++seq) {
        const int * mine = &parents[seq*c.n];
        for (int row = 0; row < c.n && wrong.empty(); ++row) {
            ints path;
            for (int r = row; r >= 0 && d.there(seq) && mine[row] != -2 && mine[r] != -2; r = mine[r]) {
                path.insert(path.begin(), r);
            }
            floats want(width, 0.0f);
            if (!path.empty()) {
                const floats all = in_pieces(d, seq, path).out;
                want.assign(all.end() - width, all.end());
            }
            if (memcmp(&got.out[(seq*c.n + row)*width], want.data(), width*sizeof(float)) != 0) {
                wrong = "row " + std::to_string(row) + " of sequence " + std::to_string(seq) + " has other bits than its path alone";
            }
        }
    }
    report(name_of("tree", c), wrong);
}

int main() {
    int i = 0;
    for (const int S : { 16, 32, 64, 128 }) {
        for (const int n : { 1, 7, 8, 9, 15, 16, 33, 70 }) {
            for (const bool ragged : { false, true }) {
                if (n < 70 || ragged == (S < 64)) {
                    emulated::order = i++ % 3;
                    check_chain({ S, 1 + S % 32/16, 2, n, S < 64 ? 3 : 2, i % 2 == 0, ragged, false });
                }
            }
        }
        emulated::order = 2;
        check_chain({ S, 2, 4, 17, 2, true, true, true });
        check_chain({ S, 1, 3, 16, 3, false, false, true });
        for (const int n : { 9, 30 }) {
            emulated::order = i++ % 3;
            check_tree({ S, 1, 2, n, S == 128 ? 1 : 2, n == 9, false, false });
        }
    }
    printf("all %d checks of the recurrence: %d failed\n", n_run, n_failed);
    return n_failed != 0;
}
