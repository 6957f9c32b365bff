"""`moegraph daemon` from the shell: its answers are those of `moegraph run`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np

PROMPTS = {"a": [1, 2, 3, 4, 5], "b": [9, 8, 7, 6, 5, 4, 3], "c": list(range(100, 180))}
# In the default mode, a pass over several sequences rounds otherwise than one over each.
OPTIONS = ("tiny", "--device", "cpu", "-c", "512", "-t", "1", "--cpu-reference")


def write_ids(path: Path, ids: list[int]) -> Path:
    path.write_bytes(np.array(ids, dtype="<i4").tobytes())
    return path


def alone(folder: Path, name: str, n_gen: int) -> list[int]:
    """Return the tokens with which `moegraph run` continues a prompt."""
    prompt, out = write_ids(folder / f"{name}.bin", PROMPTS[name]), folder / f"{name}.run"
    command = [sys.executable, "-m", "moegraph", "run", *OPTIONS, prompt, str(n_gen), out, "-q"]
    subprocess.run(command, check=True)
    return np.fromfile(out, dtype="<i4").tolist()[len(PROMPTS[name]) :]


def daemon(*options: str, lines: str, folder: Path) -> tuple[int, list[str], list[int], str]:
    """Return the exit status, the replies, the stream and the notes of a daemon."""
    stream = folder / "stream"
    with open(stream, "wb") as file:
        command = [sys.executable, "-m", "moegraph", "daemon", *OPTIONS]
        done = subprocess.run(
            [*command, "--stream-fd", str(file.fileno()), *options],
            input=lines, capture_output=True, text=True, check=False, pass_fds=[file.fileno()],
            cwd=folder, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )  # fmt: skip
    values = np.fromfile(stream, dtype="<i4").tolist()
    return done.returncode, done.stdout.splitlines(), values, done.stderr


def test_answers_equal_those_of_run(tmp_path: Path) -> None:
    want = {name: alone(tmp_path, name, 12) for name in PROMPTS}
    lines = "".join(f"./{name}.bin 12\n" for name in PROMPTS)
    code, replies, values, notes = daemon(lines=lines, folder=tmp_path)
    assert code == 0, notes
    assert replies[0] == "[daemon] ready"
    for reply, (name, ids) in zip(replies[1:], PROMPTS.items(), strict=True):
        assert reply.startswith(f"ok N={len(ids)} gen={len(want[name])} prefill_s=")
    assert values == [value for name in PROMPTS for value in [*want[name], -1]]


def test_requests_in_turns_are_not_mixed(tmp_path: Path) -> None:
    want = {name: alone(tmp_path, name, 12) for name in PROMPTS}
    lines = "".join(f"REQ {i} START ./{name}.bin 12 {i + 2}\n" for i, name in enumerate(PROMPTS))
    lines += "LIST_REQUESTS\nSCHED_DRAIN\nLIST_REQUESTS\nREQ 7 START ./a.bin 400 2\nREQ 7 CANCEL\n"
    lines += "park\nquit\n./a.bin 1\n"
    code, replies, values, notes = daemon(
        "--stream-tagged", "-np", "3", lines=lines, folder=tmp_path
    )
    assert code == 0, notes
    assert replies[:2] == ["[daemon] ready", "[daemon] target_cache_slots=3 stream_tagged=1"]
    assert [reply.split()[:2] for reply in replies[2:5]] == [["ok", "START"]] * 3
    assert replies[5].count("@slot") == 3 and replies[6].startswith("ok SCHED_DRAIN steps=")
    assert replies[7] == "[scheduler] requests="
    assert replies[9:] == ["[scheduler] cancelled req=7 slot=2", "err unsupported park"]
    frames = list(zip(values[::3], values[1::3], values[2::3]))
    assert {tag for tag, _, _ in frames} == {-2}
    for number, name in enumerate(PROMPTS):
        mine = [value for _, request, value in frames if request == number]
        assert [value for value in mine if value >= 0] == want[name]
        assert mine[-1] == -1 and mine.count(-1) == 1 + (number == 7)


def test_the_end_of_stdin_ends_it(tmp_path: Path) -> None:
    write_ids(tmp_path / "a.bin", PROMPTS["a"])
    lines = f"REQ 1 START ./a.bin 400 1\n{'x' * 70_000}\nLIST_SLOTS"
    code, replies, values, notes = daemon("--stream-tagged", lines=lines, folder=tmp_path)
    assert code == 0 and replies[2:] == ["err bad_args the line is too long", "[snap] slots="]
    assert "a line of more than 65536 bytes was dropped" in notes
    assert len(values) == 6 and values[-1] == -4


def test_a_stream_without_a_reader_ends_it_with_one_line(tmp_path: Path) -> None:
    prompt = write_ids(tmp_path / "a.bin", PROMPTS["a"])
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "moegraph", "daemon", *OPTIONS, "--stream-fd", str(writer)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        pass_fds=[writer],
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "[daemon] ready\n"
        os.close(reader)
        os.close(writer)
        _, notes = process.communicate(f"{prompt} 4\n")
    assert process.returncode == 2
    assert notes.splitlines()[-1] == f"error: --stream-fd {writer}: cannot write: Broken pipe"


def test_wrong_options_are_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    code, replies, _, notes = daemon("--stream-fd", "77", lines="", folder=tmp_path)
    assert code == 2 and replies == []
    assert notes == "error: --stream-fd 77: cannot write: Bad file descriptor\n"
