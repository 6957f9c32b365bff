"""Engines whose graphs fetch by themselves: how they are run, and what must hold between passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from helpers.cache_rules import check_cache
from helpers.shared import prompt
from moegraph.engine import Engine
from moegraph.ggml.lib import C, ffi
from moegraph.kinds import Kind
from moegraph.resident.store import ExpertStore

PRESET, N_LAYER, N_USED = "legacy32", 8, 4
# One slot more than a row chooses: most rows miss something, and nearly all is at risk.
FETCHING = {
    "pin_layers": 0, "cache_slots": N_LAYER * (N_USED + 1), "miss": "stream", "host_pin": "all",
    "policy": "lru",
}  # fmt: skip
# Single rows, with passes of several rows between them.
WIDTHS = [1, 1, 1, 8, 1, 1, 3, 1, 8, 8, 1, 1, 20, 1, 1, 1]
ALL = frozenset(range(N_LAYER))


def run(
    engine: Engine, widths: list[int] = WIDTHS, after: Callable[[], Any] = lambda: None
) -> npt.NDArray[np.float32]:
    """Return the logits of passes of these widths from an empty sequence on."""
    engine.reset()
    ids, parts, at = prompt(engine, sum(widths), seed=11), [], 0
    for width in widths:
        parts.append(engine.forward_logits(ids[at : at + width], at))
        at += width
        after()
    return np.concatenate(parts)


def fetch_layers(engine: Engine) -> frozenset[int]:
    """Return the layers whose graphs would fetch in a pass of one row."""
    return engine.runner.residency.miss_mode(Kind.DECODE, 1).fetch_layers


def source(store: ExpertStore, il: int, expert: int) -> Any:
    """Return the address of a packed expert, as those that copy it get it."""
    base = store.pinned(il)
    if base is None:
        return store.ring.take(il, expert)
    return base + expert * store.packing(il).stride


def check_sound(engine: Engine) -> None:
    """Check that cache, tables and listeds agree, and that slots hold what they are said to."""
    handler, cache = engine.runner.misses, engine.runner.cache
    store, tables, fetching = handler.store, handler.tables, fetch_layers(engine)
    check_cache(cache)
    sent = tables._rows.array.copy()
    if not tables._is_due:
        on_device = engine.stage.banks.all_tables
        C.ggml_backend_tensor_get(on_device, ffi.from_buffer(sent), 0, sent.nbytes)
    for il in set(range(len(cache.tables))) - cache.dirty:
        np.testing.assert_array_equal(sent[il, : cache.n_expert], cache.tables[il])
        if il in fetching & engine.runner.residency._victim_layers:
            listed = sent[il, cache.n_expert :][: 2 * engine.stage.banks.n_victims].reshape(-1, 2)
            listed = listed[listed[:, 0] >= 0]
            layer = cache.layers[il]
            assert [layer.owner[slot] for slot, _ in listed] == listed[:, 1].tolist()
            assert len(set(listed[:, 0].tolist())) == len(listed) >= N_USED
            # of equal scores any may be listed
            first = listed[: 2 * N_USED, 1].tolist()
            scores = [layer.policy.score[e] for e in first if e >= 0]
            others = layer.resident - set(listed[:, 1].tolist())
            assert all(max(scores) <= layer.policy.score[e] for e in others if scores)
    for il in store.layers:
        memory, packing = engine.stage.banks.layer(il).memory, store.packing(il)
        held = np.empty(packing.n_bytes, np.uint8)
        for expert in np.flatnonzero(cache.tables[il] >= 0).tolist():
            at = int(cache.tables[il, expert]) * packing.stride
            C.ggml_backend_tensor_get(memory, ffi.from_buffer(held), at, held.nbytes)
            wanted = ffi.buffer(ffi.cast("char *", source(store, il, expert)), held.nbytes)
            assert held.tobytes() == bytes(wanted), f"layer {il}, expert {expert}"


class Countdown:
    """A cancel token that is set from the k-th look on."""

    def __init__(self, n: int) -> None:
        self.n = n

    def is_set(self) -> bool:
        self.n -= 1
        return self.n <= 0
