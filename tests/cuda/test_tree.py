"""DeltaNet over trees of rows on a GPU, and the commit of a path."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.graph_runs import nmse
from helpers.tree_layer import Layer, verify_and_commit

from moegraph.ggml.device import Device


@pytest.mark.parametrize("n_tokens", [2, 24, 64])
def test_a_committed_path_leaves_what_it_leaves_alone(n_tokens: int, device: Device) -> None:
    """Within what float products differ by when they have another number of rows (TF32)."""
    rng = np.random.default_rng(n_tokens)
    tree, alone = Layer(device, 1), Layer(device, 1)
    for tokens in (n_tokens, 3):
        verified, expected = verify_and_commit(tree, alone, tokens, rng)
        assert nmse(np.stack(verified).reshape(-1), np.stack(expected)) < 1e-5
        assert nmse(tree.states().reshape(-1), alone.states()) < 1e-5
    tree.close()
    alone.close()
