"""The real program with the shipped model, in processes of its own."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from helpers.patience import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "def fibonacci(n):\n"
COMMAND = [sys.executable, "-m", "moegraph"]
# One thread: the machine may be shared, and spinning threads that wait for each other are slow.
CPU = ["--device", "cpu", "-t", "1"]
ENV = {
    **{k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "MOEGRAPH_DEBUG")},
    "TERM": "xterm", "PYTHONPATH": str(ROOT),
}  # fmt: skip
# Tokens that no test waits for. A reader that stops reading stops the program before they are over.
ENDLESS = ["-n", 8000, "-c", 16384, "--ignore-eos", *CPU]
SMALLEST_PIPE = 4096


def moegraph(*args: object, stdin: bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run(
        [*COMMAND, *map(str, args)], input=stdin, capture_output=True, check=False,
        env={**ENV, **env}, timeout=PATIENCE_S, cwd=ROOT,
    )  # fmt: skip
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    assert b"\x1b" not in done.stdout + done.stderr
    return done


def heed_ctrl_c() -> None:
    """Undo what a shell does to jobs in the background: their children ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(*args: object, stdout: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, *map(str, args)], stdin=subprocess.DEVNULL, stdout=stdout,
        stderr=subprocess.PIPE, env=ENV, cwd=ROOT, bufsize=0, pipesize=SMALLEST_PIPE,
        preexec_fn=heed_ctrl_c,  # noqa: PLW1509 - the tests start no threads
    )  # fmt: skip


@pytest.fixture(scope="module")
def report() -> dict:
    """What a greedy run of 24 tokens reports."""
    done = moegraph("run", "tiny", "-p", PROMPT, "-n", 24, "--temp", 0, "--json", *CPU)
    assert (done.returncode, done.stderr) == (0, b"")
    return json.loads(done.stdout)


class TestRun:
    def test_json_reports_what_happened(self, report: dict) -> None:
        assert report["n_generated"] == len(report["tokens"]) == 24
        assert report["finish_reason"] == "length"
        assert report["text"]
        assert report["config"]["device"] == "cpu"
        assert report["prefill_tps"] > 0
        assert report["decode_tps"] > 0
        assert report["memory"]["host_peak_bytes"] > 10 << 20
        used = report["memory"]["weights_bytes"] / report["model"]["n_bytes"]
        assert 0.9 < used < 1.01, "every tensor is counted once"

    def test_the_phases_of_a_start_add_up(self, report: dict) -> None:
        times = report["timings"]
        phases = [times[f"{name}_s"] for name in ("process", "load", "tokenizer", "prefill")]
        assert min(phases) > 0
        # the clock of processes has steps of 10 ms; there may be any time between the phases
        assert sum(phases) - 0.02 < times["first_token_s"]
        assert list(times["load"]) == [
            "device", "plan", "weights", "banks", "state", "tokenizer", "graphs"
        ]  # fmt: skip
        assert 0 < sum(times["load"].values()) < times["load_s"]

    def test_text_is_the_same_text(self, report: dict) -> None:
        done = moegraph("run", "tiny", "-f", "-", "-n", 24, "--temp", 0, *CPU,
                        stdin=PROMPT.encode() + b"\n")  # fmt: skip
        assert done.returncode == 0
        assert done.stdout.decode() == report["text"]
        assert len(done.stderr.splitlines()) == 1

    def test_ids_and_logits(self, report: dict, tmp_path: Path) -> None:
        prompt, tokens = report["prompt_tokens"], report["tokens"]
        (tmp_path / "in").write_bytes(np.array(prompt, "<i4").tobytes())
        done = moegraph("run", "tiny", tmp_path / "in", 24, tmp_path / "out", *CPU,
                        "--logits-out", tmp_path / "l.npy")  # fmt: skip
        assert (done.returncode, done.stdout) == (0, b"")
        assert np.fromfile(tmp_path / "out", "<i4").tolist() == prompt + tokens
        logits = np.load(tmp_path / "l.npy")
        assert logits.dtype == np.float32
        assert logits.shape == (len(prompt) + 24 - 1, report["model"]["n_vocab"])
        assert logits[len(prompt) - 1 :].argmax(axis=1).tolist() == tokens

    def test_text_streams(self) -> None:
        # such a socket keeps what is written apart, however late it is read
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            child = start("run", "tiny", "-p", PROMPT, "-n", 200, "--ignore-eos", *CPU,
                          stdout=theirs.fileno())  # fmt: skip
            theirs.close()
            n_pieces = sum(1 for _ in iter(lambda: ours.recv(1 << 16), b""))
        child.communicate()
        assert child.returncode == 0
        assert n_pieces > 50

    def test_characters_that_the_output_cannot_show_do_not_stop_it(self) -> None:
        done = moegraph("run", "tiny", "-p", "# 日本é", "-n", 4, "--display-prompt", *CPU,
                        PYTHONIOENCODING="ascii", LC_ALL="C", PYTHONUTF8="0",
                        PYTHONCOERCECLOCALE="0")  # fmt: skip
        assert done.returncode == 0
        assert done.stdout.isascii()


class TestRefusals:
    @pytest.mark.parametrize(
        ("args", "code", "line"),
        [
            (["run", "tiny", "-p", "x " * 300, "-c", "256"], 2, "the context holds 256"),
            (["run", "tiny", "-p", "x", "--device", "cuda:99"], 2, "no device 'cuda:99'"),
            (["run", "no-such.gguf", "-p", "x"], 3, "no-such.gguf"),
            (["run", "/dev/null", "-p", "x"], 3, "/dev/null"),
            (["run", __file__, "-p", "x"], 3, "test_cli.py"),
            (["run", "tiny", "--flag"], 2, "No such option"),
            (["run", "tiny", "/dev/null", "4", "/dev/null"], 2, "the file is empty"),
        ],
    )
    def test_bad_input_is_one_line(self, args: Sequence[str], code: int, line: str) -> None:
        done = moegraph(*args)
        assert (done.returncode, done.stdout) == (code, b"")
        assert len(done.stderr.splitlines()) == 1
        assert line in done.stderr.decode()

    def test_a_full_disk_under_stdout(self) -> None:
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [*COMMAND, "run", "tiny", "-p", "x", "-n", "4", *CPU], stdout=full,
                stderr=subprocess.PIPE, env=ENV, cwd=ROOT, check=False, timeout=PATIENCE_S,
            )  # fmt: skip
        assert (done.returncode, done.stderr) == (1, b"error: output: No space left on device\n")

    @pytest.mark.parametrize("args", [["daemon", "tiny", *CPU], ["completion", "bash"]])
    def test_a_file_that_takes_only_the_first_bytes(
        self, args: Sequence[str], tmp_path: Path
    ) -> None:
        """Python without buffers would drop the others, and the program would end well."""
        size = resource.RLIMIT_FSIZE
        with (tmp_path / "out").open("wb") as out:
            done = subprocess.run(
                [*COMMAND, *args], stdin=subprocess.DEVNULL, stdout=out, cwd=ROOT,
                stderr=subprocess.PIPE, env={**ENV, "PYTHONUNBUFFERED": "1"}, check=False,
                preexec_fn=lambda: resource.setrlimit(size, (9, 9)),
                timeout=PATIENCE_S,
            )  # fmt: skip
        assert (done.returncode, done.stderr) == (1, b"error: output: File too large\n")

    def test_a_reader_that_has_left(self) -> None:
        """It is met while options are read."""
        read, write = os.pipe()
        os.close(read)
        with open(write, "wb") as out:
            child = start("--version", stdout=out.fileno())
        assert child.stderr is not None
        assert (child.wait(PATIENCE_S), child.stderr.read()) == (141, b"")

    @pytest.mark.parametrize(("redirect", "code"), [(">&-", 0), ("2>&-", 0), ("<&-", 2)])
    def test_streams_that_are_closed(self, redirect: str, code: int) -> None:
        prompt = "" if redirect == "<&-" else "-p x"
        line = f"{sys.executable} -m moegraph run tiny {prompt} -n 2 {' '.join(CPU)} {redirect}"
        done = subprocess.run(
            line, shell=True, capture_output=True, env=ENV, cwd=ROOT, check=False,
            timeout=PATIENCE_S,
        )  # fmt: skip
        assert done.returncode == code
        assert b"Traceback" not in done.stderr

    def test_a_reader_that_leaves(self) -> None:
        child = start("run", "tiny", "-p", PROMPT, *ENDLESS)
        assert child.stdout is not None
        child.stdout.read(5)
        child.stdout.close()
        assert child.stderr is not None
        assert child.stderr.read() == b""
        assert child.wait(PATIENCE_S) == 141


def wait_for_map(pid: int, name: str) -> None:
    """Wait until the program runs in a process and has mapped a file of that name."""
    process, deadline = Path(f"/proc/{pid}"), time.monotonic() + PATIENCE_S
    # A forked child begins as a copy of this process, maps included.
    while (
        b"\0moegraph\0" not in (process / "cmdline").read_bytes()
        or name not in (process / "maps").read_text()
    ):
        assert time.monotonic() < deadline, f"{name} was never mapped"
        time.sleep(0.002)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time that a process has used."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


class TestInterrupt:
    @pytest.mark.parametrize("moment", ["multiarray", "libggml-cpu", "tiny.gguf", "text", "twice"])
    def test_ctrl_c_at_any_moment(self, moment: str) -> None:
        child = start("run", "tiny", "-p", PROMPT, *ENDLESS)
        assert child.stdout is not None
        if moment in ("text", "twice"):
            assert child.stdout.read(1)
        else:
            wait_for_map(child.pid, moment)
        for _ in range(2 if moment == "twice" else 1):
            child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=PATIENCE_S)
        assert child.returncode == 130
        assert errors.splitlines()[-1] == b"interrupted"
        assert b"Traceback" not in errors
        assert b"ignored" not in errors

    def test_a_long_prompt_is_not_read_to_its_end(self) -> None:
        """The whole takes some 20 s of a processor, a step of it some hundredths."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        child = start("run", "tiny", "-p", "x = 1\n" * 3000, "-c", 16384, "-ub", 4096, *CPU)
        until(lambda: cpu_seconds(child.pid) > 1.5)
        child.send_signal(signal.SIGSTOP)
        so_far = cpu_seconds(child.pid)
        child.send_signal(signal.SIGINT)
        child.send_signal(signal.SIGCONT)
        child.communicate(timeout=PATIENCE_S)
        assert child.returncode == 130
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        total = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        assert total - so_far < 1.0


class Terminal:
    """A program on a pseudo terminal, as a person sees it."""

    def __init__(self, *args: object, **env: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            heed_ctrl_c()
            os.chdir(ROOT)
            os.execve(sys.executable, [*COMMAND, *map(str, args)], {**ENV, **env})
        self.seen = ""

    def wait_for(self, pattern: str) -> str:
        """Read until a pattern appears; return what came before its end and forget it."""
        assert self.shows(pattern, PATIENCE_S), self.seen
        match = re.search(pattern, self.seen)
        assert match is not None
        shown, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return shown

    def shows(self, pattern: str, seconds: float) -> bool:
        """Read until a pattern appears; return whether it did in time."""
        end = time.monotonic() + seconds
        while not re.search(pattern, self.seen):
            if time.monotonic() > end:
                return False
            if select.select([self.fd], [], [], min(1, seconds))[0]:
                self.seen += os.read(self.fd, 1 << 16).decode(errors="replace")
        return True

    def wait_for_prompt(self, pattern: str = ">>> ") -> None:
        """Wait until readline listens; before that, the terminal itself echoes what is typed."""
        self.wait_for(pattern)
        until(lambda: not termios.tcgetattr(self.fd)[3] & termios.ICANON)

    def wait_for_answer(self) -> None:
        """Wait until some words of an answer are shown, or an answer and a progress bar before."""
        self.wait_for(r"\r\n")
        escapes = r"(\x1b\[[?\d;]*[a-zA-Z]|\s|Reading the prompt[^\r\n]*)*"
        self.wait_for(rf"^{escapes}[^\x1b\s]{{1,40}}\s+\S")

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def exit_code(self) -> int:
        """Read to the end, which matches no pattern, and return the exit code."""
        with suppress(OSError):  # how Linux reports the end of a terminal
            self.wait_for(r"\Z.")
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def chat() -> Iterator[Terminal]:
    terminal = Terminal("chat", "tiny", "--temp", 0, *ENDLESS)
    yield terminal
    os.close(terminal.fd)


class TestChat:
    def test_a_session_at_a_terminal(self, chat: Terminal) -> None:
        chat.wait_for("/help for help")
        chat.wait_for_prompt()
        chat.type("/help\r")
        chat.wait_for("/clear ")
        chat.wait_for_prompt()
        chat.type("def f(x):\r")
        chat.wait_for_answer()
        chat.type("\x03")
        assert "stopped" in chat.wait_for(r"wrote \d+, [\d.]+ tok/s")
        chat.wait_for_prompt()
        # Python's readline loses a signal between drawing the prompt and waiting for a key.
        while not chat.shows("Ctrl-D or /quit", 2.0):
            chat.type("\x03")
        chat.wait_for_prompt()
        chat.type("\x04")
        assert chat.exit_code() == 0
        assert "Traceback" not in chat.seen

    def test_ctrl_c_while_loading_ends_it(self, chat: Terminal) -> None:
        wait_for_map(chat.pid, "multiarray")
        chat.type("\x03")
        assert chat.exit_code() == 130
        assert "interrupted" in chat.seen

    def test_pasted_lines_are_one_message(self) -> None:
        terminal = Terminal("chat", "tiny", "-n", 4, "--ignore-eos", *CPU)
        terminal.wait_for_prompt()
        terminal.type("\x1b[200~def f(x):\r    return x\r\x1b[201~\r")
        terminal.wait_for(r"wrote 4, [\d.]+ tok/s")
        terminal.wait_for_prompt()
        terminal.type("/show\r")
        assert "so far: 1" in terminal.wait_for(r"so far: \d+")
        terminal.wait_for_prompt()
        # Ctrl-D ends the block, and the block is one message.
        terminal.type('"""one\r')
        terminal.wait_for_prompt(r"\.\.\. ")
        terminal.type("\x04")
        terminal.wait_for(r"wrote 4, [\d.]+ tok/s")
        terminal.wait_for_prompt()
        terminal.type("\x04")
        assert terminal.exit_code() == 0
        os.close(terminal.fd)

    def test_up_recalls_what_was_typed_in_the_conversation_before(self, tmp_path: Path) -> None:
        for typed, shown in (
            ("/system Be kind to cats.\r", "system prompt"),
            ("\x1b[A\x1b[A\r", "system prompt: Be kind to cats."),
        ):
            terminal = Terminal("chat", "tiny", *CPU, MOEGRAPH_HISTORY=str(tmp_path / "history"))
            terminal.wait_for_prompt()
            terminal.type(typed)
            terminal.wait_for(shown)
            terminal.wait_for_prompt()
            terminal.type("/quit\r")
            assert terminal.exit_code() == 0
            os.close(terminal.fd)

    def test_a_piped_session(self) -> None:
        done = moegraph("chat", "tiny", "-n", 8, "--temp", 0, "--ignore-eos", "--each", *CPU,
                        stdin=b"x = 1\n\nx = 1\n")  # fmt: skip
        assert done.returncode == 0
        first, empty, second = done.stdout.split(b"---\n")
        assert first == second
        assert first.strip() and not empty.strip()

    def test_objects_tell_the_hit_rate(self) -> None:
        done = moegraph("chat", "tiny", "-n", 4, "--temp", 0, "--cache-slots", 100, "--ignore-eos",
                        "--json", *CPU, stdin=b"x = 1\ny = 2\n")  # fmt: skip
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(answers) == 2 and all(0 < a["hit_rate"] < 1 for a in answers)
        # Only what is new of a conversation is computed.
        assert answers[1]["n_computed"] < answers[1]["n_prompt"]


def test_settings_without_an_effect_are_named(tmp_path: Path) -> None:
    common = ("run", "tiny", "-p", "x", "-n", 1, "-q", *CPU)
    idle = ("--profile", tmp_path / "p.json", "--miss", "stream")
    done = moegraph(*common, *idle)
    assert done.returncode == 0
    assert done.stderr == (b"warning: --profile, --miss have no effect: all experts fit on cpu\n")
    assert not (tmp_path / "p.json").exists()
    assert b"no effect" not in moegraph(*common, *idle, "--cache-slots", 100).stderr
    assert (tmp_path / "p.json").exists()


@pytest.mark.parametrize("command", ["run", "chat"])
def test_quiet_leaves_out_what_the_engine_says_of_loading(command: str) -> None:
    args = [command, "tiny", "-p", PROMPT, "-n", 2, "--device", "cpu,cpu", "-t", "1"]
    assert b"note: cpu to cpu: rows are copied" in moegraph(*args).stderr
    assert moegraph(*args, "-q").stderr == b""


def test_a_terminal_sees_prompt_and_text_and_a_pipe_only_text() -> None:
    terminal = Terminal("run", "tiny", "-p", "import os", "-n", 4, *CPU)
    assert terminal.exit_code() == 0
    os.close(terminal.fd)
    assert "import os" in terminal.seen
    assert "\x1b[2m" in terminal.seen


def test_inspect_and_doctor() -> None:
    report = json.loads(moegraph("inspect", "tiny", "--json").stdout)
    assert report["hparams"]["n_expert"] >= 32
    done = moegraph("doctor")
    assert done.returncode == 0
    assert b"ok  native libraries" in done.stdout


def bench_rows(*args: object) -> list[dict]:
    """Return the records of a benchmark."""
    done = moegraph("bench", "tiny", *args, "-o", "jsonl")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_bench_measures_lists_of_settings() -> None:
    tests = ("-p", 8, "-p", 12, "-n", 0, "-pg", "4,3", "-r", 1, "--no-warmup", "--device", "cpu")
    rows = bench_rows(*tests, "-t", "1,2", "-ub", "4,512")
    assert [row["test"] for row in rows] == 4 * ["pp8", "pp12", "pp4+tg3"]
    settings = [(row["n_threads"], row["n_ubatch"]) for row in rows[::3]]
    assert settings == [(1, 4), (2, 4), (1, 512), (2, 512)]
    assert (rows[2]["n_prompt"], rows[2]["n_gen"]) == (4, 3)


def test_bench_runs_the_sampler_and_the_text_path() -> None:
    tests = ("-p", 0, "-n", 4, "--run", 4, "-d", "0,16", "-r", 2, "--top-k", "0,1", *CPU)
    rows = bench_rows(*tests)
    names = ["tg4", "run4 top_k 0", "run4 top_k 1"]
    assert [row["test"] for row in rows] == [*names, *(f"{name} @ d16" for name in names)]
    assert all(row["avg_ts"] > 0 and row["n_gen"] == 4 for row in rows)
    assert [row["sampling"] and row["sampling"]["top_k"] for row in rows[:3]] == [None, 0, 1]


def test_bench_times_first_tokens_of_fresh_processes() -> None:
    tests = ("--ttft", "-p", "4,20", "-r", 1, "--no-warmup", *CPU)
    rows = bench_rows(*tests)
    assert [(row["test"], row["n_prompt"]) for row in rows] == [("ttft4", 4), ("ttft20", 20)]
    for row in rows:
        parts = [row[f"{name}_ms"] for name in ("process", "load", "tokenizer", "prefill", "other")]
        assert all(part >= 0 for part in parts) and parts[0] > 10
        assert sum(parts) == pytest.approx(row["avg_ns"] * 1e-6, abs=0.01)
        assert row["load_phases_ms"]["weights"] > 0 and row["device"] == "cpu"
    failed = moegraph("bench", "tiny", "--ttft", "--cache-slots", 100000)
    assert failed.returncode == 2
    assert failed.stderr.startswith(b"error: a process to be timed failed: --cache-slots is 100000")


@pytest.mark.parametrize("where", ["file", "pipe"])
@pytest.mark.parametrize("is_quiet", [False, True])
def test_text_and_figures_in_one_stream_are_lines_of_their_own(
    where: str, is_quiet: bool, tmp_path: Path
) -> None:
    args = ["run", "tiny", "-p", PROMPT, "-n", "3", "--temp", "0", *CPU, *["-q"] * is_quiet]
    alone = moegraph(*args).stdout
    assert not alone.endswith(b"\n")
    with open(tmp_path / "both", "w+b") as file:
        target = file if where == "file" else subprocess.PIPE
        done = subprocess.run(
            [*COMMAND, *args], stdout=target, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=ENV, cwd=ROOT, check=True, timeout=PATIENCE_S,
        )  # fmt: skip
        file.seek(0)
        both = file.read() if where == "file" else done.stdout
    if is_quiet:
        assert both == alone
    else:
        assert both.startswith(alone + b"\nprefill ")
