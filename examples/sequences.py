"""Decode several sequences in one pass, which reads each weight once for all of them.

    python examples/sequences.py [MODEL]

`n_seq` reserves room for the sequences. A pass takes token ids, numpy shape [n_seqs,
n_seq_tokens], and continues each sequence at its end: consecutive ones from `seq` on, or those that
a list names in any order. Sequences do not influence each other.
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
        # prompts differ in length, so each needs its own pass
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
