"""Continue a text and print each token as it comes.

    python examples/generate.py [MODEL]

MODEL is a GGUF file or the name of a shipped model (default: tiny). `generate` yields one event for
each token: its text and the counts so far. The last event also says why the generation ended.
"""

from __future__ import annotations

import sys

from moegraph import Engine, EngineConfig, SamplingParams


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "tiny"
    sampling = SamplingParams(temperature=0.7, seed=1)
    with Engine.load(model, EngineConfig(device="auto", n_ctx=2048)) as engine:
        prompt = engine.tokenizer.encode("def fibonacci(n):")
        for event in engine.generate(prompt, sampling, max_tokens=48):
            print(event.text, end="", flush=True)
        print(f"\n{event.n_generated} tokens, {event.decode_tps:.0f} tok/s, {event.finish_reason}")


if __name__ == "__main__":
    main()
