"""Look-up in dictated texts, with times that an H200 took: the speed over that without drafts."""

from __future__ import annotations

import pytest
from helpers.dictated import speed

SPECS = ("lookup", "auto")


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    ("kind", "least"),
    [
        ("edit", {1.0: 4.3, 0.6: 3.3, 0.25: 1.95}),
        ("list", {1.0: 1.7, 0.6: 1.5, 0.25: 1.1}),
        ("mixed", {1.0: 1.8, 0.6: 1.6, 0.25: 1.25}),
        ("hopeless", {1.0: 0.985, 0.6: 0.985, 0.25: 0.98}),
    ],
)
def test_later_texts(spec: str, kind: str, least: dict[float, float]) -> None:
    for share, expected in least.items():
        assert speed(share, spec, [kind] * 3, 1) > expected, share


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    ("kind", "least"), [("edit", 3.8), ("list", 1.65), ("mixed", 1.75), ("hopeless", 0.98)]
)
def test_the_first_text_of_a_process(spec: str, kind: str, least: float) -> None:
    assert speed(1.0, spec, [kind]) > least


@pytest.mark.parametrize("spec", SPECS)
def test_a_text_without_copies_after_one_of_them_loses_little(spec: str) -> None:
    for share in (1.0, 0.6):
        assert speed(share, spec, ["edit", "edit", "hopeless"], 2) > 0.89
        assert speed(share, spec, ["hopeless", "hopeless", "edit"], 2) > 3.0
