"""What both runners share: inputs, the head's results, the check for numbers that are none."""

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
from ..weights import round_up

# Results start at multiples of this in the host block.
_ALIGN = 64


@dataclass(frozen=True)
class Batch:
    """One pass.

    tokens: I32, numpy shape [n_seqs, n_seq_tokens]; rows of neighbouring sequences from seq0, each
        starting where its sequence ends.
    all_rows: logits of every row, else of the last row of each sequence.
    greedy: the device's argmax instead of logits.
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
        """Return the logits of a pass that was not greedy.

        Raises:
            InternalError: it was.
        """
        if self.logits is None:
            raise InternalError("a greedy pass has no logits")
        return self.logits


class NotFinite(NativeError):
    """A pass ended in NaN or infinity; whoever holds the tokens can find out where.

    row: the first result that is not finite.
    """

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


class Runner(ABC):
    """Runs passes on one device, one at a time: `submit`, then `collect`.

    One pass may be in flight: there is memory for the results of one.
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
        """Device bytes for inputs and intermediates."""
        return self._inputs.n_bytes + self.graphs.n_bytes

    def require_idle(self) -> None:
        """Check that no pass is in flight.

        Raises:
            RequestError: one is.
        """
        if self._pending is not None:
            raise RequestError("a pass is in flight; collect its results first")

    def drop(self, seq: int) -> None:
        """Forget the pass in flight if it is over a sequence: its results are not asked for."""
        if self._pending is not None:
            shape, _ = self._pending
            if shape.seq0 <= seq < shape.seq0 + shape.n_seqs:
                self._pending = None

    def submit(self, batch: Batch, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Start a pass. The caller has checked token ids and context length.

        Raises:
            Cancelled: asked for between two graphs; the sequences must then be reset.
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
        # graphs first: building one may need the device, and the upload must not be lost to it
        self._prepare(shape, batch.greedy)
        self._inputs.fill(shape, batch.tokens, pos0, self.model.weights.embedding, state)
        for seq in seqs:
            state.n_written[seq] = max(state.n_written[seq], state.n_past[seq] + n_seq_tokens)
        self._launch(shape, batch.greedy, cancelled)
        for seq in seqs:
            state.n_past[seq] += n_seq_tokens
        self._pending = (shape, batch.greedy)

    def collect(self) -> Output:
        """Wait for the pass and return its results.

        Raises:
            RequestError: no pass is in flight.
            NotFinite: a logit, or the hidden state that it comes from, is NaN or infinite.
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
            larger = self.device.host_buffer(needed)  # first: it may fail, and passes go on then
            self.device.synchronize()
            smaller, self._results = self._results, larger
            smaller.close()

    def _result_reads(self, shape: PassShape, head: HeadOutputs, greedy: bool) -> object:
        """Return the read-backs of the head: check first, then argmax or logits."""
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
        """Build the largest pass, so that lack of memory shows at start and nothing moves later."""

    @abstractmethod
    def _prepare(self, shape: PassShape, greedy: bool) -> None:
        """Have every graph of the pass ready."""

    @abstractmethod
    def _launch(self, shape: PassShape, greedy: bool, cancelled: Callable[[], bool]) -> None:
        """Enqueue the pass and its read-backs."""

    def close(self) -> None:
        """Free graphs and transfer memory; a pass under way ends first."""
        self.device.synchronize()
        self.graphs.close()
        self._inputs.close()
        self._results.close()
