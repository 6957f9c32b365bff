"""Fixtures: one oracle process and one set of models for all tests of the folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

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
