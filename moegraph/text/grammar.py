"""Grammars compiled for a model's vocabulary, through llguidance, and their state in an answer."""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from functools import cache
from itertools import takewhile
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ConfigError, RequestError
from ..sampling import BoolArray
from .recent import Recent

if TYPE_CHECKING:
    import llguidance

    from .tokenizer import Tokenizer

KINDS = ("json_object", "json_schema", "gbnf", "lark", "regex")
CALLS = "calls"  # Lark that `CallGrammar` has written
MAX_GRAMMAR_CHARS = 512 * 1024  # also of the tools that must be called
MAX_GBNF_CHARS = 32 * 1024  # its converter is slow
# Characters of the grammars that are kept compiled, which take about 40 bytes for each; a small
# grammar counts as so many.
_CACHED_CHARS, _LEAST_CHARS = 2 * 1024 * 1024, 32 * 1024
# Between tokens of JSON, as llama.cpp's grammars have it; without a limit, a model may write
# nothing else for ever.
_SPACE = r"[ ]?|\n{1,2}[ \t]{0,20}"
# A state of the lexer has one or two kilobytes.
_MAX_LEXER_STATES = 20_000
# llguidance makes a state for each remainder, without a limit of its own.
_MAX_REMAINDERS = 20_000
# Each optional property of an object is several items of a parser's row, and compiling takes time
# that grows with their square: 3 s for this limit.
_MAX_OPTIONAL, _ITEMS_PER_ROW = 2_000, 40_000
# Grammars of which the first uses the others, in llguidance's own form.
_SEVERAL = '{"grammars":'
_JSON = json.JSONDecoder(parse_float=Decimal)
_OBJECT, _MAX_OTHERS = re.compile(r'\{(?=\s*["}])'), 256
# A backslash and what it stands before; llguidance knows neither \u nor \U of GBNF.
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
# A bound that is written as a number with a fraction of zero; llguidance takes only 2, not 2.0.
_BOUND = re.compile(r'("(?:min|max)(?:Items|Length|Properties)"\s*:\s*\d+)\.0+(?=[\s,}])')
# Where a text can go on in one way only, llguidance has it written in the tokens that the
# vocabulary makes of it. So it is in training, and in a later prompt, which then goes on from it.
# llguidance finds that text byte by byte and without a limit, at each token: gigabytes for a{1000}
# of b{1000} of c{1000}. So only where it must be short, see `_is_short`.
_UNFORCED = '%llguidance {"no_forcing": true}\n'
_LEAST = re.compile(r'\{(\d+)|"min(?:Items|Length|Properties|Contains)"\s*:\s*(\d+)')
_MOST_FORCED = 1 << 20
_SCHEMA = ',"json_schema":'
# llguidance's mark of a token that no text can be.
_SPECIAL = b"\xff"


@dataclass(frozen=True)
class Compiled:
    """A grammar ready for use: its matcher is copied for each answer.

    pieces: the bytes of each token. eog_ids: those that end an answer. blank_ids: line ends.
    warnings: what of its schemas is passed over, for clients.
    """

    matcher: llguidance.LLMatcher
    pieces: Sequence[bytes]
    eog_ids: frozenset[int]
    blank_ids: Sequence[int]
    warnings: tuple[str, ...] = ()


class Grammars:
    """Compiles grammars for one vocabulary; any thread may call it.

    The vocabulary is read at the first use, which takes a second or two.
    """

    def __init__(self, vocabulary: Tokenizer) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._tokens: _Tokens | None = None
        self._compiled = Recent[tuple[str, str], Compiled](_CACHED_CHARS)

    def compile(self, kind: str, source: Any, frame: str = "") -> Compiled:
        """Return a grammar, compiled.

        kind: one of KINDS, or CALLS. source: a JSON schema, or the grammar's text; see `Format`.
        frame: Lark of which the grammar is the part ``@answer``.
        """
        text = _source_text(kind, source)
        tokens = self._read()
        key = (kind, f"{frame}\0{text}")
        if (found := self._compiled.get(key)) is None:
            found = tokens.compile(kind, text, frame)
            self._compiled.put(key, found, max(len(key[1]), _LEAST_CHARS))
        return found

    def _read(self) -> _Tokens:
        with self._lock:
            if self._tokens is None:
                self._tokens = _Tokens(self._vocabulary, _load_llguidance())
            return self._tokens


class _Tokens:
    """A vocabulary as llguidance has it."""

    def __init__(self, vocabulary: Tokenizer, library: ModuleType) -> None:
        ids = range(vocabulary.n_vocab)
        self._library = library
        self._pieces = [vocabulary.piece(token, special=True) for token in ids]
        self._eog_ids = vocabulary.eog_ids
        self._blank_ids = [i for i, p in enumerate(self._pieces) if p and not p.strip(b"\n")]
        marked = [
            _SPECIAL + piece if vocabulary.is_special(token) else piece
            for token, piece in zip(ids, self._pieces)
        ]
        ends = sorted(self._eog_ids)
        if not ends:
            raise RequestError("a grammar needs a token that ends the answer; the model has none")
        wrapper = library.TokenizerWrapper(_Words(vocabulary, marked, ends[0]))
        self._tokenizer = library.LLTokenizer(wrapper, eos_token=ends)
        self._limits = library.LLParserLimits(
            max_items_in_row=_ITEMS_PER_ROW,
            max_lexer_states=_MAX_LEXER_STATES,
            verbose_errors=False,
        )

    def compile(self, kind: str, text: str, frame: str = "") -> Compiled:
        try:
            grammar = self._grammar(kind, text)
            if frame:
                if not grammar.startswith(_SEVERAL):
                    grammar = json.dumps({"grammars": [{"lark_grammar": grammar}]})
                inner = json.loads(grammar)["grammars"]
                text = inner[0]["lark_grammar"].removeprefix(_UNFORCED)
                inner[0] = {"name": "answer", "lark_grammar": text}
                outer = {"name": "frame", "lark_grammar": _UNFORCED + frame}
                grammar = json.dumps({"grammars": [outer, *inner]})
        except ValueError as error:
            raise RequestError(f"the grammar ({kind}) is not valid: {_reason(error)}") from error
        matcher = self._library.LLMatcher(
            self._tokenizer, grammar, log_level=0, limits=self._limits
        )
        # the first mask is the slowest, and finds what was not found before
        bits = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            reason = _reason(matcher.get_error())
            raise RequestError(f"the grammar ({kind}) is not valid: {reason}")
        if not any(bits):
            raise RequestError(f"the grammar ({kind}) allows nothing")
        warnings = tuple(map(_told, matcher.get_grammar_warnings()))
        return Compiled(matcher, self._pieces, self._eog_ids, self._blank_ids, warnings)

    def _grammar(self, kind: str, text: str) -> str:
        if kind in ("json_schema", "lark", CALLS):
            text = _BOUND.sub(r"\1", text)
        if kind in ("json_object", "json_schema"):
            try:
                schema = _JSON.decode(text)
            except RecursionError:
                raise ValueError("it is nested too deep") from None
            _check_states(schema)
            found = self._library.LLMatcher.grammar_from_json_schema(
                text, defaults={"whitespace_pattern": _SPACE}
            )
            begin = found.index(_SCHEMA) + len(_SCHEMA)
            _, end = _JSON.raw_decode(found, begin)
            return f"{'' if _is_short(text) else _UNFORCED}start: %json {found[begin:end]}"
        if kind in ("lark", CALLS):
            _check_lark(text)
            if kind == CALLS and _is_short(text):
                return text
            if text.startswith(_SEVERAL):
                several = json.loads(text)
                first = several["grammars"][0]
                first["lark_grammar"] = _UNFORCED + first["lark_grammar"]
                return json.dumps(several)
        elif kind == "gbnf":
            text = str(self._library.grammar_from(kind, _ESCAPE.sub(_unescaped, text)))
        else:
            text = f"start: /{self._library.regex_to_lark(text)}/"
        return _UNFORCED + text


class _Words:
    """The vocabulary in the form that llguidance asks for."""

    def __init__(self, vocabulary: Tokenizer, tokens: list[bytes], end: int) -> None:
        self.tokens, self.eos_token_id, self.bos_token_id = tokens, end, None
        self._vocabulary = vocabulary

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return self._vocabulary.encode(text, add_special=False, parse_special=False)


def _is_short(text: str) -> bool:
    """Return whether what schemas, and rules of ours around them, force is no long text.

    It is at most as long as they are, as often as they ask for, unless they refer to each other.
    """
    if text.startswith(_SEVERAL) or 'Ref"' in text or '"$ref"' in text or len(text) > _MOST_FORCED:
        return False
    most = len(text)
    for counts in _LEAST.findall(text):
        count = counts[0] or counts[1]
        most *= max(1, int(count)) if len(count) < 9 else _MOST_FORCED
        if most > _MOST_FORCED:
            return False
    return True


def _source_text(kind: str, source: Any) -> str:
    if kind not in (*KINDS, CALLS):
        raise RequestError(f"the format {kind!r} is not known; allowed: {', '.join(KINDS)}")
    if kind == "json_object":
        return '{"type":"object"}'
    if kind == "json_schema" and not isinstance(source, str):
        try:
            source = json.dumps(source, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"the JSON schema is not valid: {_reason(error)}") from error
    if not isinstance(source, str) or not source.strip():
        raise RequestError(f"the grammar ({kind}) is empty")
    limit = MAX_GBNF_CHARS if kind == "gbnf" else MAX_GRAMMAR_CHARS
    if len(source) > limit:
        raise RequestError(
            f"the grammar ({kind}) has {len(source)} characters; at most {limit} are allowed"
        )
    return source


def _unescaped(found: re.Match[str]) -> str:
    """Return the character of a number; what is no number stays as it is."""
    digits = found[1] or found[2]
    if not digits:
        return found[0]
    number = int(digits, 16)
    if number < 0x80:
        return f"\\x{number:02x}"  # it may be a quote or a bracket
    try:
        return chr(number).encode().decode()
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{found[0]} is no character") from error


def _check_lark(text: str) -> None:
    """Refuse a Lark grammar, or several of them, for a schema in it that needs too many states.

    A schema follows the word %json. So every object after it is taken for one.
    """
    texts, n_others = [text], 0
    if text.startswith(_SEVERAL):
        texts = [str(one.get("lark_grammar")) for one in json.loads(text)["grammars"]]
    for one in texts:
        at = one.find("%json")
        while at >= 0 and (found := _OBJECT.search(one, at)):
            try:
                schema, at = _JSON.raw_decode(one, found.start())
            except (ValueError, RecursionError):  # it is no JSON, or llguidance refuses it
                at, n_others = found.end(), n_others + 1
                if n_others > _MAX_OTHERS:
                    raise ValueError("it has too many braces that begin no JSON") from None
            else:
                _check_states(schema)


def _check_states(schema: object) -> None:
    """Refuse a JSON schema, parsed, that needs too many states."""
    common, left = 1, [schema]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            common = math.lcm(common, _digits(value.get("multipleOf")))
            _check_properties(value)
            left += value.values()
        elif isinstance(value, list):
            left += value
        if common > _MAX_REMAINDERS:
            raise ValueError("its multipleOf need too many states; use a rounder number")


def _check_properties(schema: dict[str, Any]) -> None:
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict):
        named = required if isinstance(required, list) else ()
        n = len(properties.keys() - {one for one in named if isinstance(one, str)})
        if n > _MAX_OPTIONAL:
            raise ValueError(
                f"an object has {n} optional properties, at most {_MAX_OPTIONAL} are allowed; "
                "name those that are always there in `required`, or divide the object"
            )


def _digits(number: object) -> int:
    """Return the digits of a number without its powers of ten, such as 25 for 0.25; or 1."""
    if isinstance(number, bool) or not isinstance(number, int | Decimal):
        return 1
    return int("".join(map(str, Decimal(number).as_tuple().digits)).strip("0") or 1)


def _reason(error: object) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__


def _told(warning: str) -> str:
    """Return a warning of llguidance in the words of our pages."""
    for theirs, ours in (("Unimplemented keys: ", "keywords"), ("Unknown format: ", "format")):
        warning = warning.replace(theirs, f"schema {ours} passed over: ")
    return warning.replace('["', "").replace('"]', "").replace('", "', ", ")


def _load_llguidance() -> ModuleType:
    try:
        import llguidance
    except ImportError as error:
        raise ConfigError(
            f"grammars, JSON schemas and strict tools need llguidance: pip install llguidance "
            f"({error})"
        ) from error
    return llguidance


# Line ends between the reasoning and what follows the grammar.
_MAX_BLANK = 2
# Seconds of a CPU that a mask may take; most take less than a thousandth of that.
_MASK_S = 0.5
# After a slower one, a grammar drafts nothing, and takes its token in a way that lets other threads
# of Python go on.
_SLOW_S = 0.005


class _Phase(Enum):
    FREE = "before the text that the grammar comes after"
    BLANK = "after it, where line ends may come first"
    GRAMMAR = "within the grammar"


class GrammarConstraint:
    """A grammar's state in one answer; a `Constraint` of requests.

    after: the text that the grammar comes after, such as ``</think>``; None: it is for the whole
    answer. blank: whether line ends may come between that text and the grammar's.
    warnings: as in `Compiled`.
    """

    def __init__(self, compiled: Compiled, after: str | None = None, blank: bool = True) -> None:
        self.warnings = compiled.warnings
        self._matcher = compiled.matcher.deep_copy()
        self._pieces, self._eog_ids = compiled.pieces, compiled.eog_ids
        self._blank_ids = compiled.blank_ids
        self._after = after.encode() if after else b""
        self._then = _Phase.BLANK if blank else _Phase.GRAMMAR
        self._phase = _Phase.FREE if after else _Phase.GRAMMAR
        self._tokens: list[int] = []
        self._phases: list[_Phase] = []  # before each token
        self._mask: BoolArray | None = None
        self.is_slow = False
        self.allowed()  # on the thread that prepares, so that the first token finds it

    def allowed(self) -> BoolArray | None:
        """Return which tokens may come next, bool numpy [n_vocab]; None: any."""
        if self._phase is _Phase.FREE:
            return None
        if self._mask is None:
            began = time.thread_time()
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            n_vocab = len(self._pieces)
            self._mask = np.unpackbits(bits, count=n_vocab, bitorder="little").view(np.bool_)
            self._check()
            took_s = time.thread_time() - began
            self.is_slow = took_s > _SLOW_S
            if took_s > _MASK_S:
                raise RequestError(
                    f"the grammar is too complex: finding out what may come after "
                    f"{len(self._tokens)} tokens took {took_s:.2f} s, at most {_MASK_S:g} s are "
                    "allowed; make it less ambiguous"
                )
            if self._phase is _Phase.BLANK:
                n_left = _MAX_BLANK - self._n_blank()
                self._mask[[i for i in self._blank_ids if len(self._pieces[i]) <= n_left]] = True
        return self._mask

    def accept(self, token: int) -> None:
        """Take the next token of the answer."""
        self._phases.append(self._phase)
        self._tokens.append(token)
        self._mask = None
        if self._phase is _Phase.FREE:
            if self._after in self._tail():
                self._phase = self._then
        elif self._phase is not _Phase.BLANK or not self._is_blank(token):
            self._phase = _Phase.GRAMMAR
            if token not in self._eog_ids:
                if self.is_slow:
                    _executor().consume_token_par([(self._matcher, token)])
                else:
                    self._matcher.consume_token(token)
                self._check()

    def roll_back(self, n: int) -> None:
        """Forget the last n tokens."""
        n_matched = 0
        for _ in range(n):
            token, before = self._tokens.pop(), self._phases.pop()
            is_in = self._phase is _Phase.GRAMMAR and before is not _Phase.FREE
            n_matched += is_in and token not in self._eog_ids
            self._phase = before
        if n_matched:
            self._matcher.rollback(n_matched)
        self._mask = None

    def n_accepted(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens may follow one another; none of them is taken."""
        n = 0
        if self._phase is _Phase.GRAMMAR:
            # without masks, as far as that tells
            plain = [*takewhile(lambda token: token not in self._eog_ids, tokens)]
            n = self._matcher.validate_tokens(plain)
            if n < len(plain) or n == len(tokens):
                return n
            n = 0
        for token in tokens:
            mask = self.allowed()
            if mask is not None and not mask[token]:
                break
            self.accept(token)
            n += 1
            if token in self._eog_ids:
                break
        self.roll_back(n)
        return n

    def _tail(self) -> bytes:
        """Return the end of the answer, as far as its last token may complete a text in it."""
        tail = self._pieces[self._tokens[-1]]
        n_wanted = len(tail) + len(self._after) - 1
        for token in reversed(self._tokens[:-1]):
            if len(tail) >= n_wanted:
                break
            tail = self._pieces[token] + tail
        return tail

    def _n_blank(self) -> int:
        n = 0
        for token, phase in zip(reversed(self._tokens), reversed(self._phases)):
            if phase is not _Phase.BLANK:
                break
            n += len(self._pieces[token])
        return n

    def _is_blank(self, token: int) -> bool:
        piece = self._pieces[token]
        n = self._n_blank()  # with this token, which is already one of ours
        return bool(piece) and not piece.strip(b"\n") and n <= _MAX_BLANK

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().strip().partition("\n")[0]
            raise RequestError(f"the grammar fails: {reason}")


@cache
def _executor() -> Any:
    """Return threads of llguidance, which need no turn of Python's."""
    import llguidance

    return llguidance.LLExecutor(num_threads=2)
