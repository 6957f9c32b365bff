"""Counts and times of requests, and figures of the engine, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..loop.requests import Request, ServiceStatus, Step, Usage
from .host import ModelHost

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SHORT_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5)
_LONG_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800)


# A figure: its names, what it is, and its value.
Row = tuple[str, str, float]


class Metrics(Collector):
    """The statistics of one server and of its engine; used on the event loop only.

    Sums over all requests, also over those that run: n_computed: prompt tokens less those that
    were cached, which are n_cached. n_steps: generated tokens less the first of each answer, which
    costs no pass of its own. n_held_max: of one request. n_open, n_queued: requests now.
    """

    def __init__(self, backend: ModelHost) -> None:
        self._backend = backend
        self.registry = registry = CollectorRegistry()
        self.n_computed = self.n_cached = self.n_generated = self.n_steps = self.n_held_max = 0
        self.n_drafted = self.n_accepted = 0
        self.prefill_s = self.decode_s = 0.0
        self._then = (0, 0.0, 0, 0.0)
        self.n_open = self.n_queued = 0
        registry.register(self)

        def times(name: str, help: str, buckets: tuple[float, ...] = _LONG_S) -> Histogram:
            return Histogram(f"vllm:{name}_seconds", help, buckets=buckets, registry=registry)

        self.ended = Counter(
            "vllm:request_success", "Requests that ended.", ("finished_reason",), registry=registry
        )
        self.first_token_s = times("time_to_first_token", "From submission.")
        self.between_s = times("inter_token_latency", "Between two tokens.", _SHORT_S)
        self.whole_s = times("e2e_request_latency", "From submission to the end.")
        self.queue_s = times("request_queue_time", "Until the prompt began.")
        self.prompt_s = times("request_prefill_time", "Until the first token.")
        self.answer_s = times("request_decode_time", "From the first token on.")

    def collect(self) -> Iterator[Metric]:
        """Yield the figures for the registry, under llama-server's, vLLM's and our names."""
        n_looked_up, n_running = self.n_computed + self.n_cached, self.n_open - self.n_queued
        n_computed, prefill_s, n_steps, decode_s = (
            now - then for now, then in zip(self._now, self._then)
        )
        rows: tuple[Row, ...] = (
            ("llamacpp:prompt_tokens_total", "Prompt tokens that were computed.", self.n_computed),
            ("vllm:prompt_tokens_total vllm:prefix_cache_queries_total",
             "Prompt tokens, which are looked up in the cache.", n_looked_up),
            ("llamacpp:prompt_tokens_cached_total vllm:prefix_cache_hits_total",
             "Prompt tokens that were cached.", self.n_cached),
            ("llamacpp:prompt_seconds_total", "Time that prompts took.", self.prefill_s),
            ("llamacpp:tokens_predicted_total vllm:generation_tokens_total",
             "Tokens that were generated.", self.n_generated),
            ("llamacpp:tokens_predicted_seconds_total", "Time that answers took.", self.decode_s),
            ("llamacpp:spec_decode_num_draft_tokens_total vllm:spec_decode_num_draft_tokens_total",
             "Drafted tokens, verified.", self.n_drafted),
            ("llamacpp:spec_decode_num_accepted_tokens_total "
             "vllm:spec_decode_num_accepted_tokens_total",
             "Drafted tokens, right.", self.n_accepted),
            ("llamacpp:prompt_tokens_seconds",
             "Prompt tokens per second of a request, since this was read last.",
             n_computed / prefill_s if prefill_s > 0 else 0.0),
            ("llamacpp:predicted_tokens_seconds",
             "Generated tokens per second of a request, since this was read last.",
             n_steps / decode_s if decode_s > 0 else 0.0),
            ("llamacpp:n_tokens_max", "Largest number of tokens that a request held.",
             self.n_held_max),
            ("llamacpp:requests_processing vllm:num_requests_running",
             "Requests that are being computed.", n_running),
            ("llamacpp:requests_deferred vllm:num_requests_waiting", "Requests that wait.",
             self.n_queued),
        )  # fmt: skip
        yield from _families(rows)
        is_ready = float(self._backend.condition in ("ready", "sleeping"))
        yield GaugeMetricFamily("moegraph_ready", "Whether requests are answered.", is_ready)
        loaded = self._backend.peek()
        if loaded is not None:  # a model that sleeps has no figures
            status: ServiceStatus = loaded.service.status()
            yield from _families(_service(status))
            yield from _families(_experts(status))
            yield from _memory(status)

    @property
    def _now(self) -> tuple[int, float, int, float]:
        return self.n_computed, self.prefill_s, self.n_steps, self.decode_s

    def page(self, is_scrape: bool = True) -> bytes:
        """Return the text that Prometheus reads.

        is_scrape: means of rates begin anew, as in llama-server; False for other readers.
        """
        found = generate_latest(self.registry)
        if is_scrape:
            self._then = self._now
        return found


def _families(rows: Iterable[Row]) -> Iterator[Metric]:
    """Yield figures; a name that ends in _total is that of a counter."""
    for names, help, value in rows:
        for name in names.split():
            is_counter = name.endswith("_total")
            yield (CounterMetricFamily if is_counter else GaugeMetricFamily)(name, help, value)


class Meter:
    """Hears the steps of the answers to a client and adds them to the statistics."""

    def __init__(self, metrics: Metrics, on_close: Callable[[], None]) -> None:
        self._metrics = metrics
        self._on_close = on_close
        self._began = time.monotonic()
        self._n_open = self._n_queued = 0

    def opened(self, requests: Sequence[Request]) -> None:
        """Count requests that were accepted; all of them wait at first."""
        self._count(len(requests), len(requests))

    def _count(self, n_open: int, n_queued: int) -> None:
        self._metrics.n_open += n_open
        self._metrics.n_queued += n_queued
        self._n_open += n_open
        self._n_queued += n_queued

    def heard(self, step: Step, seconds: float, before: Usage) -> None:
        """Add what a step brought, compared with the usage before it."""
        usage, sums = step.usage, self._metrics
        if self._n_queued and _has_begun(usage) and not _has_begun(before):
            self._count(0, -1)
        n_new = usage.n_generated - before.n_generated
        n_steps = max(usage.n_generated - 1, 0) - max(before.n_generated - 1, 0)
        n_read = (usage.n_read - usage.n_cached) - (before.n_read - before.n_cached)
        sums.n_computed += max(0, n_read)
        sums.n_cached += usage.n_cached - before.n_cached
        sums.n_generated += n_new
        sums.n_steps += n_steps
        sums.n_drafted += usage.n_drafted - before.n_drafted
        sums.n_accepted += usage.n_accepted - before.n_accepted
        sums.prefill_s += usage.prefill_s - before.prefill_s
        sums.decode_s += usage.decode_s - before.decode_s
        sums.n_held_max = max(sums.n_held_max, usage.n_read + usage.n_generated)
        if n_new and not before.n_generated:
            sums.first_token_s.observe(usage.queued_s + usage.prefill_s)
        elif n_new:
            sums.between_s.observe(seconds / n_new)
        if step.finish_reason is not None:
            self._end(usage, step.finish_reason)

    def _end(self, usage: Usage, reason: str) -> None:
        sums = self._metrics
        self._count(-1, 0 if _has_begun(usage) or not self._n_queued else -1)
        sums.ended.labels(reason).inc()
        sums.queue_s.observe(usage.queued_s)
        sums.prompt_s.observe(usage.prefill_s)
        sums.answer_s.observe(usage.decode_s)
        sums.whole_s.observe(time.monotonic() - self._began)

    def closed(self) -> None:
        """Forget what did not end: the client left, or another choice failed."""
        if self._n_open:
            self._metrics.ended.labels("abort").inc(self._n_open)
        self._count(-self._n_open, -self._n_queued)
        self._on_close()


def _has_begun(usage: Usage) -> bool:
    return usage.n_read > 0 or usage.n_generated > 0 or usage.prefill_s > 0


def _service(status: ServiceStatus) -> Iterator[Row]:
    counts = status.counts
    busy = sum(slot.state != "idle" for slot in status.slots)
    held = sum(slot.n_held for slot in status.slots)
    n_drafts = 0 if status.spec is None else status.spec.steps
    mean = counts.pass_rows / counts.passes if counts.passes else 0.0
    used = min(1.0, held / status.n_ctx) if status.n_ctx else 0.0
    yield "moegraph_slots", "Requests computed at a time.", len(status.slots)
    yield "moegraph_slots_used", "Slots at work.", busy
    yield "moegraph_tokens_held", "Tokens in all slots.", held
    yield "vllm:kv_cache_usage_perc", "Share of the context that is in use, 0 to 1.", used
    yield "llamacpp:n_decode_total", "Decode passes.", counts.passes
    yield "llamacpp:spec_decode_num_drafts_total", "Passes that verified drafts.", n_drafts
    yield "llamacpp:n_busy_slots_per_decode", "Mean rows of a decode pass.", mean
    if status.group_passes:
        help = "Passes of groups, one in each stage."
        yield "moegraph_group_passes_total", help, status.group_passes
        help = "Share of their time without work, 0 to 1."
        yield "moegraph_stage_idle", help, status.stage_idle
    yield "vllm:num_preemptions_total", "Requests set aside.", counts.preempted
    yield "moegraph_refused_total", "Requests without room.", counts.refused
    yield "moegraph_prompt_seconds_total", "Device time for prompts.", counts.prompt_s
    yield "moegraph_decode_seconds_total", "Device time for answers.", counts.decode_s
    help = "Prompt beginnings kept in host memory."
    yield "moegraph_prefix_places", help, status.prefix_places
    yield "moegraph_prefix_bytes", "Host memory of those.", status.prefix_bytes
    yield "moegraph_busy_seconds", "Time of the work under way.", status.busy_s


def _experts(status: ServiceStatus) -> Iterator[Row]:
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
        yield f"moegraph_{name}_total", help, report[key]


def _memory(status: ServiceStatus) -> Iterator[Metric]:
    family = GaugeMetricFamily("moegraph_memory_bytes", "Memory by use.", labels=["use"])
    for name, n_bytes in status.memory.items():
        family.add_metric([name.removesuffix("_bytes")], n_bytes)
    yield family
