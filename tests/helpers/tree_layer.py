"""One DeltaNet layer with random weights: run plainly, over trees of rows, and committed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from helpers.tree_shapes import forest, heap, path
from moegraph.arch.blocks.deltanet import PROJECTIONS, DeltaArchitecture
from moegraph.arch.inputs import PassShape, project
from moegraph.ggml.device import Device
from moegraph.ggml.handles import Buffer, Context
from moegraph.ggml.lib import C, ffi
from moegraph.ggml.ops import F32, I32, Builder
from moegraph.graphs.rows import check_parents

Array = npt.NDArray[np.float32]

# A layer of a small model: n_embd, heads and head size large enough for all the kernels.
HP: Any = SimpleNamespace(
    n_embd=96, n_v_heads=4, n_k_heads=2, head_dim=32, conv_dim=256, ssm_d_conv=4,
    f_norm_rms_eps=1e-6, has_head_groups=False, is_recurrent=lambda il: True,
    project_delta=lambda b, w, cur, il: project(b, w, PROJECTIONS, cur),
)  # fmt: skip
WEIGHTS = {
    "attn_qkv.weight": (96, 256), "attn_gate.weight": (96, 128), "ssm_beta.weight": (96, 4),
    "ssm_alpha.weight": (96, 4), "ssm_conv1d.weight": (4, 256), "ssm_dt.bias": (4,),
    "ssm_a": (4,), "ssm_norm.weight": (32,), "ssm_out.weight": (128, 96),
}  # fmt: skip
N_SLOTS, SLOTS = 4, (2, 0)


class Layer:
    """One DeltaNet layer with random weights and N_SLOTS states."""

    def __init__(self, device: Device, seed: int) -> None:
        self.device = device
        rng = np.random.default_rng(seed)
        self.context = Context(32)
        make, leaf = self.context.ptr, {}
        for name, ne in WEIGHTS.items():
            leaf[name] = C.ggml_new_tensor(make, F32, len(ne), list(ne))
        conv = C.ggml_new_tensor_2d(make, F32, 3 * HP.conv_dim, N_SLOTS)
        ssm = C.ggml_new_tensor_2d(make, F32, 32 * 32 * HP.n_v_heads, N_SLOTS)
        self.buffer = Buffer(C.ggml_backend_alloc_ctx_tensors_from_buft(make, device.buft))
        for tensor in (*leaf.values(), conv, ssm):
            values = rng.standard_normal(C.ggml_nelements(tensor)).astype(np.float32) / 4
            if tensor == leaf["ssm_a"]:
                values = -np.abs(values)
            C.ggml_backend_tensor_set(tensor, ffi.from_buffer(values), 0, values.nbytes)
        self.weights = type("Weights", (dict,), {"joined": {}})(leaf)
        self.state = SimpleNamespace(layer_states={0: (conv, ssm)}, drafts=self)
        self._rows: Any = None

    def keep(self, b: Builder, rows: Any, il: int) -> None:
        """Note the rows of a verify pass, for the commit in the same graph."""
        self._rows = rows

    def states(self) -> Array:
        """Return the states of every slot: [N_SLOTS, n], the convolution's first."""
        found: list[Array] = []
        for tensor in self.state.layer_states[0]:
            found.append(np.empty(C.ggml_nelements(tensor), np.float32))
            C.ggml_backend_tensor_get(tensor, ffi.from_buffer(found[-1]), 0, found[-1].nbytes)
        return np.concatenate([values.reshape(N_SLOTS, -1) for values in found], 1)

    def run(self, x: Array, trees: Any = None, paths: Any = None) -> Array:
        """Run rows x [S, T, n_embd] plainly, or over trees and then commit paths [S, n].

        Sequence s has the state in SLOTS[s].
        """
        n_seqs, n_tokens, _ = x.shape
        shape = PassShape(n_tokens, n_seqs, 0, 0)
        with Context(128, 128) as context:
            b = Builder(context, 128)
            cur = b.leaf(F32, (HP.n_embd, n_tokens * n_seqs), "cur")
            slots = b.leaf(I32, (n_seqs,), "slots")
            inputs = [(cur, x), (slots, np.array(SLOTS[:n_seqs], np.int32))]
            args = (HP, b, self.weights, self.state)
            inp = SimpleNamespace(slots=slots, parents=None, joint=None)
            if trees is not None:
                inp.parents = b.leaf(I32, (n_tokens, n_seqs), "parents")
                inputs.append((inp.parents, check_parents(trees)))
            out = b.expand(DeltaArchitecture.mixer(*args, inp, shape, cur, 0))
            if paths is not None:
                path = b.leaf(I32, (len(paths[0]), n_seqs), "path")
                firsts = n_tokens * np.arange(n_seqs)[:, None]
                inputs.append((path, np.array(firsts + paths, np.int32)))
                lengths = b.leaf(I32, (n_seqs,), "lengths")
                inputs.append((lengths, np.full(n_seqs, len(paths[0]), np.int32)))
                DeltaArchitecture.commit(*args, self._rows, slots, path, lengths, 0)
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


def verify_and_commit(
    tree: Layer, alone: Layer, n_tokens: int, rng: np.random.Generator
) -> tuple[list[Array], list[Array]]:
    """Verify two random trees and commit a path of each; run the paths alone on another layer.

    Returns the outputs along the paths, of verification and alone. Verification alone must leave
    the states as they are.
    """
    x = rng.standard_normal((2, n_tokens, HP.n_embd)).astype(np.float32)
    parents = [forest(n_tokens, rng), heap(n_tokens, rng)]
    candidates = [[path(p, row) for row in range(n_tokens)] for p in parents]
    n = min(max(map(len, rows)) for rows in candidates)
    paths = [next(rows[:n] for rows in c if len(rows) >= n) for c in candidates]

    before = tree.states()
    verified = tree.run(x, parents)
    np.testing.assert_array_equal(tree.states(), before)
    tree.run(x, parents, paths)
    expected = alone.run(np.stack([x[seq, rows] for seq, rows in enumerate(paths)]))
    changed = (tree.states() != before).any(1)
    assert [slot for slot in range(N_SLOTS) if changed[slot]] == sorted(SLOTS)
    return [verified[seq, rows] for seq, rows in enumerate(paths)], list(expected)
