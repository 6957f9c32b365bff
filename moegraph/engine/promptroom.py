"""Prompts that cannot fit into the context, found out before they are tokenized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import ContextOverflow
from ..modelfile.reader import StringArray
from ..modelfile.vocab import TOKENS
from .sequence import room_after


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
