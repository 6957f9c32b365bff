"""What all tests share: the helper modules in this folder, and patience on a busy machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from moegraph.experts.prefetch import PrefetchController

sys.path.insert(0, str(Path(__file__).resolve().parent))

# How fast this machine draws examples says nothing about the code, and a busy one is slow.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture
def prefetch_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have experts fetched ahead from the first guess on, right or wrong."""
    always = property(lambda _: True, lambda *_: None)
    monkeypatch.setattr(PrefetchController, "enabled", always, raising=False)
