"""The stub of the native module says what the C declarations say."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import gen_stubs


def test_the_stub_is_what_the_declarations_give() -> None:
    assert gen_stubs.STUB.read_text(encoding="utf-8") == gen_stubs.stub(), (
        "run scripts/gen_stubs.py"
    )
