"""Rows beside others and rows alone: equal in reference mode; a changed node is found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from helpers import company
from helpers.company import differing_nodes, open_alone, open_company, settings_for

WIDTHS = (1, 2, 5, 9)
ModelPath = Callable[[str], Path]


def settings(share: int | None) -> dict[str, Any]:
    """Return settings of the CPU in reference mode; 4 * 32 experts."""
    return settings_for(share, 128, device="cpu", n_threads=2, cpu_reference=True)


@pytest.mark.parametrize("share", [None, 25])
def test_in_reference_mode_no_row_differs(model_path: ModelPath, share: int | None) -> None:
    with ExitStack() as stack:
        alone = open_alone(stack, model_path("mini35b"), settings(None))
        together = open_company(stack, model_path("mini35b"), settings(share), alone)
        found = list(together.all_forms(WIDTHS))
        assert {form for form, _, _ in found} == {"decode", "chain", "tree", "forest", "ragged"}
        assert all(result.n_rows and not result.n_differ for _, _, result in found)
        if share is None:
            assert list(differing_nodes(together.engine, 5)) == []


def test_the_first_node_that_differs_is_named(
    model_path: ModelPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = company.node_values

    def changed(*args: Any) -> dict[tuple[str, int], npt.NDArray[Any]]:
        nodes = real(*args)
        if len(args[1].slots) > 1:
            nodes["attn_gated", 3] = nodes["attn_gated", 3].copy()
            nodes["attn_gated", 3].reshape(3, -1)[1, 7] += 1
            nodes["l_out", 3] = np.full_like(nodes["l_out", 3], np.nan)
        return nodes

    monkeypatch.setattr(company, "node_values", changed)
    with ExitStack() as stack:
        alone = open_alone(stack, model_path("mini35b"), settings(None))
        together = open_company(stack, model_path("mini35b"), settings(None), alone)
        found = list(differing_nodes(together.engine, 3))
    assert found == [
        "attn_gated of layer 3: 1 of 3 rows differ",
        "l_out of layer 3: a node of its own only alone",
    ]
