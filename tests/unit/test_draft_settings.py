"""What settings of drafts come to."""

from __future__ import annotations

from typing import Any

import pytest

from moegraph.config import EngineConfig
from moegraph.placement.drafters import with_drafts


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ("off", 0)),
        ({"spec": "auto"}, ("auto", 15)),
        # `auto` takes no memory for the drafts of several sequences
        ({"spec": "auto", "n_seq": 2}, ("auto", 15)),
        ({"spec": "auto", "n_seq": 4}, ("auto", 7)),
        ({"spec": "auto", "n_seq": 4, "draft_max": 3}, ("auto", 3)),
        ({"spec": "auto", "n_seq": 16}, ("auto", 1)),
        ({"spec": "auto", "n_seq": 17}, ("off", 0)),
        ({"spec": "auto", "deterministic": True, "cpu_reference": True}, ("auto", 15)),
        ({"spec": "lookup"}, ("lookup", 15)),
        ({"spec": "mtp", "deterministic": True, "n_seq": 2}, ("mtp", 15)),
        ({"spec": "lookup", "draft_max": 3}, ("lookup", 3)),
        ({"spec": "lookup", "draft_max": 3, "budget": 6}, ("lookup", 5)),
        ({"spec": "dflash", "ddtree": True}, ("dflash", 63)),
        ({"spec": "dflash", "ddtree": True, "ddtree_budget": 22}, ("dflash", 22)),
        ({"spec": "lookup", "budget": 1}, ("off", 0)),
        ({"spec": "lookup", "n_draft": 40}, ("lookup", 40)),
        ({"spec": "off"}, ("off", 0)),
        ({"spec": "off", "n_draft": 7}, ("off", 7)),
    ],
)
def test_settings_say_what_drafts_and_how_many_rows(
    settings: dict[str, Any], expected: tuple[str, int]
) -> None:
    used = with_drafts(EngineConfig(**settings).validate())
    assert (used.spec, used.n_draft) == expected


def test_what_goes_by_time_is_refused_where_nothing_may() -> None:
    config = EngineConfig(spec="auto", deterministic=True)
    (line,) = config.problems()
    assert line.startswith("spec auto (--spec) goes by measured times") and "--spec mtp" in line
