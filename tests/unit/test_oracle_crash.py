"""An oracle that crashes is one failure; tests that would ask it afterwards are skipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from oracle.client import OracleError
from regression.harness import Upstream

MODEL = Path("any.gguf")


class Crashes:
    """Stands for an oracle whose process dies, or only refuses."""

    def __init__(self, error: Exception, dies: bool) -> None:
        self.error, self.dies, self.n_asked = error, dies, 0

    @property
    def has_ended(self) -> bool:
        return self.dies and self.n_asked > 0

    def info(self) -> None:
        self.n_asked += 1
        raise self.error

    def run(self, *_: object, **cfg: Any) -> None:
        self.n_asked += 1
        raise self.error


@pytest.mark.parametrize(
    "error",
    [OracleError("exit code -6\nGGML_ASSERT(x) failed"), BrokenPipeError(32, "Broken pipe")],
)
def test_a_crash_is_one_failure(error: Exception) -> None:
    oracle = Crashes(error, dies=True)
    upstream: Any = Upstream(oracle)  # type: ignore[arg-type]
    with pytest.raises(pytest.fail.Exception, match=r"unpatched llama\.cpp crashed: [^\n]+$"):
        upstream.logits(MODEL, [1])
    for token in (2, 3):
        with pytest.raises(pytest.skip.Exception, match="crashed in an earlier test"):
            upstream.logits(MODEL, [token])
    assert oracle.n_asked == 1


def test_a_refusal_is_the_failure_of_one_test() -> None:
    oracle = Crashes(OracleError("no such node"), dies=False)
    upstream: Any = Upstream(oracle)  # type: ignore[arg-type]
    for token in (1, 2):
        with pytest.raises(OracleError, match="no such node"):
            upstream.logits(MODEL, [token])
