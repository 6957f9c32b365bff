"""Measures what a missing expert costs here: uploaded, or computed on the CPU."""

from __future__ import annotations

import time

from ..experts.cost import MissCosts
from ..ggml.lib import C
from ..resident.layout import N_STAGING
from ..resident.stage import Stage
from .cpu_experts import CpuExperts
from .upload import Uploader

# Rows of an expert that the CPU computes for the cost of a further row: a missing expert has few.
_ROWS = 4


class LinkTimer:
    """Measures uploads to a staging bank; each number of experts once."""

    def __init__(self, stage: Stage, upload: Uploader) -> None:
        self._stage, self._upload = stage, upload
        self._measured: dict[int, float] = {}

    def seconds(self, n_experts: int) -> float:
        """Return the seconds of uploading n experts, at most N_STAGING at a time."""
        at_once = min(n_experts, N_STAGING)
        return self._at_once(at_once) * n_experts / at_once

    def _at_once(self, n_experts: int) -> float:
        """Return the least of six uploads of n_experts experts; what disturbs one adds time."""
        if n_experts in self._measured:
            return self._measured[n_experts]
        stage, samples, n_bytes = self._stage, [], self._upload.n_bytes
        il = stage.store.layers[0]
        bank = stage.banks.staging(il, 0)
        for at in range(6):
            # each twice: the device reads a page more slowly the first time
            first = at % 3 * n_experts % (stage.hp.n_expert - n_experts + 1)
            start = time.perf_counter()
            self._upload.send(il, bank, [(first + i, i) for i in range(n_experts)])
            C.ggml_backend_synchronize(stage.device.upload.ptr)
            samples.append(time.perf_counter() - start)
        self._upload.n_bytes = n_bytes  # what is measured is not counted
        self._measured[n_experts] = min(samples)
        return self._measured[n_experts]


def measure_costs(
    link: LinkTimer, cpu_experts: CpuExperts | None, mode: str, n_used: int, guarded: bool
) -> MissCosts:
    """Measure what the value of --miss, and the guard, need to know.

    n_used: experts that a row chooses.
    """
    move_s = link.seconds(1) if guarded else None
    if cpu_experts is None or mode != "auto":
        return MissCosts(move_s=move_s)
    on_cpu = [0.0] + [cpu_experts.measure(n) for n in range(1, n_used + 1)]
    streamed = [0.0] + [link.seconds(n) for n in range(1, n_used + 1)]
    more = cpu_experts.measure(n_used, _ROWS) / on_cpu[n_used] - 1.0
    per_row = more / (_ROWS - 1)
    return MissCosts(tuple(on_cpu), tuple(streamed), max(per_row, 0.0), move_s)
