"""Rules that an expert cache and a KV pool keep at every moment."""

from __future__ import annotations

import numpy as np

from moegraph.experts.cache import ExpertCache
from moegraph.experts.slots import LayerSlots
from moegraph.resident.kvpool import KVPool


def check_cache(cache: ExpertCache) -> None:
    """Check all layers."""
    for layer in cache.layers:
        check_layer(layer)


def check_layer(layer: LayerSlots) -> None:
    """Check one layer."""
    owned, loading = [e for e in layer.owner if e >= 0], layer.loading
    table, resident = layer.table, layer.resident
    assert len(set(owned)) == len(owned), "a slot has two experts or an expert two slots"
    assert not resident & set(loading), "an expert is loading and resident"
    assert set(owned) == resident | set(loading)
    assert set(np.flatnonzero(table >= 0).tolist()) == resident
    assert all(layer.owner[table[e]] == e for e in resident), "table and owners disagree"
    assert all(layer.owner[slot] == e for e, slot in loading.items()), "a loading slot was given"
    assert sorted(layer.free) == [slot for slot, e in enumerate(layer.owner) if e < 0]
    assert layer.fresh <= resident, "an expert admitted in this pass was evicted"
    assert not layer.full or layer.owner == list(range(layer.n_expert)), "a full layer changed"


def check_pool(pool: KVPool) -> None:
    """Check that sequences use the pages of their lists, and that the table is right."""
    for slot, pages in enumerate(pool._pages):
        assert sorted(pages) == np.flatnonzero(pool._uses[slot]).tolist()
        rest = (pages[:1] or [0]) * (pool.table.shape[1] - len(pages))
        assert pool.table[slot].tolist() == pages + rest, "the table is out of date"
        for at, page in enumerate(pages):
            users = np.flatnonzero(pool._uses[:, page])
            assert all(pool._pages[user][at : at + 1] == [page] for user in users)
