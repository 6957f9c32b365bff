"""What both runners share: inputs, results, and the NaN/inf check of the results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import InternalError, NativeError, RequestError
from ..ggml.device import Device
from ..ggml.lib import C, ffi
from ..graphs.cache import GraphCache
from ..graphs.head import HeadOutputs
from ..graphs.inputs import InputBlock, PassShape
from ..graphs.layer import Model
from ..units import round_up

# Bytes; every result in the host block starts at a multiple.
_ALIGN = 64


@dataclass(frozen=True)
class Batch:
    """One pass.

    tokens: I32, numpy shape [n_seqs, n_seq_tokens]; rows of consecutive sequences from seq0, each
        continuing its sequence.
    all_rows: results for every row; otherwise for the last row of each sequence.
    greedy: the results are the device's argmax instead of logits.
    """

    tokens: npt.NDArray[np.int32]
    seq0: int = 0
    all_rows: bool = False
    greedy: bool = False


@dataclass(frozen=True)
class Output:
    """Results of one pass: argmax I32 [n_out] if greedy, else logits F32, numpy shape [n_out,
    n_vocab].

    Both are copies.
    """

    argmax: npt.NDArray[np.int32] | None
    logits: npt.NDArray[np.float32] | None

    def require_logits(self) -> npt.NDArray[np.float32]:
        """Return the logits, F32, numpy shape [n_out, n_vocab].

        Raises:
            InternalError: the pass was greedy.
        """
        if self.logits is None:
            raise InternalError("a greedy pass has no logits")
        return self.logits


class NotFinite(NativeError):
    """A result is NaN or infinite; the caller can replay the tokens to locate the fault.

    row: index of the first such result.
    """

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


class Runner(ABC):
    """Runs passes on one device, one at a time: `submit`, then `collect`.

    Only one pass may be in flight, because there is memory for the results of one.
    """

    mode: str

    def __init__(self, device: Device, model: Model, n_ubatch: int) -> None:
        self.device = device
        self.model = model
        self.n_ubatch = n_ubatch
        self.graphs = GraphCache(device)
        self._inputs = InputBlock(device, model.hp, n_ubatch * model.state.n_seq, model.state.n_ctx)
        self._results = device.host_buffer(4096)
        self._pending: tuple[PassShape, bool] | None = None

    @property
    def compute_bytes(self) -> int:
        """Device bytes of inputs and intermediates."""
        return self._inputs.n_bytes + self.graphs.n_bytes

    def require_idle(self) -> None:
        """Check that no pass is in flight.

        Raises:
            RequestError: a pass is in flight.
        """
        if self._pending is not None:
            raise RequestError("a pass is in flight; collect its results first")

    def drop(self, seq: int) -> None:
        """Drop the results of the pass in flight if it includes sequence seq."""
        if self._pending is not None:
            shape, _ = self._pending
            if shape.seq0 <= seq < shape.seq0 + shape.n_seqs:
                self._pending = None

    def submit(self, batch: Batch, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Start a pass. The caller has checked token ids and context length.

        After any error from launching, the caller must reset the sequences of the pass.

        Raises:
            Cancelled: cancelled() returned true before a graph.
            RequestError: a pass is in flight.
        """
        self.require_idle()
        state, (n_seqs, n_seq_tokens) = self.model.state, batch.tokens.shape
        seqs = range(batch.seq0, batch.seq0 + n_seqs)
        pos0 = [state.n_past[seq] for seq in seqs]
        shape = PassShape(
            n_seq_tokens=n_seq_tokens,
            n_seqs=n_seqs,
            seq0=batch.seq0,
            n_kv=state.n_kv(max(pos0) + n_seq_tokens),
            n_out=n_seqs * n_seq_tokens if batch.all_rows else n_seqs,
        )
        self._grow_results(shape, batch.greedy)
        # graphs first: building one may use the device, and must not disturb the uploaded inputs
        self._prepare(shape, batch.greedy)
        self._inputs.fill(shape, batch.tokens, pos0, self.model.weights.embedding, state)
        for seq in seqs:
            state.n_written[seq] = max(state.n_written[seq], state.n_past[seq] + n_seq_tokens)
        self._launch(shape, batch.greedy, cancelled)
        for seq in seqs:
            state.n_past[seq] += n_seq_tokens
        self._pending = (shape, batch.greedy)

    def collect(self) -> Output:
        """Wait for the pass in flight and return its results.

        Raises:
            RequestError: no pass is in flight.
            NotFinite: a logit, or a hidden state before the output matrix, is NaN or infinite.
        """
        if self._pending is None:
            raise RequestError("no pass is in flight; submit one first")
        shape, greedy = self._pending
        C.ggml_backend_synchronize(self.device.compute.ptr)
        self._pending = None
        n_out, host = shape.n_out, self._results.array
        check = host[: 4 * n_out].view(np.float32)
        body = host[round_up(4 * n_out, _ALIGN) :]
        finite = np.isfinite(check)
        if greedy:
            output = Output(body[: 4 * n_out].view(np.int32).copy(), None)
        else:
            n_vocab = self.model.hp.n_vocab
            logits = body[: 4 * n_out * n_vocab].view(np.float32).reshape(n_out, n_vocab).copy()
            finite = finite & np.isfinite(logits.sum(axis=1))
            output = Output(None, logits)
        if not finite.all():
            row = int(np.argmin(finite))
            raise NotFinite(f"{self.device.name} computed logits that are not finite", row)
        return output

    def _grow_results(self, shape: PassShape, greedy: bool) -> None:
        per_row = 4 if greedy else 4 * self.model.hp.n_vocab
        needed = round_up(4 * shape.n_out, _ALIGN) + per_row * shape.n_out
        if needed > self._results.array.nbytes:
            larger = self.device.host_buffer(
                needed
            )  # first: if it fails, the old memory stays usable
            self.device.synchronize()
            smaller, self._results = self._results, larger
            smaller.close()

    def _result_reads(self, shape: PassShape, head: HeadOutputs, greedy: bool) -> object:
        """Return the copies of the head's results to the host: check, then argmax or logits."""
        n_out = shape.n_out
        body = round_up(4 * n_out, _ALIGN)
        main = head.argmax if greedy else head.logits
        size = 4 * n_out if greedy else 4 * n_out * self.model.hp.n_vocab
        return ffi.new(
            "struct mg_readback[2]",
            [
                {"src": head.check, "dst": self._results.address(), "size": 4 * n_out},
                {"src": main, "dst": self._results.address(body), "size": size},
            ],
        )

    @abstractmethod
    def reserve_graphs(self) -> None:
        """Build the graphs of the largest pass, so that the shared block never grows later.

        Raises:
            OutOfDeviceMemory: the intermediates do not fit.
        """

    @abstractmethod
    def _prepare(self, shape: PassShape, greedy: bool) -> None:
        """Build every graph of the pass that is not built yet."""

    @abstractmethod
    def _launch(self, shape: PassShape, greedy: bool, cancelled: Callable[[], bool]) -> None:
        """Enqueue the graphs of the pass and the copies of its results."""

    def close(self) -> None:
        """Wait for the device, then free graphs and transfer memory."""
        self.device.synchronize()
        self.graphs.close()
        self._inputs.close()
        self._results.close()
