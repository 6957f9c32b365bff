"""Convert the corpus to token ids of a new byte-level BPE, or of a model file's own tokenizer.

    python tokenize_text.py CORPUS_DIR [--model MODEL.gguf] [--max-tokens N]

Reads train.txt and heldout.txt as corpus.py wrote them; writes train.u16 and heldout.u16
(little-endian uint16 ids, every file followed by the end-of-text token), and without --model also
tokenizer.json. --max-tokens keeps a random part of the files.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from shape import EOT, PRE_TOKENIZER, PRE_TOKENIZER_REGEX, SPECIAL_TOKENS, VOCAB_SIZE
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

TRAIN_BYTES = 48_000_000
CONTROL = 3


def byte_level(model: models.BPE) -> Tokenizer:
    """Return a byte-level tokenizer that splits text as `qwen35` of llama.cpp does."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PRE_TOKENIZER_REGEX), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Return a BPE of VOCAB_SIZE tokens trained on some of the texts, the special tokens last."""
    sample, n_bytes = [], 0
    for text in random.Random(2).sample(texts, len(texts)):
        if n_bytes > TRAIN_BYTES:
            break
        sample.append(text)
        n_bytes += len(text)
    tokenizer = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise SystemExit(f"vocabulary has {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    return tokenizer


def load_tokenizer(model: Path) -> Tokenizer:
    """Return the byte-level BPE that a GGUF file describes."""
    reader = gguf.GGUFReader(str(model))

    def field(name: str) -> Any:
        found = reader.get_field(f"tokenizer.ggml.{name}")
        if found is None:
            raise SystemExit(f"{model}: no tokenizer.ggml.{name}")
        return found.contents()

    if field("pre") != PRE_TOKENIZER:
        raise SystemExit(f"{model}: pre-tokenizer {field('pre')}, not {PRE_TOKENIZER}")
    names: list[str] = field("tokens")
    merges = [(a, b) for a, _, b in (m.partition(" ") for m in field("merges"))]
    tokenizer = byte_level(models.BPE({name: i for i, name in enumerate(names)}, merges))
    kinds = np.array(field("token_type"))
    tokenizer.add_special_tokens([names[i] for i in np.flatnonzero(kinds == CONTROL)])
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str], max_tokens: int) -> np.ndarray:
    """Return the ids of whole texts, each followed by the end-of-text token, as uint16."""
    end = np.array([tokenizer.token_to_id(EOT)], "<u2")
    parts: list[np.ndarray] = []
    n = 0
    for start in range(0, len(texts), 256):
        for encoding in tokenizer.encode_batch(texts[start : start + 256]):
            parts += [np.array(encoding.ids, "<u2"), end]
            n += len(encoding.ids) + 1
        if n >= max_tokens:
            break
    return np.concatenate(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--model", type=Path, help="take this file's tokenizer")
    parser.add_argument("--max-tokens", type=int, default=10**10)
    args = parser.parse_args()
    texts = {
        name: (args.corpus / f"{name}.txt").read_text(encoding="utf-8").split("\0")
        for name in ("train", "heldout")
    }
    if args.model:
        tokenizer = load_tokenizer(args.model)
    else:
        tokenizer = train_tokenizer(texts["train"])
        tokenizer.save(str(args.corpus / "tokenizer.json"))
    for name, files in texts.items():
        if args.model:
            random.Random(3).shuffle(files)
        ids = encode(tokenizer, files, args.max_tokens)
        ids.tofile(args.corpus / f"{name}.u16")
        print(f"{name}: {len(files)} files, {len(ids)} tokens", flush=True)


if __name__ == "__main__":
    main()
