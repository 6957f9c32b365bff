"""Compare the exported file in llama.cpp with the same weights in transformers.

    python check.py MODEL.gguf TOKENIZER.json TEXT [--prompt "def fibonacci(n):"]

Compares the token ids of TEXT, and logits and perplexity over its first N_CTX_TRAIN tokens; then
prints greedy text. LLAMA_CPP_LIB_PATH selects the llama.cpp build that llama-cpp-python loads.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import torch
from load import load_gguf
from shape import N_CTX_TRAIN
from tokenizers import Tokenizer


def mean_loss(logits: np.ndarray, ids: list[int]) -> float:
    """Return the mean loss, in nats, of ids [n] under logits [n, n_vocab] (row i: id i + 1)."""
    rows = logits[:-1].astype(np.float64)
    top = rows.max(-1)
    norm = np.log(np.exp(rows - top[:, None]).sum(-1)) + top
    return float((norm - rows[np.arange(len(rows)), ids[1:]]).mean())


def upstream_logits(llama: llama_cpp.Llama, ids: list[int]) -> np.ndarray:
    """Return llama.cpp's logits [n, n_vocab] for ids [n]."""
    llama.reset()
    llama.eval(ids)
    return np.array(llama.scores[: len(ids)])


def compare(llama: llama_cpp.Llama, model: Path, ids: list[int]) -> None:
    """Print perplexities and the difference of the logits."""
    reference = load_gguf(model)
    with torch.no_grad():
        theirs = reference(input_ids=torch.tensor([ids]), use_cache=False).logits[0].numpy()
    ours = upstream_logits(llama, ids)
    nmse = float(((ours - theirs) ** 2).sum() / (theirs**2).sum())
    same = float((ours.argmax(-1) == theirs.argmax(-1)).mean())
    for name, logits in (("transformers", theirs), ("llama.cpp", ours)):
        loss = mean_loss(logits, ids)
        print(f"{name:12s}  loss {loss:.4f}  perplexity {np.exp(loss):.4f}")
    print(f"logits: NMSE {nmse:.1e}, same argmax {same:.2%} of {len(ids)} positions")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--prompt", action="append", default=[])
    parser.add_argument("--max-tokens", type=int, default=160)
    args = parser.parse_args()
    llama = llama_cpp.Llama(
        str(args.model), n_ctx=N_CTX_TRAIN, logits_all=True, n_gpu_layers=0, verbose=False
    )
    text = args.text.read_text(encoding="utf-8")
    ids = llama.tokenize(text.encode(), add_bos=False, special=False)
    expected = Tokenizer.from_file(str(args.tokenizer)).encode(text).ids
    print(f"token ids: {'equal' if ids == expected else 'DIFFERENT'} ({len(ids)} tokens)")
    compare(llama, args.model, ids[:N_CTX_TRAIN])
    for prompt in args.prompt:
        out: Any = llama.create_completion(prompt, max_tokens=args.max_tokens, temperature=0.0)
        print("-" * 72 + "\n" + prompt + out["choices"][0]["text"])


if __name__ == "__main__":
    main()
