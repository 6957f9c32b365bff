#include "choose.h"

#include "moegraph-candidates.h"

#include <math.h>
#include <stdbool.h>

// Bound of the relative error of the device's sums, and of its scores beside those computed here.
#define SUM_ERROR   2e-5
#define SCORE_ERROR 2e-5

struct token {
    float   logit;
    int32_t id;
};

// What is known of a row after bias and penalties. All tokens of at least `floor` are listed, in order; the first n of
// them may be kept. is_closed: no token behind them is kept.
#define MAX_TOKENS (MOEGRAPH_CANDIDATES + MOEGRAPH_DRAW_IDS)

struct known {
    const struct mg_sampler * sampler;
    const struct moegraph_listed * row;
    uint64_t key;
    struct token tokens[MAX_TOKENS];
    int    n;
    bool   is_closed;
    bool   is_rank_open; // top-k cuts behind what is listed
    bool   is_mass_open; // so does top-p
    double low, high;    // bounds of the sum of what top-p keeps a part of
    struct token changed[MOEGRAPH_DRAW_IDS];
};

static double weight(const struct known * k, float logit) {
    return exp((double) logit - k->row->largest);
}

// The place of an id among the changed ones, or -1.
static int find_changed(const struct mg_sampler * s, int32_t id) {
    int low = 0, high = s->n_changed;
    while (low < high) {
        const int middle = (low + high)/2;
        if (s->ids[middle] < id) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low < s->n_changed && s->ids[low] == id ? low : -1;
}

static bool is_allowed(const struct mg_sampler * s, int32_t id) {
    return s->allowed == NULL || s->allowed[id];
}

// As `Sampler._adjust` computes it, with the same roundings.
static float adjusted(const struct mg_sampler * s, int i, float logit) {
    logit = logit + s->bias[i];
    logit = logit <= 0.0f ? logit*s->repeat[i] : logit/s->repeat[i];
    return (float) ((double) logit - s->subtracted[i]);
}

static void insert(struct known * k, struct token token) {
    int at = k->n++;
    for (; at > 0 && moegraph_is_before(token.logit, token.id, k->tokens[at - 1].logit, k->tokens[at - 1].id); --at) {
        k->tokens[at] = k->tokens[at - 1];
    }
    k->tokens[at] = token;
}

static void list_tokens(struct known * k) {
    const struct mg_sampler * s = k->sampler;
    const struct moegraph_listed * row = k->row;
    const int  n_listed = row->n_likely <= MOEGRAPH_CANDIDATES ? row->n_likely : 0;
    const float floor   = row->n_likely <= MOEGRAPH_CANDIDATES ? row->floor : INFINITY;
    k->n         = 0;
    k->is_closed = floor == -INFINITY;
    for (int i = 0; i < n_listed; ++i) {
        if ((s->n_changed == 0 || find_changed(s, row->ids[i]) < 0) && is_allowed(s, row->ids[i])) {
            k->tokens[k->n++] = (struct token) { row->logits[i], row->ids[i] };
        }
    }
    for (int i = 0; i < s->n_changed; ++i) {
        const float now = adjusted(s, i, row->wanted[s->places[i]]);
        k->changed[i] = (struct token) { now, s->ids[i] };
        if (now >= floor && now > -INFINITY && is_allowed(s, s->ids[i])) {
            insert(k, k->changed[i]);
        }
    }
}

// Bounds of the sum over all tokens; listed: the sum over those that are listed.
static void bound_sum(struct known * k, double listed) {
    const struct mg_sampler * s = k->sampler;
    double total = k->row->total, error = k->row->total;
    for (int i = 0; i < s->n_changed; ++i) {
        const double now = weight(k, k->changed[i].logit);
        total += now - weight(k, k->row->wanted[s->places[i]]);
        error += now;
    }
    k->low  = k->is_rank_open || s->allowed ? listed : total - SUM_ERROR*error;
    k->high = total + SUM_ERROR*error;
}

static void cut(struct known * k, int n) {
    k->n         = n;
    k->is_closed = true;
}

static void apply_top_k(struct known * k) {
    const int top_k = k->sampler->top_k;
    if (top_k > 0 && top_k <= k->n) {
        cut(k, top_k);
    } else if (top_k > 0 && !k->is_closed) {
        k->is_rank_open = true;
    }
}

// Keeps the tokens whose surprise is closest to the entropy, up to probability typical_p, in order of their logits.
static void apply_typical(struct known * k) {
    double probs[MAX_TOKENS], odd[MAX_TOKENS], total = 0.0, entropy = 0.0, sum = 0.0;
    bool   is_kept[MAX_TOKENS] = { false };
    for (int i = 0; i < k->n; ++i) {
        probs[i] = exp((double) k->tokens[i].logit - k->tokens[0].logit);
        total += probs[i];
    }
    for (int i = 0; i < k->n; ++i) {
        probs[i] /= total;
        odd[i]   = -log(probs[i]);
        entropy += probs[i] > 0.0 ? probs[i]*odd[i] : 0.0;
    }
    for (int i = 0; i < k->n; ++i) {
        odd[i] = fabs(odd[i] - entropy);
    }
    for (int n_kept = 0; n_kept < k->n && sum <= k->sampler->typical_p; ++n_kept) {
        int next = -1;
        for (int i = 0; i < k->n; ++i) {
            if (!is_kept[i] && (next < 0 || odd[i] < odd[next])) {
                next = i;
            }
        }
        is_kept[next] = true;
        sum += probs[next];
    }
    int n = 0;
    for (int i = 0; i < k->n; ++i) {
        if (is_kept[i]) {
            k->tokens[n++] = k->tokens[i];
        }
    }
    k->n = n;
}

// Returns how many of the listed tokens are surely kept; those behind may be.
static int apply_top_p(struct known * k) {
    const double p = k->sampler->top_p;
    if (p >= 1.0) {
        return k->n;
    }
    double sum = 0.0;
    for (int i = 0; i < k->n; ++i) {
        sum += weight(k, k->tokens[i].logit);
    }
    if (k->is_closed) {
        k->low = k->high = sum;
    } else {
        bound_sum(k, sum);
    }
    double before = 0.0;
    for (int i = 0; i < k->n; ++i) {
        if (i > 0 && before >= p*k->high) {
            cut(k, i);
            return i;
        }
        if (i > 0 && before >= p*k->low) {
            return i;
        }
        before += weight(k, k->tokens[i].logit);
    }
    k->is_mass_open = !k->is_closed;
    return k->n;
}

static double score(const struct known * k, struct token token) {
    const double v = ((double) (moegraph_random(k->key, (uint32_t) token.id) >> 11) + 0.5)*0x1p-53;
    return ((double) token.logit - k->row->largest)/k->sampler->temperature - log(-log1p(-v));
}

static int32_t draw(const struct known * k) {
    int    best       = 0;
    double best_score = -INFINITY;
    for (int i = 0; i < k->n && k->n > 1; ++i) {
        const double own = score(k, k->tokens[i]);
        if (own > best_score) {
            best_score = own;
            best       = i;
        }
    }
    return k->tokens[best].id;
}

enum answer { NO, YES, MAYBE };

// Whether top-k and top-p keep a token that is not listed, the i-th early one.
static enum answer is_kept(const struct known * k, int i, struct token token) {
    const struct mg_sampler * s = k->sampler;
    if (i >= MOEGRAPH_CANDIDATES_MASSES || s->allowed) {
        return MAYBE;
    }
    double mass = 0.0;
    int    rank = 0;
    for (int p = 0; p < MOEGRAPH_CANDIDATES_PARTS; ++p) {
        mass += k->row->above[p][i];
        rank += k->row->n_above[p][i];
    }
    for (int c = 0; c < s->n_changed; ++c) {
        const float logit = k->row->wanted[s->places[c]];
        if (moegraph_is_before(logit, s->ids[c], token.logit, token.id)) {
            mass -= weight(k, logit);
            rank -= 1;
        }
        if (moegraph_is_before(k->changed[c].logit, s->ids[c], token.logit, token.id)) {
            mass += weight(k, k->changed[c].logit);
            rank += 1;
        }
    }
    if (k->is_rank_open && rank >= s->top_k) {
        return NO;
    }
    if (!k->is_mass_open) {
        return YES;
    }
    const double error = SUM_ERROR*(k->row->total + k->high);
    return mass + error < s->top_p*k->low ? YES : mass - error >= s->top_p*k->high ? NO : MAYBE;
}

// The kept token of the largest score, by the list of early tokens. Those whose logits change are in no list.
static int32_t draw_early(const struct known * k, float least) {
    const struct mg_sampler * s = k->sampler;
    const struct moegraph_listed * row = k->row;
    if (row->n_early < 1 || row->n_early > MOEGRAPH_EARLY) {
        return MG_CHOOSE_UNKNOWN;
    }
    const double shift = row->largest/s->temperature;
    const double floor = row->early_floor - shift + SCORE_ERROR*(2.0 + fabs((double) row->early_floor) + fabs(shift));
    const float  listed = row->n_likely <= MOEGRAPH_CANDIDATES ? row->floor : INFINITY;
    double last = INFINITY;
    for (;;) { // the next smaller score
        struct token next = { 0.0f, -1 };
        double next_score = floor;
        int    place      = -1;
        for (int i = 0; i < row->n_early + s->n_changed; ++i) {
            const struct token token = i < row->n_early ? (struct token) { row->early_logits[i], row->early_ids[i] } :
                k->changed[i - row->n_early];
            if (token.logit == -INFINITY || token.logit < least || !is_allowed(s, token.id) ||
                    (i < row->n_early && find_changed(s, token.id) >= 0)) {
                continue;
            }
            const double own = score(k, token);
            if (own < last && own > next_score) {
                next_score = own;
                next       = token;
                place      = i;
            }
        }
        if (next.id < 0) {
            return MG_CHOOSE_UNKNOWN;
        }
        if ((!k->is_rank_open && !k->is_mass_open) || next.logit >= listed) {
            return next.id;
        }
        const enum answer kept = place < row->n_early ? is_kept(k, place, next) : MAYBE;
        if (kept != NO) {
            return kept == YES ? next.id : MG_CHOOSE_UNKNOWN;
        }
        last = next_score;
    }
}

int32_t mg_choose(const struct mg_sampler * sampler, const void * row, uint64_t key) {
    struct known k;
    k.sampler = sampler;
    k.row     = (const struct moegraph_listed *) row;
    k.key     = key;
    k.is_rank_open = k.is_mass_open = false;
    list_tokens(&k);
    if (k.n == 0 && k.is_closed) {
        return MG_CHOOSE_NONE;
    }
    if (sampler->temperature <= 0.0 && sampler->typical_p >= 1.0) {
        return k.n ? k.tokens[0].id : MG_CHOOSE_UNKNOWN;
    }
    apply_top_k(&k);
    if (sampler->typical_p < 1.0) {
        if (!k.is_closed) {
            return MG_CHOOSE_UNKNOWN;
        }
        apply_typical(&k);
        if (sampler->temperature <= 0.0) {
            return k.tokens[0].id;
        }
    }
    const int n_sure = apply_top_p(&k);
    float least = -INFINITY;
    if (sampler->min_p_log > -INFINITY) {
        if (k.n == 0) {
            return MG_CHOOSE_UNKNOWN;
        }
        least = k.tokens[0].logit + sampler->min_p_log;
        int n = k.n;
        while (n > 0 && k.tokens[n - 1].logit < least) {
            --n;
        }
        if (n < k.n || least >= k.row->floor) {
            cut(&k, n);
        }
    }
    if (n_sure < k.n) { // it is not sure where top-p cuts
        return MG_CHOOSE_UNKNOWN;
    }
    if (k.is_closed) {
        return draw(&k);
    }
    return draw_early(&k, least);
}
