"""Routing traces: a file of the expert ids that a router chose for each token and layer.

Layout, little-endian:

    8 bytes   b"MOETRACE"
    u32       version, 2
    u32       length of the header
    header    JSON object: n_layer n_expert n_expert_used n_tokens n_prompt model source sha256
              slot_bytes
    ids       u8 (n_expert <= 256) or u16 [n_tokens][n_layer][n_expert_used], best expert first

sha256: hash of the ids. model: fingerprint of the router (identity.py); empty for generated traces,
which fit every model of their shape. slot_bytes [n_layer]: bytes of one expert of each layer with
padding, 0 for a dense one, whose ids mean nothing; empty if no model was loaded, absent in
version 1.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, InternalError, RequestError
from ..units import format_bytes, format_share
from .identity import RouterShape

MAGIC = b"MOETRACE"
VERSION = 2
_READABLE = (1, 2)
_MAX_HEADER = 64 * 1024
_MAX_TOKENS = 1 << 24
_MAX_SLOT_BYTES = 1 << 40
_PREFIX = struct.Struct("<8sII")


@dataclass(frozen=True)
class Trace:
    """The expert ids that a router chose.

    ids: numpy u8 or u16 [n_tokens, n_layer, n_expert_used]; the first n_prompt tokens are a prompt.
    source: where the ids come from, for people. slot_bytes [n_layer]: bytes of one expert of each
    layer, 0 for a dense one; empty if unknown.
    """

    shape: RouterShape
    ids: npt.NDArray[Any] = field(repr=False)
    n_prompt: int = 0
    source: str = ""
    slot_bytes: tuple[int, ...] = ()

    @property
    def n_tokens(self) -> int:
        """Return the number of tokens."""
        return len(self.ids)

    @cached_property
    def sha256(self) -> str:
        """Return the hash of the ids, 64 hex digits."""
        return hashlib.sha256(np.ascontiguousarray(self.ids).data).hexdigest()

    def part(self, start: int, stop: int) -> Trace:
        """Return tokens start..stop-1 as a trace."""
        n_prompt = min(max(self.n_prompt - start, 0), max(stop - start, 0))
        return replace(self, ids=self.ids[start:stop], n_prompt=n_prompt)

    @property
    def routed(self) -> npt.NDArray[np.bool_]:
        """Return which layers have a router, numpy [n_layer]."""
        return np.array(self.slot_bytes or [1] * self.shape.n_layer) > 0

    def routers(self) -> Trace:
        """Return the trace without dense layers."""
        ids, n_layer = self.ids[:, self.routed], int(self.routed.sum())
        return replace(self, shape=replace(self.shape, n_layer=n_layer), ids=ids, slot_bytes=())

    def counts(self) -> npt.NDArray[np.int64]:
        """Return how often each expert was chosen, numpy [n_layer, n_expert]."""
        size = n_layer, n_expert = self.shape.sizes[:2]
        flat = self.ids.astype(np.int64) + n_expert * np.arange(n_layer)[:, None]
        found = np.bincount(flat.reshape(-1), minlength=n_layer * n_expert).reshape(size)
        return np.where(self.routed[:, None], found, 0)


def ids_dtype(n_expert: int) -> np.dtype[Any]:
    """Return the type of the ids of n_expert experts in a file."""
    return np.dtype("u1" if n_expert <= 256 else "<u2")


class TraceRecorder:
    """Collects a trace as an observer of a runner.

    The runner calls it for the routed layers of each pass, in order; a pass may have several rows.
    slot_bytes: as in `Trace`.
    """

    def __init__(self, shape: RouterShape, slot_bytes: Sequence[int] = ()) -> None:
        self._shape = shape
        self._slot_bytes = tuple(slot_bytes)
        routed = [il for il, size in enumerate(slot_bytes) if size] or range(shape.n_layer)
        self._first, self._last = routed[0], routed[-1]
        self._passes: list[npt.NDArray[Any]] = []
        self._pass: npt.NDArray[Any] | None = None

    def __call__(self, il: int, ids: npt.NDArray[np.int32]) -> None:
        """Note the ids of one layer and pass, I32 [n_tokens * n_expert_used]."""
        shape = self._shape
        rows = ids.reshape(-1, shape.n_expert_used)
        if il == self._first:
            size, dtype = (len(rows), shape.n_layer, 1), ids_dtype(shape.n_expert)
            self._pass = np.tile(np.arange(shape.n_expert_used, dtype=dtype), size)
        if self._pass is None or len(self._pass) != len(rows):
            raise InternalError(f"trace: layer {il} came with {len(rows)} rows, out of order")
        self._pass[:, il] = rows
        if il == self._last:
            self._passes.append(self._pass)
            self._pass = None

    def trace(self, n_prompt: int, source: str) -> Trace:
        """Return a trace of all complete passes."""
        shape = self._shape
        empty = np.empty((0, shape.n_layer, shape.n_expert_used), ids_dtype(shape.n_expert))
        ids = np.concatenate([empty, *self._passes])
        return Trace(shape, ids, min(n_prompt, len(ids)), source, self._slot_bytes)


def write_trace(path: str | Path, trace: Trace) -> None:
    """Write a trace; replace an older file only when the new one is complete."""
    shape = trace.shape
    ids = np.ascontiguousarray(trace.ids, dtype=ids_dtype(shape.n_expert))
    header = json.dumps({
        "n_layer": shape.n_layer, "n_expert": shape.n_expert, "n_expert_used": shape.n_expert_used,
        "n_tokens": len(ids), "n_prompt": trace.n_prompt, "model": shape.model,
        "source": trace.source[:1000], "sha256": hashlib.sha256(ids.data).hexdigest(),
        "slot_bytes": list(trace.slot_bytes),
    }).encode()  # fmt: skip
    replace_file(path, (_PREFIX.pack(MAGIC, VERSION, len(header)), header, ids.tobytes()))


def read_trace(path: str | Path) -> Trace:
    """Read and check a trace."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start, empty, n_tokens, sha256 = _header(
                str(path), file.read(_PREFIX.size), file.read(_MAX_HEADER)
            )
            shape, dtype = empty.shape, empty.ids.dtype
            n_bytes = n_tokens * shape.n_layer * shape.n_expert_used * dtype.itemsize
            if size != start + n_bytes:
                raise _damaged(path, f"it has {size} bytes; its header says {start + n_bytes}")
            file.seek(start)
            data = file.read(n_bytes)
    except OSError as error:
        raise RequestError(f"{path}: cannot read the trace: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest() != sha256:
        raise _damaged(path, "its ids do not match their sha256")
    ids = np.frombuffer(data, dtype).reshape(n_tokens, shape.n_layer, shape.n_expert_used)
    if ids.size and int(ids.max()) >= shape.n_expert:
        raise _damaged(path, f"it names expert {int(ids.max())} of {shape.n_expert}")
    ordered = np.sort(ids, axis=2)
    if (ordered[:, :, 1:] == ordered[:, :, :-1]).any():
        raise _damaged(path, "a token chose the same expert twice")
    return replace(empty, ids=ids)


def replace_file(path: str | Path, pieces: Sequence[bytes]) -> None:
    """Write pieces to a new file and rename it to path, so that readers see only complete files.

    The new file keeps the permissions of the old one. If path is a symbolic link, its target is
    replaced. A device or a pipe, such as /dev/null, is written directly.
    """
    target = Path(os.path.realpath(path))
    try:
        mode = target.stat().st_mode if os.path.exists(target) else None
        if mode is not None and not stat.S_ISREG(mode):
            _write(os.open(target, os.O_WRONLY | _PLAIN), pieces)
            return
        # an unpredictable name that must not exist, so an attacker cannot plant a link there
        beside = target.with_name(f".moegraph-{secrets.token_hex(8)}")
        fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _PLAIN, 0o666)
        try:
            _write(fd, pieces, mode)
            os.replace(beside, target)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot write: {error.strerror}") from error


_PLAIN = os.O_NOFOLLOW | os.O_CLOEXEC


def _write(fd: int, pieces: Sequence[bytes], mode: int | None = None) -> None:
    """Write pieces to an open file and close it."""
    with os.fdopen(fd, "wb") as file:
        if mode is not None:
            os.fchmod(fd, stat.S_IMODE(mode))
        for piece in pieces:
            file.write(piece)


def _header(path: str, prefix: bytes, rest: bytes) -> tuple[int, Trace, int, str]:
    """Return where ids start, the trace without them, the number of tokens, and the sha256."""
    if len(prefix) < _PREFIX.size or not prefix.startswith(MAGIC):
        raise RequestError(f"{path}: not a routing trace; `moegraph trace` writes them")
    _, version, length = _PREFIX.unpack(prefix)
    if version not in _READABLE:
        raise RequestError(
            f"{path}: trace format {version}; this moegraph reads formats 1 to {VERSION}"
        )
    if length > len(rest):
        raise _damaged(path, f"its header of {format_bytes(length)} is cut off or too long")
    try:
        fields = json.loads(rest[:length])
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise _damaged(path, "its header is not a JSON object")
    shape = RouterShape.from_fields(fields)
    n_tokens, n_prompt = fields.get("n_tokens"), fields.get("n_prompt")
    source, sha256 = fields.get("source"), fields.get("sha256")
    if shape is None or not isinstance(source, str) or not isinstance(sha256, str):
        raise _damaged(path, "its header does not describe a router")
    if type(n_tokens) is not int or not 0 <= n_tokens <= _MAX_TOKENS:
        raise _damaged(path, f"n_tokens is {n_tokens!r}; allowed: 0 to {_MAX_TOKENS}")
    if type(n_prompt) is not int or not 0 <= n_prompt <= n_tokens:
        raise _damaged(path, f"n_prompt is {n_prompt!r}; allowed: 0 to {n_tokens}")
    sizes = _slot_bytes(path, fields.get("slot_bytes", []), shape.n_layer)
    ids = np.empty((0, shape.n_layer, shape.n_expert_used), ids_dtype(shape.n_expert))
    return _PREFIX.size + length, Trace(shape, ids, n_prompt, source, sizes), n_tokens, sha256


def _slot_bytes(path: str, sizes: Any, n_layer: int) -> tuple[int, ...]:
    """Return slot_bytes of a header, checked: one size for each layer, or empty."""
    right = isinstance(sizes, list) and len(sizes) in (0, n_layer)
    right = right and (not sizes or any(sizes))  # some layer has experts
    if not right or not all(type(n) is int and 0 <= n <= _MAX_SLOT_BYTES for n in sizes):
        raise _damaged(path, f"slot_bytes is neither empty nor a list of {n_layer} sizes")
    return tuple(sizes)


def _damaged(path: str | Path, what: str) -> RequestError:
    return RequestError(f"{path}: damaged routing trace: {what}; record it again")


# Hit rates of similar models were published for this share of the experts.
LRU_SHARE = 0.269
LRU_TOKENS = 256


@dataclass(frozen=True)
class TraceStats:
    """Figures that describe a trace, to be reported with every speed that was measured with it.

    overlap: share of experts in common with the previous token. entropy: normalised entropy of a
    layer's choices, 1 if all experts are chosen equally often; both are means over layers. lru: hit
    rates, in the quarters of the first LRU_TOKENS tokens, of one LRU over all layers that holds
    LRU_SHARE of the experts and is empty at the start.
    """

    sha256: str
    n_tokens: int
    overlap: float
    entropy: float
    lru: tuple[float, ...]

    def line(self) -> str:
        """Return all figures as one line."""
        rates = " ".join(f"{rate:.3f}" for rate in self.lru)
        return (
            f"trace {self.sha256[:16]}: {self.n_tokens} tokens, lag-1 overlap {self.overlap:.3f}, "
            f"entropy {self.entropy:.3f}, LRU of {format_share(LRU_SHARE)} of the experts hits "
            f"{rates}"
        )


def trace_stats(trace: Trace) -> TraceStats:
    """Return the statistics of a trace.

    Overlap and entropy are of the first LRU_TOKENS tokens, because they depend on the length.
    """
    head = trace.routers().part(0, LRU_TOKENS)
    return TraceStats(
        trace.sha256, trace.n_tokens, _overlap(head), _entropy(head), tuple(_global_lru(head))
    )


def _overlap(trace: Trace) -> float:
    """Return the mean share of experts in common with the token before."""
    if trace.n_tokens < 2:
        return 0.0
    chosen = np.zeros((trace.n_tokens, *trace.shape.sizes[:2]), dtype=np.bool_)
    np.put_along_axis(chosen, trace.ids.astype(np.intp), True, axis=2)
    return float((chosen[1:] & chosen[:-1]).sum(axis=2).mean() / trace.shape.n_expert_used)


def _entropy(trace: Trace) -> float:
    """Return the normalised entropy of a layer's choices, 0 to 1, the mean of all."""
    counts = trace.counts()
    p = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    bits = -np.sum(p * np.log(np.where(p > 0, p, 1.0)), axis=1)
    return float((bits / np.log(max(trace.shape.n_expert, 2))).mean())


def _global_lru(trace: Trace) -> list[float]:
    """Return the hit rates of one LRU over the experts of all layers, in quarters of the trace.

    It does not protect the working set. With fewer than n_layer * n_expert_used experts it hits
    nothing.
    """
    n_layer, n_expert, k = trace.shape.sizes
    capacity = int(LRU_SHARE * n_layer * n_expert)
    order: OrderedDict[int, None] = OrderedDict()
    rates = []
    keys = trace.ids.astype(np.int64) + n_expert * np.arange(n_layer)[:, None]
    for part in np.array_split(keys.reshape(trace.n_tokens, n_layer * k), 4):
        hits = 0
        for key in part.reshape(-1).tolist():
            if key in order:
                hits += 1
                order.move_to_end(key)
                continue
            order[key] = None
            if len(order) > capacity:
                order.popitem(last=False)
        rates.append(hits / part.size if part.size else 0.0)
    return rates
