"""`moegraph chat` over a scripted engine: piped, typed, interrupted."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fake_engine import END, FakeEngine

from moegraph.chat.template import TEMPLATE_KEY
from moegraph.cli import ui
from moegraph.errors import NativeError

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
        assert (result.exit_code, result.stdout, result.stderr) == (0, "one\ntwo\n", "")
        assert prompts(cli) == [
            "[user]first[assistant]",
            "[user]first[assistant]one[user]second[assistant]",
        ]
        assert all(call.reuse for call in cli.engine.calls)

    def test_what_changed_meanwhile_follows_each_answer(self, cli: Cli) -> None:
        cli.engine = FakeEngine("ok", kv=KV)
        news = [["bypassed"], []]
        cli.engine.drain_messages = lambda: news.pop(0)  # type: ignore[method-assign]
        result = cli("chat", "m", stdin="a\nb\n")
        assert result.exit_code == 0 and news == []
        assert result.stderr.count("note: bypassed\n") == 1

    def test_a_system_prompt_comes_first(self, cli: Cli) -> None:
        cli.engine = FakeEngine("ok", kv=KV)
        cli("chat", "m", "--system", "Be brief.", stdin="hi\n")
        assert prompts(cli) == ["[system]Be brief.[user]hi[assistant]"]

    def test_clear_forgets_all_but_the_system_prompt(self, cli: Cli) -> None:
        cli.engine = FakeEngine("ok", kv=KV)
        cli("chat", "m", "-sys", "S", stdin="a\n/clear\nb\n")
        assert prompts(cli)[1] == "[system]S[user]b[assistant]"
        assert cli.engine.n_resets == 1

    @pytest.mark.parametrize("command", ["/quit", "/exit", "/bye"])
    def test_quit_ends_it(self, cli: Cli, command: str) -> None:
        cli.engine = FakeEngine("ok", kv=KV)
        result = cli("chat", "m", stdin=f"a\n{command}\nb\n")
        assert (result.exit_code, len(prompts(cli))) == (0, 1)

    def test_help_and_unknown_commands_are_not_messages(self, cli: Cli) -> None:
        cli.engine = FakeEngine("ok", kv=KV)
        result = cli("chat", "m", stdin="/help\n/dance now\n")
        assert "/clear " in result.stderr
        assert "unknown command /dance" in result.stderr
        assert (result.stdout, prompts(cli)) == ("", [])

    def test_one_question_on_the_command_line(self, cli: Cli) -> None:
        cli.engine = FakeEngine("four", kv=KV)
        result = cli("chat", "m", "-p", "2+2?", stdin="not read")
        assert (result.stdout, prompts(cli)) == ("four\n", ["[user]2+2?[assistant]"])

    def test_reasoning_goes_to_stderr(self, cli: Cli) -> None:
        cli.engine = FakeEngine("<think>\nhm</think>\n\nyes", kv=KV)
        result = cli("chat", "m", stdin="a\nb\n")
        assert result.stdout == "yes\nyes\n"
        assert result.stderr == "\nhm\nhm"
        # The template decides what becomes of old reasoning.
        assert "[assistant]<think>\nhm</think>\n\nyes[user]b" in prompts(cli)[1]

    def test_reasoning_that_the_prompt_opens_stays_whole_in_the_history(self, cli: Cli) -> None:
        opens = TEMPLATE.replace("[assistant]", "[assistant]<think>\n")
        cli.engine = FakeEngine("hm\n</think>\nyes", kv={TEMPLATE_KEY: opens})
        result = cli("chat", "m", stdin="a\nb\n")
        assert (result.stdout, result.stderr) == ("yes\nyes\n", "hm\nhm\n")
        assert "<think>\nhm\n</think>\nyes[user]b" in prompts(cli)[1]

    @pytest.mark.parametrize(("choice", "seen"), [("on", "True"), ("off", "False"), ("auto", "")])
    def test_reasoning_is_asked_of_the_template(self, cli: Cli, choice: str, seen: str) -> None:
        cli.engine = FakeEngine("ok", kv=KV)
        cli("chat", "m", "--reasoning", choice, stdin="a\n")
        assert prompts(cli) == [f"[user]a[assistant]{seen}"]

    def test_settings_reach_the_engine(self, cli: Cli) -> None:
        cli.engine = FakeEngine("ok", kv=KV)
        cli("chat", "m", "-n", 5, "--stop", r"\n", "-e", "--seed", 3, "--ignore-eos", stdin="a\n")
        call = cli.engine.calls[0]
        assert (call.max_tokens, call.stop, call.sampling.seed) == (5, ("\n",), 3)
        assert call.sampling.logit_bias == {END: float("-inf")}

    def test_a_seed_holds_for_the_whole_conversation(self, cli: Cli) -> None:
        cli.engine = FakeEngine("ok", kv=KV)
        cli("chat", "m", stdin="a\nb\n")
        first, second = (call.sampling.seed for call in cli.engine.calls)
        assert first == second is not None

    def test_a_template_that_prints_the_bos_gets_no_second_one(self, cli: Cli) -> None:
        asked = []
        cli.engine = FakeEngine("ok", kv={TEMPLATE_KEY: "{{ bos_token }}" + TEMPLATE})
        encode = cli.engine.tokenizer.encode
        cli.engine.tokenizer.encode = lambda text, add_special: (
            asked.append(add_special) or encode(text)
        )
        cli("chat", "m", stdin="a\n")
        cli.engine.file.kv[TEMPLATE_KEY] = TEMPLATE
        cli("chat", "m", stdin="a\n")
        assert asked == [False, True]

    def test_a_message_that_does_not_fit_ends_it_with_one_line(self, cli: Cli) -> None:
        cli.engine = FakeEngine("ok", kv=KV, n_ctx=24)
        result = cli("chat", "m", stdin="a\n" + "b" * 100 + "\nc\n")
        assert (result.exit_code, result.stdout) == (2, "ok\n")
        assert "the context holds 24" in result.stderr
        assert len(result.stderr.splitlines()) == 1

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

    def test_a_broken_template_of_a_model_is_a_broken_model(self, cli: Cli) -> None:
        cli.engine = FakeEngine("", kv={TEMPLATE_KEY: "{{ ''.__class__.mro() }}"})
        assert "the chat template failed" in cli.refused("chat", "m", stdin="a\n", code=3)

    def test_a_template_may_refuse_a_message(self, cli: Cli) -> None:
        cli.engine = FakeEngine("", kv={TEMPLATE_KEY: "{{ raise_exception('too rude') }}"})
        assert "refuses the messages: too rude" in cli.refused("chat", "m", stdin="a\n")

    def test_a_model_without_vocabulary(self, cli: Cli) -> None:
        cli.engine = FakeEngine("", vocabulary=False, kv=KV)
        assert "no vocabulary" in cli.refused("chat", "m", stdin="a\n", code=3)
        assert cli.loaded == []

    def test_it_takes_exactly_one_model(self, cli: Cli) -> None:
        assert "give one model" in cli.refused("chat")
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
        assert "tok/s decode" in result.stderr

    def test_a_message_of_several_lines(self, cli: Cli, type_lines: Type) -> None:
        cli.engine = FakeEngine("ok", kv=KV)
        type_lines('"""one', "", 'two"""', '"""three"""')
        assert prompts(cli)[0] == "[user]one\n\ntwo[assistant]"
        assert prompts(cli)[1].endswith("[user]three[assistant]")

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

    def test_ctrl_c_twice_forgets_the_question(self, cli: Cli, type_lines: Type) -> None:
        def press_twice(at: int) -> None:
            if len(cli.engine.calls) == 1:
                for _ in range(2):
                    signal.raise_signal(signal.SIGINT)

        cli.engine = FakeEngine("yes", kv=KV, before_token=press_twice)
        result = type_lines("a", "b")
        assert result.exit_code == 0
        assert prompts(cli)[1] == "[user]b[assistant]"

    def test_ctrl_c_at_the_prompt_is_a_hint(self, cli: Cli, type_lines: Type) -> None:
        cli.engine = FakeEngine("ok", kv=KV)
        result = type_lines(KeyboardInterrupt, "a")
        assert (result.exit_code, result.stdout) == (0, "ok\n")
        assert "Ctrl-D or /quit" in result.stderr

    def test_a_wrong_message_is_told_and_forgotten(self, cli: Cli, type_lines: Type) -> None:
        cli.engine = FakeEngine("ok", kv=KV, n_ctx=40)
        result = type_lines("b" * 100, "c")
        assert (result.exit_code, result.stdout) == (0, "ok\n")
        assert "error: the prompt has" in result.stderr
        assert prompts(cli)[-1] == "[user]c[assistant]"

    def test_a_full_context_is_told(self, cli: Cli, type_lines: Type) -> None:
        cli.engine = FakeEngine("abcdef", kv=KV)
        assert "the context or -n is used up" in type_lines("a", args=("-n", "2")).stderr

    def test_a_failure_of_the_engine_ends_it(self, cli: Cli, type_lines: Type) -> None:
        def fail(at: int) -> None:
            raise NativeError("device lost")

        cli.engine = FakeEngine("ok", kv=KV, before_token=fail)
        result = type_lines("a", "b")
        assert result.exit_code == 4
        assert result.stderr.splitlines()[-1] == "error: device lost"
