"""`moegraph run` with token ids in and out, over a scripted engine, and what it writes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from helpers.disk import file_limit
from helpers.fake_engine import END, N_VOCAB, FakeEngine, ids_file

from moegraph.errors import ModelFileError

if TYPE_CHECKING:
    from conftest import Cli


class TestIds:
    def test_prompt_and_generated_ids_are_written(self, cli: Cli, tmp_path: Path) -> None:
        cli.engine = FakeEngine("xy")
        result = cli("run", "m", ids_file(tmp_path / "in", 97, 98), 64, tmp_path / "out")
        assert result.exit_code == 0
        assert result.stdout == ""
        assert "decode 2 tokens" in result.stderr
        assert np.fromfile(tmp_path / "out", "<i4").tolist() == [97, 98, 120, 121, END]
        assert cli.engine.calls[0].max_tokens == 64

    def test_a_model_without_vocabulary_runs(self, cli: Cli, tmp_path: Path) -> None:
        cli.engine = FakeEngine(b"\x05\x06", vocabulary=False)
        trio = (ids_file(tmp_path / "in", 97), 3, tmp_path / "out")
        assert cli("run", "m", *trio, "--ignore-eos").exit_code == 0
        assert not cli.engine.calls[0].text
        assert np.fromfile(tmp_path / "out", "<i4").tolist() == [97, 5, 6, END]

    @pytest.mark.parametrize(
        ("data", "line"),
        [
            (b"", "the file is empty"),
            (b"\1\0\0", "3 bytes is not a multiple of 4"),
            (b"\1\0\0\0\1", "5 bytes is not a multiple of 4"),
            (b"\1\0\0\0\0\1\0\0", "token id 256 at position 1; the model has ids 0 to 255"),
            (b"\xff\xff\xff\xff", "token id -1 at position 0"),
            (b"\1\0\0\0" * 4097, "4097 tokens, the context holds 4096"),
        ],
    )
    def test_wrong_ids_are_refused_before_anything_is_loaded(
        self, cli: Cli, tmp_path: Path, data: bytes, line: str
    ) -> None:
        (tmp_path / "in").write_bytes(data)
        assert line in cli.refused("run", "m", tmp_path / "in", 4, tmp_path / "out")
        assert cli.loaded == []
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("n", ["0", "-1", "x", "1.5", "", str(2**31), "9" * 5000, "²"])
    def test_n_gen_out_of_range(self, cli: Cli, tmp_path: Path, n: str) -> None:
        line = cli.refused("run", "m", "--", ids_file(tmp_path / "in", 1), n, "/dev/null")
        assert "N_GEN is" in line

    @pytest.mark.parametrize("extra", [["-p", "x"], ["-f", "x"], ["-n", "3"], ["-e"]])
    def test_text_options_do_not_go_with_ids(
        self, cli: Cli, tmp_path: Path, extra: list[str]
    ) -> None:
        trio = (ids_file(tmp_path / "in", 1), 1, "/dev/null")
        assert f"{extra[0]} does not go with" in cli.refused("run", "m", *trio, *extra)


class TestOutputs:
    @pytest.mark.parametrize("where", ["no/such/dir", "."])
    @pytest.mark.parametrize("which", ["ids", "logits"])
    def test_an_output_that_cannot_be_written_is_found_before_loading(
        self, cli: Cli, tmp_path: Path, where: str, which: str
    ) -> None:
        target = tmp_path / where
        if which == "ids":
            args = [ids_file(tmp_path / "in", 1), 1, target]
        else:
            args = ["-p", "x", "--logits-out", target]
        assert f"{target}: cannot write:" in cli.refused("run", "m", *args)
        assert cli.loaded == []

    @pytest.mark.parametrize("existed", [True, False])
    def test_a_failure_leaves_the_output_as_it_was(
        self, cli: Cli, tmp_path: Path, existed: bool
    ) -> None:
        out = tmp_path / "out"
        if existed:
            out.write_bytes(b"old")

        def fail() -> None:
            raise ModelFileError("broken")

        cli.on_load = fail
        cli.refused("run", "m", ids_file(tmp_path / "in", 1), 1, out, code=3)
        assert (out.read_bytes() if out.exists() else None) == (b"old" if existed else None)

    def test_a_full_disk_is_one_line(self, cli: Cli, tmp_path: Path) -> None:
        line = cli.refused("run", "m", ids_file(tmp_path / "in", 1), 1, "/dev/full")
        assert "/dev/full: cannot write: No space left on device" in line

    def test_no_half_of_a_file_is_left_on_a_full_disk(self, cli: Cli, tmp_path: Path) -> None:
        ids = ids_file(tmp_path / "in", 97)
        for args in ((ids, 1, tmp_path / "ids"), ("-p", "x", "--logits-out", tmp_path / "l.npy")):
            with file_limit(6):
                assert "cannot write: File too large" in cli.refused("run", "m", *args)
        assert list(tmp_path.iterdir()) == [ids]

    def test_logits_have_a_row_for_every_position_that_was_computed(
        self, cli: Cli, tmp_path: Path
    ) -> None:
        cli.engine = FakeEngine("abcdef")
        cli("run", "m", "-p", "xyz", "-n", 4, "--logits-out", tmp_path / "l.npy")
        logits = np.load(tmp_path / "l.npy")
        assert (logits.shape, logits.dtype) == ((3 + 4 - 1, N_VOCAB), np.float32)
        assert logits[:, 0].tolist() == [1, 1, 1, 2, 3, 4]
