"""The answer to one request of a loop: what was drawn, and what its caller was told."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..arch import ModelFile
from ..errors import MoegraphError, RequestError
from ..events import CancelToken, Progress
from ..ggml.device import Device
from ..passes.checks import picture_rows, prompt_ids
from ..passes.passes import Passes
from ..passes.prefixes import Prefixes
from ..passes.sequencecopies import SequenceCopies, SwappedSequence
from ..passes.speculation import Speculation
from ..resident.stage import Stage
from ..runner import AnyRunner
from ..runner.sweep import Sweep
from ..runner.sweep_batch import SweepBatch, SweptPrompt
from ..text.tokenizer import Tokenizer
from .choice import TokenChoice
from .generated import GeneratedText
from .requests import Request, Step, TokenLogprobs, Usage

_BOS = "tokenizer.ggml.bos_token_id"
# A context shift leaves at least so many positions for the text, as in llama-server.
_LEAST_LEFT = 4
# Seconds between two steps that only say how much of the prompt is read.
_PROGRESS_S = 0.25


@dataclass(frozen=True)
class Core:
    """A loaded model: what runs its passes, and what is kept of its sequences.

    stage: the last one, which has the results. speculation: what drafts; None without drafters.
    n_ctx: positions of a sequence. n_keep: as in `EngineConfig`; None: no context shift.
    """

    file: ModelFile
    passes: Passes
    prefixes: Prefixes
    copies: SequenceCopies
    speculation: Speculation | None
    runner: AnyRunner
    devices: tuple[Device, ...]
    stage: Stage
    n_ctx: int
    n_keep: int | None = None


class Answer:
    """A request from its submission to its last step. Only the engine's thread changes it.

    ids: the prompt; after a context shift, what is computed in its place. pictures: of it.
    n_before: how many tokens of the text are in it. asked: until then, its tokens, n_read and
    n_cached; None before a shift. slot: the sequence that computes it; -1 without. number:
    counts requests that have had a slot, from 1 on; 0 before. sweep: of its prompt, perhaps
    together with others, while that is under way; swept: its part of that; rest: what comes after
    it, or, without one, is read in pieces; marks: where beginnings of the prompt are to be kept.
    decodes_last: the states before the last token of the prompt are kept, as those of a text are
    that may come again: it is a row of the first decode pass, and has no chunk of its own.
    swapped: its sequence, while that is in host memory.
    n_cached, n_read: as in `Usage`.
    n_rest: how much of the prompt is left to compute, as far as is known; None: not known.
    late: a row that was computed before the grammar knew what may follow it: its logits F32
    [n_vocab], and which row of the tree it was.
    wants_logits: whether the logits of each row are needed besides the token.
    fresh: tokens that the caller was not told yet, each with its logits if they are wanted.
    may_draft: whether the next step may draft. is_over: its last step was delivered. reason: of its
    end. error: why it ended, with the reason "error". problem: why telling its caller failed.
    """

    def __init__(
        self,
        request: Request,
        core: Core,
        vocabulary: Tokenizer | None,
        deliver: Callable[[Answer, str | None], None] | None,
        cancel: CancelToken | None = None,
        progress: Progress | None = None,
        keep_logits: bool = False,
    ) -> None:
        """Check a request, which nothing computes yet.

        vocabulary: None if there is to be no text. deliver: called when there is something to tell,
        with the reason if it is the last step; None: the caller looks for it. cancel: ends the
        request; its prompt at once, its answer after the pass under way. progress: called with
        "prefill" and the tokens of the prompt that its sequence holds; None: `deliver` is called
        too, now and then. keep_logits: the caller gets all rows of logits.
        """
        n_vocab, n_top, grammar = core.file.hparams.n_vocab, request.n_logprobs, request.constraint
        sampling = request.sampling.validate(n_vocab)
        self.ids = ids = prompt_ids(request.prompt, n_vocab, bool(request.pictures))
        self.pictures = picture_rows(ids, request.pictures, core.file.hparams)
        if n_top is not None and not 0 <= n_top <= n_vocab:
            raise RequestError(f"{n_top} likeliest tokens; the vocabulary has {n_vocab}")
        self.generated = GeneratedText(
            ids.tolist(),
            n_ctx=core.n_ctx,
            max_tokens=request.max_tokens,
            piece=vocabulary.piece if vocabulary else None,
            eog_ids=vocabulary.eog_ids if vocabulary and not request.ignore_eos else frozenset(),
            stop=request.stop,
            shifts=core.n_keep is not None,
        )
        self.choice = TokenChoice(
            core.passes, ids[ids >= 0], sampling, n_vocab, keep_logits, grammar
        )
        self._core, self._progress = core, progress
        self.request = request
        self.wants_logits = n_top is not None or keep_logits
        self.cancel = cancel or CancelToken()
        self.slot, self.number = -1, 0
        self.sweep: Sweep | None = None
        self.swept: SweptPrompt | None = None
        self.rest: SweepBatch | None = None
        self.marks: list[int] = []
        self.swapped: SwappedSequence | None = None
        self.n_cached = self.n_read = self.n_before = self._n_dropped = 0
        self.asked: tuple[int, int, int] | None = None
        self.n_drafted = self.n_accepted = 0
        self.n_rest: int | None = None
        self.late: tuple[npt.NDArray[np.float32], int] | None = None
        self.may_draft, self.is_over, self.decodes_last = True, False, False
        self.reason: str | None = None
        self.error: MoegraphError | None = None
        self.problem: Exception | None = None
        self.prompt_logits: npt.NDArray[np.float32] | None = None  # if nothing is drawn
        self.submitted = self._told = time.perf_counter()
        self.began = self._first = self._last = 0.0
        self._deliver = deliver
        self.fresh: deque[tuple[int, npt.NDArray[np.float32] | None]] = deque()

    @property
    def is_late(self) -> bool:
        """Whether its deadline is over."""
        seconds = self.request.deadline_s
        return seconds is not None and time.perf_counter() >= self.submitted + seconds

    @property
    def is_drawn(self) -> bool:
        """Whether the last token was drawn."""
        return self.generated.finish_reason is not None

    def submit(self) -> None:
        """Note that the request begins to wait now."""
        self.submitted = self._told = time.perf_counter()

    def times(self) -> tuple[float, float]:
        """Return the seconds from the submission to the first token, and from there to the last."""
        if not self._first:
            return time.perf_counter() - self.submitted, 0.0
        return self._first - self.submitted, self._last - self._first

    def begin(self, n_cached: int) -> None:
        """Note that the prompt begins in a slot that holds its first n_cached tokens."""
        self.n_cached = self.n_read = n_cached
        if not self.asked:
            self.began = time.perf_counter()

    def append(self, token: int, logits: npt.NDArray[np.float32] | None = None) -> None:
        """Have the text go on with a token; `tell` delivers it.

        logits: F32 [n_vocab], if they are wanted.
        """
        self.generated.append(token)
        if not self.choice.greedy:
            self.choice.accept(token, self.is_drawn)
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self.fresh.append((token, logits))

    def shift(self) -> None:
        """Drop a part of the text and its prompt; `ids` is to be computed, then the text goes on.

        As in llama-server, the first n_keep tokens stay, and the later half of the others. Of a
        picture nothing stays if a part of it goes.
        """
        core, generated, request = self._core, self.generated, self.request
        self.asked = self.asked or (len(self.ids), self.n_read, self.n_cached)
        ids = np.append(self.ids, np.array(generated.tokens[self.n_before :], np.int32))
        n_keep = core.n_keep if request.n_keep is None else request.n_keep
        if n_keep is None or n_keep < 0:
            n_keep = self.asked[0]
        elif ids[0] == core.file.kv.get(_BOS):
            n_keep += 1
        n_keep = min(n_keep, max(core.n_ctx - _LEAST_LEFT, 0))
        end = n_keep + max((core.n_ctx - n_keep) // 2, 1)
        places = [(first, first + len(one.rows)) for first, one in request.pictures]
        n_keep = next((first for first, last in places if first < n_keep < last), n_keep)
        end = next((last for first, last in places if first < end < last), end)
        n = end - n_keep
        self.ids = np.append(ids[:n_keep], ids[end:])
        kept = [
            (first if first < n_keep else first - n, one)
            for first, one in request.pictures
            if not n_keep <= first < end
        ]
        self.pictures = picture_rows(self.ids, kept, core.file.hparams)
        self.request = replace(request, pictures=kept, marks=(n_keep,) if n_keep else ())
        self.n_before, self.n_rest = generated.n_generated, None
        self._n_dropped += n
        generated.shift(n)

    def usage(self) -> Usage:
        """Return what the request has cost so far."""
        now = time.perf_counter()
        began, first = self.began or now, self._first or now
        return Usage(
            *(self.asked or (len(self.ids), self.n_read, self.n_cached)),
            self.generated.n_generated,
            self.n_drafted,
            self.n_accepted,
            queued_s=began - self.submitted,
            prefill_s=first - began,
            decode_s=max(0.0, self._last - first),
            n_dropped=self._n_dropped,
        )

    def tell(self) -> None:
        """Deliver the tokens that were drawn; the last step if these end the text."""
        reason = self.generated.finish_reason
        if self.is_over or not (self.fresh or reason):
            return
        if reason:
            self.is_over, self.reason = True, reason
        if self._deliver:
            self._send(reason)

    def tell_progress(self) -> None:
        """Tell how much of the prompt is read."""
        if self.asked:
            return
        if self._progress:
            self._progress("prefill", self.n_read, len(self.ids))
        elif time.perf_counter() - self._told >= _PROGRESS_S and not self.is_over:
            self._send(None)

    def end(self, reason: str, error: MoegraphError | None = None) -> None:
        """Deliver the last step, unless that was done or the text has ended by itself."""
        if self.is_over:
            return
        if self.is_drawn:
            self.tell()
            return
        self.is_over, self.reason, self.error = True, reason, error
        self._send(reason)

    def next_step(self, reason: str | None) -> Step:
        """Return what the caller was not told yet; reason: why the answer ends with it."""
        fresh, self.fresh = self.fresh, deque()
        text = "".join([self.generated.tell() for _ in fresh])
        if reason is not None and not self.is_drawn:
            text += self.generated.cancel(reason)
        n_top, found = self.request.n_logprobs, []
        if n_top is not None:
            found = [token_logprobs(row, t, n_top) for t, row in fresh if row is not None]
        stop = self.generated.stop if reason == "stop" else None
        tokens = tuple(token for token, _ in fresh)
        return Step(self.usage(), tokens, text, tuple(found), reason, stop, self.error)

    def _send(self, reason: str | None) -> None:
        self._told = time.perf_counter()
        try:
            if self._deliver:
                self._deliver(self, reason)
        except Exception as error:  # noqa: BLE001 - one caller's mistake ends its own request
            self.problem = error


def token_logprobs(logits: npt.NDArray[np.float32], token: int, n_top: int) -> TokenLogprobs:
    """Return the log probability of a token and of the n_top likeliest ones, before sampling.

    logits: F32 [n_vocab], finite. Of equally likely tokens the smaller id comes first.
    """
    largest = logits.max()
    below = float(largest) + float(np.log(np.exp(logits - largest, dtype=np.float64).sum()))
    top: list[tuple[int, float]] = []
    if n_top:
        floor = np.partition(logits, logits.size - n_top)[logits.size - n_top]
        ids = np.flatnonzero(logits >= floor)
        order = ids[np.argsort(-logits[ids], kind="stable")][:n_top]
        top = [(int(i), float(logits[i]) - below) for i in order]
    return TokenLogprobs(token, float(logits[token]) - below, tuple(top))
