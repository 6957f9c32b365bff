"""`moegraph chat` over a scripted engine: piped, typed, interrupted."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers.cli_page import json_tables
from helpers.fake_engine import FakeEngine

from moegraph.cli import ui
from moegraph.gguf import resolve_target
from moegraph.text.chat.template import TEMPLATE_KEY

if TYPE_CHECKING:
    from click.testing import Result
    from conftest import Cli

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
)
KV = {TEMPLATE_KEY: TEMPLATE}
Type = Callable[..., "Result"]


def prompts(cli: Cli) -> list[str]:
    return [call.prompt for call in cli.engine.calls]


class TestPiped:
    def test_every_line_is_a_turn_of_one_conversation(self, cli: Cli) -> None:
        cli.engine = FakeEngine("one", "two\n", kv=KV)
        result = cli("chat", "m", stdin="first\n\nsecond")
        # An empty line has an empty answer, so that answers and questions stay side by side.
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout.split("---\n") == ["one\n", "\n", "two\n"]
        assert prompts(cli) == [
            "[user]first[assistant]",
            "[user]first[assistant]one[user]second[assistant]",
        ]
        assert all(call.reuse for call in cli.engine.calls)

    def test_thoughts_in_a_channel_are_no_part_of_the_conversation(self, cli: Cli) -> None:
        answer = (
            "<|channel|>analysis<|message|>hm<|end|>"
            "<|start|>assistant<|channel|>final<|message|>one"
        )
        source = TEMPLATE + "{# <|channel|> <|message|> #}"
        cli.engine = FakeEngine(answer, "<|channel|>final<|message|>two", kv={TEMPLATE_KEY: source})
        result = cli("chat", "m", stdin="first\nsecond")
        assert result.stdout.split("---\n") == ["one\n", "two\n"] and "hm" in result.stderr
        assert prompts(cli)[1] == "[user]first[assistant]one[user]second[assistant]"

    def test_a_system_prompt_in_a_file(self, cli: Cli, tmp_path: Path) -> None:
        (tmp_path / "s").write_text("Be brief:\\n\n")
        cli.engine = FakeEngine("ok", kv=KV)
        cli("chat", "m", "-sysf", tmp_path / "s", stdin="hi\n")
        assert prompts(cli) == ["[system]Be brief:\\n[user]hi[assistant]"]
        line = cli.refused("chat", "m", "-sysf", tmp_path / "s", "-sys", "x", "-p", "hi")
        assert "both -sys and -sysf give a system prompt" in line
        assert "no: cannot read" in cli.refused("chat", "m", "-sysf", tmp_path / "no", "-p", "hi")

    @pytest.mark.parametrize("line", ["/clear", "/quit", "/help", "/etc/hosts, what is it?"])
    def test_a_line_is_a_question_whatever_it_begins_with(self, cli: Cli, line: str) -> None:
        cli.engine = FakeEngine("ok", kv=KV)
        result = cli("chat", "m", stdin=f"{line}\n")
        assert (result.exit_code, result.stdout) == (0, "ok\n")
        assert prompts(cli) == [f"[user]{line}[assistant]"]

    def test_each_line_can_be_a_conversation_of_its_own(self, cli: Cli) -> None:
        cli.engine = FakeEngine("one", "two", kv=KV)
        cli("chat", "m", "--each", "-sys", "S", stdin="a\nb\n")
        assert prompts(cli) == ["[system]S[user]a[assistant]", "[system]S[user]b[assistant]"]
        assert "--each is for" in cli.refused("chat", "m", "--each", "-p", "a")

    def test_json_is_one_object_a_line(self, cli: Cli) -> None:
        kv = {**KV, "general.sampling.top_k": 20}
        cli.engine = FakeEngine("<think>\nhm</think>\n\nyes\nand no", kv=kv, n_ctx=100)
        result = cli("chat", "m", "--json", "-n", 50, stdin="a\n\n" + "b" * 200 + "\n")
        first, empty, failed = map(json.loads, result.stdout.splitlines())
        assert (first["question"], first["answer"]) == ("a", "yes\nand no")
        assert (first["reasoning"], first["finish_reason"]) == ("hm", "stop")
        assert first["n_held"] == first["n_prompt"] + first["n_generated"]
        assert (first["n_ctx"], first["hit_rate"]) == (100, None)
        assert first["sampling"]["from_file"] == ["top_k"]
        assert list(first) == list(json_tables("chat")[0])
        assert empty == {"question": "", "answer": "", "error": None}
        assert failed["question"] == "b" * 200 and "the context holds 100" in failed["error"]
        assert result.exit_code == 2
        assert result.stderr.startswith("error: message 3: the prompt has")

    def test_one_question_on_the_command_line(self, cli: Cli) -> None:
        cli.engine = FakeEngine("four", kv=KV)
        for args in (["-p", "2+2?"], ["2+2?"], ["2", "+", "2?"]):
            result = cli("chat", "m", *args)
            assert (result.exit_code, result.stdout) == (0, "four\n")
            assert re.match(r"prefill .* decode 4 tokens .* seed \d+;", result.stderr)
        assert prompts(cli) == ["[user]2+2?[assistant]"] * 2 + ["[user]2 + 2?[assistant]"]
        assert "and -p gives another" in cli.refused("chat", "m", "a", "-p", "b")

    def test_a_question_about_a_text(self, cli: Cli, tmp_path: Path) -> None:
        cli.engine = FakeEngine("ok", kv=KV)
        (tmp_path / "t").write_text(r"a\n" + "\n")
        cli("chat", "m", "-p", r"b\n?", stdin="piped\n")
        cli("chat", "m", "-p", "why?", "-f", tmp_path / "t", stdin="not read")
        cli("chat", "m", "-f", tmp_path / "t")
        cli("chat", "m", "-f", "-", stdin="two\nlines\n")
        asked = [p.removeprefix("[user]").removesuffix("[assistant]") for p in prompts(cli)]
        assert asked == ["piped\n\nb\n?", r"a\n" + "\n\nwhy?", r"a\n", "two\nlines"]

    def test_the_shipped_model_is_no_chat_model(self, cli: Cli) -> None:
        cli.engine = FakeEngine("ok", kv=KV)
        tiny = resolve_target("tiny")
        line = "note: tiny is no chat model: it was trained to write Python code"
        cut = "; its answers are cut at 256 tokens (-n N for another limit)\n"
        assert line + cut in cli("chat", tiny, "-p", "a").stderr
        assert f"{line}\n" in cli("chat", tiny, "-p", "a", "-n", "7").stderr
        cli.engine.calls.pop()
        assert cli("chat", tiny, "-p", "a", "-n", "7", "-q").stderr == ""
        assert [call.max_tokens for call in cli.engine.calls] == [256, 7]

    def test_reasoning_goes_to_stderr(self, cli: Cli) -> None:
        cli.engine = FakeEngine("<think>\nhm</think>\n\nyes", kv=KV)
        result = cli("chat", "m", stdin="a\nb\n")
        assert result.stdout == "yes\n---\nyes\n"
        assert result.stderr == "hm\nhm\n"
        # The template decides what becomes of old reasoning.
        assert "[assistant]<think>\nhm</think>\n\nyes[user]b" in prompts(cli)[1]

    @pytest.mark.parametrize(("choice", "seen"), [("on", "True"), ("off", "False"), ("auto", "")])
    def test_reasoning_is_asked_of_the_template(self, cli: Cli, choice: str, seen: str) -> None:
        cli.engine = FakeEngine("ok", kv=KV)
        cli("chat", "m", "--reasoning", choice, stdin="a\n")
        assert prompts(cli) == [f"[user]a[assistant]{seen}"]

    def test_a_message_that_does_not_fit_is_left_out(self, cli: Cli) -> None:
        cli.engine = FakeEngine("ok", kv=KV, n_ctx=80)
        result = cli("chat", "m", stdin="a\n" + "b" * 100 + "\nc\n")
        assert (result.exit_code, result.stdout) == (2, "ok\n---\n\n---\nok\n")
        assert "error: message 2: the prompt has" in result.stderr
        assert len(result.stderr.splitlines()) == 1
        # Making room for it was in vain: nothing was forgotten.
        assert prompts(cli)[-1] == "[user]a[assistant]ok[user]c[assistant]"

    def test_the_oldest_turns_make_room(self, cli: Cli) -> None:
        cli.engine = FakeEngine("ok", kv=KV, n_ctx=160)
        lines = "".join(f"question {i}\n" for i in range(6))
        result = cli("chat", "m", "-sys", "S", stdin=lines)
        assert result.exit_code == 0
        assert len(result.stdout.split("---\n")) == 6
        full = "note: the context of 160 tokens is full: the oldest 2 turns are forgotten\n"
        assert full in result.stderr
        # More go than must, so that the next message need not read everything again.
        assert [p.count("[user]") for p in prompts(cli)] == [1, 2, 3, 2, 3, 2]
        assert all(p.startswith("[system]S[user]question") for p in prompts(cli))
        assert all(f"question {i}" in p for i, p in enumerate(prompts(cli)))

    def test_ctrl_c_ends_it(self, cli: Cli) -> None:
        cli.engine = FakeEngine("abc", kv=KV, before_token=lambda at: at == 2 and press())
        result = cli("chat", "m", stdin="a\nb\n")
        assert (result.exit_code, result.stdout) == (130, "ab\n")
        assert result.stderr.splitlines() == ["interrupted"]


class TestTemplate:
    def test_a_model_without_template(self, cli: Cli) -> None:
        assert "has no chat template" in cli.refused("chat", "m", stdin="a\n")
        assert cli.loaded == []

    def test_a_file_replaces_it(self, cli: Cli, tmp_path: Path) -> None:
        (tmp_path / "t").write_text("Q: {{ messages[-1].content }}")
        cli("chat", "m", "--chat-template-file", tmp_path / "t", stdin="a\n")
        assert prompts(cli) == ["Q: a"]

    def test_a_file_is_checked_before_the_model_is_loaded(self, cli: Cli, tmp_path: Path) -> None:
        (tmp_path / "t").write_text("{% if %}")
        line = cli.refused("chat", "m", "--chat-template-file", tmp_path / "t", stdin="a\n")
        assert "is not valid: line 1" in line
        assert "No such file" in cli.refused("chat", "m", "--chat-template-file", tmp_path / "no")
        assert cli.loaded == []

    def test_it_takes_exactly_one_model(self, cli: Cli) -> None:
        assert "no model; give" in cli.refused("chat")
        assert "give one model" in cli.refused("chat", "m", "-m", "m")


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def type_lines(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Type:
    """Return a function that types lines; an exception among them is raised, then Ctrl-D."""

    def run(*typed: str | type[BaseException], args: tuple[str, ...] = ()) -> Result:
        lines: Iterator[str | type[BaseException]] = iter([*typed, EOFError])

        def ask(prompt: str) -> str:
            line = next(lines)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr(ui, "stdin_is_terminal", lambda: True)
        monkeypatch.setattr(ui, "ask", ask)
        return cli("chat", "m", *args)

    return run


class TestTyped:
    def test_a_conversation(self, cli: Cli, type_lines: Type) -> None:
        cli.engine = FakeEngine("one", "two", kv=KV)
        result = type_lines("a", "   ", "b")
        assert (result.exit_code, result.stdout) == (0, "one\ntwo\n")
        assert len(prompts(cli)) == 2
        assert "/help for help" in result.stderr
        assert "; wrote 4, 4.0 tok/s\n" in result.stderr

    def test_a_message_of_several_lines(self, cli: Cli, type_lines: Type) -> None:
        cli.engine = FakeEngine("ok", kv=KV)
        block = ('"""one', "", 'two"""', '"""three"""')
        type_lines(*block, '"""four', "five", EOFError, "pasted\nlines")
        assert prompts(cli)[0] == "[user]one\n\ntwo[assistant]"
        assert prompts(cli)[1].endswith("[user]three[assistant]")
        # Ctrl-D ends the block and not the conversation.
        assert prompts(cli)[2].endswith("[user]four\nfive[assistant]")
        assert prompts(cli)[3].endswith("[user]pasted\nlines[assistant]")

    def test_ctrl_c_stops_the_answer_and_not_the_program(self, cli: Cli, type_lines: Type) -> None:
        cli.engine = FakeEngine(
            "abcdef", kv=KV,
            before_token=lambda at: at == 3 and len(cli.engine.calls) == 1 and press(),
        )  # fmt: skip
        result = type_lines("a", "b")
        assert (result.exit_code, result.stdout) == (0, "abc\nabcdef\n")
        assert "stopped; " in result.stderr
        # What was said before it was stopped was said.
        assert prompts(cli)[1] == "[user]a[assistant]abc[user]b[assistant]"

    def test_ctrl_c_before_the_first_token_forgets_the_question(
        self, cli: Cli, type_lines: Type
    ) -> None:
        cli.engine = FakeEngine(
            "abc", kv=KV, before_token=lambda at: len(cli.engine.calls) == 1 and press()
        )
        result = type_lines("a", "b")
        assert "stopped after reading 18 of 18 tokens; the message is forgotten" in result.stderr
        assert prompts(cli)[1] == "[user]b[assistant]"

    def test_ctrl_c_at_the_prompt_is_a_hint(self, cli: Cli, type_lines: Type) -> None:
        cli.engine = FakeEngine("ok", kv=KV)
        result = type_lines(KeyboardInterrupt, "a")
        assert (result.exit_code, result.stdout) == (0, "ok\n")
        assert "Ctrl-D or /quit" in result.stderr

    def test_a_full_context_is_told(self, cli: Cli, type_lines: Type) -> None:
        cli.engine = FakeEngine("abcdef", kv=KV)
        shown = type_lines("a", args=("-n", "2")).stderr
        assert "context 4096 tokens; /help" in shown
        assert "note: the answer was cut at 2 tokens (-n)\ncontext 20 of 4096; read 18" in shown
        cli.engine = FakeEngine("abcdef", kv=KV, n_ctx=20)
        shown = type_lines("a").stderr
        assert "cut: the context of 20 tokens is full; your next" in shown
        assert "context 20 of 20; read 18" in shown
