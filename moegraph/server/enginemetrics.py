"""Figures of the engine for Prometheus: its slots, caches, drafts and memory."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..loop.status import ServiceStatus
from .backend import Backend


class EngineMetrics(Collector):
    """Reads the service's status when Prometheus asks; a model that sleeps has no figures."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def collect(self) -> Iterator[Metric]:
        """Yield the figures."""
        yield GaugeMetricFamily(
            "moegraph_ready", "Whether requests are answered.",
            value=float(self._backend.condition in ("ready", "sleeping")),
        )  # fmt: skip
        loaded = self._backend.peek()
        if loaded is not None:
            status: ServiceStatus = loaded.service.status()
            yield from _service(status)
            yield from _experts(status)
            yield from _memory(status)

    def describe(self) -> list[Metric]:
        """Return nothing: the names need no check, and the model may not be there yet."""
        return []


def _service(status: ServiceStatus) -> Iterator[Metric]:
    counts = status.counts
    busy = sum(slot.state != "idle" for slot in status.slots)
    held = sum(slot.n_held for slot in status.slots)
    yield GaugeMetricFamily("moegraph_slots", "Requests computed at a time.", len(status.slots))
    yield GaugeMetricFamily("moegraph_slots_used", "Slots at work.", busy)
    yield GaugeMetricFamily("moegraph_tokens_held", "Tokens in all slots.", held)
    yield GaugeMetricFamily(
        "vllm:kv_cache_usage_perc", "Share of the context that is in use, 0 to 1.",
        min(1.0, held / status.n_ctx) if status.n_ctx else 0.0,
    )  # fmt: skip
    yield CounterMetricFamily("llamacpp:n_decode", "Decode passes.", counts.passes)
    yield CounterMetricFamily(
        "llamacpp:spec_decode_num_drafts", "Passes that verified drafts.",
        0 if status.spec is None else status.spec.steps,
    )  # fmt: skip
    yield GaugeMetricFamily(
        "llamacpp:n_busy_slots_per_decode", "Mean rows of a decode pass.",
        counts.pass_rows / counts.passes if counts.passes else 0.0,
    )  # fmt: skip
    if status.group_passes:
        yield CounterMetricFamily("moegraph_group_passes", "Passes of groups, one in each stage.",
                                  status.group_passes)  # fmt: skip
        yield GaugeMetricFamily("moegraph_stage_idle", "Share of their time without work, 0 to 1.",
                                status.stage_idle)  # fmt: skip
    yield CounterMetricFamily("vllm:num_preemptions", "Requests set aside.", counts.preempted)
    yield CounterMetricFamily("moegraph_refused", "Requests without room.", counts.refused)
    yield CounterMetricFamily("moegraph_prompt_seconds", "Device time for prompts.",
                              counts.prompt_s)  # fmt: skip
    yield CounterMetricFamily("moegraph_decode_seconds", "Device time for answers.",
                              counts.decode_s)  # fmt: skip
    yield GaugeMetricFamily("moegraph_prefix_places", "Prompt beginnings kept in host memory.",
                            status.prefix_places)  # fmt: skip
    yield GaugeMetricFamily("moegraph_prefix_bytes", "Host memory of those.", status.prefix_bytes)
    yield GaugeMetricFamily("moegraph_busy_seconds", "Time of the work under way.", status.busy_s)


def _experts(status: ServiceStatus) -> Iterator[Metric]:
    if status.experts is None:
        return
    report = status.experts.report()
    for name, key, help in (
        ("expert_hits", "hits", "Experts that were on the device."),
        ("expert_misses", "misses", "Experts that were not."),
        ("expert_evictions", "evicted", "Experts that made room for others."),
        ("expert_upload_bytes", "uploaded_bytes", "Expert bytes sent to the device."),
        ("expert_cpu", "n_cpu_experts", "Experts computed on the CPU."),
    ):
        yield CounterMetricFamily(f"moegraph_{name}", help, report[key])


def _memory(status: ServiceStatus) -> Iterator[Metric]:
    family = GaugeMetricFamily("moegraph_memory_bytes", "Memory by use.", labels=["use"])
    for name, n_bytes in status.memory.items():
        family.add_metric([name.removesuffix("_bytes")], n_bytes)
    yield family
