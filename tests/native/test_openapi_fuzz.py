"""The real server with the shipped model, asked at random within and without its own document."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import schemathesis
from helpers.server_process import serving
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS: Any = [
    not_a_server_error, status_code_conformance, content_type_conformance,
    response_schema_conformance,
]  # fmt: skip
# Of all operations together: a busy machine gets to fewer of them, in an order of chance. Answers
# are cut after a second (--timeout).
BUDGET_S = 9.0


@pytest.fixture(scope="module")
def operations() -> Iterator[list[Any]]:
    with serving("-c", 256, "-np", 2, "--timeout", 1) as server:
        document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        results: Any = list(document.get_all_operations())
        found = [result.ok() for result in results]
        # once, not with and without /v1
        paths = {one.path for one in found}
        yield [one for one in found if f"/v1{one.path}" not in paths]


class Enough(Exception):
    """The time is over: to make more requests would take as long as to send them."""


def ask(operation: Any, mode: GenerationMode, n: int, end: float) -> int:
    """Send up to n requests before a time; return how many were sent."""
    n_sent = 0

    @settings(
        max_examples=n,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def one(case: Any) -> None:
        nonlocal n_sent
        if time.monotonic() >= end:
            raise Enough
        case.call_and_validate(checks=CHECKS)
        n_sent += 1

    with suppress(Enough):
        one()
    return n_sent


@pytest.mark.long
def test_no_request_makes_the_server_fail_or_answer_otherwise(operations: list[Any]) -> None:
    assert len(operations) > 15
    end, n_sent = time.monotonic() + BUDGET_S, 0
    for operation in random.sample(operations, len(operations)):
        if time.monotonic() < end:
            n_sent += ask(operation, GenerationMode.POSITIVE, 10, end)
        if time.monotonic() < end and operation.body:
            n_sent += ask(operation, GenerationMode.NEGATIVE, 6, end)
    assert n_sent
