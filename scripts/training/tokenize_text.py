"""Convert the corpus to token ids of a new byte-level BPE, or of a model file's own tokenizer.

    python tokenize_text.py CORPUS_DIR [--model MODEL.gguf]

Reads train.txt and heldout.txt as corpus.py wrote them; writes train.u16 and heldout.u16
(little-endian uint16 ids, every file followed by the end-of-text token), and without --model also
tokenizer.json.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from shape import EOT, PRE_TOKENIZER_REGEX, SHAPE, SPECIAL_TOKENS
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

TRAIN_BYTES = 48_000_000


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Return a byte-level BPE of SHAPE.n_vocab tokens trained on some texts, the special ones last.

    It splits text as `qwen35` of llama.cpp does.
    """
    sample, n_bytes = [], 0
    for text in random.Random(2).sample(texts, len(texts)):
        if n_bytes > TRAIN_BYTES:
            break
        sample.append(text)
        n_bytes += len(text)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PRE_TOKENIZER_REGEX), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPE.n_vocab - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    if tokenizer.get_vocab_size() != SHAPE.n_vocab:
        raise SystemExit(f"vocabulary has {tokenizer.get_vocab_size()} tokens, not {SHAPE.n_vocab}")
    return tokenizer


def encode(ids_of: Callable[[str], Sequence[int]], texts: list[str]) -> np.ndarray:
    """Return the ids of whole texts, each followed by the end-of-text token, as uint16."""
    (end,) = ids_of(EOT)
    return np.concatenate([np.array([*ids_of(text), end], "<u2") for text in texts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--model", type=Path, help="take this file's tokenizer")
    args = parser.parse_args()
    texts = {
        name: (args.corpus / f"{name}.txt").read_text(encoding="utf-8").split("\0")
        for name in ("train", "heldout")
    }
    ids_of: Callable[[str], list[int]]
    if args.model:
        from moegraph.text.tokenizer import Tokenizer as Own

        ids_of = Own(args.model).encode
    else:
        tokenizer = train_tokenizer(texts["train"])
        tokenizer.save(str(args.corpus / "tokenizer.json"))

        def ids_of(text: str) -> list[int]:
            return list(tokenizer.encode(text).ids)

    for name, files in texts.items():
        ids = encode(ids_of, files)
        ids.tofile(args.corpus / f"{name}.u16")
        print(f"{name}: {len(files)} files, {len(ids)} tokens", flush=True)


if __name__ == "__main__":
    main()
