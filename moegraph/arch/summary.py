"""Sizes of a model in bytes: by type, layer, expert and token.

Pure functions of a tensor table and Architecture. Sizes are those of the tensors alone, without the
alignment that allocators add.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ..errors import ConfigError
from ..gguf.tensorfile import TensorInfo
from .base import Architecture, Layer
from .model import expected_tensors, merged_layers
from .tensors import block_index

_F32_BYTES = 4
_EXPERT_NAMES = ("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps")
_KV_TYPES = {
    "f16": GGMLQuantizationType.F16,
    "q8_0": GGMLQuantizationType.Q8_0,
    "q4_0": GGMLQuantizationType.Q4_0,
}


@dataclass(frozen=True)
class TypeTotal:
    """All tensors of one type."""

    type: str
    n_tensors: int
    n_params: int
    n_bytes: int


@dataclass(frozen=True)
class LayerSummary:
    """One layer that runs. expert_types: (short name, type) of each routed-expert tensor."""

    il: int
    mixer: str
    recurrent: bool
    dense_bytes: int
    expert_bytes: int
    bytes_per_expert: int
    expert_types: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ModelSummary:
    """Sizes of a model in bytes.

    dense_bytes: all that runs except the routed experts: embedding, head, norms, attention, router,
    shared expert. unused_bytes: prediction blocks and unknown tensors. active_params: parameters
    that one token uses; the embedding counts as one row unless it is also the head.
    """

    n_params: int
    active_params: int
    n_bytes: int
    dense_bytes: int
    expert_bytes: int
    unused_bytes: int
    by_type: tuple[TypeTotal, ...]
    layers: tuple[LayerSummary, ...]


def summarize(hp: Architecture, tensors: Mapping[str, TensorInfo]) -> ModelSummary:
    """Return the sizes of a model."""
    names = expected_tensors(hp, merged_layers(hp, tensors))
    running = {name: tensors[name] for name in names if name in tensors}
    blocks: dict[int, list[TensorInfo]] = {il: [] for il in range(hp.n_layer)}
    for info in running.values():
        il = block_index(info.name)
        if il is not None:
            blocks[il].append(info)
    layers = tuple(_summarize_layer(hp, il, block) for il, block in blocks.items())
    n_bytes = sum(t.nbytes for t in tensors.values())
    expert_bytes = sum(layer.expert_bytes for layer in layers)
    used_bytes = sum(t.nbytes for t in running.values())
    return ModelSummary(
        n_params=sum(t.n_params for t in tensors.values()),
        active_params=_active_params(hp, running),
        n_bytes=n_bytes,
        dense_bytes=used_bytes - expert_bytes,
        expert_bytes=expert_bytes,
        unused_bytes=n_bytes - used_bytes,
        by_type=types_of(tensors.values()),
        layers=layers,
    )


def kv_bytes(layer: Layer, type_k: str = "f16", type_v: str = "f16") -> int:
    """Return the bytes that one position takes in the KV cache of a layer."""
    if layer.kv is None:
        return 0
    if layer.v_in_k and type_k != type_v:
        raise ConfigError(
            f"type_k is {type_k!r} but type_v {type_v!r}; this model's V is a part of its K, so "
            "both must be the same"
        )
    sizes = [_row_bytes(*one) for one in zip(("type_k", "type_v"), (type_k, type_v), layer.kv)]
    return sum(sizes[: len(layer.cached)])


def state_bytes(layer: Layer, n_seq: int = 1) -> int:
    """Return the bytes of a layer's recurrent states of n_seq sequences."""
    return n_seq * sum(layer.state_sizes) * _F32_BYTES


def _is_expert(name: str) -> bool:
    return name.split(".")[-2] in _EXPERT_NAMES and name.endswith((".weight", ".bias"))


def _summarize_layer(hp: Architecture, il: int, tensors: list[TensorInfo]) -> LayerSummary:
    layer, experts = hp.layer(il), [t for t in tensors if _is_expert(t.name)]
    expert_bytes = sum(t.nbytes for t in experts)
    return LayerSummary(
        il=il,
        mixer=layer.mixer,
        recurrent=layer.kv is None,
        dense_bytes=sum(t.nbytes for t in tensors) - expert_bytes,
        expert_bytes=expert_bytes,
        bytes_per_expert=expert_bytes // hp.n_expert,
        expert_types=tuple(
            (t.name.split(".")[2], t.type.name) for t in experts if t.name.endswith(".weight")
        ),
    )


def _active_params(hp: Architecture, tensors: Mapping[str, TensorInfo]) -> int:
    """Return the parameters that one token touches: top-k experts, one embedding row, the head."""
    total = 0
    for name, info in tensors.items():
        if _is_expert(name):
            total += info.n_params // hp.n_expert * hp.n_expert_used
        elif name == "token_embd.weight":
            tied = "output.weight" not in tensors
            total += info.n_params if tied else hp.n_embd
        else:
            total += info.n_params
    return total


def types_of(tensors: Iterable[TensorInfo]) -> tuple[TypeTotal, ...]:
    """Return totals by type, the largest first."""
    groups: dict[str, list[TensorInfo]] = {}
    for info in tensors:
        groups.setdefault(info.type.name, []).append(info)
    totals = [
        TypeTotal(name, len(g), sum(t.n_params for t in g), sum(t.nbytes for t in g))
        for name, g in groups.items()
    ]
    return tuple(sorted(totals, key=lambda t: (-t.n_bytes, t.type)))


def _row_bytes(field: str, name: str, n: int) -> int:
    """Return the bytes of n elements of a cache type."""
    if name not in _KV_TYPES:
        raise ConfigError(f"{field} is {name!r}; allowed: {', '.join(_KV_TYPES)}")
    block, size = GGML_QUANT_SIZES[_KV_TYPES[name]]
    if n % block:
        raise ConfigError(
            f"{field} is {name!r}, whose blocks of {block} do not divide "
            f"the {n} elements of a cache row; use f16"
        )
    return n // block * size
