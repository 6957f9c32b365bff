"""DeltaNet over trees of rows on the CPU: every row has the bits of its path run alone."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tree_rows import TREES, ConvCase, DeltaCase, chain, forest, heap, path

from moegraph.errors import InternalError
from moegraph.ggml.device import Device
from moegraph.ggml.handles import Buffer, Context
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.ops import F32, I32, MAX_TREE_ROWS, Builder
from moegraph.graphs.deltanet import build_deltanet
from moegraph.graphs.inputs import PassShape
from moegraph.graphs.tree import build_commit, build_tree_deltanet, check_parents

HEADS = [(2, 2, 64), (2, 4, 128), (1, 3, 16), (2, 2, 20)]


@pytest.fixture(scope="module", params=[False, True], ids=["default", "reference"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Yield the CPU device in its default and its reference mode."""
    opened = Device("cpu", n_threads=3, reference=request.param)
    yield opened
    opened.close()


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("n_tokens", [1, 2, 7, 29, 30, 64])
def test_each_row_of_the_delta_rule_equals_its_path_alone(tree: Any, n_tokens: int, device: Device):
    for n_k, n_v, s in HEADS:
        rng = np.random.default_rng(n_tokens)
        case = DeltaCase.random(rng, 2, n_tokens, (n_k, n_v), s)
        parents = check_parents([tree(n_tokens, rng) for _ in range(2)])
        together = case.run(device, parents)
        for seq in range(2):
            for row in range(n_tokens - 1, -1, -max(1, n_tokens // 7)):
                rows = path(parents[seq], row)
                np.testing.assert_array_equal(
                    together[seq, rows], case.alone(device, seq, rows), err_msg=f"row {row}"
                )


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("d_conv", [2, 4, 9])
def test_each_row_of_the_convolution_equals_its_path_alone(tree: Any, d_conv: int, device: Device):
    for n_tokens in (1, 2, 3, 21, 64):
        rng = np.random.default_rng(n_tokens)
        case = ConvCase.random(rng, 3, n_tokens, 130, d_conv)
        parents = check_parents([tree(n_tokens, rng) for _ in range(3)])
        together = case.run(device, parents, silu=False)
        for seq in range(3):
            for row in range(n_tokens):
                rows = path(parents[seq], row)
                alone = case.alone(device, seq, rows, silu=False)
                np.testing.assert_array_equal(together[seq, rows], alone, err_msg=f"row {row}")


def test_a_chain_is_the_plain_operation(device: Device) -> None:
    rng = np.random.default_rng(3)
    parents = check_parents([chain(33, rng)] * 2)
    delta, conv = DeltaCase.random(rng, 2, 33, (2, 4), 64), ConvCase.random(rng, 2, 33, 256, 4)
    np.testing.assert_array_equal(delta.run(device, parents), delta.run(device, None))
    np.testing.assert_array_equal(conv.run(device, parents, True), conv.run(device, None, True))


def test_rows_may_come_in_any_order(device: Device) -> None:
    rng = np.random.default_rng(4)
    for _ in range(20):
        parents = forest(40, rng)
        order: list[int] = []  # another order in which parents come first
        while len(order) < 40:
            order.append(int(rng.choice([
                row for row in range(40)
                if row not in order and (parents[row] < 0 or parents[row] in order)
            ])))  # fmt: skip
        moved = [order.index(parents[row]) if parents[row] >= 0 else -1 for row in order]
        case = DeltaCase.random(rng, 1, 40, (1, 2), 16)
        there = DeltaCase(*(a[:, order] for a in list(vars(case).values())[:5]), case.state)
        np.testing.assert_array_equal(
            there.run(device, check_parents(moved))[0],
            case.run(device, check_parents(parents))[0, order],
        )


def test_kernels_take_a_row_with_a_bad_parent_for_a_root(device: Device) -> None:
    rng = np.random.default_rng(5)
    good, bad = heap(20, rng), heap(20, rng)
    for row, parent in ((0, 0), (3, 3), (5, 19), (9, 2**31 - 1), (12, -(2**31)), (19, -2)):
        good[row], bad[row] = -1, parent
    delta, conv = DeltaCase.random(rng, 1, 20, (1, 2), 64), ConvCase.random(rng, 1, 20, 128, 4)
    for case in (lambda p: delta.run(device, p), lambda p: conv.run(device, p, False)):
        np.testing.assert_array_equal(
            case(np.array([bad], np.int32)), case(np.array([good], np.int32))
        )


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([[-1, 0], [-1, 1]], "tree 1: the parent of row 1 is 1, not -1 to 0;"),
        ([-1, -2], "tree 0: the parent of row 1 is -2, not -1 to 0;"),
        ([0], "tree 0: the parent of row 0 is 0, not -1 to -1;"),
        ([-1] * 65, "a tree has 65 rows, not 1 to 64;"),
        ([], "a tree has 0 rows, not 1 to 64;"),
    ],
)
def test_bad_parents_are_refused(parents: list, message: str) -> None:
    with pytest.raises(InternalError, match=message):
        check_parents(parents)


def test_operands_that_do_not_fit_are_refused() -> None:
    with Context(16, 8) as context:
        b = Builder(context, 8)
        kernel = b.leaf(F32, (4, 128), "kernel")
        for n_tokens, ne in ((5, (4, 1)), (5, (5, 2)), (65, (65, 1))):
            columns = b.leaf(F32, (n_tokens + 3, 128, 1), "columns")
            with pytest.raises(InternalError, match="ssm_conv: operands do not fit"):
                b.ssm_conv(columns, kernel, b.leaf(I32, ne, "parents"))
    assert MAX_TREE_ROWS == 64


# A layer of a small model: n_embd, heads and head size large enough for all the kernels.
HP = SimpleNamespace(
    n_embd=96, n_v_heads=4, n_k_heads=2, head_k_dim=32, head_v_dim=32, conv_dim=256, ssm_d_conv=4,
    f_norm_rms_eps=1e-6,
)  # fmt: skip
WEIGHTS = {
    "attn_qkv.weight": (96, 256), "attn_gate.weight": (96, 128), "ssm_beta.weight": (96, 4),
    "ssm_alpha.weight": (96, 4), "ssm_conv1d.weight": (4, 256), "ssm_dt.bias": (4,),
    "ssm_a": (4,), "ssm_norm.weight": (32,), "ssm_out.weight": (128, 96),
}  # fmt: skip
N_SEQ, SEQ0 = 4, 1


class Layer:
    """One DeltaNet layer with random weights and the states of N_SEQ sequences."""

    def __init__(self, device: Device, seed: int) -> None:
        self.device = device
        rng = np.random.default_rng(seed)
        self.context = Context(32)
        make, leaf = self.context.ptr, {}
        for name, ne in WEIGHTS.items():
            leaf[name] = C.ggml_new_tensor(make, F32, len(ne), list(ne))
        conv = C.ggml_new_tensor_2d(make, F32, 3 * HP.conv_dim, N_SEQ)
        ssm = C.ggml_new_tensor_2d(make, F32, 32 * 32 * HP.n_v_heads, N_SEQ)
        self.buffer = Buffer(C.ggml_backend_alloc_ctx_tensors_from_buft(make, device.buft))
        for tensor in (*leaf.values(), conv, ssm):
            values = rng.standard_normal(C.ggml_nelements(tensor)).astype(np.float32) / 4
            if tensor == leaf["ssm_a"]:
                values = -np.abs(values)
            C.ggml_backend_tensor_set(tensor, ffi.from_buffer(values), 0, values.nbytes)
        self.weights = type("Weights", (dict,), {"joined": {}})(leaf)
        self.state = SimpleNamespace(conv={0: conv}, ssm={0: ssm})

    def states(self) -> list[bytes]:
        """Return both states of all sequences."""
        found = []
        for tensor in (self.state.conv[0], self.state.ssm[0]):
            found.append(bytearray(C.ggml_nbytes(tensor)))
            C.ggml_backend_tensor_get(tensor, ffi.from_buffer(found[-1]), 0, len(found[-1]))
        return [bytes(data) for data in found]

    def run(self, x: np.ndarray, trees: Any = None, paths: Any = None) -> np.ndarray:
        """Run rows x [S, T, n_embd] plainly, or over trees and then commit paths [S, n]."""
        n_seqs, n_tokens, _ = x.shape
        shape = PassShape(n_tokens, n_seqs, SEQ0, 0, 0)
        with Context(128, 128) as context:
            b = Builder(context, 128)
            cur = b.leaf(F32, (HP.n_embd, n_tokens * n_seqs), "cur")
            inputs = [(cur, x)]
            args = (b, HP, self.weights, self.state, shape)
            if trees is None:
                out = b.expand(build_deltanet(*args, cur, 0))
            else:
                parents = b.leaf(I32, (n_tokens, n_seqs), "parents")
                out, rows = build_tree_deltanet(*args, parents, cur, 0)
                inputs.append((parents, check_parents(trees)))
                b.expand(out)
            if paths is not None:
                path = b.leaf(I32, (len(paths[0]), n_seqs), "path")
                inputs.append((path, np.array(paths, np.int32)))
                build_commit(*args, rows, path, 0)
            with Buffer(C.ggml_backend_alloc_ctx_tensors_from_buft(context.ptr, self.device.buft)):
                for tensor, array in inputs:
                    C.ggml_backend_tensor_set(
                        tensor, ffi.from_buffer(np.ascontiguousarray(array)), 0, array.nbytes
                    )
                self.device.check(
                    C.mg_launch(self.device.compute.ptr, b.graph, ffi.NULL, 0), "layer"
                )
                self.device.synchronize()
                result = np.empty((n_seqs, n_tokens, HP.n_embd), np.float32)
                C.ggml_backend_tensor_get(out, ffi.from_buffer(result), 0, result.nbytes)
        return result

    def close(self) -> None:
        """Free the memory."""
        self.buffer.close()
        self.context.close()


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
    tree, alone = layers
    for tokens in (n_tokens, 3):
        x = rng.standard_normal((2, tokens, HP.n_embd)).astype(np.float32)
        parents = [forest(tokens, rng), heap(tokens, rng)]
        candidates = [[path(p, row) for row in range(tokens)] for p in parents]
        n = min(max(map(len, rows)) for rows in candidates)
        paths = [next(rows[:n] for rows in c if len(rows) >= n) for c in candidates]

        before = tree.states()
        verified = tree.run(x, parents)
        assert tree.states() == before, "verification writes no state"
        tree.run(x, parents, paths)
        together = np.stack([x[seq, rows] for seq, rows in enumerate(paths)])
        expected = alone.run(together)
        assert tree.states() == alone.states()
        for seq, rows in enumerate(paths):
            np.testing.assert_array_equal(verified[seq, rows], expected[seq])
    assert tree.states() != before
