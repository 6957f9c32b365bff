"""Train the byte-level BPE and convert the corpus to token ids.

    python bpe.py CORPUS_DIR

Reads train.txt and heldout.txt as corpus.py wrote them; writes tokenizer.json, train.u16 and
heldout.u16 (little-endian uint16 ids, every file followed by the end-of-text token).
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np
from shape import EOT, PRE_TOKENIZER_REGEX, SPECIAL_TOKENS, VOCAB_SIZE
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

TRAIN_BYTES = 48_000_000


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Return a byte-level BPE of VOCAB_SIZE tokens, the special ones last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise SystemExit(f"vocabulary has {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Return the ids of all texts, each followed by the end-of-text token, as uint16."""
    end = np.array([tokenizer.token_to_id(EOT)], np.uint16)
    parts: list[np.ndarray] = []
    for start in range(0, len(texts), 256):
        for encoding in tokenizer.encode_batch(texts[start : start + 256]):
            parts += [np.array(encoding.ids, np.uint16), end]
    return np.concatenate(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    args = parser.parse_args()
    texts = {
        name: (args.corpus / f"{name}.txt").read_text(encoding="utf-8").split("\0")
        for name in ("train", "heldout")
    }
    sample, n_bytes = [], 0
    for text in random.Random(2).sample(texts["train"], len(texts["train"])):
        if n_bytes > TRAIN_BYTES:
            break
        sample.append(text)
        n_bytes += len(text)
    tokenizer = train_tokenizer(sample)
    tokenizer.save(str(args.corpus / "tokenizer.json"))
    for name, files in texts.items():
        ids = encode(tokenizer, files)
        ids.tofile(args.corpus / f"{name}.u16")
        print(f"{name}: {len(files)} files, {sum(map(len, files))} characters, {len(ids)} tokens")


if __name__ == "__main__":
    main()
