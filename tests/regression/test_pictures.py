"""Pictures in prompts: the same bits as unpatched llama.cpp, which gets the same rows."""

from __future__ import annotations

import base64
import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers.drafters import write_small
from helpers.images import has_mtmd, png
from modelgen.mmproj import write_mmproj
from oracle.client import Step
from regression.compare import assert_logits_equal
from regression.harness import THREADS, Models, Upstream, open_engine, random_ids

from moegraph.engine import Engine
from moegraph.engine.service import Service
from moegraph.errors import RequestError
from moegraph.loop.requests import Request
from moegraph.loop.requests import Step as LoopStep
from moegraph.passes import prefixes
from moegraph.pictures import Picture
from moegraph.sampling import SamplingParams
from moegraph.text.chat.prompting import SegmentEncoder
from moegraph.text.pictures import PictureReader, Shown

N_CTX = 1024


def picture(n_embd: int, nx: int, ny: int, seed: int) -> Picture:
    """Return a picture of random rows, with the positions that mtmd gives those of Qwen's."""
    rows = np.random.default_rng(seed).normal(0, 0.1, (nx * ny, n_embd)).astype(np.float32)
    i = np.arange(nx * ny, dtype=np.int32)
    places = np.stack([0 * i, i // nx, i % nx]).astype(np.int32)
    return Picture(b"%d" % seed, rows, places, max(nx, ny))


Part = list[int] | Picture


def prompt_of(parts: list[Part]) -> tuple[list[int], list[tuple[int, Picture]]]:
    """Return the ids of a prompt, and its pictures."""
    ids: list[int] = []
    pictures = []
    for part in parts:
        if isinstance(part, Picture):
            pictures.append((len(ids), part))
        ids += part.ids.tolist() if isinstance(part, Picture) else part
    return ids, pictures


def theirs(
    upstream: Upstream, path: Path, parts: list[Part], more: list[int], **cfg: Any
) -> npt.NDArray[np.float32]:
    """Return upstream's logits of the last row of a prompt, and of tokens after it."""
    steps = [
        Step(embd=part.rows, axes=part.places, n_positions=part.n_positions)
        if isinstance(part, Picture)
        else Step(part)
        for part in parts
    ]
    steps += [Step([token]) for token in more]
    found = upstream.oracle.run(path, steps, n_ctx=N_CTX, **cfg)
    rows = [one.logits for one in found[len(parts) - 1 :]]
    return np.concatenate([row[-1:] for row in rows if row is not None])


# Text, then pictures of odd sizes: one, two in a row, interleaved, and one of several chunks.
SIZES = ([(3, 5)], [(7, 2), (1, 9)], [(4, 4), None, (5, 3), None, (2, 6)], [(13, 11)])


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    "settings",
    [{}, {"n_seq": 3}, {"cache_slots": 20, "miss": "stream"}, {"device": "cpu,cpu", "n_seq": 2}],
)
def test_text_after_pictures_equals_upstreams(
    sizes: list[Any], settings: dict[str, Any], models: Models, upstream: Upstream
) -> None:
    path = models.path("mini35b")
    with open_engine(path, n_ubatch=64, n_ctx=N_CTX, profile="none", **settings) as engine:
        hp = engine.hparams
        text = random_ids(hp.n_vocab, 200)
        parts: list[Part] = [text[:40]]
        for i, size in enumerate(sizes):
            parts.append(picture(hp.n_embd, *size, i) if size else text[50 + 7 * i :][:9])
        parts.append(text[150:170])
        ids, pictures = prompt_of(parts)
        events = engine.generate(
            ids, max_tokens=12, text=False, keep_logits=True, pictures=pictures
        )
        found = list(events)
        more = [event.token for event in found if event.token is not None]
        ours = np.concatenate([event.logits[-1:] for event in found if event.logits is not None])
        rows = theirs(upstream, path, parts, more[:-1], n_ubatch=64, threads=THREADS)
        assert_logits_equal(ours, rows, f"{sizes}")


@pytest.mark.parametrize("spec", ["mtp", "lookup", "dflash"])
def test_drafts_company_and_kept_beginnings_change_no_token(
    spec: str, models: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Three requests at once and one after the other; each beginning has a picture that is kept."""
    monkeypatch.setattr(prefixes, "_WORTH", 1)
    path, shared = models.path("mini35b"), {"n_ctx": N_CTX, "n_threads": 1, "cpu_reference": True}
    with open_engine(path, **shared) as engine:
        hp = engine.hparams
        first, other = picture(hp.n_embd, 6, 7, 1), picture(hp.n_embd, 6, 7, 2)
        text = random_ids(hp.n_vocab, 64)
        prompts = [
            prompt_of(parts)
            for parts in (
                [text[:20], first, text[20:30]],
                [text[:20], first, text[20:30], other, text[30:34]],
                [text[:20], other, text[20:30]],
            )
        ]
        expected = [told(engine, *one)[0] for one in prompts]
    assert expected[0] != expected[2]
    drafts: dict[str, Any] = {"spec": spec}
    if spec == "dflash":
        sizes = {"n_vocab": hp.n_vocab, "n_embd": hp.n_embd, "target_layers": (0, 2)}
        drafts["draft"] = str(write_small(tmp_path, "safetensors", **sizes))
    with open_engine(path, n_seq=3, **drafts, **shared) as engine:
        before = [told(engine, *one, marks=(62,), reuse=True) for one in prompts]
        assert [ids for ids, _ in before] == expected
        assert [n for _, n in before] == [0, 62, 0]
        service = Service(engine)
        service.start()
        asked = [
            Request(ids, SamplingParams(temperature=0.0), 12, text=False, pictures=pictures)
            for ids, pictures in prompts
        ]
        together = [Collected(service, one) for one in asked]
        assert [one.wait() for one in together] == expected
        service.close()


def told(engine: Engine, ids: list[int], pictures: Any, **more: Any) -> tuple[list[int], int]:
    """Return 12 tokens, and how many of the prompt were known."""
    events = list(engine.generate(ids, max_tokens=12, text=False, pictures=pictures, **more))
    return [e.token for e in events if e.token is not None], events[0].n_reused


class Collected:
    """The tokens of a request of a service."""

    def __init__(self, service: Service, request: Request) -> None:
        self._tokens: list[int] = []
        self._end = threading.Event()
        service.submit(request, self._take)

    def _take(self, step: LoopStep) -> None:
        self._tokens += step.tokens
        if step.finish_reason:
            self._end.set()

    def wait(self) -> list[int]:
        assert self._end.wait(60)
        return self._tokens


# Width and height: odd, one row of patches, too small, too large for the learned positions.
PIXELS = ([(200, 130)], [(64, 300), (333, 77)], [(5, 5), (640, 480), (97, 33)])


@pytest.mark.parametrize("sizes", PIXELS)
def test_files_equal_upstreams_multimodal_program(
    sizes: list[tuple[int, int]], models: Models, upstream: Upstream, tmp_path: Path
) -> None:
    path = models.path("mini35b")
    files = [tmp_path / f"{i}.png" for i in range(len(sizes))]
    for i, (file, (width, height)) in enumerate(zip(files, sizes)):
        file.write_bytes(png(width, height, i))
    cfg = {"n_ctx": N_CTX, "n_ubatch": 64, "threads": THREADS}
    with open_engine(path, n_ubatch=64, n_ctx=N_CTX) as engine:
        mmproj = write_mmproj(tmp_path / "mmproj.gguf", engine.hparams.n_embd)
        text = "Look: <__media__>, " * len(files) + "what is it?"
        theirs = upstream.oracle.pictures(path, mmproj, text, files, 8, **cfg)
        reader = PictureReader(engine.file, mmproj, THREADS)
        if theirs is None or not has_mtmd():
            pytest.skip("no libmtmd: of ours, or of unpatched llama.cpp")
        logits, rows = theirs
        shown: dict[str, Shown] = {}
        for file in files:
            address = f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
            text = text.replace("<__media__>", reader.show(shown, address, "picture"), 1)
        reader.close()
        encoded = SegmentEncoder(engine.tokenizer).encode_around(text, shown, False)
        for (_, ours), one in zip(encoded.pictures, rows, strict=True):
            np.testing.assert_array_equal(ours.rows, one)
        events = engine.generate(
            encoded.ids, max_tokens=8, text=False, keep_logits=True, ignore_eos=True,
            pictures=encoded.pictures,
        )  # fmt: skip
        found = np.concatenate([e.logits[-1:] for e in events if e.logits is not None])
        # our first row is one of a product of many
        assert found[0].argmax() == logits[0].argmax()
        assert_logits_equal(found[1:], logits[1:], f"{sizes}")


def test_a_prompt_goes_on_inside_a_picture(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "_WORTH", 1)
    path = models.path("mini35b")
    with open_engine(path, n_ctx=N_CTX, n_threads=1, cpu_reference=True, n_ubatch=16) as engine:
        hp = engine.hparams
        one, text = picture(hp.n_embd, 6, 7, 1), random_ids(hp.n_vocab, 64)
        first, second = (prompt_of([text[:20], one, part]) for part in (text[20:30], text[40:60]))
        cold = told(engine, *second)[0]
        told(engine, *first, marks=(40,), reuse=True)
        assert told(engine, *second, reuse=True) == (cold, 40)
        ids, pictures = first
        with pytest.raises(RequestError, match="other ids than its picture"):
            engine.generate(ids, pictures=[(19, one)])
        with pytest.raises(RequestError, match="a picture that is not given"):
            engine.generate([*ids, -5], pictures=pictures)
        with pytest.raises(RequestError, match="out of range"):
            engine.generate(ids)
    with (
        open_engine(models.path("qwen3moe"), n_threads=1) as engine,
        pytest.raises(RequestError, match="no pictures with models of the kind qwen3moe"),
    ):
        engine.generate(ids, pictures=pictures)
