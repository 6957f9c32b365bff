"""An engine that follows a script, for tests of what stands above the engine.

A token is a byte: the vocabulary has 256 of them, and id 0 ends a generation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from moegraph.draft.plan import SpecStats
from moegraph.events import CancelToken, GenerationEvent
from moegraph.loop.generated import GeneratedText
from moegraph.sampling import SamplingParams

END = 0
N_VOCAB = 256


class ByteTokenizer:
    """Every byte is a token; id 0 is the end of a text, id 1 its beginning."""

    n_vocab = N_VOCAB
    bos, eos = 1, END
    eog_ids = frozenset({END})

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return list(text.encode())

    def piece(self, token: int, special: bool = False) -> bytes:
        return bytes([token])

    def is_special(self, token: int) -> bool:
        return token in (self.bos, self.eos)

    def fim(self, name: str) -> int | None:
        return None

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        return bytes(ids).decode(errors="replace")


class BeginTokenizer(ByteTokenizer):
    """One of a vocabulary that adds its BOS."""

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        return [self.bos] * add_special + super().encode(text)


class FakeEngine:
    """Answers each generation with the next text of its script, then with its end token.

    before_token: called with the index of each token before it is drawn; it may raise.
    """

    def __init__(
        self,
        *script: str | bytes,
        n_ctx: int = 4096,
        vocabulary: bool = True,
        before_token: Callable[[int], None] = lambda i: None,
        kv: dict[str, Any] | None = None,
    ) -> None:
        self.script = [s.encode() if isinstance(s, str) else s for s in script]
        self.n_ctx = n_ctx
        self.before_token = before_token
        self.hparams = SimpleNamespace(
            n_vocab=N_VOCAB,
            n_embd=8,
            n_layer=4,
            n_expert=32,
            n_expert_used=4,
            n_ctx_train=4096,
            rope_sections=(),
        )
        pairs = {"general.name": "fake", "general.architecture": "qwen35moe", **(kv or {})}
        if vocabulary:
            pairs["tokenizer.ggml.model"] = "gpt2"
        self.file = SimpleNamespace(
            path=Path("fake.gguf"), kv=pairs, n_bytes=1000, warnings=(), hparams=self.hparams
        )
        self.tokenizer = ByteTokenizer()
        self.device_name, self.mode = "cpu", "whole"
        self.config: Any = None
        self.plan = SimpleNamespace(all_resident=True)
        self.stages = self.stage_plans = ()
        self.runner = SimpleNamespace(parts=())
        self.calls: list[SimpleNamespace] = []
        self.n_resets = 0
        self.prefixes = SimpleNamespace(store=SimpleNamespace(n_places=2, n_bytes=3 << 20))
        self.closed = False
        used = {"n_threads": 1, "n_threads_batch": 2, "poll": 50,
                "cpus_taken": 0.0}  # fmt: skip
        self.threads = SimpleNamespace(report=lambda: used)

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def reset(self) -> None:
        self.n_resets += 1

    notes: tuple[str, ...] = ()

    load_times: ClassVar[dict[str, float]] = {"device": 0.25}

    def expert_stats(self) -> None:
        """Everything is resident."""

    spec: SpecStats | None = None
    drafter_lines: tuple[str, ...] = ()

    def spec_stats(self) -> SpecStats | None:
        """Return what a test set."""
        return self.spec

    def drain_messages(self) -> list[str]:
        """Return nothing new."""
        return []

    def save_profile(self) -> None:
        """There is no profile."""

    def memory(self) -> dict[str, int]:
        return dict.fromkeys(
            ("device_peak_bytes", "host_peak_bytes", "host_pinned_bytes", "weights_bytes",
             "kv_bytes", "state_bytes", "compute_bytes"), 1 << 20,
        )  # fmt: skip

    def generate(
        self,
        prompt_ids: Iterable[int],
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        *,
        cancel: CancelToken | None = None,
        keep_logits: bool = False,
        progress: Callable[[str, int, int], None] | None = None,
        text: bool = True,
        reuse: bool = False,
        marks: Iterable[int] = (),
        pictures: object = (),
    ) -> Iterator[GenerationEvent]:
        assert sampling is not None
        ids = list(prompt_ids)
        sampling.validate(N_VOCAB)
        self.calls.append(SimpleNamespace(
            ids=ids, prompt=bytes(ids).decode(errors="replace"), sampling=sampling,
            max_tokens=max_tokens, stop=stop, text=text, reuse=reuse,
            marks=list(marks),
        ))  # fmt: skip
        sequence = GeneratedText(
            ids, n_ctx=self.n_ctx, max_tokens=max_tokens, stop=stop,
            piece=self.tokenizer.piece if text else None,
            eog_ids=self.tokenizer.eog_ids if text else (),
        )  # fmt: skip
        answer = self.script[min(len(self.calls), len(self.script)) - 1] if self.script else b""
        return self._events(sequence, answer, cancel or CancelToken(), keep_logits, progress)

    def _events(
        self,
        sequence: GeneratedText,
        answer: bytes,
        cancel: CancelToken,
        keep_logits: bool,
        progress: Callable[[str, int, int], None] | None,
    ) -> Iterator[GenerationEvent]:
        def event(token: int | None, text: str, rows: int) -> GenerationEvent:
            logits = np.full((rows, N_VOCAB), sequence.n_generated, np.float32)
            return GenerationEvent(
                token, text, len(sequence.prompt), sequence.n_generated, 0.5,
                0.25 * max(0, sequence.n_generated - 1), sequence.finish_reason,
                logits if keep_logits and rows else None,
            )  # fmt: skip

        if progress:
            progress("prefill", len(sequence.prompt), len(sequence.prompt))
        n_rows = len(sequence.prompt)
        if sequence.finish_reason:
            yield event(None, "", n_rows)
        while sequence.finish_reason is None:
            at = sequence.n_generated
            self.before_token(at)
            if cancel.is_set():
                yield event(None, sequence.cancel(), 0)
                return
            token = answer[at] if at < len(answer) else END
            sequence.append(token)
            yield event(token, sequence.tell(), n_rows)
            n_rows = 1


def ids_file(path: Path, *ids: int) -> Path:
    """Write token ids as `moegraph run` reads them; return the path."""
    path.write_bytes(np.array(ids, dtype="<i4").tobytes())
    return path
