"""Check the tokenizer keys of a header before llama.cpp builds its tokenizer from them.

llama.cpp asserts, which ends the process, if two tokens are equal up to a NUL. It reads arrays
without checking their type. Text that is not UTF-8 makes it throw through its C interface. Python
can catch none of these, so this module refuses such a vocabulary first.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..errors import ModelFileError, UnsupportedModel
from .metadata import Metadata

MODEL = "tokenizer.ggml.model"
TOKENS = "tokenizer.ggml.tokens"
MERGES = "tokenizer.ggml.merges"
SCORES = "tokenizer.ggml.scores"
TOKEN_TYPE = "tokenizer.ggml.token_type"
BYTE_LEVEL = "gpt2"
NO_TOKENIZER = ("none", "no_vocab")

_SPECIAL_IDS = tuple(
    f"tokenizer.ggml.{name}_token_id"
    for name in (
        "bos eos eot eom unknown seperator padding mask fim_pre fim_suf fim_mid fim_pad fim_rep "
        "fim_sep prefix suffix middle"
    ).split()
)
# llama.cpp's BOS and EOS for byte-level BPE if the file names none.
_DEFAULT_ID = 11
_MAX_VOCAB = 1 << 24


def check_vocab(meta: Metadata, n_embd_rows: int, own: str = BYTE_LEVEL) -> int:
    """Check the tokenizer keys and return n_vocab.

    n_embd_rows: rows of token_embd.weight; the default of n_vocab without a tokenizer. own: another
    BPE tokenizer that the architecture has, which begins each text with BOS.
    """
    model = meta.string(MODEL, NO_TOKENIZER[0])
    if model in NO_TOKENIZER:
        n_vocab = meta.integer(".vocab_size", 1, _MAX_VOCAB, min(n_embd_rows, _MAX_VOCAB))
    elif model in (BYTE_LEVEL, own):
        n_vocab = _check_bpe(meta)
    else:
        what = f"is {model!r}; moegraph runs byte-level BPE ({BYTE_LEVEL!r})"
        raise meta.error(MODEL, what, UnsupportedModel)
    if n_vocab != n_embd_rows:
        raise ModelFileError(
            f"{meta.path}: the vocabulary has {n_vocab} tokens "
            f"but token_embd.weight has {n_embd_rows} rows"
        )
    return n_vocab


# Types of tokens that are not ordinary text: ends of turns, tags of thoughts and tools.
_CONTROL, _USER_DEFINED = 3, 4


def frequent_ids(meta: Metadata, n_vocab: int, n: int) -> npt.NDArray[np.int32]:
    """Return n tokens of which most text is made, ascending: I32 [n].

    Those that are not ordinary text come first; there are few of them. The others are taken in the
    order of their ids, which for byte-level BPE is that of how often their merges occurred in the
    text that the tokenizer was made from.
    """
    order = np.arange(n_vocab, dtype=np.int32)
    if TOKEN_TYPE in meta:
        types = np.array(meta.integers(TOKEN_TYPE, n_vocab, 0, 1 << 31))
        is_special = np.isin(types, (_CONTROL, _USER_DEFINED))
        order = np.concatenate([order[is_special], order[~is_special]])
    return np.sort(order[:n])


def _check_bpe(meta: Metadata) -> int:
    """Check a BPE vocabulary and return its size."""
    tokens = meta.strings(TOKENS)
    n_vocab = len(tokens)
    if not 1 <= n_vocab <= _MAX_VOCAB:
        raise meta.error(TOKENS, f"has {n_vocab} tokens; allowed are 1 to {_MAX_VOCAB}")
    # llama.cpp gives an empty token this name before it compares tokens.
    raw = [t or b"[EMPTY_%d]" % i for i, t in enumerate(tokens.raw_strings())]
    if len(set(raw)) != n_vocab:
        raise meta.error(TOKENS, f"contains {_first_repeated(raw)!r} more than once")
    joined = b"\n".join(raw)
    if b"\0" in joined:
        raise meta.error(TOKENS, "contains a token with a NUL byte")
    try:
        joined.decode("utf-8")
    except UnicodeDecodeError as error:
        raise meta.error(TOKENS, "contains a token that is not UTF-8") from error
    meta.strings(MERGES)
    _check_array(meta, TOKEN_TYPE, ("int32",), n_vocab)
    _check_array(meta, SCORES, ("float32", "int32"), n_vocab)
    _check_special(meta, n_vocab)
    return n_vocab


def _first_repeated(raw: list[bytes]) -> bytes:
    """Return the first string that occurs a second time."""
    seen: set[bytes] = set()
    for item in raw:
        if item in seen:
            break
        seen.add(item)
    return item


def _check_array(meta: Metadata, key: str, dtypes: tuple[str, ...], n: int) -> None:
    """Check an optional array with one number per token."""
    if key not in meta:
        return
    value = meta.values[key]
    if not isinstance(value, np.ndarray) or value.dtype.name not in dtypes:
        raise meta.error(key, f"must be an array of {' or '.join(dtypes)}")
    if len(value) != n:
        raise meta.error(key, f"has {len(value)} elements for {n} tokens")


def _check_special(meta: Metadata, n_vocab: int) -> None:
    """Check special token ids, and that BOS and EOS exist if the file asks to add them."""
    for key in _SPECIAL_IDS:
        if key in meta:
            meta.integer(key, 0, n_vocab - 1)
    is_own = meta.string(MODEL) != BYTE_LEVEL
    has_default = n_vocab > _DEFAULT_ID and not is_own
    for name in ("bos", "eos"):
        flag, key = f"tokenizer.ggml.add_{name}_token", f"tokenizer.ggml.{name}_token_id"
        if meta.boolean(flag, False) and key not in meta and not has_default:
            raise meta.error(flag, f"is true but there is no {key}")
    if is_own:
        meta.integer("tokenizer.ggml.bos_token_id", 0, n_vocab - 1)
    meta.string("tokenizer.ggml.pre", "")
    meta.string("tokenizer.chat_template", "")
