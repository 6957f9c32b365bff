"""What ties data to a model: shape and fingerprint of its router, and a hash of its contents."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..errors import RequestError
from ..modelfile import ModelFile

# Tensors of which a part is hashed, and how much of each.
_N_SAMPLED, _SAMPLE_BYTES = 128, 4096
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
        """Refuse data of another model; what: name of the data, as in 'trace.bin: the trace'.

        Raises:
            RequestError: shapes or fingerprints differ.
        """
        if self.sizes != model.sizes:
            raise RequestError(f"{what} is of a model with {self}; this model has {model}")
        if self.model and model.model and self.model != model.model:
            raise RequestError(
                f"{what} is of a model with another router ({self.model}; this model: "
                f"{model.model}); record one with this model"
            )


def router_shape(model: ModelFile) -> RouterShape:
    """Return shape and fingerprint of a model's router.

    The fingerprint is a hash of the router matrices of the first and the last layer, which all
    quantizations of a model share.
    """
    hp = model.hparams
    digest = hashlib.sha256()
    for il in sorted({0, hp.n_layer - 1}):
        info = model.tensors[f"blk.{il}.ffn_gate_inp.weight"]
        digest.update(model.map(info).data)
    return RouterShape(hp.n_layer, hp.n_expert, hp.n_expert_used, digest.hexdigest()[:16])


def content_hash(model: ModelFile) -> str:
    """Return a hash of what a model computes: its hyper-parameters, tensors, and samples of them.

    Another quantization or finetune of the model has another one.
    """
    digest = hashlib.blake2b(repr(model.hparams).encode(), digest_size=16)
    for info in model.tensors.values():
        digest.update(f"{info.name} {info.type} {info.ne}".encode())
    tensors = list(model.tensors.values())
    for info in tensors[:: max(1, len(tensors) // _N_SAMPLED)]:
        n = min(_SAMPLE_BYTES, info.nbytes)
        sample = np.empty(n, np.uint8)
        model.read(info, sample, (info.nbytes - n) // 2)
        digest.update(sample.data)
    return digest.hexdigest()
