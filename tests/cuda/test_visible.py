"""Which card is spoken of where CUDA_VISIBLE_DEVICES hides some."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

_ASK = """
import json
from moegraph.ggml.device import gpu_names, list_devices
from moegraph.ggml.nvml import gpu_card
first = next((d for d in list_devices() if d["kind"] == "cuda"), None)
card = gpu_card()
print(json.dumps([first and first["description"], card and card.name, len(gpu_names())]))
"""


@pytest.mark.parametrize("shown", [None, "0", ""])
def test_the_card_that_is_described_is_the_one_that_the_engine_takes(shown: str | None) -> None:
    env = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES" or shown is None}
    env |= {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    command = [sys.executable, "-c", _ASK]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    first, card, n = json.loads(done.stdout)
    assert (n == 0) == (first is None) == (shown == ""), done.stdout
    assert card in (None, first), "None if it is divided"
