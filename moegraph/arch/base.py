"""What an architecture is: a model's hyper-parameters, the tensors it needs, and its graph.

A subclass is one file, for example qwen3moe.py. Everything else asks these methods, and knows no
architecture by its name.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from ..gguf.vocab import BYTE_LEVEL
from .inputs import Memory, PassInputs, PassShape, Weights
from .tensors import Expected

if TYPE_CHECKING:
    from ..ggml.ops import Builder, Tensor
    from ..gguf.metadata import Metadata


@dataclass(frozen=True)
class Layer:
    """What a layer keeps of each sequence, which placement, state, planner and runner ask.

    mixer: its name, for people. kv: elements of a row of K and of V; None: it has no KV cache, and
    one graph serves all KV lengths. v_in_k: V is the first elements of K, and has no cache.
    window: the last positions, its own included, that a row attends to; None: all. has_sinks: its
    attention has sinks. states: shapes of its recurrent states, F32 in ggml order, by the names of
    llama.cpp's nodes that compute them. drafts: F32 numbers of each kind that a verify pass keeps
    of a row, so that accepted rows can be committed to the states. n_ff: width of the FFN that a
    dense layer has in place of router and experts; 0: it has those.
    """

    mixer: str
    kv: tuple[int, int] | None = None
    v_in_k: bool = False
    window: int | None = None
    has_sinks: bool = False
    states: tuple[tuple[str, tuple[int, ...]], ...] = ()
    drafts: tuple[int, ...] = ()
    n_ff: int = 0

    @property
    def is_routed(self) -> bool:
        """Return whether the layer has a router; a dense one never lacks an expert."""
        return not self.n_ff

    @property
    def cached(self) -> tuple[int, ...]:
        """Return the elements of a row of each KV cache: of K, and of V unless it is in K."""
        return self.kv[: 2 - self.v_in_k] if self.kv else ()

    @property
    def state_sizes(self) -> tuple[int, ...]:
        """Return how many F32 numbers each state of a sequence has."""
        return tuple(math.prod(ne) for _, ne in self.states)


@dataclass(frozen=True)
class Routing:
    """A router's choice.

    argsort I32 [n_expert, n_tokens]: all experts, best first. topk I32 [n_expert_used, n_tokens]: a
    view of the best ones. weights F32 [n_factors, n_expert_used, n_tokens]. weights_data: the node
    whose memory holds the weights.
    """

    argsort: Tensor
    topk: Tensor
    weights: Tensor
    weights_data: Tensor


@dataclass(frozen=True)
class Architecture(ABC):
    """An architecture with the hyper-parameters of one model.

    n_layer: layers of a pass. n_layer_nextn: prediction (MTP) blocks after them, which only draft.
    n_ff_shexp: width of the shared expert, 0 without one. rope_*, n_ctx_orig: arguments of
    ggml_rope_ext, with scaling applied; rope_sections: of ggml_rope_multi, for pictures, if there
    are any.

    In the methods, il is a layer, w its weights, cur and x are F32 [n_embd, n_tokens].
    """

    name: ClassVar[str]
    families: ClassVar[str]  # for people
    # another tokenizer.ggml.model than that of byte-level BPE that its files may have
    tokenizer: ClassVar[str] = BYTE_LEVEL
    # whether outputs of experts may be added to a layer's output after `layer_end`
    adds_late: ClassVar[bool] = True
    # the activation of routed experts, a method of `Builder`
    glu: ClassVar[str] = "swiglu"
    # whether what attention and FFNs add to a layer is summed in F32, also where F16 is faster
    sums_in_f32: ClassVar[bool] = False
    # whether the matrices of routed experts have biases, which are parts of a slot too
    has_expert_biases: ClassVar[bool] = False
    # what launches of a layer take for one row, in kernels of 2.34 us: from speeds on an H200
    # (docs/benchmarks/families.md and h200.md), assumed for olmoe and glm4moe
    layer_launches: ClassVar[float] = 14.0
    # numbers by which the output of a chosen expert is multiplied, one after the other
    n_factors: ClassVar[int] = 1
    # groups of projections of the same vector; those of one type are placed next to each other
    same_input: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("attn_q.weight", "attn_k.weight", "attn_v.weight"),
    )

    n_vocab: int
    n_embd: int
    n_layer: int
    n_layer_nextn: int
    n_ctx_train: int
    n_head: int
    n_head_kv: int
    n_embd_head_k: int
    n_embd_head_v: int
    n_rot: int
    n_ff_exp: int
    n_ff_shexp: int
    n_expert: int
    n_expert_used: int
    f_norm_rms_eps: float
    rope_freq_base: float
    rope_freq_scale: float
    rope_ext_factor: float
    rope_attn_factor: float
    rope_beta_fast: float
    rope_beta_slow: float
    n_ctx_orig: int
    rope_sections: tuple[int, ...] = field(default=(), kw_only=True)

    @classmethod
    @abstractmethod
    def read(cls, meta: Metadata, n_vocab: int) -> Architecture:
        """Read and check the hyper-parameters; n_vocab is that of tokenizer and embedding."""

    @abstractmethod
    def layer(self, il: int) -> Layer:
        """Return what layer il keeps of a sequence; n_layer is the prediction block."""

    @abstractmethod
    def layer_tensors(self, il: int, merged: bool) -> dict[str, Expected]:
        """Return the tensors of layer il, named without `blk.N.`.

        merged: gate and up experts are stored as one tensor, gate first.
        """

    def model_tensors(self) -> dict[str, Expected]:
        """Return the tensors outside the layers that only this architecture has or asks for."""
        return {}

    def at(self, il: int) -> Architecture:
        """Return the same with the heads and the rope of layer il."""
        return self

    @property
    def embedding_scale(self) -> float:
        """Return what embeddings are multiplied by."""
        return 1.0

    @property
    def attention_scale(self) -> float:
        """Return what the products of Q and K are multiplied by."""
        return 1.0 / math.sqrt(self.n_embd_head_k)

    @property
    def logit_softcap(self) -> float:
        """Return the bound x of logits, which become x * tanh(logit / x); 0 without one."""
        return 0.0

    @property
    def has_cpu_kernel(self) -> bool:
        """Return whether native/py/cpu_ffn.c computes experts: gate, up, SwiGLU, down, a weight."""
        return self.glu == "swiglu" and not self.has_expert_biases and self.n_factors == 1

    @property
    def routed_layers(self) -> list[int]:
        """Return the layers with a router."""
        return [il for il in range(self.n_layer) if self.layer(il).is_routed]

    @property
    def window(self) -> int | None:
        """Return the window of the layers that have one, which is the same in all of them."""
        windows = (self.layer(il).window for il in range(self.n_layer))
        return next((window for window in windows if window), None)

    @property
    def mixer_width(self) -> int:
        """Return a bound on the F32 numbers that a mixer and its projections have of a row."""
        return 4 * self.n_embd_head_k * self.n_head

    @abstractmethod
    def mixer(
        self, b: Builder, w: Weights, memory: Memory, inp: PassInputs, shape: PassShape,
        cur: Tensor, il: int,
    ) -> Tensor:  # fmt: skip
        """Append the mixer over the normed input cur. With parents, rows go to memory.drafts."""

    @abstractmethod
    def ffn_input(
        self, b: Builder, w: Weights, cur: Tensor, x: Tensor, il: int
    ) -> tuple[Tensor, Tensor]:
        """Append the residual of a mixer's output cur and the layer's input x, and its norm."""

    @abstractmethod
    def router(self, b: Builder, w: Weights, residual: Tensor, cur: Tensor, il: int) -> Routing:
        """Append the choice of experts; residual, cur: what `ffn_input` gave."""

    @abstractmethod
    def layer_end(
        self, b: Builder, w: Weights, residual: Tensor, cur: Tensor, moe: Tensor | None, il: int
    ) -> Tensor:
        """Append what follows the routed experts, up to the layer's output l_out.

        residual, cur: what `ffn_input` gave. moe: the sum of the routed experts; None: it is added
        to l_out later, or the layer is dense, and its FFN comes here.
        """

    def keys_values(
        self, b: Builder, w: Weights, memory: Memory, pos: Tensor, kv_idx: Tensor, cur: Tensor,
        il: int,
    ) -> None:  # fmt: skip
        """Append only the writes of K and V of normed rows cur, as `mixer` does.

        pos I32 [n_tokens]; kv_idx I64 [n_tokens], rows of the caches. For prediction blocks.
        """
        raise NotImplementedError

    def commit(
        self, b: Builder, w: Weights, memory: Memory, rows: list[Tensor], slots: Tensor,
        path: Tensor, lengths: Tensor, il: int,
    ) -> None:  # fmt: skip
        """Append the update of a layer's states by the rows of one path through each tree.

        rows: what a verify pass kept, F32 [width, n] of each kind. slots I32 [S]; path I32
        [n_accepted, S], rows counted over all sequences, of each tree from its root on; lengths I32
        [S], how many of them count. For layers with states.
        """
        raise NotImplementedError
