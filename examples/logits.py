"""Read logits: the most likely next tokens, and the perplexity of a text.

    python examples/logits.py [MODEL]

`forward_logits` runs tokens in one pass from a position and returns one row of logits for each
token, as a numpy array [n_tokens, n_vocab]. On the CPU they equal llama.cpp's bit for bit.
"""

from __future__ import annotations

import sys

import numpy as np

from moegraph import Engine, EngineConfig

TEXT = "for i in range(10):\n    print(i)\n"


def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "tiny"
    with Engine.load(model, EngineConfig(device="auto", n_ctx=512)) as engine:
        ids = engine.tokenizer.encode(TEXT)
        logits = engine.forward_logits(ids).astype(np.float64)
        top = logits.max(axis=1, keepdims=True)
        log_p = logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))
        print("most likely next tokens:")
        for token in np.argsort(-log_p[-1])[:5]:
            text = engine.tokenizer.piece(int(token)).decode("utf-8", "replace")
            print(f"  {np.exp(log_p[-1, token]):6.1%}  {text!r}")
        # row i holds the logits of the token after token i
        expected = log_p[np.arange(len(ids) - 1), ids[1:]]
        print(f"perplexity of the text: {np.exp(-expected.mean()):.2f}")


if __name__ == "__main__":
    main()
