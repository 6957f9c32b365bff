"""Graph nodes whose shapes are checked before ggml sees them.

A failed assertion in ggml ends the process. So each method first checks what ggml would assert and
raises InternalError. Shapes are in ggml order.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from typing import Any, Protocol

from ..errors import InternalError
from .handles import Context
from .lib import C, ffi


class Tensor(Protocol):
    """A cffi pointer to struct ggml_tensor; its memory belongs to a Context.

    type: a GGML_TYPE number. ne, nb: 4 extents and 4 strides in bytes. src: operands. data:
    address of the elements, or NULL. view_src: the tensor that this is a view of, or
    NULL. op_params: 16 I32 parameters of the op.
    """

    type: int
    ne: MutableSequence[int]
    nb: MutableSequence[int]
    src: Sequence[Tensor]
    view_src: Tensor
    data: Any
    name: Any
    op_params: MutableSequence[int]


F32: int = C.GGML_TYPE_F32
F16: int = C.GGML_TYPE_F16
I32: int = C.GGML_TYPE_I32
I64: int = C.GGML_TYPE_I64

# Most rows per sequence of the ops that take parents.
MAX_TREE_ROWS: int = C.MOEGRAPH_TREE_ROWS
# Most ids of a look-up that fetches missing experts.
MAX_FETCH_IDS: int = C.MOEGRAPH_FETCH_IDS
# Attention over pages: most rows, words of a row's description and of the path in it, most elements
# of a head, most positions of a sequence's pages.
MAX_ATTN_ROWS: int = C.MOEGRAPH_ATTN_ROWS
ATTN_WORDS: int = C.MOEGRAPH_ATTN_WORDS
ATTN_PATH: int = C.MOEGRAPH_ATTN_PATH
MAX_ATTN_HEAD: int = C.MOEGRAPH_ATTN_HEAD
MAX_ATTN_POSITIONS: int = C.MOEGRAPH_ATTN_CAPACITY


def shape(t: Tensor) -> tuple[int, int, int, int]:
    """Return the four extents of a tensor, ggml order."""
    return t.ne[0], t.ne[1], t.ne[2], t.ne[3]


def name_of(t: Tensor) -> str:
    """Return the tensor's name."""
    return ffi.string(t.name).decode("utf-8", "replace")


def type_id(name: str) -> int:
    """Return the ggml type of a KV cache type name: f16, q8_0 or q4_0."""
    return {"f16": C.GGML_TYPE_F16, "q8_0": C.GGML_TYPE_Q8_0, "q4_0": C.GGML_TYPE_Q4_0}[name]


def _require(ok: bool, op: str, *tensors: Tensor, given: object = "") -> None:
    """Check operands; given: others than tensors, as text only if they do not fit."""
    if not ok:
        operands = ", ".join(f"{name_of(t) or '?'}{list(shape(t))}" for t in tensors)
        raise InternalError(f"{op}{given}: operands do not fit: {operands}; please report this")


def _require_states(
    pool: Tensor, slots: Tensor, parents: Tensor | None, lengths: Tensor | None, n_tokens: int,
    n_seqs: int, op: str,
) -> None:  # fmt: skip
    ok = pool.type == F32 and pool.nb[0] == 4 and shape(pool)[2:] == (1, 1)
    for each in (slots, slots if lengths is None else lengths):
        ok = ok and each.type == I32 and shape(each) == (n_seqs, 1, 1, 1)
    ok = ok and (lengths is None or parents is None)
    _require(ok and C.ggml_is_contiguous(slots), op, pool, slots)
    if parents is not None:
        ok = parents.type == I32 and shape(parents) == (n_tokens, n_seqs, 1, 1)
        _require(ok and C.ggml_is_contiguous(parents) and n_tokens <= MAX_TREE_ROWS, op, parents)


def _unary(op: Callable[[Any, Tensor], Tensor]) -> Callable[[Builder, Tensor], Tensor]:
    """Return the method of an op that takes any tensor."""
    return lambda b, a: op(b.ctx, a)


class Builder:
    """Builds one graph; its nodes run in the order in which `expand` appends them."""

    def __init__(self, ctx: Context, n_nodes: int) -> None:
        self.context = ctx
        self.ctx = ctx.ptr
        self.graph = C.ggml_new_graph_custom(self.ctx, n_nodes, False)
        self.named: dict[tuple[str, int], Tensor] = {}
        self.spans: list[Any] = []  # tensors whose size is the KV length (arch/blocks/length.py)

    def name(self, t: Tensor, name: str, il: int = -1) -> Tensor:
        """Name a node as upstream's cb() does: `name-il`, or `name` outside a layer."""
        C.ggml_set_name(t, (f"{name}-{il}" if il >= 0 else name).encode())
        self.named[(name, il)] = t
        return t

    def expand(self, t: Tensor) -> Tensor:
        """Append a node after all nodes that it depends on."""
        C.ggml_build_forward_expand(self.graph, t)
        return t

    def output(self, t: Tensor) -> Tensor:
        """Mark a node as a result, whose memory no later node takes; return it."""
        C.ggml_set_output(t)
        return t

    def leaf(self, dtype: int, ne: Sequence[int], name: str) -> Tensor:
        """Make a tensor that no node computes; the caller places it in memory."""
        t = C.ggml_new_tensor(self.ctx, dtype, len(ne), list(ne))
        C.ggml_set_name(t, name.encode())
        return t

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b, b repeated to a's shape."""
        _require(C.ggml_can_repeat(b, a), "add", a, b)
        return C.ggml_add(self.ctx, a, b)

    def add_rows(self, a: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        """Add to each row of a F32 [n, m] the row of F32 [n, r] that ids I32 [m] names, if >= 0."""
        ok = a.type == rows.type == F32 and ids.type == I32 and a.ne[0] == rows.ne[0]
        _require(ok and shape(a)[1:] == (ids.ne[0], 1, 1), "add_rows", a, rows, ids)
        n, m = a.ne[0], a.ne[1]
        one = self.reshape(a, n, 1, m)
        return self.reshape(C.ggml_add_id(self.ctx, one, rows, self.reshape(ids, 1, m)), n, m)

    def add_id(self, a: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        """Add to a F32 [n, k, m] the rows of F32 [n, r] that ids I32 [k, m] name, if >= 0."""
        ok = a.type == rows.type == F32 and ids.type == I32 and a.ne[0] == rows.ne[0]
        _require(ok and shape(a)[1:] == shape(ids)[:3], "add_id", a, rows, ids)
        return C.ggml_add_id(self.ctx, a, rows, ids)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """a * b, b repeated to a's shape."""
        _require(C.ggml_can_repeat(b, a), "mul", a, b)
        return C.ggml_mul(self.ctx, a, b)

    def div(self, a: Tensor, b: Tensor) -> Tensor:
        """a / b, b repeated to a's shape."""
        _require(C.ggml_can_repeat(b, a), "div", a, b)
        return C.ggml_div(self.ctx, a, b)

    def scale(self, a: Tensor, s: float) -> Tensor:
        """a * s."""
        return C.ggml_scale(self.ctx, a, s)

    def fill(self, a: Tensor, value: float) -> Tensor:
        """A tensor of a's shape, filled with value."""
        return C.ggml_fill(self.ctx, a, value)

    def clamp(self, a: Tensor, low: float, high: float) -> Tensor:
        """Limit a to [low, high]; in place, as ggml's clamp works."""
        return C.ggml_clamp(self.ctx, a, low, high)

    sigmoid = _unary(C.ggml_sigmoid)  # 1 / (1 + exp(-a))
    silu = _unary(C.ggml_silu)  # a * sigmoid(a)
    softplus = _unary(C.ggml_softplus)  # log(1 + exp(a))
    tanh = _unary(C.ggml_tanh)
    soft_max = _unary(C.ggml_soft_max)  # over ne0
    sum_rows = _unary(C.ggml_sum_rows)  # over ne0: [1, ne1, ne2, ne3]

    def geglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """gelu(gate) * up."""
        _require(shape(gate) == shape(up) and gate.type == up.type, "geglu", gate, up)
        return C.ggml_geglu_split(self.ctx, gate, up)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""
        _require(shape(gate) == shape(up) and gate.type == up.type, "swiglu", gate, up)
        return C.ggml_swiglu_split(self.ctx, gate, up)

    def swiglu_oai(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate * sigmoid(1.702 gate) * (1 + up), with gate up to 7 and up from -7 to 7."""
        _require(shape(gate) == shape(up) and gate.type == up.type, "swiglu_oai", gate, up)
        return C.ggml_swiglu_oai(self.ctx, gate, up, 1.702, 7.0)

    def rms_norm(self, a: Tensor, eps: float) -> Tensor:
        """a / sqrt(mean(a^2) + eps) over ne0."""
        return C.ggml_rms_norm(self.ctx, a, eps)

    def norm(self, a: Tensor, weight: Tensor, eps: float) -> Tensor:
        """rms_norm(a) * weight."""
        return self.mul(self.rms_norm(a, eps), weight)

    def argmax(self, a: Tensor) -> Tensor:
        """Index of the largest element of each row: I32 [ne1]."""
        _require(a.ne[2] == 1 and a.ne[3] == 1, "argmax", a)
        return C.ggml_argmax(self.ctx, a)

    def argsort_top_k(self, a: Tensor, k: int) -> Tensor:
        """Indices of the k largest elements of each row, in order: a view of a full argsort."""
        _require(0 < k <= a.ne[0], f"argsort_top_k({k})", a)
        return C.ggml_argsort_top_k(self.ctx, a, k)

    def mul_mat(self, w: Tensor, x: Tensor, in_f32: bool = False) -> Tensor:
        """w^T x: [k, m] and [k, n] give F32 [m, n]; in_f32: sums are F32 on every device."""
        ok = w.ne[0] == x.ne[0] and x.ne[2] % w.ne[2] == 0 and x.ne[3] % w.ne[3] == 0
        _require(ok and w.nb[0] <= w.nb[1], "mul_mat", w, x)
        y = C.ggml_mul_mat(self.ctx, w, x)
        if in_f32:
            C.ggml_prec_set_acc(y, C.GGML_PREC_F32)
        return y

    def mul_mat_hadamard(self, rot: Tensor, x: Tensor) -> Tensor:
        """Multiply each run of rot.ne0 elements of a row of x by the Hadamard matrix rot."""
        n, ne = rot.ne[0], shape(x)
        n_rows = ne[0] * ne[1] * ne[2] * ne[3] // n
        _require(ne[0] % n == 0, "mul_mat_hadamard", rot, x)
        flat = self.reshape if C.ggml_is_contiguous(x) else self.cont
        y = self.mul_mat(rot, flat(x, n, n_rows))
        C.ggml_mul_mat_set_hint(y, C.GGML_HINT_SRC0_IS_HADAMARD)
        return self.reshape(y, *ne)

    def mul_mat_id(self, experts: Tensor, x: Tensor, ids: Tensor) -> Tensor:
        """Multiply each token by the experts that it chose.

        experts [k, m, n_expert], x F32 [k, 1 or n_used, n_tokens], ids I32 [n_used, n_tokens]:
        F32 [m, n_used, n_tokens].
        """
        ok = (
            ids.type == I32
            and experts.ne[3] == 1
            and x.ne[3] == 1
            and ids.ne[2] == 1
            and ids.ne[1] == x.ne[2]
            and experts.ne[0] == x.ne[0]
            and ids.ne[0] % x.ne[1] == 0
        )
        _require(ok, "mul_mat_id", experts, x, ids)
        return C.ggml_mul_mat_id(self.ctx, experts, x, ids)

    def reshape(self, a: Tensor, *ne: int) -> Tensor:
        """Give a contiguous tensor another shape of 1 to 4 extents."""
        n = 1
        for extent in ne:
            n *= extent
        _require(n == C.ggml_nelements(a) and C.ggml_is_contiguous(a), "reshape", a, given=ne)
        calls: tuple[Callable[..., Tensor], ...]
        calls = (C.ggml_reshape_1d, C.ggml_reshape_2d, C.ggml_reshape_3d, C.ggml_reshape_4d)
        return calls[len(ne) - 1](self.ctx, a, *ne)

    def view(self, a: Tensor, ne: Sequence[int], nb: Sequence[int] = (), offset: int = 0) -> Tensor:
        """View part of a tensor: extents ne, strides nb of ne1 and up in bytes, offset in bytes."""
        _require(len(nb) == len(ne) - 1, "view", a, given=ne)
        last = C.ggml_row_size(a.type, ne[0]) + sum((e - 1) * s for e, s in zip(ne[1:], nb))
        _require(offset + last <= C.ggml_nbytes(a), "view", a, given=(ne, offset))
        calls: tuple[Callable[..., Tensor], ...]
        calls = (C.ggml_view_1d, C.ggml_view_2d, C.ggml_view_3d, C.ggml_view_4d)
        return calls[len(ne) - 1](self.ctx, a, *ne, *nb, offset)

    def retype(self, a: Tensor, dtype: int, ne0: int) -> Tensor:
        """View the bytes of contiguous rows [n, r] as rows of ne0 elements of another type."""
        n_rows, n_bytes = a.ne[1], C.ggml_row_size(dtype, ne0)
        ok = C.ggml_is_contiguous(a) and a.ne[2] == a.ne[3] == 1 and n_bytes == a.nb[1]
        _require(ok, f"retype([{ne0}])", a)
        t = C.ggml_view_2d(self.ctx, a, a.ne[0], n_rows, a.nb[1], 0)
        # ggml has views of other shapes, but not of other types; its kernels only read these
        t.type, t.ne[0] = dtype, ne0
        t.nb[0], t.nb[1] = C.ggml_type_size(dtype), n_bytes
        t.nb[2] = t.nb[3] = n_bytes * n_rows
        return t

    def permute(self, a: Tensor, *axes: int) -> Tensor:
        """Move axis i to position axes[i]."""
        _require(sorted(axes) == [0, 1, 2, 3], f"permute{axes}", a)
        return C.ggml_permute(self.ctx, a, *axes)

    def cont(self, a: Tensor, *ne: int) -> Tensor:
        """Copy into contiguous memory, with the same or a new two-dimensional shape."""
        if not ne:
            return C.ggml_cont(self.ctx, a)
        _require(len(ne) == 2 and ne[0] * ne[1] == C.ggml_nelements(a), f"cont{list(ne)}", a)
        return C.ggml_cont_2d(self.ctx, a, *ne)

    def concat(self, a: Tensor, b: Tensor, dim: int) -> Tensor:
        """Join two tensors along one axis."""
        ok = all(i == dim or a.ne[i] == b.ne[i] for i in range(4)) and a.type == b.type
        _require(ok, f"concat(dim={dim})", a, b)
        return C.ggml_concat(self.ctx, a, b, dim)

    def cpy(self, a: Tensor, dst: Tensor) -> Tensor:
        """Write a's elements into dst, in the order of their indices; the shapes may differ."""
        _require(C.ggml_nelements(a) == C.ggml_nelements(dst), "cpy", a, dst)
        return C.ggml_cpy(self.ctx, a, dst)

    def publish(self, a: Tensor, host: Tensor) -> Tensor:
        """Do as `cpy` into host memory that the graph does not read; CUDA does it beside the graph.

        a: F32 or I32.

        Source: moegraph.h.
        """
        ok = C.ggml_nelements(a) == C.ggml_nelements(host) and a.type in (F32, I32)
        _require(ok and a.type == host.type, "publish", a, host)
        return C.moegraph_publish(self.ctx, a, host)

    def get_rows(self, a: Tensor, ids: Tensor) -> Tensor:
        """Gather rows: a [n, m, b], ids I32 [r, b] give [n, r, b]; I32 for an I32 a, else F32."""
        _require(ids.type == I32 and a.ne[2] == ids.ne[1] and ids.ne[3] == 1, "get_rows", a, ids)
        return C.ggml_get_rows(self.ctx, a, ids)

    def fetch_rows(
        self, table: Tensor, ids: Tensor, victims: Tensor, source: Tensor, target: Tensor
    ) -> Tensor:
        """Look up ids in a table, as `get_rows`; copy an id without a row to a victim's row first.

        table I32 [1, n]: for each id a row of target, or below 0. ids I32 [n_ids]. victims I32
        [2, n_victims]: rows of target to overwrite in turn, each with the id that it holds. source
        F32 [m, n], may be host memory. target F32 [m, n_rows]. Result: rows, I32 [1, n_ids].

        Source: moegraph.h.
        """
        n_ids, n_victims, (m, n_rows) = ids.ne[0], victims.ne[1], target.ne[0:2]
        ok = (
            (table.type, ids.type, victims.type) == (I32, I32, I32)
            and (source.type, target.type) == (F32, F32)
            and shape(table) == (1, source.ne[1], 1, 1)
            and shape(victims) == (2, n_victims, 1, 1)
            and shape(ids) == (n_ids, 1, 1, 1)
            and max(n_ids, n_victims) <= MAX_FETCH_IDS
            and all(C.ggml_is_contiguous(t) for t in (table, ids, victims))
            and shape(source) == (m, source.ne[1], 1, 1)
            and shape(target) == (m, n_rows, 1, 1)
            and m % 4 == 0
            and all(t.nb[0] == 4 and t.nb[1] % 16 == 0 for t in (source, target))
        )
        _require(ok, "fetch_rows", table, ids, victims, source, target)
        return C.moegraph_fetch_rows(self.ctx, table, ids, victims, source, target)

    def set_rows(self, dst: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        """Write F32 rows [n, r, b] to rows ids I64 or I32 [r] of dst [n, m, b], as dst's type."""
        ok = dst.ne[0] == rows.ne[0] and rows.ne[1] == ids.ne[0] and ids.type in (I64, I32)
        ok = ok and dst.ne[2] == rows.ne[2] and dst.ne[3] == rows.ne[3]
        _require(ok and rows.type == F32, "set_rows", dst, rows, ids)
        return C.ggml_set_rows(self.ctx, dst, rows, ids)

    def rope(
        self, a: Tensor, pos: Tensor, hp: Any, factors: Tensor | None = None, neox: bool = True
    ) -> Tensor:
        """Rotate the first n_rot elements of each head, NEOX pairing or of neighbours.

        factors F32 [n_rot / 2]: what each frequency is divided by.

        Qwen3.5 uses interleaved multi-axis rope. Text has the same position on all axes, which
        makes that equal to NEOX, and only NEOX is fused on CUDA. Rows with four positions have it.
        """
        n_axes = 4 if pos.ne[0] == 4 * a.ne[2] and hp.rope_sections else 1
        ok = pos.type == I32 and n_axes * a.ne[2] == pos.ne[0] and hp.n_rot <= a.ne[0]
        _require(ok, "rope", a, pos)
        if n_axes > 1:
            return C.ggml_rope_multi(
                self.ctx, a, pos, ffi.NULL, hp.n_rot, ffi.new("int[4]", hp.rope_sections),
                C.GGML_ROPE_TYPE_IMROPE, hp.n_ctx_orig, hp.rope_freq_base, hp.rope_freq_scale,
                hp.rope_ext_factor, hp.rope_attn_factor, hp.rope_beta_fast, hp.rope_beta_slow,
            )  # fmt: skip
        if factors is not None:
            ok = factors.type == F32 and factors.ne[0] >= hp.n_rot // 2
            _require(ok, "rope", a, factors)
        return C.ggml_rope_ext(
            self.ctx,
            a,
            pos,
            ffi.NULL if factors is None else factors,
            hp.n_rot,
            C.GGML_ROPE_TYPE_NEOX if neox else 0,  # 0: GGML_ROPE_TYPE_NORMAL
            hp.n_ctx_orig,
            hp.rope_freq_base,
            hp.rope_freq_scale,
            hp.rope_ext_factor,
            hp.rope_attn_factor,
            hp.rope_beta_fast,
            hp.rope_beta_slow,
        )

    def flash_attn(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, n_parts: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention with F32 accumulation.

        q F32 [d, n_tokens, n_head, s], k [d, n_kv, n_head_kv, s], v [m, n_kv, n_head_kv, s], mask
        F16 [n_kv, n_tokens, 1, s]: F32 [m, n_head, n_tokens, s]. n_parts: on the
        CPU, parts in which a single row sums over a long context; 0: one per thread. sinks F32
        [n_head]: a further logit of each head, without a value.
        """
        ok = (
            q.ne[0] == k.ne[0]
            and k.ne[1] == v.ne[1] == mask.ne[0]
            and q.ne[2] % k.ne[2] == 0
            and q.ne[3] == k.ne[3] == mask.ne[3]
            and mask.type == F16
            and mask.ne[1] >= q.ne[1]
        )
        _require(ok, "flash_attn", q, k, v, mask)
        y = C.ggml_flash_attn_ext(self.ctx, q, k, v, mask, scale, 0.0, 0.0)
        C.ggml_prec_set_acc(y, C.GGML_PREC_F32)
        y.op_params[5] = n_parts
        if sinks is not None:
            _require(sinks.type == F32 and shape(sinks) == (q.ne[2], 1, 1, 1), "sinks", q, sinks)
            C.ggml_flash_attn_ext_add_sinks(y, sinks)
        return y

    def paged_attn(
        self, q: Tensor, k: Tensor, v: Tensor, pages: Tensor, rows: Tensor, page_size: int,
        scale: float, sinks: Tensor | None = None, window: int = 0,
    ) -> Tensor:  # fmt: skip
        """Attention of rows of any sequences over keys and values in pages of a pool.

        q F32 [d, n_head, n_rows], any strides of heads and rows. k, v F16, Q8_0 or Q4_0
        [d * n_head_kv, n_pool_rows]; a page is page_size pool rows, a power of two from 16 up.
        pages I32 [n_pages, n_seqs]: the pages of each sequence, in the order of what is stored in
        them. rows I32 [36, n_rows], for each row: its sequence; n_past, the committed positions of
        the sequence; n_keys, the row's position + 1, or 0 for padding; a word that is not used;
        then 32 words for the row's own path: word i is the offset in rows, after the committed
        ones, at which the key of position n_past + i is stored. sinks F32 [n_head]: scores without
        values. window: positions that a row attends to, its own the last; 0: all. Returns F32
        [d * n_head, n_rows], zeros for padding. A row's bits depend on its query and on its keys
        and values in order of position, and on nothing else. On CUDA, d is 64, 128 or 256, at most
        16 query heads share a head of keys, and the result's memory has partial sums after its
        elements (ggml_backend_buft_get_alloc_size).

        Source: native/ggml/include/moegraph.h, moegraph_attn and moegraph_attn_add.
        """
        kinds = (C.GGML_TYPE_F16, C.GGML_TYPE_Q8_0, C.GGML_TYPE_Q4_0)
        d, n_head, n_rows, n_pages = q.ne[0], q.ne[1], q.ne[2], pages.ne[0]
        ok = (
            (q.type, pages.type, rows.type) == (F32, I32, I32)
            and (q.nb[0], q.ne[3]) == (4, 1)
            and d % 32 == 0
            and d <= MAX_ATTN_HEAD
            and n_rows <= MAX_ATTN_ROWS
            and all(t.type in kinds and shape(t) == shape(k) for t in (k, v))
            and all(t.nb[0] == C.ggml_type_size(t.type) for t in (k, v))
            and shape(k)[2:] == (1, 1)
            and k.ne[0] % d == 0
            and n_head % (k.ne[0] // d) == 0
            and shape(pages)[2:] == (1, 1)
            and shape(rows) == (ATTN_WORDS, n_rows, 1, 1)
            and all(C.ggml_is_contiguous(t) for t in (pages, rows))
            and page_size >= 16
            and page_size & (page_size - 1) == 0
            and n_pages * page_size <= MAX_ATTN_POSITIONS
            and (sinks is None or (sinks.type, shape(sinks)) == (F32, (n_head, 1, 1, 1)))
            and window >= 0
        )
        _require(ok, f"paged_attn(page_size={page_size})", q, k, v, pages, rows)
        out = C.moegraph_attn(self.ctx, q, k, v, pages, rows, page_size, scale)
        if sinks is not None or window:
            C.moegraph_attn_add(out, ffi.NULL if sinks is None else sinks, window)
        return out

    def candidates(self, logits: Tensor, draws: Tensor) -> Tensor:
        """What a sampler needs of rows of logits.

        logits F32 [n_vocab, n_rows], at most 32 rows; draws I32 [512, n_rows]. Returns I32 [n,
        n_rows]: for each row the likeliest tokens, the first ones of a race, and more.

        Source: native/ggml/include/moegraph.h, moegraph_candidates.
        """
        n_rows = logits.ne[1]
        ok = (
            (logits.type, draws.type) == (F32, I32)
            and shape(logits)[2:] == (1, 1)
            and shape(draws) == (C.MOEGRAPH_DRAW_WORDS, n_rows, 1, 1)
            and all(C.ggml_is_contiguous(t) for t in (logits, draws))
            and 0 < logits.ne[0] < 1 << 30
            and n_rows <= C.MOEGRAPH_DRAW_ROWS
        )
        _require(ok, "candidates", logits, draws)
        return C.moegraph_candidates(self.ctx, logits, draws)

    def conv(
        self, rows: Tensor, kernel: Tensor, pool: Tensor, slots: Tensor,
        parents: Tensor | None = None, lengths: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Depthwise causal convolution of rows that continue a state.

        rows F32 [channels, T, S], kernel F32 [d_conv, channels], pool F32 [(d_conv - 1) * channels,
        n_slots] with each channel's last values side by side: F32 [channels, T, S]. slots I32 [S],
        parents I32 [T, S], lengths I32 [S]: see delta_net.
        """
        ok = (
            rows.type == kernel.type == F32
            and rows.nb[0] == 4
            and rows.ne[3] == 1
            and shape(kernel)[1:] == (rows.ne[0], 1, 1)
            and 2 <= kernel.ne[0] <= C.MOEGRAPH_CONV_WIDTH
            and C.ggml_is_contiguous(kernel)
            and pool.ne[0] == (kernel.ne[0] - 1) * rows.ne[0]
        )
        _require(ok, "conv", rows, kernel, pool)
        _require_states(pool, slots, parents, lengths, rows.ne[1], rows.ne[2], "conv")
        optional = parents or ffi.NULL, lengths or ffi.NULL
        return C.moegraph_conv(self.ctx, rows, kernel, pool, slots, *optional)

    def delta_net(
        self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, pool: Tensor,
        slots: Tensor, parents: Tensor | None = None, lengths: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Gated delta rule over rows that continue a state.

        q, k F32 [D, n_k_heads, T, S], v F32 [D, H, T, S], gate and beta F32 [1, H, T, S], pool F32
        [D * D * H, n_slots]: F32 [D, H, T, S]. Sequence s has the state of slots[s], I32 [S]; its
        rows continue one another, and the state becomes that of the last row. With parents I32
        [T, S] each row continues its parent, or the state if that is -1; the state stays. Padding
        touches no state, and its results are 0: a sequence in slot -1, a row whose parent is -2,
        and, without parents, the rows after the first lengths[s] of a sequence; lengths I32 [S].
        """
        d, h, t, s = shape(v)
        ok = (
            q.type == k.type == v.type == gate.type == beta.type == F32
            and q.nb[0] == k.nb[0] == v.nb[0] == 4
            and shape(q) == shape(k) == (d, q.ne[1], t, s)
            and h % q.ne[1] == 0
            and shape(gate) == shape(beta) == (1, h, t, s)
            and C.ggml_is_contiguous(gate)
            and C.ggml_is_contiguous(beta)
            and pool.ne[0] == d * d * h
        )
        _require(ok, "delta_net", q, k, v, gate, beta, pool)
        _require_states(pool, slots, parents, lengths, t, s, "delta_net")
        optional = parents or ffi.NULL, lengths or ffi.NULL
        return C.moegraph_delta_net(self.ctx, q, k, v, gate, beta, pool, slots, *optional)
