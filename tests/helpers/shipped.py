"""The shipped model, its drafters, and the file that both make together."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

from gguf import GGUFValueType

from .ggufbytes import kv

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


FIM = {"pre": 4070, "suf": 4071, "mid": 4072, "rep": 4073, "sep": 4074}


def tiny_with_gaps(folder: Path, model: Path = TINY) -> Path:
    """Write a model, with seldom tokens as those that mark gaps; return the file."""
    data, path = model.read_bytes(), folder / "tiny-with-gaps.gguf"
    pairs = b""
    for name, token in FIM.items():
        pairs += kv(f"tokenizer.ggml.fim_{name}_token_id", GGUFValueType.UINT32, token)
    # the tensors stay aligned
    n_blank = -(len(pairs) + len(kv("x", GGUFValueType.STRING, ""))) % 32
    pairs += kv("x", GGUFValueType.STRING, " " * n_blank)
    (n_pairs,) = struct.unpack("<Q", data[16:24])
    path.write_bytes(data[:16] + struct.pack("<Q", n_pairs + len(FIM) + 1) + pairs + data[24:])
    return path
