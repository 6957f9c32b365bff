"""Expert products on a GPU with absent and repeated ids: kernels of vectors, tiles and floats."""

from __future__ import annotations

import pytest
from helpers.expert_products import CHOICES, FLOATS, N_USED, QUANTIZED, Choice, check_products

from moegraph.ggml.device import Device


@pytest.mark.parametrize("n_tokens", [1, 2, 8, 9, 17, 33, 64, 200])
@pytest.mark.parametrize("kind", FLOATS + QUANTIZED)
@pytest.mark.parametrize("choose", CHOICES)
def test_rows_are_right_and_rows_of_absent_ids_are_zero(
    kind: str, choose: Choice, n_tokens: int, device: Device
) -> None:
    check_products(device, kind, choose, n_tokens, 1)
    check_products(device, kind, choose, n_tokens, N_USED)
