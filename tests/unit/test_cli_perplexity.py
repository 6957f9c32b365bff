"""`moegraph perplexity`: what is refused before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

if TYPE_CHECKING:
    from conftest import Cli

SHORT = "the file is damaged or was cut short"


def base(n_ctx: int = 8, n_vocab: int = 4, n: int = 2, token: int = 3, lacking: int = 0) -> bytes:
    ids = np.full(max(n * n_ctx, 0), token, dtype="<i4").tobytes()
    words = bytes(2 * n * 3 * 8 - lacking)
    return b"_logits_" + np.array([n_ctx, n_vocab, n], dtype="<i4").tobytes() + ids + words


@pytest.mark.parametrize("content, words", [
    (b"", "not a file of --kl-divergence-base"),
    (b"_logits_" + bytes(11), "not a file of --kl-divergence-base"),
    (b"GGUF" + base(), "not a file of --kl-divergence-base"),
    (base(lacking=1), SHORT),
    (base(n_ctx=-1, n=0), SHORT),
    (base(n_vocab=1 << 30), SHORT),
    (base(n_ctx=7), SHORT),
    (base(token=4), "it has a token beyond 3"),
    (base(token=-1), "it has a token beyond 3"),
])  # fmt: skip
def test_a_damaged_base_file_is_refused_in_a_line(
    cli: Cli, tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "base.kld"
    path.write_bytes(content)
    line = cli.refused("perplexity", "tiny", "--kl-divergence", "--kl-divergence-base", path)
    assert f"{path}: " in line and words in line


@pytest.mark.parametrize("args, words", [
    ([], "no text"),
    (["--kl-divergence"], "takes --kl-divergence-base FILE in place of -f"),
    (["-f", "TEXT", "--kl-divergence", "--kl-divergence-base", "BASE"], "in place of -f"),
    (["-f", "TEXT", "-c", "7"], "at least 8 tokens"),
    (["-c", "16", "--kl-divergence", "--kl-divergence-base", "BASE"], "made with a context of 8"),
    (["--kl-divergence", "--kl-divergence-base", "MISSING"], "cannot read"),
    (["--kl-divergence", "--kl-divergence-base", "BASE"], "of a vocabulary of 4 tokens"),
])  # fmt: skip
def test_what_cannot_work_is_refused_in_a_line(
    cli: Cli, tmp_path: Path, args: list[str], words: str
) -> None:
    (tmp_path / "TEXT").write_text("a text")
    (tmp_path / "BASE").write_bytes(base())
    given = [tmp_path / arg if arg.isupper() else arg for arg in args]
    assert words in cli.refused("perplexity", "tiny", *given)
