"""docs/cli.md says what the commands say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from helpers.cli_page import json_tables
from helpers.fake_engine import FakeEngine

if TYPE_CHECKING:
    from conftest import Cli

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "gen_cli_docs.py"


def test_the_page_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_key_of_the_json_object_is_explained(cli: Cli) -> None:
    cli.engine = FakeEngine("x")
    report = json.loads(cli("run", "m", "-p", "x", "--json").stdout)
    assert list(report) == list(json_tables("run")[0])
