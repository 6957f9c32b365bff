"""Separate a model's reasoning from its answer in a stream of text."""

from __future__ import annotations

THINK = "<think>"
END_OF_THINK = "</think>"


class ReasoningSplitter:
    """Split a stream at ``<think>`` and ``</think>``; only the start of a tag is held back.

    opened: whether the prompt ends inside a reasoning block, as with Qwen's template.
    """

    def __init__(self, opened: bool = False) -> None:
        self.is_thinking = opened
        self._at_start = not opened
        self._skip_blank = True
        self._held = ""

    @classmethod
    def after(cls, prompt: str) -> ReasoningSplitter:
        """Return a splitter for the text that follows this prompt."""
        return cls(opened=prompt.rstrip().endswith(THINK))

    def push(self, text: str) -> tuple[str, str]:
        """Return (reasoning, answer): the parts that text completes."""
        text, self._held = self._held + text, ""
        if self._at_start:
            text = self._find_start(text)
        if not self.is_thinking:
            return "", self._answer(text)
        reasoning, tag, rest = text.partition(END_OF_THINK)
        if not tag:
            reasoning, self._held = _split_open_tag(text, END_OF_THINK)
            return reasoning, ""
        self.is_thinking, self._skip_blank = False, True
        return reasoning, self._answer(rest)

    def flush(self) -> tuple[str, str]:
        """Return the held-back text as (reasoning, answer); call it at the end of the stream."""
        held, self._held = self._held, ""
        return (held, "") if self.is_thinking else ("", held)

    def _find_start(self, text: str) -> str:
        """Hold text until it is known whether it begins with a tag; return it without one."""
        head = text.lstrip()
        if head.startswith(THINK):
            self.is_thinking, self._at_start = True, False
            return head[len(THINK) :]
        if THINK.startswith(head):
            self._held = text
            return ""
        self._at_start = self._skip_blank = False
        return text

    def _answer(self, text: str) -> str:
        # The blank lines between reasoning and answer belong to neither.
        if self._skip_blank and not self._at_start:
            text = text.lstrip("\n")
            self._skip_blank = not text
        return text


def _split_open_tag(text: str, tag: str) -> tuple[str, str]:
    """Split text before its longest end that may begin the tag."""
    for n in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:n]):
            return text[:-n], text[-n:]
    return text, ""
