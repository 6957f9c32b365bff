"""A device that is woken before it is opened."""

from __future__ import annotations

import pytest

from moegraph.errors import ConfigError
from moegraph.ggml import device as device_module
from moegraph.ggml.device import Device, wake


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list with an entry for each look at the memory in use on the GPUs."""
    seen: list[int] = []

    def used() -> dict[str, int]:
        seen.append(1)
        return {}

    monkeypatch.setattr(device_module, "gpu_used_bytes", used)
    monkeypatch.setattr(device_module, "_woken", {})
    return seen


def test_what_a_device_needs_to_know_from_before_is_asked_once(looks: list[int]) -> None:
    wake("auto")
    wake("auto")
    Device("auto").close()
    n = len(looks)
    Device("auto").close()
    # a GPU is looked at once more, after its context is open
    assert (n, len(looks)) in [(1, 2), (2, 3)]


def test_the_cpu_needs_no_waking(looks: list[int]) -> None:
    wake("cpu")
    assert device_module._woken == {} and looks == []


def test_a_device_that_does_not_exist_is_refused_where_it_is_opened(looks: list[int]) -> None:
    wake("cuda:77")
    for _ in range(2):
        with pytest.raises(ConfigError, match="no device 'cuda:77'"):
            Device("cuda:77")
