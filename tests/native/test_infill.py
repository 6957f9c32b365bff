"""Gaps with a real vocabulary and model: what is computed again after a typed character."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.clients import Client, serving
from helpers.shipped import FIM, ROOT, merged_tiny, tiny_with_gaps

from moegraph.config import EngineConfig
from moegraph.engine import Engine
from moegraph.engine.chat import ChatModel, TextRequest
from moegraph.text.infill import Gap

LINES = (ROOT / "moegraph" / "server" / "replies.py").read_text("utf-8").splitlines(keepends=True)
BEFORE, AFTER = "".join(LINES[:60]), "".join(LINES[62:80])
EXTRA = [("state.py", "import asyncio\nSMALL = 16 * KiB\n" * 4)]


def load(file: Path, spec: str = "off") -> Engine:
    given = EngineConfig(device="cpu", n_threads=1, n_ctx=4096, n_seq=1, cpu_reference=True)
    return Engine.load(file, replace(given, spec=spec))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return load(tiny_with_gaps(tmp_path_factory.mktemp("gaps")))


def test_a_prompt_has_the_tokens_of_its_texts(engine: Engine) -> None:
    with ChatModel.of(engine) as chat:
        request = chat.prepare_text(TextRequest(gap=Gap(BEFORE + "    retu", AFTER))).request
        encode = lambda text: chat.tokenizer.encode(text, False, False)  # noqa: E731
        name = [FIM["rep"], *encode("myproject\n"), FIM["sep"], *encode("filename\n")]
        head, tail = encode(BEFORE + "    retu"), encode(AFTER)
    assert request.prompt == [*name, FIM["pre"], *head, FIM["suf"], *tail, FIM["mid"]]


@pytest.mark.parametrize("lines", ["    pass", "    pass\n    x ="])
def test_only_what_follows_the_line_before_is_computed_again(engine: Engine, lines: str) -> None:
    def ask(text: str, reuse: bool = True) -> Client:
        """Return an answer to what an editor sends when this is written."""
        head, _, line = text.rpartition("\n")
        gap = Gap(BEFORE + head + "\n" * bool(head), AFTER, line, EXTRA)
        asked = chat.prepare_text(TextRequest(gap=gap)).request
        more = {"marks": asked.marks, "max_tokens": 6, "reuse": reuse}
        return Client(service, asked.prompt, **more).wait()

    with ChatModel.of(engine) as chat, serving(engine) as service:
        ask("    p")
        again, anew = ask(lines), ask(lines, reuse=False)
        n_after = sum(len(chat.tokenizer.encode(text, False)) for text in (AFTER, lines)) + 2
    assert again.tokens == anew.tokens
    usage = again.last.usage
    assert usage.n_prompt > 500 and usage.n_prompt - usage.n_cached <= n_after


def test_so_it_is_where_a_client_marks_the_gap(engine: Engine) -> None:
    with ChatModel.of(engine) as chat, serving(engine) as service:
        for line in ("    r", "    re"):
            pieces = [FIM["pre"], BEFORE + line, FIM["suf"], AFTER, FIM["mid"]]
            asked = chat.prepare_text(TextRequest(prompt=pieces)).request
            last = Client(service, asked.prompt, marks=asked.marks, max_tokens=2).wait().last
        n_after = sum(len(chat.tokenizer.encode(text, False)) for text in (AFTER, line)) + 2
    assert last.usage.n_prompt > 500 and last.usage.n_prompt - last.usage.n_cached <= n_after


@pytest.mark.parametrize("spec", ["mtp", "lookup"])
def test_drafts_change_no_text_of_a_gap(engine: Engine, spec: str, tmp_path: Path) -> None:
    def ask(model: Engine) -> Client:
        with ChatModel.of(model) as chat, serving(model) as service:
            asked = chat.prepare_text(TextRequest(gap=gap)).request
            return Client(service, asked.prompt, marks=asked.marks, max_tokens=64).wait()

    gap = Gap("".join(LINES[:30]), "", LINES[20][:12], EXTRA)
    with load(tiny_with_gaps(tmp_path, merged_tiny(tmp_path)), spec) as drafting:
        found = ask(drafting)
    assert found.last.usage.n_drafted > 0
    assert found.tokens == ask(engine).tokens
