"""Gated DeltaNet: a short convolution and the gated delta rule; both update the states.

In shapes, T is n_seq_tokens and S is n_seqs. The states are columns of the two
tensors of `Memory.layer_states`; slots I32 [S] names the column of each sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..base import Layer
from ..hparams import MAX_DIM
from ..inputs import JointRows, Memory, PassInputs, PassShape, Weights, project
from ..tensors import Expected, matrix, vector
from .common import CommonArchitecture

if TYPE_CHECKING:
    from ...ggml.ops import Builder, Tensor
    from ...gguf.metadata import Metadata

PROJECTIONS = ("attn_qkv.weight", "attn_gate.weight", "ssm_beta.weight", "ssm_alpha.weight")


@dataclass(frozen=True)
class DeltaArchitecture(CommonArchitecture):
    """An architecture some of whose layers are gated DeltaNets: those where `recurrent` is true."""

    # whether value heads that are next to each other read the same key head; else value head h
    # reads key head h % n_k_heads
    has_head_groups: ClassVar[bool] = False

    ssm_d_conv: int
    ssm_d_inner: int
    ssm_d_state: int
    ssm_dt_rank: int
    ssm_n_group: int
    recurrent: tuple[bool, ...]

    @property
    def head_dim(self) -> int:
        """Return the width of a DeltaNet head, of keys or of values."""
        return self.ssm_d_state

    @property
    def n_k_heads(self) -> int:
        """Return the number of DeltaNet key heads."""
        return self.ssm_n_group

    @property
    def n_v_heads(self) -> int:
        """Return the number of DeltaNet value heads."""
        return self.ssm_dt_rank

    @property
    def key_dim(self) -> int:
        """Return the width of all DeltaNet key heads together."""
        return self.head_dim * self.n_k_heads

    @property
    def value_dim(self) -> int:
        """Return the width of all DeltaNet value heads together."""
        return self.head_dim * self.n_v_heads

    @property
    def conv_dim(self) -> int:
        """Return the number of convolution channels: q, k and v side by side."""
        return 2 * self.key_dim + self.value_dim

    @property
    def mixer_width(self) -> int:
        """Return a bound on the F32 numbers that a mixer has of a row."""
        return 3 * self.conv_dim + 3 * self.value_dim + super().mixer_width

    def is_recurrent(self, il: int) -> bool:
        """Return whether layer il is a DeltaNet; the prediction block has attention."""
        return il < self.n_layer and self.recurrent[il]

    def layer(self, il: int) -> Layer:
        """Return what layer il keeps."""
        if not self.is_recurrent(il):
            return super().layer(il)
        d, n_v = self.head_dim, self.n_v_heads
        conv = "conv_state_last", (self.ssm_d_conv - 1, self.conv_dim)
        return Layer(
            "DeltaNet", states=(conv, ("new_state", (d, d, n_v))), drafts=(self.conv_dim, n_v, n_v)
        )

    def project_delta(self, b: Builder, w: Weights, cur: Tensor, il: int) -> list[Tensor]:
        """Append the projections of rows F32 [n_embd, n_tokens]: qkv, z, beta and alpha.

        F32 [conv_dim, value_dim, n_v_heads or n_v_heads, n_tokens].
        """
        return project(b, w, PROJECTIONS, cur)

    def mixer(
        self, b: Builder, w: Weights, memory: Memory, inp: PassInputs, shape: PassShape,
        cur: Tensor, il: int,
    ) -> Tensor:  # fmt: skip
        """Append attention or a DeltaNet: F32 [n_embd, n_tokens] in and out.

        With inp.joint, the rows of the sequences are not equally many; shape has the rectangle.
        With inp.parents, each row continues its parent; a root continues the states, which do not
        change. Then the inputs of the recurrences go to memory.drafts, from which `commit` runs the
        accepted rows again.

        Source: mirrors llama.cpp src/models/qwen35moe.cpp build_layer_attn_linear, except that
        states are read and written in place; upstream copies them.
        """
        if not self.is_recurrent(il):
            return super().mixer(b, w, memory, inp, shape, cur, il)
        joint, n = inp.joint, cur.ne[1]
        flat = PassShape(n, 1, shape.n_kv, 0) if joint else shape
        rows, z = _project_rows(b, self, w, flat, cur, il)
        if joint:
            placed, lengths = _spread_rows(b, rows, shape, joint), joint.lengths
            out = _recurrence(b, self, w, memory, placed, inp.slots, il, lengths=lengths)
            out = joint.gather(b, b.reshape(out, self.value_dim, shape.n_tokens))
            out = b.reshape(out, self.head_dim, self.n_v_heads, n, 1)
        else:
            out = _recurrence(b, self, w, memory, rows, inp.slots, il, inp.parents)
        out = _output(b, self, w, flat, out, z, il)
        if inp.parents is not None:
            memory.drafts.keep(b, (rows.qkv, rows.gate, rows.beta), il)
        return out

    def commit(
        self, b: Builder, w: Weights, memory: Memory, rows: list[Tensor], slots: Tensor,
        path: Tensor, lengths: Tensor, il: int,
    ) -> None:  # fmt: skip
        """Append the update of a DeltaNet's states by the rows of one path through each tree.

        Row r of sequence s is s * T + r in path. The recurrences of `mixer` run over the path
        alone, so the states are those of a pass without the rest of the tree.
        """
        n, s, n_v = path.ne[0], path.ne[1], self.n_v_heads
        flat = b.reshape(path, n * s)

        def along(a: Tensor, width: int) -> Tensor:
            n_rows = math.prod(a.ne[i] for i in range(4)) // width
            return b.get_rows(b.reshape(a, width, n_rows), flat)

        qkv = b.reshape(along(rows[0], self.conv_dim), self.conv_dim, n, s)
        gate, beta = (b.reshape(along(a, n_v), 1, n_v, n, s) for a in rows[1:])
        accepted = _DeltaRows(qkv, gate, beta)
        _recurrence(b, self, w, memory, accepted, slots, il, lengths=lengths)


def read_delta(meta: Metadata) -> dict[str, Any]:
    """Read the sizes of the DeltaNet layers."""
    d_conv = meta.integer(".ssm.conv_kernel", 2, 64)
    d_inner = meta.integer(".ssm.inner_size", 1, MAX_DIM)
    d_state = meta.integer(".ssm.state_size", 1, MAX_DIM)
    dt_rank = meta.integer(".ssm.time_step_rank", 1, MAX_DIM)
    n_group = meta.integer(".ssm.group_count", 1, MAX_DIM)
    heads = f"{dt_rank} value heads ({meta.full('.ssm.time_step_rank')})"
    if d_inner != dt_rank * d_state:
        size = f"the state size {d_state} ({meta.full('.ssm.state_size')})"
        raise meta.error(".ssm.inner_size", f"is {d_inner}; it must be {heads} times {size}")
    if dt_rank % n_group:
        what = f"gives {n_group} key heads, which do not divide the {heads}"
        raise meta.error(".ssm.group_count", what)
    return {
        "ssm_d_conv": d_conv,
        "ssm_d_inner": d_inner,
        "ssm_d_state": d_state,
        "ssm_dt_rank": dt_rank,
        "ssm_n_group": n_group,
    }


def delta_tensors(hp: DeltaArchitecture) -> dict[str, Expected]:
    """Return the tensors of a DeltaNet mixer."""
    return {
        "attn_norm.weight": vector(hp.n_embd),
        "attn_qkv.weight": matrix(hp.n_embd, hp.conv_dim),
        "attn_gate.weight": matrix(hp.n_embd, hp.value_dim),
        "ssm_conv1d.weight": vector(hp.ssm_d_conv, hp.conv_dim),
        "ssm_dt.bias": vector(hp.n_v_heads),
        "ssm_a": vector(hp.n_v_heads),
        "ssm_beta.weight": matrix(hp.n_embd, hp.n_v_heads),
        "ssm_alpha.weight": matrix(hp.n_embd, hp.n_v_heads),
        "ssm_norm.weight": vector(hp.head_dim),
        "ssm_out.weight": matrix(hp.value_dim, hp.n_embd),
    }


@dataclass(frozen=True)
class _DeltaRows:
    """Inputs of one layer's recurrences; enough to run some of the rows again.

    qkv F32 [conv_dim, T, S], before the convolution. gate (log of the decay, <= 0) and beta: F32
    [1, n_v_heads, T, S].
    """

    qkv: Tensor
    gate: Tensor
    beta: Tensor


def _spread_rows(b: Builder, rows: _DeltaRows, shape: PassShape, joint: JointRows) -> _DeltaRows:
    """Append copies of rows of several sequences to their places in the rectangle of shape."""
    n, t, s = rows.qkv.ne[1], shape.n_seq_tokens, shape.n_seqs
    n_channels, n_v = rows.qkv.ne[0], rows.gate.ne[1]
    qkv = b.reshape(joint.spread(b, b.reshape(rows.qkv, n_channels, n)), n_channels, t, s)
    gate, beta = (
        b.expand(b.reshape(joint.spread(b, b.reshape(one, n_v, n)), 1, n_v, t, s))
        for one in (rows.gate, rows.beta)
    )
    return _DeltaRows(qkv, gate, beta)


def _project_rows(
    b: Builder, hp: DeltaArchitecture, w: Weights, shape: PassShape, cur: Tensor, il: int
) -> tuple[_DeltaRows, Tensor]:
    """Append the projections of rows F32 [n_embd, n_tokens]; z is F32 [value_dim, n_tokens]."""
    t, s, n_v = shape.n_seq_tokens, shape.n_seqs, hp.n_v_heads

    qkv, z, beta, alpha = hp.project_delta(b, w, cur, il)
    qkv = b.name(b.reshape(qkv, hp.conv_dim, t, s), "linear_attn_qkv_mixed", il)
    z = b.name(z, "z", il)
    beta = b.name(b.reshape(beta, 1, n_v, t, s), "beta", il)
    # CUDA runs the nodes from here to k in _recurrence as one kernel, in this order, for few
    # rows
    beta = b.expand(b.name(b.sigmoid(beta), "beta_sigmoid", il))
    alpha = b.name(b.reshape(alpha, n_v, t, s), "alpha", il)
    softplus = b.name(b.softplus(b.add(alpha, w["ssm_dt.bias"])), "a_softplus", il)
    gate = b.expand(b.name(b.mul(softplus, w["ssm_a"]), "gate", il))
    return _DeltaRows(qkv, b.reshape(gate, 1, n_v, t, s), beta), z


def _output(
    b: Builder, hp: DeltaArchitecture, w: Weights, shape: PassShape, out: Tensor, z: Tensor, il: int
) -> Tensor:
    """Append norm, gate z and projection of out F32 [head_dim, n_v_heads, T, S].

    Returns F32 [n_embd, n_tokens].
    """
    d_v, n_v, t, s = hp.head_dim, hp.n_v_heads, shape.n_seq_tokens, shape.n_seqs
    out = b.norm(out, w["ssm_norm.weight"], hp.f_norm_rms_eps)
    out = b.mul(out, b.silu(b.reshape(z, d_v, n_v, t, s)))
    # one matrix of rows, also of several sequences: else CUDA would read the weights for each of
    # them, with a kernel whose sums have another order
    out = b.name(b.reshape(out, d_v * n_v, t * s), "final_output", il)
    return b.name(b.mul_mat(w["ssm_out.weight"], out), "linear_attn_out", il)


def _recurrence(
    b: Builder, hp: DeltaArchitecture, w: Weights, memory: Memory, rows: _DeltaRows,
    slots: Tensor, il: int, parents: Tensor | None = None, lengths: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Append convolution and delta rule: F32 [head_dim, n_v_heads, T, S].

    They store the new states. With parents I32 [T, S] (see graphs/rows.py) they store none. With
    lengths I32 [S], only the first lengths[s] rows of a sequence count.
    """
    conv_state, state = memory.layer_states[il]
    conv = b.conv(rows.qkv, w["ssm_conv1d.weight"], conv_state, slots, parents, lengths)
    conv = b.name(b.silu(b.name(conv, "conv_output_raw", il)), "conv_output_silu", il)
    q, k, v = _split_qkv(b, hp, conv)
    q, k = (b.expand(_l2_norm(b, x, hp.f_norm_rms_eps)) for x in (q, k))
    if hp.has_head_groups:
        q, k = (_repeat_heads(b, x, hp.n_v_heads) for x in (q, k))
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        b.name(x, f"{name}_conv_predelta", il)
    args = (q, k, v, rows.gate, rows.beta, state, slots, parents, lengths)
    out = b.delta_net(*args)
    return b.expand(b.name(out, "attn_output", il))


def _split_qkv(b: Builder, hp: DeltaArchitecture, conv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """View q, k [head_dim, n_k_heads, T, S] and v [head_dim, n_v_heads, T, S]."""
    parts, offset, d = [], 0, hp.head_dim
    for n in (hp.n_k_heads, hp.n_k_heads, hp.n_v_heads):
        ne = (d, n, conv.ne[1], conv.ne[2])
        parts.append(b.view(conv, ne, (4 * d, conv.nb[1], conv.nb[2]), offset))
        offset += 4 * d * n
    return parts[0], parts[1], parts[2]


def _repeat_heads(b: Builder, x: Tensor, n: int) -> Tensor:
    """Append x F32 [d, n_heads, T, S] with each head as often as makes them n, one by one."""
    d, n_heads, t, s = x.ne[0:4]
    one = b.reshape(x, d, 1, n_heads, t * s)

    def repeated(times: int) -> Tensor:
        if times == 1:
            return one
        half = repeated(times // 2)
        both = b.concat(half, half, 1)
        return b.concat(both, one, 1) if times % 2 else both

    return b.reshape(repeated(n // n_heads), d, n, t, s)


def _l2_norm(b: Builder, x: Tensor, eps: float) -> Tensor:
    """x / sqrt(sum(x^2) + eps), as rms_norm and scale, which CUDA runs as one kernel."""
    n = x.ne[0]
    return b.scale(b.rms_norm(x, eps / n), 1.0 / math.sqrt(n))
