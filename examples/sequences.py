"""Decode several sequences in one pass: a weight that is read once serves all of them.

    python examples/sequences.py [MODEL]

`n_seq` makes room for sequences. A pass takes rows of neighbouring sequences, numpy shape [n_seqs,
n_tokens], and continues each where it ends. Every sequence gets the tokens it would get alone.
"""

from __future__ import annotations

import sys

import numpy as np

from moegraph import Engine, EngineConfig

PROMPTS = ("def add(a, b):", "import os", "class Stack:")


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "tiny"
    config = EngineConfig(device="auto", n_ctx=256, n_seq=len(PROMPTS))
    with Engine.load(model, config) as engine:
        texts = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
        # prompts differ in length, so each is a pass of its own
        last = []
        for seq, ids in enumerate(texts):
            output = engine.forward(np.array(ids, dtype=np.int32), seq=seq, greedy=True)
            assert output.argmax is not None
            last.append(int(output.argmax[0]))
        for _ in range(24):
            for ids, token in zip(texts, last):
                ids.append(token)
            output = engine.forward(np.array(last, dtype=np.int32)[:, None], greedy=True)
            assert output.argmax is not None
            last = output.argmax.tolist()
        for ids in texts:
            print(f"--- {len(ids)} tokens\n{engine.tokenizer.decode(ids)}")


if __name__ == "__main__":
    main()
