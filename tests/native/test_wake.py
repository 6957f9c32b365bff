"""A device that is woken before it is opened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from moegraph.cli import models
from moegraph.errors import ConfigError, ModelFileError
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


def test_a_model_that_cannot_be_opened_wakes_only_if_it_is_a_file(
    looks: list[int], tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError):
        models.open_header(tmp_path / "none.gguf", "auto")
    assert device_module._woken == {}


def test_the_header_is_read_meanwhile(looks: list[int], model_path: Callable[[str], Path]) -> None:
    with models.open_header(model_path("legacy32"), "auto") as model:
        assert list(device_module._woken) == ["auto"]
        assert model.hparams.n_expert == 32
    device_module._woken["auto"].result()
