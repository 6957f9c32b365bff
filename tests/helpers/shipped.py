"""The shipped model, its drafters, and the file that both make together."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "training"))

from merge_mtp import merge

_MODELS = ROOT / "moegraph" / "models"
TINY = _MODELS / "tiny.gguf"
TINY_MTP = _MODELS / "tiny-mtp.gguf"
TINY_DFLASH = _MODELS / "tiny-dflash.gguf"

PROMPTS = (
    "def fibonacci(n):",
    "import unittest\n\nclass TestQueue(unittest.TestCase):\n    def test_put",
    'class Stack:\n    """A stack."""\n\n    def __init__(self):\n        self.items = []\n\n',
    "def read_lines(path):\n    with open(path) as f:\n        for line in f:\n",
)


def merged_tiny(folder: Path) -> Path:
    """Write the model with its MTP block into a folder; return the file."""
    path = folder / "tiny-with-mtp.gguf"
    merge(TINY, TINY_MTP, path)
    return path
