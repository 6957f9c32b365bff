"""A byte-level BPE vocabulary of any size, so that text commands work on synthetic models."""

from __future__ import annotations

from .gguf_write import Keys

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6

SPECIALS = (
    ("<|endoftext|>", CONTROL),
    ("<|im_start|>", CONTROL),
    ("<|im_end|>", CONTROL),
    ("<think>", USER_DEFINED),
    ("</think>", USER_DEFINED),
)

# Words whose merges exist, so that tokenizing text does more than split it into bytes.
WORDS = (
    "def return self import from class if else for in not and is None True False print the of to "
    "a that it as with be on this are or an by at range len str int list dict name value error"
).split()

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokens() -> list[str]:
    """Return the 256 characters that stand for bytes in byte-level BPE, in byte order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(b if b in printable else next(spare)) for b in range(256)]


GEMMA4_BEGIN = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
GEMMA4_TURNS = ("<|turn>", "<turn|>")
GEMMA4_TAGS = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>",
               "<tool_response|>", '<|"|>')  # fmt: skip
GEMMA4_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|turn>{{ message.role }}\n{{ message.content }}<turn|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)


def _merges(space: str) -> list[tuple[str, str]]:
    """Return what builds each word from its first character on, and joins it to a space."""
    chains = [(word[:i], word[i]) for word in WORDS for i in range(1, len(word))]
    return list(dict.fromkeys(chains + [(space, word) for word in WORDS]))


def gemma4_vocabulary(n_vocab: int) -> Keys:
    """Return the tokenizer keys of gemma4: bytes and characters, merged words, fillers, tags."""
    space, ends = "\u2581", (*GEMMA4_TURNS, *GEMMA4_TAGS)
    tokens = [*GEMMA4_BEGIN, *(f"<0x{b:02X}>" for b in range(256))]
    types = [CONTROL] * len(GEMMA4_BEGIN) + [BYTE] * 256
    merges = _merges(space)
    tokens += [*("\n" * n for n in range(1, 5)), space, *map(chr, range(0x21, 0x7F)), "\u00e9"]
    tokens += [a + b for a, b in merges]
    tokens += [f"{space}w{i}" for i in range(n_vocab - len(ends) - len(tokens))]
    types += [NORMAL] * (len(tokens) - len(types))
    types += [CONTROL] * len(GEMMA4_TURNS) + [USER_DEFINED] * len(GEMMA4_TAGS)
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": [*tokens, *ends],
        "tokenizer.ggml.scores": [-1000.0] * n_vocab,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.chat_template": GEMMA4_TEMPLATE,
    }


def vocabulary(n_vocab: int) -> Keys:
    """Return the tokenizer keys: bytes, merged words, fillers, and the special tokens last."""
    tokens = byte_tokens()
    space = tokens[0x20]
    merges = _merges(space)
    tokens += [a + b for a, b in merges]
    n_normal = n_vocab - len(SPECIALS)
    tokens += [f"{space}w{i}" for i in range(n_normal - len(tokens))]
    types = [NORMAL] * n_normal + [kind for _, kind in SPECIALS]
    tokens += [text for text, _ in SPECIALS]
    ids = {text: n_normal + i for i, (text, _) in enumerate(SPECIALS)}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [f"{a} {b}" for a, b in merges],
        "tokenizer.ggml.eos_token_id": ids["<|im_end|>"],
        "tokenizer.ggml.padding_token_id": ids["<|endoftext|>"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
