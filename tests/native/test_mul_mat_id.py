"""Expert products on the CPU with absent and repeated ids: plain, tiled and reference kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.expert_products import CHOICES, FLOATS, N_USED, QUANTIZED, Choice, check_products

from moegraph.ggml.device import Device


@pytest.fixture(scope="module", params=[False, True], ids=["default", "reference"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """Yield the CPU device in its default and its reference mode."""
    opened = Device("cpu", n_threads=3, reference=request.param)
    yield opened
    opened.close()


@pytest.mark.parametrize("kind", FLOATS + QUANTIZED)
@pytest.mark.parametrize("choose", CHOICES)
def test_rows_are_right_and_rows_of_absent_ids_are_zero(
    kind: str, choose: Choice, device: Device
) -> None:
    for n_tokens, n_rows in ((1, 1), (1, N_USED), (2, 1), (9, N_USED), (33, 1), (33, N_USED)):
        check_products(device, kind, choose, n_tokens, n_rows)
