"""How two runs are compared, and the numbers of the exactness contract (docs/correctness.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Key = tuple[str, int]

# Matched settings on the CPU: both sides call the same kernels in the same order, so every value
# is equal, bit for bit. There is no bound and no exception.

# Where equality is out of reach, ours may differ from upstream this many times as much as upstream
# differs from itself between two settings. Both are measured in the same test.
OTHER_FACTOR = 2.0

# The lengths the contract names: single row, below and above the tiled kernels, past one KV bucket.
PROMPT_LENGTHS = (1, 7, 64, 300)
DECODE_STEPS = 64
FORCED_POSITIONS = 2000
FREE_PROMPTS, FREE_TOKENS = 20, 64

# Named upstream, but no node of ours need have these names: views and reshapes of other nodes, the
# norm before its weight, the attention output before a quantized cache's rotation is undone
# (attn_pregate after it), and copies between the state cache and the graph (ours updates the states
# in place; the states themselves are compared as conv_state_last and new_state). Where ours has
# one, it is compared, as the gate of a DeltaNet is; that of attention is a view.
PLUMBING = frozenset({
    "Qcur_reshaped", "Qcur_view", "conv_input", "conv_state_update", "conv_states",
    "conv_states_reshaped", "gate", "k_conv", "kqv_out", "model.input_embed", "norm", "q_conv",
    "qkv_mixed_transposed", "state_predelta",
})  # fmt: skip

ROUTER_IDS = "ffn_moe_topk"


def nmse(ours: Array, theirs: Array) -> float:
    """Return the squared error of `ours` over the energy of `theirs`; inf if it is not finite."""
    a, b = ours.astype(np.float64).ravel(), theirs.astype(np.float64).ravel()
    if a.size != b.size:
        raise ValueError(f"shapes {ours.shape} and {theirs.shape} cannot be compared")
    error, energy = float(np.sum((a - b) ** 2)), float(np.sum(b**2))
    if not np.isfinite(error):
        return float("inf")
    return error / energy if energy else (0.0 if error == 0 else float("inf"))


def same_bits(ours: Array, theirs: Array) -> bool:
    """Return whether two arrays hold the same bits in the same order; NaN equals nothing."""
    a, b = np.ascontiguousarray(ours).ravel(), np.ascontiguousarray(theirs).ravel()
    return a.dtype == b.dtype and np.array_equal(a, b) and a.tobytes() == b.tobytes()


def margins(logits: Array) -> Array:
    """Return the distance of the two largest logits of each row."""
    two = np.partition(logits, -2, axis=-1)[..., -2:]
    gap: Array = two[..., 1] - two[..., 0]
    return gap


def first_differences(
    ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]
) -> list[tuple[int, int]]:
    """Return (text, token) of the first difference of every pair of texts that differ."""
    found = []
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        pairs = zip(a, b, strict=True)
        at = next((k for k, (x, y) in enumerate(pairs) if x != y), None)
        if at is not None:
            found.append((i, at))
    return found


@dataclass(frozen=True)
class NodeDiff:
    """How one node differs; `problem` says in words what a number cannot."""

    key: Key
    nmse: float
    problem: str

    def __str__(self) -> str:
        name, il = self.key
        where = f"layer {il}" if il >= 0 else "outside the layers"
        return f"{name:28} {where:18} NMSE {self.nmse:.2e}  {self.problem}"


def _compare(key: Key, ours: Array | None, theirs: Array) -> NodeDiff | None:
    if ours is None and key[0] in PLUMBING:
        return None
    if ours is None:
        return NodeDiff(key, float("inf"), "missing on our side")
    if ours.size != theirs.size:
        return NodeDiff(key, float("inf"), f"shape {ours.shape}, upstream {theirs.shape}")
    if same_bits(ours, theirs):
        return None
    if key[0] == ROUTER_IDS:
        wrong = np.flatnonzero(ours.ravel() != theirs.ravel())
        row = int(wrong[0]) // theirs.shape[-1]
        return NodeDiff(key, float("inf"), f"{wrong.size} router ids differ, first in row {row}")
    error = nmse(ours, theirs)
    gap = np.abs(ours.astype(np.float64).ravel() - theirs.astype(np.float64).ravel())
    worst = int(np.argmax(np.nan_to_num(gap, nan=np.inf)))
    at = tuple(int(i) for i in np.unravel_index(worst, theirs.shape))
    values = f"{ours.ravel()[worst]:.6g} against {theirs.ravel()[worst]:.6g}"
    return NodeDiff(key, error, f"worst at {at} of {theirs.shape}: {values}")


def node_diffs(ours: Mapping[Key, Array], theirs: Mapping[Key, Array]) -> list[NodeDiff]:
    """Return the nodes that differ in any bit, in the order in which upstream computed them.

    Every node of upstream must exist on our side, PLUMBING aside.
    """
    found = [_compare(key, ours.get(key), value) for key, value in theirs.items()]
    return [diff for diff in found if diff is not None]


def report(diffs: Sequence[NodeDiff], n_compared: int, most: int = 12) -> str:
    """Return a text that names the first differing node and lists what follows from it."""
    if not diffs:
        return f"all {n_compared} nodes are equal"
    name, il = diffs[0].key
    lines = [f"{len(diffs)} of {n_compared} nodes differ; the first is {name} of layer {il}:"]
    lines += [f"  {diff}" for diff in diffs[:most]]
    if len(diffs) > most:
        lines.append(f"  and {len(diffs) - most} more")
    return "\n".join(lines)


def assert_nodes_equal(ours: Mapping[Key, Array], theirs: Mapping[Key, Array], what: str) -> None:
    """Fail with a report unless every named node is equal bit for bit."""
    assert theirs, f"{what}: upstream gave no nodes"
    diffs = node_diffs(ours, theirs)
    assert not diffs, f"{what}: {report(diffs, len(theirs))}"


def assert_logits_equal(ours: Array, theirs: Array, what: str) -> None:
    """Fail unless logits are equal bit for bit; name the first row that is not."""
    assert ours.shape == theirs.shape, f"{what}: shape {ours.shape}, upstream {theirs.shape}"
    if same_bits(ours, theirs):
        return
    rows = [i for i in range(len(ours)) if not same_bits(ours[i], theirs[i])]
    raise AssertionError(
        f"{what}: logits of {len(rows)} of {len(ours)} rows differ, first in row {rows[0]},"
        f" NMSE {nmse(ours, theirs):.2e}"
    )


@dataclass(frozen=True)
class Difference:
    """One number of ours against upstream, beside the same number of upstream against itself."""

    ours: float
    upstream: float
    what: str = "NMSE"

    @property
    def within(self) -> bool:
        """Whether ours is at most OTHER_FACTOR times upstream's; False if it is no number."""
        return self.ours <= OTHER_FACTOR * self.upstream

    def __str__(self) -> str:
        times = f" ({self.ours / self.upstream:.2f} times)" if self.upstream else ""
        return f"{self.what} {self.ours:.3g}, upstream from itself {self.upstream:.3g}{times}"
