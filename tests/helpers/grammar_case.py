"""A model with a chat template, and an answer of it that is begun with a grammar."""

from __future__ import annotations

import json
from typing import Any, cast

import numpy as np

from helpers.tag_tokenizer import TAGS, TagTokenizer
from moegraph.engine.chat import ChatModel, ChatRequest
from moegraph.text.chat.parts import Reply
from moegraph.text.chat.template import ChatTemplate
from moegraph.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "Hi"}
XML = "{{ tools }}<function={% if enable_thinking %}<think>\n{% endif %}"
JSON = "{{ tools }}"


class Case:
    """A model, and an answer that is begun with a grammar."""

    def __init__(self, source: str = XML, tags: tuple[str, ...] = TAGS, **fields: Any) -> None:
        self.vocabulary = TagTokenizer(tags)
        with ChatModel(cast(Tokenizer, self.vocabulary), ChatTemplate(source)) as model:
            self.prepared = model.prepare(ChatRequest(messages=[USER], **fields))
        assert self.prepared.request.constraint is not None
        self.constraint = self.prepared.request.constraint

    def allows(self, text: str) -> bool:
        """Return whether a text may follow, and then the end."""
        ids = [*self.vocabulary.encode(text), self.vocabulary.eos]
        return self.constraint.n_accepted(ids) == len(ids)

    def next(self, text: str) -> set[str]:
        """Return what may follow a text."""
        ids = self.vocabulary.encode(text)
        assert self.constraint.n_accepted(ids) == len(ids), text
        for token in ids:
            self.constraint.accept(token)
        mask = self.constraint.allowed()
        assert mask is not None
        self.constraint.roll_back(len(ids))
        return {self.vocabulary.decode([int(i)]) for i in np.flatnonzero(mask)}

    def calls(self, text: str) -> list[tuple[str, Any]]:
        found = Reply()
        found.add(self.prepared.parser.push(text) + self.prepared.parser.flush())
        return [(one.name, json.loads(one.arguments)) for one in found.calls]
