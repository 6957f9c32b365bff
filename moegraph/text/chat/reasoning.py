"""Separate a model's reasoning from its answer in a stream of text."""

from __future__ import annotations

THINK = "<think>"
END_OF_THINK = "</think>"


class ReasoningSplitter:
    """Split a stream at ``<think>`` and ``</think>``; only the start of a tag is held back.

    A tag that is repeated where reasoning begins is dropped, and an answer that begins with one is
    more reasoning. opened: whether the prompt ends inside a reasoning block, as with Qwen's
    template.
    """

    def __init__(self, opened: bool = False) -> None:
        self.is_thinking = opened
        self._at_start = True
        self._skip_blank = False
        self._held = ""

    @classmethod
    def after(cls, prompt: str) -> ReasoningSplitter:
        """Return a splitter for the text that follows this prompt."""
        return cls(opened=prompt.rstrip().endswith(THINK))

    def push(self, text: str) -> tuple[str, str]:
        """Return (reasoning, answer): the parts that text completes."""
        text, self._held = self._held + text, ""
        reasoning = ""
        while text:
            text = self._find_start(text) if self._at_start else text
            if not self.is_thinking:
                return reasoning, self._answer(text)
            before, tag, after = text.partition(END_OF_THINK)
            if not tag:
                if not self._at_start:
                    before, self._held = _split_open_tag(text, END_OF_THINK)
                return reasoning + before, ""
            reasoning, text = reasoning + before, after
            self.is_thinking, self._at_start, self._skip_blank = False, True, True
        return reasoning, ""

    def flush(self) -> tuple[str, str]:
        """Return the held-back text as (reasoning, answer); call it at the end of the stream."""
        held, self._held = self._held, ""
        return (held, "") if self.is_thinking else ("", self._answer(held))

    def _find_start(self, text: str) -> str:
        """Hold text until it is known whether it begins with a tag; return it without tags."""
        while (head := text.lstrip()).startswith(THINK):
            self.is_thinking, text = True, head[len(THINK) :]
        if THINK.startswith(head):
            self._held = text
            return ""
        self._at_start = False
        return text

    def _answer(self, text: str) -> str:
        # The blank lines between reasoning and answer belong to neither.
        if self._skip_blank:
            text = text.lstrip("\n")
            self._skip_blank = not text
        return text


def _split_open_tag(text: str, tag: str) -> tuple[str, str]:
    """Split text before its longest end that may begin the tag."""
    for n in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:n]):
            return text[:-n], text[-n:]
    return text, ""
