"""Prompts that cannot fit into the context, found out before they are tokenized."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import ContextOverflow
from ..gguf.reader import StringArray
from ..gguf.vocab import TOKENS
from ..loop.sequence import room_after

# Characters that a token has at most in usual text, several times over.
_CHARS_PER_TOKEN = 8


@dataclass(frozen=True)
class PromptRoom:
    """How much a prompt may have.

    A word of a megabyte costs the tokenizer a second and a hundred megabytes. No such text fits
    into a small context, as no token is longer than n_longest bytes.
    """

    n_ctx: int
    n_longest: int

    @classmethod
    def of(cls, kv: Mapping[str, object], n_ctx: int) -> PromptRoom | None:
        """Return the room for prompts of a model file, or None if the file has no tokens."""
        tokens = kv.get(TOKENS)
        return cls(n_ctx, tokens.n_longest) if isinstance(tokens, StringArray) else None

    def require(self, prompt: str | Sequence[int]) -> None:
        """Check a text, as far as its length tells, or token ids.

        Raises:
            ContextOverflow: the context cannot hold them.
        """
        if not isinstance(prompt, str):
            if prompt:
                room_after(len(prompt), self.n_ctx)
        elif len(prompt) > self.n_ctx * self.n_longest:
            raise ContextOverflow(
                f"the prompt has {len(prompt)} characters, the context holds {self.n_ctx} tokens "
                f"of at most {self.n_longest}; shorten the prompt or raise -c/--ctx-size",
                -(-len(prompt) // self.n_longest), self.n_ctx,
            )  # fmt: skip

    def require_beginning(self, prompt: str, encode: Callable[[str], list[int]]) -> None:
        """Check a text, and its beginning if it is much longer than usual texts that fit.

        Raises:
            ContextOverflow: the context cannot hold even that.
        """
        self.require(prompt)
        n_chars = self.n_ctx * _CHARS_PER_TOKEN
        if len(prompt) <= n_chars:
            return
        # the last tokens may be others in the whole text
        n_tokens = len(encode(prompt[:n_chars])) - self.n_longest
        if n_tokens > self.n_ctx:
            raise ContextOverflow(
                f"the prompt has {len(prompt)} characters, of which the first {n_chars} have at "
                f"least {n_tokens} tokens; the context holds {self.n_ctx}; shorten the prompt or "
                "raise -c/--ctx-size", n_tokens, self.n_ctx,
            )  # fmt: skip
