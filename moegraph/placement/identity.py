"""What ties data to a model.

Counts of routing (profiles, traces) carry the shape and a fingerprint of the router: all
quantizations of a model share them, and counts of another model cost speed, never a result. Saved
KV rows and states are results, so they carry `file_hash`, which no other file has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from ..arch import ModelFile
from ..errors import RequestError
from ..gguf.tensorfile import TensorInfo

# Slices of a tensor that is not experts, and bytes in the middle of each that are hashed.
_N_SLICES, _SAMPLE_BYTES = 16, 1024
# Threads that read samples: a disk finds several places at a time.
_N_READERS = 8
_MAX = {"n_layer": 1024, "n_expert": 65536, "n_expert_used": 1024}


@dataclass(frozen=True)
class RouterShape:
    """Sizes of a router, and its fingerprint in `model`; an empty one fits every model."""

    n_layer: int
    n_expert: int
    n_expert_used: int
    model: str = ""

    def __str__(self) -> str:
        return f"{self.n_layer} layers of {self.n_expert} experts, {self.n_expert_used} used"

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return n_layer, n_expert, n_expert_used."""
        return self.n_layer, self.n_expert, self.n_expert_used

    @staticmethod
    def from_fields(fields: Mapping[str, object]) -> RouterShape | None:
        """Return the shape that a file's header describes, or None if it is not valid."""
        sizes = []
        for name, most in _MAX.items():
            value = fields.get(name)
            if type(value) is not int or not 1 <= value <= most:
                return None
            sizes.append(value)
        model = fields.get("model")
        if not isinstance(model, str) or len(model) > 64 or sizes[2] > sizes[1]:
            return None
        n_layer, n_expert, n_expert_used = sizes
        return RouterShape(n_layer, n_expert, n_expert_used, model)

    def require(self, model: RouterShape, what: str) -> None:
        """Refuse data of another model; what: name of the data, as in 'trace.bin: the trace'."""
        if self.sizes != model.sizes:
            raise RequestError(f"{what} is of a model with {self}; this model has {model}")
        if self.model and model.model and self.model != model.model:
            raise RequestError(
                f"{what} is of a model with another router ({self.model}; this model: "
                f"{model.model}); record one with this model"
            )


def router_shape(model: ModelFile) -> RouterShape:
    """Return shape and fingerprint of a model's router.

    The fingerprint is a hash of the first and the last router's matrices, which all
    quantizations of a model share.
    """
    hp = model.hparams
    digest = hashlib.sha256()
    routed = hp.routed_layers
    for il in sorted({routed[0], routed[-1]}):
        info = model.tensors[f"blk.{il}.ffn_gate_inp.weight"]
        digest.update(model.map(info).data)
    return RouterShape(hp.n_layer, hp.n_expert, hp.n_expert_used, digest.hexdigest()[:16])


def file_hash(model: ModelFile) -> str:
    """Return a hash of a model's files: what they declare, when they changed, and samples of them.

    It has the size and the modification time of each part, the hyper-parameters, the names, types
    and shapes of all tensors, and bytes from the middle of each expert of each tensor, or from 16
    places of a tensor without experts. So a file that was written to has another hash. One whose
    modification time was set back has the old hash only if no sample changed.
    """
    digest = hashlib.blake2b(repr((model.hparams, model.stamps)).encode(), digest_size=16)
    for info in model.tensors.values():
        digest.update(f"{info.name} {info.type} {info.ne}".encode())

    def sample(info: TensorInfo) -> bytes:
        n_slices = info.ne[2] if info.ne[2] > 1 else _N_SLICES
        size = max(1, info.nbytes // n_slices)
        n = min(_SAMPLE_BYTES, size)
        found = np.empty((min(n_slices, info.nbytes), n), np.uint8)
        for i, row in enumerate(found):
            model.read(info, row, i * size + (size - n) // 2)
        return hashlib.blake2b(found.data, digest_size=16).digest()

    with ThreadPoolExecutor(_N_READERS, "identity") as readers:
        for found in readers.map(sample, model.tensors.values()):
            digest.update(found)
    return digest.hexdigest()
