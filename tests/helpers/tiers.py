"""Host memory as a cache of experts: its size for a test, and whether it holds what it says."""

from __future__ import annotations

import numpy as np

from moegraph.engine import Engine
from moegraph.ggml.lib import ffi
from moegraph.resident import layout


def room(engine: Engine, share: float) -> str:
    """Return the --host-mem with which host memory has room for a share of all experts."""
    store, n_expert = engine.stage.store, engine.hparams.n_expert
    strides = [store.packing(il).stride for il in store.layers]
    return f"{int(share * n_expert * sum(strides)) + layout.passing_bytes(strides)}B"


def check_held(engine: Engine) -> None:
    """Check host memory against the file, byte by byte, and against the books of both levels."""
    store, uploads, cache = engine.stage.store, engine.runner.misses.uploads, engine.runner.cache
    ring = store.ring
    engine.device.synchronize()
    for (il, expert), at in ring._held.items():
        packing, base = store.packing(il), ring._blocks[at].address
        whole = np.frombuffer(ffi.buffer(base, packing.n_bytes), np.uint8)
        cleared = whole.copy()
        packing.clear_gaps(cleared)
        assert np.array_equal(whole, cleared), "kernels multiply what is between the parts by zero"
        for part, info in store.infos(il).items():
            size = packing.sizes[part]
            got = np.frombuffer(ffi.buffer(base + packing.offsets[part], size), np.uint8)
            expected = engine.file.map(info)[expert * size : (expert + 1) * size]
            assert np.array_equal(got, expected), (il, expert, part)
    for il in store.n_held:
        held = ring.held(il)
        assert uploads.level._host[il].resident == held
        assert not held & cache.layers[il].resident, "an expert is on both levels"
    blocks = [*ring._held.values(), *(at for each in ring._passing.values() for at in each)]
    assert sorted(blocks) == list(range(len(ring._blocks))), "a block is lost or in use twice"
