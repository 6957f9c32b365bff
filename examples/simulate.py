"""Record which experts a model chooses, and count the hits of smaller caches.

    python examples/simulate.py [MODEL]

The replay uses the same cache as decode, so hits and misses are counted, not estimated. A replay
needs no model: `moegraph trace` writes traces to files, and `moegraph.placement.trace.read_trace`
reads them.
"""

from __future__ import annotations

import sys

from moegraph import Engine, EngineConfig
from moegraph.experts.machines import find_machine
from moegraph.experts.policy import parse_policy
from moegraph.placement.identity import router_shape
from moegraph.placement.simulate import even_slots, simulate
from moegraph.placement.trace import Trace, TraceRecorder
from moegraph.runner import LayeredRunner


def record(model: str, n_tokens: int) -> Trace:
    """Return the trace of a generation."""
    with Engine.load(model, EngineConfig(device="auto", n_ctx=512, mode="layered")) as engine:
        assert isinstance(engine.runner, LayeredRunner)
        recorder = TraceRecorder(router_shape(engine.file))
        engine.runner.observers.append(recorder)
        prompt = engine.tokenizer.encode("def fibonacci(n):")
        for _ in engine.generate(prompt, max_tokens=n_tokens):
            pass
    return recorder.trace(len(prompt), "an example")


def main() -> None:
    trace = record(sys.argv[1] if len(sys.argv) > 1 else "tiny", 64)
    n_layer, n_expert, n_used = trace.shape.sizes
    print(f"{trace.n_tokens} tokens, {n_layer} layers, {n_used} of {n_expert} experts a token")
    for share in (0.25, 0.5, 0.75):
        slots = even_slots([True] * n_layer, n_expert, share)
        for policy in ("lru", "lfu"):
            found = simulate(trace, slots, parse_policy(policy), find_machine("desktop")).stats
            print(
                f"{share:4.0%} of the experts on the device, {policy}: {found.hit_rate:.1%} hits, "
                f"{found.missing_per_step:.1f} missing a token"
            )


if __name__ == "__main__":
    main()
