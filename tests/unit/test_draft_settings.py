"""What settings of drafts come to on a device."""

from __future__ import annotations

from typing import Any

import pytest

from moegraph.config import EngineConfig
from moegraph.placement.drafters import with_drafts


@pytest.mark.parametrize(
    ("settings", "on_cpu", "expected"),
    [
        ({}, False, ("off", 0)),
        ({"spec": "auto"}, False, ("auto", 15)),
        # a text must not depend on measured times, nor `auto` take memory for many sequences
        ({"spec": "auto"}, True, ("off", 0)),
        ({"spec": "auto", "deterministic": True}, False, ("off", 0)),
        ({"spec": "auto", "n_seq": 2}, False, ("off", 0)),
        # a source that is named drafts everywhere
        ({"spec": "lookup"}, True, ("lookup", 15)),
        ({"spec": "mtp", "deterministic": True, "n_seq": 2}, True, ("mtp", 15)),
        ({"spec": "lookup", "draft_max": 3}, True, ("lookup", 3)),
        ({"spec": "lookup", "draft_max": 3, "budget": 6}, True, ("lookup", 5)),
        ({"spec": "dflash", "ddtree": True}, True, ("dflash", 64)),
        ({"spec": "dflash", "ddtree": True, "ddtree_budget": 22}, True, ("dflash", 22)),
        ({"spec": "lookup", "budget": 1}, True, ("off", 0)),
        ({"spec": "lookup", "n_draft": 40}, True, ("lookup", 40)),
        ({"spec": "off"}, False, ("off", 0)),
        ({"spec": "off", "n_draft": 7}, False, ("off", 7)),
    ],
)
def test_settings_say_what_drafts_and_how_many_rows(
    settings: dict[str, Any], on_cpu: bool, expected: tuple[str, int]
) -> None:
    used = with_drafts(EngineConfig(**settings).validate(), on_cpu)
    assert (used.spec, used.n_draft) == expected
