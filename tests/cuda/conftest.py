"""Models for the tests that need a CUDA device; skipped with a reason when nothing is built."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from modelgen.build import write_model  # noqa: E402
from modelgen.presets import PRESETS  # noqa: E402

try:
    from moegraph.ggml.device import list_devices

    list_devices()
except Exception as error:  # noqa: BLE001 - whatever the reason, it is the skip's reason
    collect_ignore_glob = ["test_*.py"]
    print(f"tests/cuda is skipped: {error}", file=sys.stderr)


@pytest.fixture(scope="session")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from preset name to a model file written once per session."""
    folder = tmp_path_factory.mktemp("cuda-models")
    made: dict[str, Path] = {}

    def path_of(preset: str) -> Path:
        if preset not in made:
            chosen, path = PRESETS[preset], folder / f"{preset}.gguf"
            made[preset] = write_model(path, chosen.shape, chosen.mix, seed=7)[0]
        return made[preset]

    return path_of
