"""Grammars as masks of tokens: what they allow, when they begin, and what is refused."""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import numpy as np
import pytest
from helpers.tag_tokenizer import TagTokenizer

from moegraph.errors import ConfigError, RequestError
from moegraph.text import grammar as constraint
from moegraph.text.grammar import MAX_GBNF_CHARS, GrammarConstraint, Grammars

VOCABULARY = TagTokenizer()
GRAMMARS = Grammars(VOCABULARY)
END = VOCABULARY.eos
# It has a state for each remainder: llguidance would take minutes and gigabytes.
PRIME = '{"type": "integer", "multipleOf": 99999989}'
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


def begin(kind: str, source: Any = None, **options: Any) -> GrammarConstraint:
    return GrammarConstraint(GRAMMARS.compile(kind, source), **options)


def take(constraint: GrammarConstraint, text: str) -> None:
    """Take the tokens of a text, each of which must be allowed."""
    for token in VOCABULARY.encode(text):
        mask = constraint.allowed()
        assert mask is None or mask[token], (text, VOCABULARY.piece(token))
        constraint.accept(token)


def may_follow(constraint: GrammarConstraint) -> set[str]:
    mask = constraint.allowed()
    assert mask is not None and mask.shape == (VOCABULARY.n_vocab,) and mask.dtype == np.bool_
    return {VOCABULARY.piece(int(i)).decode(errors="replace") for i in np.flatnonzero(mask)}


def drawn(constraint: GrammarConstraint, seed: int, limit: int = 400) -> str:
    """Return a text of tokens drawn at random from those that are allowed."""
    generator, found = random.Random(seed), list[int]()
    for _ in range(limit):
        mask = constraint.allowed()
        assert mask is not None
        ids = [int(i) for i in np.flatnonzero(mask)]
        # what ends strings and objects is likelier, so that the text comes to its end
        ends = [i for i in ids if VOCABULARY.piece(i) in (b'"', b"}", b"]")]
        token = END if END in ids else generator.choice(ends if ends and found[10:] else ids)
        if token == END:
            return VOCABULARY.decode(found)
        constraint.accept(token)
        found.append(token)
    raise AssertionError(f"no end: {VOCABULARY.decode(found)!r}")


class TestKinds:
    @pytest.mark.parametrize(
        ("kind", "source", "text"),
        [
            ("json_object", None, '{"a": [1, true, null], "b": {}}'),
            ("json_schema", SCHEMA, '{"name": "x", "n": -5}'),
            ("json_schema", json.dumps(SCHEMA), '{\n  "name": "x",\n  "n": 7\n}'),
            ("gbnf", 'root ::= ("yes" | "no") [0-9]+ "\\n"', "yes42\n"),
            (
                "gbnf",
                r'root ::= "\x41\u0042\U00000022\\u0043" [\u005d\U0001f600é]+',
                'AB"\\u0043]😀é',
            ),
            ("lark", 'start: "a" B+\nB: /[bc]/', "abcb"),
            ("regex", r"\d{3}-\d{2}", "123-45"),
        ],
    )
    def test_it_allows_what_it_describes_and_then_the_end(
        self, kind: str, source: Any, text: str
    ) -> None:
        constraint = begin(kind, source)
        take(constraint, text)
        assert "<|im_end|>" in may_follow(constraint)
        constraint.accept(END)

    def test_it_allows_nothing_else(self) -> None:
        constraint = begin("json_schema", SCHEMA)
        assert may_follow(constraint) == {"{", '{"', "{\n"}
        take(constraint, '{"name": "12345678')
        assert may_follow(constraint) == {'"'}
        constraint = begin("regex", "ab")
        take(constraint, "ab")
        assert may_follow(constraint) == {"<|im_end|>"}

    @pytest.mark.parametrize("seed", range(20))
    def test_what_is_drawn_is_json_of_the_schema(self, seed: int) -> None:
        found = json.loads(drawn(begin("json_schema", SCHEMA), seed))
        assert set(found) == {"name", "n"} and isinstance(found["n"], int)

    def test_blanks_between_json_tokens_have_an_end(self) -> None:
        constraint = begin("json_object")
        take(constraint, "{\n" + " " * 20)
        assert may_follow(constraint) == {'"', '": ', "}"}


class TestLimits:
    @pytest.mark.parametrize("n_rules", [2, 3])
    def test_a_long_text_without_alternatives_takes_no_longer_than_others(
        self, n_rules: int
    ) -> None:
        rules = [f"{a} ::= {b}{{1000}}" for a, b in zip(("root", "a", "b"), "abc")][:n_rules]
        begin_s = time.process_time()
        found = begin("gbnf", "\n".join([*rules, f'{"abc"[n_rules - 1]} ::= "xy"']))
        take(found, "xy" * 10)
        assert time.process_time() - begin_s < 0.5  # it took seconds for each token

    @pytest.mark.parametrize("is_referred", [False, True])
    def test_long_schemas_without_alternatives_take_no_longer_either(
        self, is_referred: bool
    ) -> None:
        def many(item: object, n: int) -> dict[str, object]:
            return {"type": "array", "items": item, "minItems": n, "maxItems": n}

        schema: dict[str, object] = many(many({"const": "xy"}, 300), 300)
        if is_referred:
            rules = {f"a{i}": many({"$ref": f"#/$defs/a{i + 1}"}, 2) for i in range(16)}
            schema = {"$ref": "#/$defs/a0", "$defs": rules | {"a16": {"const": "xy"}}}
        begin_s = time.process_time()
        found = begin("json_schema", schema)
        take(found, "[[" if is_referred else '[["xy"')
        assert time.process_time() - begin_s < 1.0

    def test_a_grammar_that_takes_too_long_is_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = begin("regex", "a*")
        found.accept(VOCABULARY.encode("a")[0])
        monkeypatch.setattr(constraint, "_MASK_S", 0.0)
        with pytest.raises(RequestError, match="what may come after 1 tokens took 0.* at most 0 s"):
            found.allowed()

    def test_slow_grammars_allow_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        texts = [drawn(begin("json_schema", SCHEMA), seed) for seed in range(3)]
        monkeypatch.setattr(constraint, "_SLOW_S", 0.0)
        assert begin("json_schema", SCHEMA).is_slow
        assert [drawn(begin("json_schema", SCHEMA), seed) for seed in range(3)] == texts
        slow = begin("json_schema", SCHEMA)
        with pytest.raises(RequestError, match="the grammar fails"):
            slow.accept(VOCABULARY.encode("x")[0])


class TestState:
    def test_rolling_back_restores_what_is_allowed(self) -> None:
        constraint = begin("json_schema", SCHEMA)
        text = '{"name": "x", "n": 12}'
        masks = []
        for token in VOCABULARY.encode(text):
            masks.append(may_follow(constraint))
            constraint.accept(token)
        constraint.accept(END)
        constraint.roll_back(1)
        for mask in reversed(masks):
            constraint.roll_back(1)
            assert may_follow(constraint) == mask
        take(constraint, text)

    def test_how_much_of_a_draft_may_follow(self) -> None:
        constraint = begin("json_schema", SCHEMA)
        take(constraint, "{")
        before = may_follow(constraint)
        for text, n in (('"name"', 6), ('"nam"x', 4), ("x", 0), ("", 0)):
            assert constraint.n_accepted(VOCABULARY.encode(text)) == n
            assert may_follow(constraint) == before
        take(constraint, '"name": "x", "n": 1')
        assert constraint.n_accepted([*b"2}", END, END]) == 3

    def test_two_answers_of_one_grammar_are_apart(self) -> None:
        one, other = begin("regex", "ab|cd"), begin("regex", "ab|cd")
        take(one, "a")
        assert may_follow(one) == {"b"} and may_follow(other) == {"a", "c"}

    def test_a_token_that_is_not_allowed_is_an_error(self) -> None:
        with pytest.raises(RequestError, match="the grammar fails"):
            begin("regex", "ab").accept(ord("x"))


class TestAfterReasoning:
    def test_it_begins_behind_the_end_of_reasoning(self) -> None:
        constraint = begin("regex", "ab", after="</think>")
        take(constraint, "any <thing> {")
        assert constraint.allowed() is None
        take(constraint, "</think>")
        assert may_follow(constraint) == {"a", "\n", "\n\n"}
        take(constraint, "\n")
        assert may_follow(constraint) == {"a", "\n"}
        take(constraint, "\nab")
        assert may_follow(constraint) == {"<|im_end|>"}

    def test_an_end_of_several_tokens(self) -> None:
        constraint = begin("regex", "ab", after="</think>")
        for token in b"so</thi":
            constraint.accept(token)
        assert constraint.n_accepted([*b"nk>ax"]) == 4
        for token in b"nk>":
            assert constraint.allowed() is None
            constraint.accept(token)
        assert "a" in may_follow(constraint)

    def test_rolling_back_into_reasoning(self) -> None:
        constraint = begin("regex", "ab", after="</think>")
        tokens = VOCABULARY.encode("hm</think>\n\nab")
        for n in range(1, len(tokens) + 1):
            for token in tokens[:n]:
                constraint.accept(token)
            constraint.roll_back(n)
            assert constraint.allowed() is None
        take(constraint, "hm</think>\nab")

    def test_at_once_behind_a_tag(self) -> None:
        constraint = begin("regex", "ab", after="<tool_call>", blank=False)
        take(constraint, "text<tool_call>")
        assert may_follow(constraint) == {"a"}


class TestRefused:
    @pytest.mark.parametrize(
        ("kind", "source", "says"),
        [
            ("xml", "", "the format 'xml' is not known"),
            ("gbnf", "", "is empty"),
            ("lark", None, "is empty"),
            ("gbnf", "root ::= other", "not valid: .*other"),
            ("gbnf", r'root ::= "\ud800"', "not valid: .*ud800 is no character"),
            ("gbnf", r'root ::= "\U00110000"', "not valid: .*U00110000 is no character"),
            ("gbnf", 'root ::= "' + "x" * MAX_GBNF_CHARS, "characters; at most"),
            ("gbnf", "root ::= " + "(" * 5000, "not valid"),
            ("lark", "start: ((", "not valid"),
            ("lark", "start: " + "(" * 5000, "not valid"),
            ("lark", "start: missing", "not valid: .*missing"),
            ("regex", "(a", "not valid"),
            ("json_schema", {"type": "thing"}, "not valid"),
            ("json_schema", {"unevaluatedProperties": False}, "not valid: .*unevaluated"),
            ("json_schema", '{"a"', "not valid"),
            ("json_schema", "[" * 100_000, "not valid"),
            ("json_schema", {"type": "integer", "multipleOf": 123456789}, "multipleOf"),
            (
                "json_schema",
                {"properties": {f"{i}": {} for i in range(2001)}, "required": [{}]},
                "2001 optional properties, at most 2000 are allowed; name those",
            ),
            ("json_schema", {"type": "number", "multipleOf": 0.0000123457}, "multipleOf"),
            ("json_schema", '{"allOf": [{"multipleOf": 9973}, {"multipleOf": 101}]}', "multipleOf"),
            ("lark", f"%llguidance {{}}\nstart: %json {PRIME}", "multipleOf"),
            ("lark", f"%llguidance {{}}\nstart: x | {{\nx: %json // a\n {PRIME}", "multipleOf"),
            ("lark", 'start: "" %json {"multipl\\u0065Of": 99999989}', "multipleOf"),
            (
                "lark",
                json.dumps({"grammars": [{"name": "a", "lark_grammar": f"start: %json {PRIME}"}]}),
                "multipleOf",
            ),
            ("lark", 'start: "" %json ' + '{"a":' * 1000, "too many braces"),
            ("json_schema", {"x": {1, 2}}, "not JSON serializable"),
            ("json_schema", False, "not valid|nothing"),
        ],
    )
    def test_with_the_reason(self, kind: str, source: Any, says: str) -> None:
        with pytest.raises(RequestError, match=says):
            GRAMMARS.compile(kind, source)

    def test_a_schema_that_is_too_deep(self) -> None:
        schema: dict[str, Any] = {}
        for _ in range(3000):
            schema = {"items": schema}
        with pytest.raises(RequestError, match="not valid"):
            GRAMMARS.compile("json_schema", schema)

    def test_without_the_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "llguidance", None)
        with pytest.raises(ConfigError, match="pip install llguidance"):
            Grammars(VOCABULARY).compile("regex", "a")


def test_braces_in_a_lark_grammar_are_no_schemas() -> None:
    source = '%llguidance {}\nstart: "{x}" "{\\"a\\":" %json {"const": {"b": 1}} /}{2}/'
    take(begin("lark", source), '{x}{"a":{"b":1}}}')


@pytest.mark.parametrize("step", [0.01, 0.25, 1, 7, 60, 1e6])
def test_numbers_may_be_multiples_of_round_ones(step: float) -> None:
    begin("json_schema", {"type": "number", "multipleOf": step})


def test_an_object_may_have_many_optional_properties() -> None:
    properties = {f"p{i}": {"type": "integer"} for i in range(1000)}
    constraint = begin("json_schema", {"type": "object", "properties": properties})
    take(constraint, '{"p3": 1, "p999": 2}')
    assert "<|im_end|>" in may_follow(constraint)


@pytest.mark.parametrize("kind", ["json_schema", "lark"])
def test_a_bound_may_have_a_fraction_of_zero(kind: str) -> None:
    schema = {"type": "array", "items": {"maxLength": 1.0}, "minItems": 1.0, "maxItems": 2.0}
    source = schema if kind == "json_schema" else f"start: %json {json.dumps(schema)}"
    take(begin(kind, source), "[1,2]")
    for text in ("[]", "[1,2,3]", '["ab"]'):
        with pytest.raises(AssertionError):
            take(begin(kind, source), text)


def test_what_of_a_schema_is_passed_over_is_told() -> None:
    schema = {"uniqueItems": True, "not": {}, "items": {"type": "string", "format": "odd"}}
    loose = {**schema, "x-guidance": {"lenient": True}}
    told = ("schema keywords passed over: not, uniqueItems", "schema format passed over: odd")
    assert begin("json_schema", loose).warnings == told
    assert begin("lark", f"start: %json {json.dumps(loose)}").warnings == told
    assert begin("json_schema", {"type": "array"}).warnings == ()
