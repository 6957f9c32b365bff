#include "places.h"

#include <string.h>

int32_t mg_find_missing(const int32_t * ids, int32_t n, const int32_t * table, int32_t n_expert, uint8_t * absent,
        int32_t * counts, int32_t * found) {
    memset(counts, 0, sizeof(*counts) * (size_t) n_expert);
    for (int32_t i = 0; i < n; i++) {
        if ((uint32_t) ids[i] >= (uint32_t) n_expert) {
            return -1;
        }
        absent[i] = table[ids[i]] < 0;
        counts[ids[i]]++;
    }
    int32_t n_found = 0;
    for (int32_t e = 0; e < n_expert; e++) {
        if (counts[e] > 0 && table[e] < 0) {
            int32_t at = n_found++;
            while (at > 0 && counts[found[at - 1]] < counts[e]) {
                found[at] = found[at - 1];
                at--;
            }
            found[at] = e;
        }
    }
    return n_found;
}

int32_t mg_sort_places(const int32_t * ids, const uint8_t * absent, int32_t n, int32_t n_expert, int32_t * bounds,
        int32_t * places) {
    // no branches on `absent`, which no processor foresees: bounds[0] counts what has a slot, and those places go behind
    memset(bounds, 0, sizeof(*bounds) * ((size_t) n_expert + 1));
    int is_wrong = 0;
    for (int32_t i = 0; i < n; i++) {
        const int is_known = (uint32_t) ids[i] < (uint32_t) n_expert;
        is_wrong |= (absent[i] != 0) & !is_known;
        bounds[(absent[i] != 0) & is_known ? ids[i] + 1 : 0]++;
    }
    if (is_wrong) {
        return -1;
    }
    bounds[0] = 0;
    for (int32_t e = 0; e < n_expert; e++) {
        bounds[e + 1] += bounds[e];
    }
    // each bound moves to the end of its expert, which is where the next one begins
    int32_t behind = bounds[n_expert];
    for (int32_t i = 0; i < n; i++) {
        int32_t * at = absent[i] ? &bounds[ids[i]] : &behind;
        places[(*at)++] = i;
    }
    memmove(bounds + 1, bounds, sizeof(*bounds) * (size_t) n_expert);
    bounds[0] = 0;
    return bounds[n_expert];
}

int32_t mg_merge_places(const int32_t * sorted, const int32_t * bounds, const int32_t * experts, int32_t n_experts,
        int32_t n_used, int32_t n_rows, int32_t * ends, int32_t * out) {
    memset(ends, 0, sizeof(*ends) * ((size_t) n_rows + 1));
    for (int32_t i = 0; i < n_experts; i++) {
        for (int32_t at = bounds[experts[i]]; at < bounds[experts[i] + 1]; at++) {
            ends[sorted[at] / n_used + 1]++;
        }
    }
    for (int32_t row = 0; row < n_rows; row++) {
        ends[row + 1] += ends[row];
    }
    memset(out, 0xFF, sizeof(*out) * (size_t) ends[n_rows]); // -1: nothing there yet
    for (int32_t i = 0; i < n_experts; i++) {
        for (int32_t at = bounds[experts[i]]; at < bounds[experts[i] + 1]; at++) {
            const int32_t place = sorted[at], row = place / n_used;
            // few places are of one row: move those that come after this one
            int32_t to = ends[row]++;
            while (to > 0 && out[to - 1] > place) {
                out[to] = out[to - 1];
                to--;
            }
            out[to] = place;
        }
    }
    return ends[n_rows];
}

static void fill(int32_t * words, int32_t from, int32_t to, int32_t value) {
    for (int32_t i = from; i < to; i++) {
        words[i] = value;
    }
}

int32_t mg_unit(const int32_t * places, int32_t n, const int32_t * ids, const int32_t * slots, int32_t n_used,
        int32_t n_rows, int32_t n_padded, int32_t max_rounds, int32_t no_term, int32_t * words) {
    int32_t * token = words, * slot = token + n_padded, * place = slot + n_padded, * target = place + n_padded;
    int32_t * terms = target + n_padded;
    int32_t most = 0, n_targets = 0;
    for (int32_t i = 0, count = 0; i < n; i++) {
        token[i] = places[i] / n_used;
        slot[i] = slots[ids[places[i]]];
        place[i] = places[i];
        count = i > 0 && token[i] == token[i - 1] ? count + 1 : 1;
        most = count > most ? count : most;
    }
    fill(token, n, n_padded, 0);
    fill(slot, n, n_padded, -1);
    fill(place, n, n_padded, n_rows * n_used);
    int32_t n_rounds = 1;
    while (n_rounds < most) {
        n_rounds *= 2;
    }
    if (n_rounds > max_rounds) {
        return -1;
    }
    fill(terms, 0, n_rounds * n_padded, no_term);
    for (int32_t i = 0, round = 0; i < n; i++) {
        const int is_first = i == 0 || token[i] != token[i - 1];
        round = is_first ? 0 : round + 1;
        if (is_first) {
            target[n_targets++] = token[i];
        }
        terms[round * n_padded + n_targets - 1] = i;
    }
    fill(target, n_targets, n_padded, n_rows);
    return n_rounds;
}
