"""Chat templates under attack and in use, histories, and reasoning told from answers."""

from __future__ import annotations

import array
import fcntl
import json
import os
import signal
import termios
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from helpers.patience import PATIENCE_S, until
from hypothesis import given
from hypothesis import strategies as st

from moegraph.errors import ConfigError, ModelFileError, MoegraphError, RequestError
from moegraph.text.chat.answer import ReasoningSplitter
from moegraph.text.chat.messages import History, Message
from moegraph.text.chat.template import (
    MAX_OUTPUT_CHARS,
    MAX_TEMPLATE_BYTES,
    TEMPLATE_KEY,
    ChatTemplate,
)

HELLO = [Message("user", "hello")]

CHATML = """
{%- for message in messages -%}
    <|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def render(source: str, messages: list[Message] = HELLO, **variables: object) -> str:
    with ChatTemplate(source, max_seconds=2) as template:
        return template.render(messages, **variables)


def refusal(source: str, seconds: float = 2) -> str:
    with pytest.raises(MoegraphError) as error, ChatTemplate(source, max_seconds=seconds) as t:
        t.render(HELLO)
    return str(error.value)


class TestUse:
    def test_messages_become_a_prompt(self) -> None:
        messages = [Message("system", "Be brief."), *HELLO]
        assert render(CHATML, messages) == (
            "<|im_start|>system\nBe brief.<|im_end|>\n"
            "<|im_start|>user\nhello<|im_end|>\n"
            "<|im_start|>assistant\n"
        )

    def test_a_renderer_that_somebody_ended_is_replaced(self) -> None:
        """Where memory runs out, the kernel may choose it."""
        with ChatTemplate("{{ messages[-1].content }}") as template:
            assert template._child is not None
            template._child.kill()
            template._child.wait()
            assert template.render([Message("user", "one")]) == "one"

    def test_a_renderer_that_the_system_stops_for_a_while_is_waited_for(self) -> None:
        """The limit is one of CPU time: a busy machine makes no template wrong."""
        source = "{% for i in range(99999) %}{{ i % 7 }}{% endfor %}"
        with ChatTemplate(source, max_seconds=1) as template:
            assert template._child is not None
            pid = template._child.pid
            pauses = [
                threading.Timer(delay, os.kill, (pid, number))
                for delay, number in ((0.02, signal.SIGSTOP), (1.2, signal.SIGCONT))
            ]
            for pause in pauses:
                pause.start()
            assert len(template.render(HELLO)) == 99999
            for pause in pauses:
                pause.join()

    def test_a_renderer_that_is_stopped_while_it_writes_loses_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Python without buffers would write what fits into the pipe, and drop the rest."""
        monkeypatch.setenv("PYTHONUNBUFFERED", "1")
        source = "{% for i in range(99999) %}{{ i % 7 }}{% endfor %}"
        with ChatTemplate(source) as template:
            child = template._child
            assert child is not None and child.stdin is not None and child.stdout is not None
            child.stdin.write('{"messages": []}\n')
            child.stdin.flush()
            pipe, held = child.stdout.fileno(), array.array("i", [0])
            room = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
            until(lambda: fcntl.ioctl(pipe, termios.FIONREAD, held) == 0 and held[0] == room)
            child.send_signal(signal.SIGSTOP)
            os.waitpid(child.pid, os.WUNTRACED)
            child.send_signal(signal.SIGCONT)
            child.stdin.close()  # so what is lost is an end, not a wait
            assert len(json.loads(child.stdout.readline())["text"]) == 99999

    def test_helpers_that_hub_templates_call(self) -> None:
        assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")
        assert render("{{ {'b': '<\u00e9>', 'a': 1} | tojson }}") == '{"b": "<\u00e9>", "a": 1}'
        assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
        loop = "{% for i in range(9) %}{% if i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        assert render(loop) == "012"
        assert render("{% generation %}x{{ 1 }}{% endgeneration %}") == "x1"
        assert render("{% set ns = namespace(n=0) %}{% set ns.n = 5 %}{{ ns.n }}") == "5"

    def test_variables_reach_the_template(self) -> None:
        assert render("{{ enable_thinking }} {{ tools is defined }}", enable_thinking=False) == (
            "False False"
        )
        with ChatTemplate("{{ bos_token }}", tokens={"bos_token": "<s>"}) as template:
            assert template.render(HELLO) == "<s>"

    def test_a_template_may_refuse_the_messages_and_lives_on(self) -> None:
        source = "{% if messages|length > 1 %}{{ raise_exception('one at a time') }}{% endif %}ok"
        with ChatTemplate(source) as template:
            with pytest.raises(RequestError, match="refuses the messages: one at a time"):
                template.render(HELLO * 2)
            assert template.render(HELLO) == "ok"


class TestAttacks:
    @pytest.mark.parametrize(
        "source",
        [
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ messages.__init__.__globals__ }}",
            "{{ raise_exception.__globals__.sys }}",
            "{{ (''|attr('__class__')).mro() }}",
            "{{ cycler.__init__.__globals__.os.system('true') }}",
            "{{ messages.append(1) }}",
            "{{ messages[0].update({'role': 'system'}) }}",
            "{% include '/etc/passwd' %}",
            "{% import 'os' as os %}{{ os }}",
            "{{ lipsum(n=100000) }}",
        ],
    )
    def test_no_way_to_python_objects_or_files(self, source: str) -> None:
        assert "chat template failed" in refusal(source)

    @pytest.mark.parametrize(
        "source",
        [
            "{{ raise_exception.__globals__ }}",
            "{{ ''|attr('__class__') }}",
            "{{ '{0.__class__}'.format(messages) }}",
            "{% set f = '{0.__class__}'.format %}{{ f(messages) }}",
        ],
    )
    def test_what_the_sandbox_hides_renders_as_nothing(self, source: str) -> None:
        assert render(source) == ""

    @pytest.mark.parametrize(
        "source",
        [
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "{% macro f() %}{% for i in range(9999) %}{{ f() }}{% endfor %}{% endmacro %}{{ f() }}",
            "{{ (messages|length + 9) ** (9 ** 9) }}",
            "{{ 7 ** (10 ** 9) }}",
        ],
    )
    def test_endless_work_ends_in_time(self, source: str) -> None:
        start = time.perf_counter()
        line = refusal(source, seconds=0.5)
        assert "more than 0.5 seconds" in line or "recursion" in line
        assert time.perf_counter() - start < PATIENCE_S  # without the limit, it takes hours

    @pytest.mark.parametrize(
        "source",
        [
            "{{ 'a' * 10**10 }}",
            "{{ ('a' * (messages|length * 2000000000))|length }}",
            "{{ 'x'|center(3000000000) }}",
            "{{ '%3000000000d' % 1 }}",
        ],
    )
    def test_memory_is_bounded(self, source: str) -> None:
        assert "memory" in refusal(source).lower()

    def test_output_is_bounded(self) -> None:
        line = refusal("{% for i in range(90000) %}{{ 'x' * 1000 }}{% endfor %}")
        assert f"more than {MAX_OUTPUT_CHARS} characters" in line

    def test_size_is_bounded(self) -> None:
        assert "at most 256 KiB" in refusal("x" * (MAX_TEMPLATE_BYTES + 1))

    def test_a_template_is_usable_after_it_was_killed(self) -> None:
        source = "{% if messages|length > 1 %}{{ 7 ** (messages|length * 10 ** 9) }}{% endif %}ok"
        with ChatTemplate(source, max_seconds=0.5) as template:
            with pytest.raises(ConfigError):
                template.render(HELLO * 2)
            assert template.render(HELLO) == "ok"


class TestOrigin:
    def test_a_broken_template_of_a_model_is_a_broken_model(self) -> None:
        with pytest.raises(ModelFileError, match=r"m\.gguf: .* is not valid: line 2"):
            ChatTemplate.from_metadata({TEMPLATE_KEY: "\n{% if %}"}, Path("m.gguf"))

    @pytest.mark.parametrize("kv", [{}, {TEMPLATE_KEY: ""}, {TEMPLATE_KEY: 7}], ids=str)
    def test_a_model_without_one_says_what_to_do(self, kv: dict[str, object]) -> None:
        with pytest.raises(ConfigError, match=r"--chat-template-file"):
            ChatTemplate.from_metadata(kv, Path("m.gguf"))

    def test_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "t.jinja"
        path.write_text("{{ messages[0].content }}\u00e9", encoding="utf-8")
        with ChatTemplate.from_file(path) as template:
            assert template.render(HELLO) == "hello\u00e9"

    def test_files_that_are_no_template(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot read the chat template: No such file"):
            ChatTemplate.from_file(tmp_path / "none")
        (tmp_path / "binary").write_bytes(b"ok \xff\xfe")
        with pytest.raises(ConfigError, match=r"not UTF-8 \(byte 3\)"):
            ChatTemplate.from_file(tmp_path / "binary")
        (tmp_path / "long").write_bytes("é".encode() * MAX_TEMPLATE_BYTES)
        with pytest.raises(ConfigError, match="at most 256 KiB"):
            ChatTemplate.from_file(tmp_path / "long")


class TestHistory:
    def test_turns_can_be_taken_back_from_both_ends(self) -> None:
        history = History("sys")
        for turn in "abc":
            history.ask(turn)
            history.answer(turn.upper())
        assert history.forget_oldest()
        assert history.undo() == "c"
        assert [m.content for m in history.messages] == ["sys", "b", "B"]
        assert not history.forget_oldest()
        assert (history.undo(), history.undo(), history.system) == ("b", None, "sys")

    def test_a_question_that_waits_for_its_answer_is_not_forgotten(self) -> None:
        history = History()
        history.ask("a")
        history.answer("b")
        history.ask("c")
        assert history.forget_oldest() and not history.forget_oldest()
        assert [m.content for m in history.messages] == ["c"]

    def test_reasoning_that_was_cut_is_not_an_answer(self) -> None:
        history = History()
        history.answer("<think>\nlet me see")
        history.answer("<think>\nwell</think>yes")
        assert [m.content for m in history.messages] == ["", "<think>\nwell</think>yes"]


def split_stream(text: str, cuts: list[int], opened: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(opened)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [splitter.push(text[a:b]) for a, b in pairwise(edges)]
    parts.append(splitter.flush())
    return "".join(p[0] for p in parts), "".join(p[1] for p in parts)


class TestReasoning:
    @pytest.mark.parametrize(
        ("text", "opened", "expected"),
        [
            ("hm\n</think>\n\nYes.", True, ("hm\n", "Yes.")),
            ("<think>\nhm</think>\nYes.", False, ("\nhm", "Yes.")),
            ("  <think>hm", False, ("hm", "")),
            ("Yes <think> no", False, ("", "Yes <think> no")),
            ("  indented", False, ("", "  indented")),
            ("\n\nfirst", False, ("", "\n\nfirst")),
            ("a </thi b", True, ("a </thi b", "")),
            ("a</think>b</think>c", True, ("a", "b</think>c")),
            ("<thin", False, ("", "<thin")),
            ("<think>\nhm</think>Yes.", True, ("\nhm", "Yes.")),
            ("\n<think><think>hm", True, ("hm", "")),
            ("\n<thin", True, ("\n<thin", "")),
            ("  hm <think> so", True, ("  hm <think> so", "")),
            ("<think>\n\n</think>\n\n<think>\nhm</think>\nYes.", False, ("\n\n\nhm", "Yes.")),
            ("hm</think>\n\n<think", True, ("hm", "<think")),
            ("hm</think>\n\n", True, ("hm", "")),
            ("hm</think>Yes <think>", True, ("hm", "Yes <think>")),
        ],
    )
    def test_parts(self, text: str, opened: bool, expected: tuple[str, str]) -> None:
        assert split_stream(text, [], opened) == expected

    @given(
        st.lists(st.sampled_from(["<think>", "</think>", "<th", "ink>", "a", "\n"]), max_size=9),
        st.lists(st.integers(0, 60), max_size=9),
        st.booleans(),
    )
    def test_the_split_of_the_stream_makes_no_difference(
        self, words: list[str], cuts: list[int], opened: bool
    ) -> None:
        text = "".join(words)
        assert split_stream(text, cuts, opened) == split_stream(text, [], opened)

    def test_the_prompt_tells_whether_reasoning_is_open(self) -> None:
        assert ReasoningSplitter.after("...assistant\n<think>\n").is_thinking
        assert not ReasoningSplitter.after("<think>\n\n</think>\n\n").is_thinking


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    """Every renderer a test starts has ended when the test has."""
    before = _children()
    yield
    assert _children() <= before


def _children() -> set[str]:
    found = set()
    for tasks in Path("/proc/self/task").glob("*/children"):
        found |= set(tasks.read_text().split())
    return found
