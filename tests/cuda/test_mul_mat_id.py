"""Expert products on a GPU with absent and repeated ids; mul_mat_id.cpp goes through many more."""

from __future__ import annotations

import pytest
from helpers.expert_products import CHOICES, FLOATS, N_USED, QUANTIZED, Choice, check_products

from moegraph.ggml.device import Device


@pytest.mark.parametrize("n_tokens", [1, 2, 8])
@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("choose", CHOICES)
def test_vector_kernels(kind: str, choose: Choice, n_tokens: int, device: Device) -> None:
    check_products(device, kind, choose, n_tokens, 1)
    check_products(device, kind, choose, n_tokens, N_USED)


@pytest.mark.parametrize("n_tokens", [9, 33, 64, 200])
@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("choose", CHOICES)
def test_tile_kernels(kind: str, choose: Choice, n_tokens: int, device: Device) -> None:
    check_products(device, kind, choose, n_tokens, 1)
    check_products(device, kind, choose, n_tokens, N_USED)


@pytest.mark.parametrize("n_tokens", [1, 2, 9, 16, 17, 64, 200])
@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("choose", CHOICES)
def test_float_kernels(kind: str, choose: Choice, n_tokens: int, device: Device) -> None:
    check_products(device, kind, choose, n_tokens, 1)
    check_products(device, kind, choose, n_tokens, N_USED)
