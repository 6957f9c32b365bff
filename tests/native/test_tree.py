"""DeltaNet layers over trees of rows on the CPU: a committed path leaves what it leaves alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from helpers.tree_layer import Layer, verify_and_commit

from moegraph.ggml.device import Device


@pytest.fixture
def layers() -> Iterator[tuple[Layer, Layer]]:
    """Yield two equal layers in reference mode, where no result depends on the number of rows."""
    device = Device("cpu", n_threads=2, reference=True)
    pair = Layer(device, 1), Layer(device, 1)
    yield pair
    for layer in pair:
        layer.close()
    device.close()


@pytest.mark.parametrize("n_tokens", [2, 5, 24, 64])
def test_a_committed_path_leaves_what_it_leaves_alone(n_tokens: int, layers: tuple[Layer, Layer]):
    rng = np.random.default_rng(n_tokens)
    for tokens in (n_tokens, 3):
        verified, expected = verify_and_commit(*layers, tokens, rng)
        np.testing.assert_array_equal(layers[0].states(), layers[1].states())
        for got, want in zip(verified, expected, strict=True):
            np.testing.assert_array_equal(got, want)
