"""Convert the text of train_tiny/corpus.py to token ids of a model file's own tokenizer.

    python encode_text.py MODEL.gguf CORPUS_DIR [--max-tokens N]

Reads train.txt and heldout.txt, writes train.u16.xz and heldout.u16.xz (little-endian uint16 ids,
every file followed by the end-of-text token). --max-tokens keeps a random part of the files, for
machines to which little can be carried.
"""

from __future__ import annotations

import argparse
import lzma
import random
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

sys.path.append(str(Path(__file__).resolve().parents[1] / "train_tiny"))
from shape import EOT, PRE_TOKENIZER, PRE_TOKENIZER_REGEX

CONTROL = 3


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
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = np.array(field("token_type"))
    tokenizer.add_special_tokens([names[i] for i in np.flatnonzero(kinds == CONTROL)])
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str], max_tokens: int) -> np.ndarray:
    """Return the ids of whole texts, each followed by the end-of-text token."""
    end = np.array([tokenizer.token_to_id(EOT)], "<u2")
    parts: list[np.ndarray] = []
    n = 0
    for start in range(0, len(texts), 64):
        for encoding in tokenizer.encode_batch(texts[start : start + 64]):
            parts += [np.array(encoding.ids, "<u2"), end]
            n += len(encoding.ids) + 1
        if n >= max_tokens:
            break
    return np.concatenate(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--max-tokens", type=int, default=10**10)
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)
    for name in ("heldout", "train"):
        texts = (args.corpus / f"{name}.txt").read_text(encoding="utf-8").split("\0")
        random.Random(3).shuffle(texts)
        ids = encode(tokenizer, texts, args.max_tokens)
        packed = lzma.compress(ids.tobytes(), preset=6)
        (args.corpus / f"{name}.u16.xz").write_bytes(packed)
        print(f"{name}: {len(ids)} tokens, {len(packed) / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main()
