"""`moegraph run` over a scripted engine: what goes where, what is refused, and how it ends."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from helpers.fake_engine import (
    END,
    N_VOCAB,
    BeginTokenizer,
    ByteTokenizer,
    FakeEngine,
    ids_file,
)  # fmt: skip

from moegraph.cli import ui
from moegraph.cli.run import OutputFile
from moegraph.config import EngineConfig
from moegraph.errors import (
    ConfigError,
    InternalError,
    ModelFileError,
    NativeError,
    OutOfDeviceMemory,
    UnsupportedModel,
)
from moegraph.text.chat.template import TEMPLATE_KEY

if TYPE_CHECKING:
    from conftest import Cli


class TestText:
    def test_text_goes_to_stdout_and_everything_else_to_stderr(self, cli: Cli) -> None:
        cli.engine = FakeEngine("hello world")
        result = cli("run", "m.gguf", "-p", "say")
        assert result.exit_code == 0
        assert result.stdout == "hello world"
        assert "prefill 3 tokens" in result.stderr
        assert "decode 11 tokens in 2.75 s, 4.0 tok/s" in result.stderr
        assert re.search(r"; seed \d+;", result.stderr)
        assert cli.engine.calls[0].prompt == "say"
        assert cli.engine.closed

    def test_a_prompt_with_a_bos_before_which_the_vocabulary_adds_one(self, cli: Cli) -> None:
        for tokenizer, text, n in (
            (BeginTokenizer(), "\x01say", 1), (BeginTokenizer(), "say", 0),
            (ByteTokenizer(), "\x01\x01say", 0),
        ):  # fmt: skip
            cli.engine = FakeEngine("hello")
            cli.engine.tokenizer = tokenizer
            assert cli("run", "m.gguf", "-p", text).stderr.count("begins with two") == n

    @pytest.mark.parametrize("text", ["naïve 日本", "a\x07b"])
    def test_characters_arrive_in_a_pipe_whole_and_as_they_are(self, cli: Cli, text: str) -> None:
        cli.engine = FakeEngine(text)
        assert cli("run", "m", "-p", "x").stdout == text

    @pytest.mark.parametrize("how", ["file", "dash", "pipe"])
    def test_a_prompt_from_a_file_or_a_pipe_loses_one_newline(
        self, cli: Cli, tmp_path: Path, how: str
    ) -> None:
        (tmp_path / "p").write_text("two\nlines\n\n")
        if how == "file":
            cli("run", "m", "-f", tmp_path / "p")
        else:
            cli("run", "m", *(["-f", "-"] if how == "dash" else []), stdin="two\nlines\n\n")
        assert cli.engine.calls[0].prompt == "two\nlines\n"

    def test_stop_strings_end_the_text(self, cli: Cli) -> None:
        cli.engine = FakeEngine("one\n\ntwo")
        assert cli("run", "m", "-p", "x", "-e", "--stop", r"\n\n").stdout == "one"
        assert cli("run", "m", "-p", "x", "-r", "tw", "--stop", "zz").stdout == "one\n\n"

    def test_escapes_are_read_on_the_command_line_and_in_files_on_request(
        self, cli: Cli, tmp_path: Path
    ) -> None:
        typed, read = r"a\nb\\n\x\"", 'a\nb\\n\\x"'
        (tmp_path / "p").write_text(typed)
        for given in (["-p", typed], ["-f", tmp_path / "p"]):
            for flags in ([], ["-e"], ["--no-escape"]):
                cli("run", "m", *given, *flags)
        prompts = [call.prompt for call in cli.engine.calls]
        assert prompts == [read, read, typed, typed, read, typed]

    def test_quiet_leaves_only_the_text(self, cli: Cli) -> None:
        cli.engine = FakeEngine("x", kv={TEMPLATE_KEY: "t"})
        result = cli("run", "m", "-p", "a", "-q")
        assert (result.stdout, result.stderr) == ("x", "")

    def test_a_chat_model_asked_without_its_template_is_told(self, cli: Cli) -> None:
        cli.engine = FakeEngine("x", kv={TEMPLATE_KEY: "t"})
        note = cli("run", "m", "-p", "Why?").stderr.splitlines()[0]
        assert note.startswith("note: this model has a chat template") and "chat -p" in note
        for turn in ("<|im_start|>user", "<|turn>user"):
            assert "note:" not in cli("run", "m", "-p", f"{turn}\nWhy?").stderr
        cli.engine = FakeEngine("x")
        assert "note:" not in cli("run", "m", "-p", "Why?").stderr

    def test_a_model_without_vocabulary_says_how_to_use_ids(self, cli: Cli) -> None:
        cli.engine = FakeEngine("", vocabulary=False)
        assert "PROMPT_IDS N_GEN OUT_IDS" in cli.refused("run", "m", "-p", "x", code=3)
        assert cli.loaded == []


class TestSettings:
    def test_options_reach_the_engine_under_llama_cpp_spellings(self, cli: Cli) -> None:
        cli("run", "m", "-p", "x", "-c", 128, "-t", 3, "-ub", 64, "-ctk", "q8_0", "-ctv", "q4_0",
            "--device", "cpu", "--mode", "layered", "--cpu-reference")  # fmt: skip
        assert cli.engine.config == EngineConfig(
            device="cpu", mode="layered", n_ctx=128, n_ubatch=64, n_threads=3,
            type_k="q8_0", type_v="q4_0", cpu_reference=True,
        )  # fmt: skip

    def test_sampling_options_reach_the_engine(self, cli: Cli) -> None:
        cli("run", "m", "-p", "x", "--temp", "0.5", "--top-k", 7, "--top-p", "0.9", "--min-p",
            "0.1", "--typical", "0.8", "--repeat-penalty", "1.2", "--repeat-last-n", 32,
            "--presence-penalty", "0.3", "--frequency-penalty", "0.4", "-s", 42,
            "-l", "65+1.5", "-l", "65-0.5", "-l", "66-inf")  # fmt: skip
        assert asdict(cli.engine.calls[0].sampling) == {
            "temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.8,
            "repeat_penalty": 1.2, "repeat_last_n": 32, "presence_penalty": 0.3,
            "frequency_penalty": 0.4, "seed": 42, "logit_bias": {65: 1.0, 66: -math.inf},
        }  # fmt: skip

    def test_ignore_eos_bans_the_end_tokens(self, cli: Cli) -> None:
        cli("run", "m", "-p", "x", "--ignore-eos", "-l", "65+1")
        assert cli.engine.calls[0].sampling.logit_bias == {65: 1.0, END: -math.inf}

    @pytest.mark.parametrize(
        ("args", "line"),
        [
            (["--top-p", "1.5"], "top_p is 1.5 (--top-p); allowed: 0 to 1"),
            (["--temp", "nan"], "temperature is nan"),
            (["--repeat-last-n", "-2"], "repeat_last_n is -2"),
            (["-m", "other"], "give one model, not other and "),
            (["--profile-scaling", "-m", "other"], "give one model, not other and m"),
            (["-s", "-2"], "seed is -2"),
            (["-c", "-2"], "n_ctx is -2 (-c/--max-ctx/--ctx-size)"),
            (["-t", "0"], "n_threads is 0"),
            (["-ub", "0"], "n_ubatch is 0"),
            (["--device", "tpu"], "device is 'tpu'"),
            (["--device", "cuda", "--cpu-reference"], "cpu_reference needs the CPU"),
            (["-n", "-2"], "-n is -2"),
            (["-l", "15"], "logit bias '15'"),
            (["-l", "x+1"], "logit bias 'x+1'"),
            (["-l", "5+1x"], "logit bias '5+1x'"),
            (["-l", f"{N_VOCAB}+1"], f"logit_bias names token {N_VOCAB}"),
            (["-l", "5+inf"], "logit_bias of token 5 is inf"),
            (["--stop", ""], "a stop string is empty"),
        ],
    )
    def test_values_out_of_range(self, cli: Cli, args: list[str], line: str) -> None:
        assert line in cli.refused("run", "m", "-p", "x", *args)

    @pytest.mark.parametrize(
        ("args", "line"),
        [
            (["--foo"], "No such option"),
            (["--temp"], "requires an argument"),
            (["--temp", "warm"], "'warm' is not a valid float"),
            (["--top-k", "1.5"], "'1.5' is not a valid integer"),
            (["-ctk", "q5_0"], "'q5_0' is not one of"),
            (["--mode", "fast"], "'fast' is not one of"),
        ],
    )
    def test_a_command_line_that_makes_no_sense(self, cli: Cli, args: list[str], line: str) -> None:
        message = cli.refused("run", "m", "-p", "x", *args)
        assert line in message
        assert message.endswith("-h)")
        assert cli.loaded == []


class TestPrompt:
    def test_no_prompt_on_a_terminal(self, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ui, "stdin_is_terminal", lambda: True)
        assert "no prompt; give -p TEXT" in cli.refused("run", "m")

    @pytest.mark.parametrize(
        ("args", "stdin", "line"),
        [
            (["m", "-p", ""], b"\n", "the prompt is empty"),
            (["m"], b"\n", "the prompt is empty"),
            (["m"], b"\xff", "stdin: the prompt is not UTF-8"),
            (["m", "-p", "x", "-f", "y"], b"", "both -p and -f"),
            (["m", "-f", "nope"], b"", "cannot read the prompt: No such file"),
            (["m", "-f", "/"], b"", "Is a directory"),
            (["m", "-p", "a\udcff"], b"", "not UTF-8 text on the command line"),
            ([], b"", "no model"),
        ],
    )
    def test_prompts_that_cannot_be_read(
        self, cli: Cli, args: list[str], stdin: bytes, line: str
    ) -> None:
        assert line in cli.refused("run", *args, stdin=stdin) and cli.loaded == []

    def test_a_prompt_file_that_is_not_text_or_too_large(
        self, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "p").write_bytes(b"ok\xff")
        line = cli.refused("run", "m", "-f", tmp_path / "p")
        assert "not UTF-8 text (byte 0xff at offset 2)" in line
        monkeypatch.setattr("moegraph.cli.options.MAX_PROMPT_BYTES", 10)
        (tmp_path / "p").write_text("x" * 11)
        assert "larger than 10 B" in cli.refused("run", "m", "-f", tmp_path / "p")
        assert cli.loaded == []

    def test_an_argument_in_a_locale_without_utf8_is_still_text(self, cli: Cli) -> None:
        cli("run", "m", "-p", "\u65e5".encode().decode("ascii", "surrogateescape"))
        assert cli.engine.calls[0].prompt == "\u65e5"

    def test_a_prompt_longer_than_the_context(self, cli: Cli) -> None:
        line = cli.refused("run", "m", "-p", "x" * 257, "-c", "256")
        assert "257 tokens, the context holds 256" in line
        assert "-c/--ctx-size" in line
        assert cli.loaded == []
        assert "holds 4096" in cli.refused("run", "m", "-p", "x" * 4097, "-c", "0")
        assert cli("run", "m", "-p", "x" * 256, "-c", "256").exit_code == 0


class TestJson:
    def report(self, cli: Cli, *args: object) -> dict[str, Any]:
        result = cli("run", "m", *args, "--json")
        assert result.stderr == ""
        return json.loads(result.stdout)

    def test_one_object_with_everything(self, cli: Cli) -> None:
        cli.engine = FakeEngine("hé")
        report = self.report(cli, "-p", "ab", "--seed", "5", "-l", "7-inf", "-ub", "64")
        assert report["text"] == "hé"
        assert report["prompt_tokens"] == [97, 98]
        assert report["tokens"] == [*"hé".encode(), END]
        assert (report["n_prompt"], report["n_generated"]) == (2, 4)
        assert report["finish_reason"] == "stop"
        assert report["timings"]["prefill_s"] == 0.5
        assert report["timings"]["decode_s"] == 0.75
        assert report["prefill_tps"] == 4
        assert report["decode_tps"] == 4
        assert report["memory"]["device_peak_bytes"] == 1 << 20
        assert report["config"]["device"] == "cpu"
        assert report["config"]["n_ubatch"] == 64
        assert report["sampling"]["seed"] == 5
        assert report["sampling"]["logit_bias"] == {"7": "-inf"}
        assert report["model"]["n_expert"] == 32

    def test_what_the_file_recommends_is_used_unless_told_otherwise(self, cli: Cli) -> None:
        cli.engine = FakeEngine("x", kv={
            "general.sampling.temp": float(np.float32(0.7)), "general.sampling.top_k": 20,
            "general.sampling.top_p": 2.0, "general.sampling.min_p": float("nan"),
            "general.sampling.penalty_last_n": "many", "general.sampling.penalty_repeat": 1.5,
        })  # fmt: skip
        done = cli("run", "m", "-p", "x", "--json", "--top-k", "40")
        sampling = json.loads(done.stdout)["sampling"]
        assert (sampling["temperature"], sampling["top_k"]) == (0.7, 40)
        # What is out of range is left alone, with one line.
        assert [line for line in done.stderr.splitlines() if "warning" in line] == [
            "warning: out of range in the model file, and ignored: general.sampling.top_p 2.0, "
            "general.sampling.min_p nan, general.sampling.penalty_last_n 'many'"
        ]
        assert (sampling["top_p"], sampling["min_p"], sampling["repeat_last_n"]) == (0.95, 0.05, 64)
        assert sampling["repeat_penalty"] == 1.5
        assert sampling["from_file"] == ["temperature", "repeat_penalty"]

    def test_token_ids_are_continued_greedily_unless_a_temperature_is_given(
        self, cli: Cli, tmp_path: Path
    ) -> None:
        cli.engine = FakeEngine("x", kv={"general.sampling.penalty_repeat": 1.5})
        ids = ids_file(tmp_path / "in", 97)
        sampling = self.report(cli, ids, 1, tmp_path / "out")["sampling"]
        assert (sampling["temperature"], sampling["repeat_penalty"]) == (0.0, 1.0)
        assert sampling["from_file"] == []
        sampling = self.report(cli, "--temp", "1", ids, 1, tmp_path / "out")["sampling"]
        assert (sampling["temperature"], sampling["repeat_penalty"]) == (1.0, 1.5)


class TestFailures:
    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (ConfigError("no device cuda:3"), 2),
            (ModelFileError("m: bad magic"), 3),
            (UnsupportedModel("m: architecture llama"), 3),
            (NativeError("mul_mat failed"), 4),
            (OutOfDeviceMemory("needs 3 GiB, 2 GiB free; lower -c"), 4),
            (InternalError("slots"), 1),
            (KeyError("key"), 1),
            (MemoryError(), 4),
            (KeyboardInterrupt(), 130),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
    )
    def test_an_error_while_loading_is_one_line_and_a_code(
        self, cli: Cli, error: BaseException, code: int
    ) -> None:
        def fail() -> None:
            raise error

        cli.on_load = fail
        line = cli.refused("run", "m", "-p", "x", code=code)
        assert str(error) in line
        if isinstance(error, KeyError):
            assert "internal error: KeyError: 'key' (please report this)" in line

    def test_an_error_in_the_middle_comes_after_the_text(
        self, cli: Cli, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(at: int) -> None:
            if at == 2:
                raise NativeError("device lost")

        cli.engine = FakeEngine("abcdef", before_token=fail)
        result = cli("run", "m", "-p", "x")
        assert (result.exit_code, result.stdout) == (4, "ab")
        assert result.stderr == "error: device lost\n"
        # on a terminal it begins a line
        monkeypatch.setattr(ui, "is_terminal", lambda stream: True)
        monkeypatch.setenv("NO_COLOR", "1")
        cli.engine = FakeEngine("abcdef", before_token=fail)
        assert cli("run", "m", "-p", "x").stdout.endswith("ab\n")

    def test_a_reader_that_leaves_is_no_error(self, cli: Cli) -> None:
        def leave(at: int) -> None:
            raise BrokenPipeError

        cli.engine = FakeEngine("a", before_token=leave)
        result = cli("run", "m", "-p", "x")
        assert (result.exit_code, result.output) == (141, "")


def press_ctrl_c(at: int) -> Any:
    def press(i: int) -> None:
        if i == at:
            os.kill(os.getpid(), signal.SIGINT)

    return press


class TestInterrupt:
    def test_ctrl_c_ends_the_text_with_one_line(self, cli: Cli) -> None:
        cli.engine = FakeEngine("abcdef", before_token=press_ctrl_c(3))
        result = cli("run", "m", "-p", "x")
        assert (result.exit_code, result.stdout) == (130, "abc")
        assert result.stderr.splitlines()[-1] == "interrupted"
        assert cli.engine.closed

    def test_what_was_generated_so_far_is_written(self, cli: Cli, tmp_path: Path) -> None:
        cli.engine = FakeEngine("abc", before_token=press_ctrl_c(3))
        assert cli("run", "m", "-p", "x", "--stop", "bcd").stdout == "abc", "text held back"
        cli.engine = FakeEngine("abcdef", before_token=press_ctrl_c(2))
        result = cli("run", "m", ids_file(tmp_path / "in", 7), 6, tmp_path / "out")
        assert result.exit_code == 130
        assert np.fromfile(tmp_path / "out", "<i4").tolist() == [7, 97, 98]
        result = cli("run", "m", "-p", "xy", "--json", "--logits-out", tmp_path / "l.npy")
        assert json.loads(result.stdout)["finish_reason"] == "cancelled"
        assert np.load(tmp_path / "l.npy").shape == (3, N_VOCAB)

    def test_a_second_ctrl_c_does_not_wait_for_the_engine(self, cli: Cli) -> None:
        def press_twice(at: int) -> None:
            if at == 2:
                for _ in range(2):
                    signal.raise_signal(signal.SIGINT)
                raise AssertionError("went on after the second Ctrl-C")

        cli.engine = FakeEngine("abcdef", before_token=press_twice)
        result = cli("run", "m", "-p", "x")
        assert (result.exit_code, result.stderr) == (130, "interrupted\n")


def test_a_shorter_result_leaves_nothing_of_a_longer_one(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"a longer one")
    with OutputFile(path) as file:
        assert path.read_bytes() == b"a longer one", "nothing is lost before there is a result"
        file.write(b"one")
        file.write(b"two")
    assert path.read_bytes() == b"onetwo"


def test_a_file_that_fails_is_one_line_and_code_1(cli: Cli) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device", "f.bin")

    cli.on_load = fail
    result = cli("run", "m", "-p", "x")
    assert (result.exit_code, result.stderr) == (1, "error: f.bin: No space left on device\n")
