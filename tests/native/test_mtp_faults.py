"""The k-th native call of drafting with the MTP block fails: one error, and later drafts work."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.faults import FAULTS, faulty
from helpers.mtp import MtpModel

from moegraph.errors import MoegraphError

ModelPath = Callable[[str], Path]
NAMES = ["mg_launch", "ggml_backend_tensor_alloc", "mg_graph_alloc", "ggml_init",
         "ggml_backend_buft_alloc_buffer"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_failure_while_drafting_changes_no_later_draft(
    model_path: ModelPath, no_leak: None, name: str
) -> None:
    ids = np.arange(1, 40, dtype=np.int32)
    result, kind = FAULTS[name]

    def work(model: MtpModel) -> list[np.ndarray]:
        drafts = [model.drafter.draft(0, 5, 3, 2).tokens]
        model.decode(5)
        drafts.append(model.drafter.draft(0, 6, 2, 2).tokens)
        return drafts

    with MtpModel(model_path("mini35b"), cpu_reference=True) as model:
        model.read(ids)
        wanted = work(model)
    at, n_failures = 0, 0
    while True:
        at += 1
        with MtpModel(model_path("mini35b"), cpu_reference=True) as model:
            model.read(ids)
            before = model.state.snapshot(0)
            with faulty(name, at, result) as library:
                try:
                    work(model)
                except MoegraphError as error:
                    assert isinstance(error, kind) and "\n" not in str(error)
                    n_failures += 1
            if library.n_calls < at:
                break
            model.runner.give_up()
            model.state.restore(before)
            for got, want in zip(work(model), wanted, strict=True):
                np.testing.assert_array_equal(got, want)
            before.close()
    assert n_failures
