"""What bodies of requests have in common: limits, fields, and how objects in them are read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from ..engine.chat import Format, thinking_variables
from ..sampling import RANDOM_SEED, SamplingParams, settings
from ..units import KiB, MiB
from .errors import ApiError, from_validation


@dataclass(frozen=True)
class Limits:
    """Upper bounds of a request; beyond them it is refused with status 400, or 413 for its body.

    body_bytes: of a body. held_bytes: of the bodies of all requests that are being served; then
    503. commas: in a body, which bound its values, as many small ones take 30 times the memory of
    their text. messages, tools, stops: how many. stop_chars: of a stop string. grammar_bytes: of a
    grammar, or of a schema as JSON. depth: of nested objects in schemas and in tools. choices: n.
    prompts: of one text completion. top_logprobs: per token. body_s: how long a body may take to
    arrive.
    """

    body_bytes: int = 64 * MiB
    held_bytes: int = 512 * MiB
    commas: int = 1 << 20
    messages: int = 10_000
    tools: int = 1024
    stops: int = 64
    stop_chars: int = 1024
    grammar_bytes: int = 256 * KiB
    depth: int = 64
    choices: int = 16
    prompts: int = 16
    top_logprobs: int = 20
    body_s: float = 60.0


LIMITS = Limits()


def json_depth(value: object) -> int:
    """Return how deep the objects and lists of a JSON value are nested; a number has depth 0."""
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return 1 + max(map(json_depth, inner), default=0)


_SETTINGS = {s.name: s for s in settings()}
# The seeds that OpenAI's clients send have 64 bits.
_MAX_SEED = 1 << 63
# More than any context holds.
MAX_TOKENS = 1 << 31
# Variables of templates that belong to the conversation and not to the client.
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")


class Body(BaseModel):
    """A JSON object of a client: types are not converted, unknown fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())


def wrong(message: str) -> PydanticCustomError:
    """Return the error of a field whose value is refused; braces must not come from a client."""
    return PydanticCustomError("refused", message)


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


_Stop = Annotated[str, Field(min_length=1, max_length=LIMITS.stop_chars)]
_StopList = Annotated[list[_Stop], Field(max_length=LIMITS.stops)]
Stops = Annotated[
    _StopList | None, BeforeValidator(_listed, json_schema_input_type=_Stop | _StopList | None)
]


def _biases(value: object) -> object:
    """Return {token or text: number} from OpenAI's object, or from llama-server's pairs."""
    if value is None:
        return None
    if isinstance(value, dict):
        pairs: list[Any] = list(value.items())
    elif isinstance(value, list):
        pairs = value
    else:
        raise wrong("expected an object of tokens and numbers, or a list of pairs")
    if len(pairs) > _MAX_BIASES:
        raise wrong(f"at most {_MAX_BIASES} tokens can have a bias")
    return [_bias(pair) for pair in pairs]


_MAX_BIASES = 4096
_MAX_BIAS = 1e6


def _bias(pair: Any) -> tuple[int | str, float]:
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        raise wrong("expected pairs of a token and a number")
    token, bias = pair
    if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 10:
        token = int(token)
    if isinstance(token, bool) or not isinstance(token, int | str) or token == "":
        raise wrong("a token is its number or its text")
    if bias is False:
        return token, float("-inf")
    if isinstance(bias, bool) or not isinstance(bias, int | float) or abs(bias) > _MAX_BIAS:
        raise wrong(f"a bias is false, or a number from {-_MAX_BIAS:.0f} to {_MAX_BIAS:.0f}")
    return token, float(bias)


_Pairs = Annotated[list[tuple[int | str, float | bool]], Field(max_length=_MAX_BIASES)]
Biases = Annotated[
    list[tuple[int | str, float]] | None,
    BeforeValidator(_biases, json_schema_input_type=dict[str, float | bool] | _Pairs | None),
]


def _limited(name: str, *aliases: str) -> Any:
    names = AliasChoices(name, *aliases) if aliases else None
    low, high = _SETTINGS[name].minimum, _SETTINGS[name].maximum
    return Field(default=None, ge=low, le=high, validation_alias=names)


def _absent(value: float | None) -> float | None:
    if value and value > 0:
        raise wrong("this sampler is absent; only 0 is taken")
    return value


def _negative(value: float | None) -> float | None:
    if value is not None and value >= 0:
        raise wrong("this sampler is absent; only numbers below 0 are taken")
    return value


_Absent = Annotated[float | None, AfterValidator(_absent)]


class Sampled(Body):
    """Fields that say how tokens are drawn; None leaves what the server was started with."""

    temperature: float | None = _limited("temperature")
    top_k: int | None = _limited("top_k")
    top_p: float | None = _limited("top_p")
    min_p: float | None = _limited("min_p")
    typical_p: float | None = _limited("typical_p")
    repeat_penalty: float | None = _limited("repeat_penalty", "repetition_penalty")
    repeat_last_n: int | None = _limited("repeat_last_n")
    presence_penalty: float | None = _limited("presence_penalty")
    frequency_penalty: float | None = _limited("frequency_penalty")
    adaptive_target: Annotated[float | None, AfterValidator(_negative)] = None
    dry_multiplier: _Absent = None
    dynatemp_range: _Absent = None
    mirostat: _Absent = None
    top_n_sigma: _Absent = None
    xtc_probability: _Absent = None
    seed: int | None = Field(default=None, ge=-_MAX_SEED, le=_MAX_SEED)
    logit_bias: Biases = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    n_keep: int | None = Field(
        default=None, ge=-1, le=MAX_TOKENS, validation_alias=AliasChoices("n_keep", "num_keep")
    )
    stop: Stops = None

    def drawn(self, defaults: Defaults) -> dict[str, Any]:
        """Return what `DrawSettings` takes of these fields.

        `logit_bias` is not among them yet: tokens that are given as texts must be looked up.
        """
        given = {one: getattr(self, one) for one in _SETTINGS}
        given["seed"] = None if self.seed is None else folded_seed(self.seed)
        given = {one: value for one, value in given.items() if value is not None}
        return {
            "sampling": replace(defaults.sampling, **given),
            "stop": tuple(self.stop or ()),
            "ignore_eos": defaults.ignore_eos if self.ignore_eos is None else self.ignore_eos,
            "reuse": self.cache_prompt is not False,
            "deadline_s": defaults.deadline_s,
            "n_keep": self.n_keep,
        }


class Asking(Sampled):
    """Fields of every body that asks for an answer: which model, and whether as a stream."""

    model: str | None = None
    stream: bool | None = None


def folded_seed(seed: int) -> int:
    """Return a seed that the sampler takes: -1 is random, and others are cut to 32 bits."""
    return -1 if seed in (-1, RANDOM_SEED) else seed % RANDOM_SEED


@dataclass(kw_only=True)
class Defaults:
    """What a request gets where it says nothing.

    max_tokens: of an answer; None: until the context is full. deadline_s: of every request; None:
    none. variables: of the chat template.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    deadline_s: float | None = None
    ignore_eos: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)

    def with_effort(
        self, effort: str | None, given: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the variables of a chat template, with those for a reasoning effort.

        effort: OpenAI's word, from none to max; None leaves the template's own default. given:
        chat_template_kwargs, which have the last word.
        """
        given = given or {}
        for name in given:
            if name in _RESERVED or not name.isidentifier():
                refuse(f"chat_template_kwargs.{name[:80]}", "a request may not set this variable")
        thinks = given.get("enable_thinking", True)
        if not isinstance(thinks, bool):  # any text would be true to a template
            refuse("chat_template_kwargs.enable_thinking", f"{thinks!r:.80} is not true or false")
        return {**self.variables, **thinking_variables(effort), **given}


class StreamOptions(Body):
    """What a stream holds besides the answer."""

    include_usage: bool | None = None


# A grammar that begins so is in Lark's syntax, as in llama-server; otherwise it is GBNF.
_LARK = "%llguidance"


def bounded(value: dict[str, Any]) -> dict[str, Any]:
    """Return a schema if it is small and flat enough."""
    if json_depth(value) > LIMITS.depth:
        raise wrong(f"it is nested more than {LIMITS.depth} deep")
    if len(json.dumps(value)) > LIMITS.grammar_bytes:
        raise wrong(f"it is larger than {LIMITS.grammar_bytes} bytes")
    return value


Schema = Annotated[dict[str, Any], AfterValidator(bounded)]
Grammar = Annotated[str, Field(max_length=LIMITS.grammar_bytes)]


def schema_format(schema: dict[str, Any], is_strict: bool) -> Format:
    """Return the form of a schema.

    Keywords that no grammar can hold an answer to are an error if it is strict, as with OpenAI;
    otherwise they are passed over, as llama-server does.
    """
    loose = {} if is_strict else {"x-guidance": {"lenient": True}}
    return Format("json_schema", {**loose, **schema})


class NamedSchema(Body):
    """OpenAI's wrapper of a JSON schema."""

    name: str | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's response_format; llama-server also takes the schema without its wrapper."""

    type: str
    json_schema: NamedSchema | None = None
    schema_: Schema | None = Field(default=None, alias="schema")

    def format(self) -> Format | None:
        """Return the format; None if every text fits."""
        if self.type == "text":
            return None
        if self.type not in ("json_object", "json_schema"):
            refuse("response_format.type", "it is not text, json_object or json_schema")
        schema, is_strict = self.schema_, False
        if self.json_schema is not None and self.json_schema.schema_ is not None:
            schema, is_strict = self.json_schema.schema_, self.json_schema.strict is True
        if schema is not None:
            return schema_format(schema, is_strict)
        if self.type == "json_object":
            return Format("json_object")
        refuse("response_format.json_schema.schema", "this field is required")


class CompletionBody(Asking):
    """What the bodies of OpenAI's two kinds of completions have in common."""

    n: int | None = Field(
        default=None, ge=1, le=LIMITS.choices, validation_alias=AliasChoices("n", "n_cmpl")
    )
    max_tokens: int | None = Field(default=None, ge=-1, le=MAX_TOKENS)
    n_predict: int | None = Field(default=None, ge=-1, le=MAX_TOKENS)
    echo: bool | None = None
    response_format: ResponseFormat | None = None
    json_schema: Schema | None = None
    grammar: Grammar | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None

    @property
    def n_choices(self) -> int:
        """Return how many answers are wanted for each prompt."""
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """Return whether a stream ends with what the answer has cost."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def limit(self, default: int | None, *first: int | None) -> int | None:
        """Return the most tokens of an answer; None: until the context is full.

        first: what counts more than the other fields.
        """
        given = (*first, self.max_tokens, self.n_predict)
        asked = next((n for n in given if n is not None), None)
        return default if asked is None else None if asked < 0 else asked

    def format(self) -> Format | None:
        """Return the format that the request asks for."""
        found = [] if self.response_format is None else [self.response_format.format()]
        if self.json_schema is not None:
            found.append(schema_format(self.json_schema, is_strict=False))
        if self.grammar:
            kind = "lark" if self.grammar.lstrip().startswith(_LARK) else "gbnf"
            found.append(Format(kind, self.grammar))
        formats = [one for one in found if one is not None]
        if len(formats) > 1:
            refuse("grammar", "response_format, json_schema and grammar exclude one another")
        return formats[0] if formats else None


Object = dict[str, Any]


def _text_or_objects(value: object) -> object:
    """Check by hand: for a union, pydantic would name its members as if they were fields."""
    if isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(part, dict) for part in value)
    ):
        return value
    raise wrong("expected a text, or a list of objects")


Texts = str | list[Object]


def contents(form: Any) -> PlainValidator:
    """Return what checks `Texts`; form: what they are, for the OpenAPI document."""
    return PlainValidator(_text_or_objects, json_schema_input_type=form)


def seen_as(form: Any) -> BeforeValidator:
    """Return what tells the OpenAPI document the form of an object that `read` checks."""
    return BeforeValidator(lambda value: value, json_schema_input_type=form)


def kind_of(value: Mapping[str, Any]) -> str:
    """Return the type that an object says it has; "" if that is no word."""
    kind = value.get("type")
    return kind if isinstance(kind, str) else ""


def text_parts(texts: Sequence[str | Object]) -> Texts:
    """Return texts and pictures as the content of a message whose parts the template joins."""
    if len(texts) == 1 and isinstance(texts[0], str):
        return texts[0]
    return [{"type": "text", "text": one} if isinstance(one, str) else one for one in texts]


def picture_part(url: object) -> Object:
    """Return the part of a message that is the picture at an address."""
    return {"type": "image_url", "image_url": {"url": url}}


T = TypeVar("T", bound=Body)


def read(model: type[T], value: Any, where: str) -> T:
    """Return an object that lies at this place of a body."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        inner = from_validation(error)
        if inner.param is None:
            refuse(where, inner.message)
        raise ApiError(
            400, f"{where}.{inner.message}", param=f"{where}.{inner.param}", code=inner.code
        ) from None


def refuse(param: str, message: str) -> NoReturn:
    """Refuse a field."""
    raise ApiError(400, f"{param}: {message}", param=param, code="invalid_value")
