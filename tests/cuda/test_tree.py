"""DeltaNet over trees of rows on a GPU; tree.cpp goes through many more shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers.tree_layer import Layer, verify_and_commit
from helpers.tree_rows import TREES, ConvCase, DeltaCase, path

from moegraph.ggml.device import Device
from moegraph.graphs.tree import check_parents

# Squared error over squared norm of the rows of a path. The order of sums is that of the plain
# kernels; the GPU's exp differs from the CPU's by some 1e-7, once for each ancestor.
LIMIT_ALONE, LIMIT_CPU = 1e-12, 1e-9


@pytest.fixture(scope="module")
def cpu() -> Iterator[Device]:
    """Yield the CPU."""
    opened = Device("cpu", n_threads=2)
    yield opened
    opened.close()


def nmse(got: npt.NDArray, expected: npt.NDArray) -> float:
    return float(((got - expected) ** 2).sum() / (expected**2).sum())


@pytest.mark.parametrize("n_tokens", [1, 2, 8, 23, 30, 64])
@pytest.mark.parametrize("tree", TREES)
def test_each_row_of_the_delta_rule_equals_its_path_alone(
    tree: Any, n_tokens: int, device: Device, cpu: Device
) -> None:
    for n_k, n_v, s in ((2, 4, 128), (2, 2, 64)):
        rng = np.random.default_rng(n_tokens)
        case = DeltaCase.random(rng, 2, n_tokens, (n_k, n_v), s)
        parents = check_parents([tree(n_tokens, rng) for _ in range(2)])
        together = case.run(device, parents)
        assert nmse(together, case.run(cpu, parents)) < LIMIT_CPU
        for seq in range(2):
            for row in {n_tokens - 1, n_tokens // 2}:
                rows = path(parents[seq], row)
                assert nmse(together[seq, rows], case.alone(device, seq, rows)) < LIMIT_ALONE


@pytest.mark.parametrize("n_tokens", [1, 2, 8, 23, 64])
@pytest.mark.parametrize("tree", TREES)
def test_each_row_of_the_convolution_equals_its_path_alone(
    tree: Any, n_tokens: int, device: Device, cpu: Device
) -> None:
    rng = np.random.default_rng(n_tokens)
    case = ConvCase.random(rng, 2, n_tokens, 256, 4)
    parents = check_parents([tree(n_tokens, rng) for _ in range(2)])
    for silu in (False, True):
        together = case.run(device, parents, silu)
        assert nmse(together, case.run(cpu, parents, silu)) < LIMIT_CPU
        for seq in range(2):
            rows = path(parents[seq], n_tokens - 1)
            assert nmse(together[seq, rows], case.alone(device, seq, rows, silu)) < LIMIT_ALONE


@pytest.mark.parametrize("n_tokens", [2, 24, 64])
def test_a_committed_path_leaves_what_it_leaves_alone(n_tokens: int, device: Device) -> None:
    """Within what float products differ by when they have another number of rows (TF32)."""
    rng = np.random.default_rng(n_tokens)
    tree, alone = Layer(device, 1), Layer(device, 1)
    for tokens in (n_tokens, 3):
        verified, expected = verify_and_commit(tree, alone, tokens, rng)
        assert nmse(np.stack(verified), np.stack(expected)) < 1e-5
        assert nmse(tree.states(), alone.states()) < 1e-5
    tree.close()
    alone.close()
