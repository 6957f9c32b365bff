"""Fixtures: one oracle process and one set of models for all tests of the folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# libgomp's threads, which upstream uses, spin for milliseconds after each graph. Two processes take
# turns here, so that would be time taken from the other one. Read in the oracle's process.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from regression.harness import Models, Upstream, start_oracle


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """The test models, written once."""
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def upstream() -> Iterator[Upstream]:
    """Unpatched llama.cpp in a process of its own."""
    with start_oracle() as oracle:
        yield Upstream(oracle)
