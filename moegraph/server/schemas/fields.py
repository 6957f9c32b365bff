"""Fields that requests of several interfaces have: sampling, stops, formats of answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Protocol

from pydantic import AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from ...sampling import RANDOM_SEED, SamplingParams, settings
from ..limits import LIMITS

_SETTINGS = {s.name: s for s in settings()}
# The seeds that OpenAI's clients send have 64 bits.
_MAX_SEED = 1 << 63
# More than any context holds.
MAX_TOKENS = 1 << 31


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
    seed: int | None = Field(default=None, ge=-_MAX_SEED, le=_MAX_SEED)
    logit_bias: Biases = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    stop: Stops = None

    def sampling(self, defaults: SamplingParams) -> SamplingParams:
        """Return the parameters of this request; `logit_bias` is not among them yet.

        The caller must look up the tokens of biases that are given as texts.
        """
        names = [s.name for s in settings() if s.name != "seed"]
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        seed = defaults.seed if self.seed is None else folded_seed(self.seed)
        values = {name: getattr(defaults, name) for name in names} | given
        return SamplingParams(**values, seed=seed, logit_bias=defaults.logit_bias)

    def ignores_eos(self, defaults: Defaults) -> bool:
        """Return whether an end token does not end the answer."""
        return defaults.ignore_eos if self.ignore_eos is None else self.ignore_eos

    @property
    def stops(self) -> tuple[str, ...]:
        """Return the stop strings."""
        return tuple(self.stop or ())


def folded_seed(seed: int) -> int:
    """Return a seed that the sampler takes: -1 is random, and others are cut to 32 bits."""
    return -1 if seed in (-1, RANDOM_SEED) else seed % RANDOM_SEED


class Defaults(Protocol):
    """What a request gets where it says nothing."""

    sampling: SamplingParams
    max_tokens: int | None
    deadline_s: float | None
    ignore_eos: bool
    variables: Mapping[str, Any]


class StreamOptions(Body):
    """What a stream holds besides the answer."""

    include_usage: bool | None = None


class Streamed(Body):
    """Whether an answer is sent as it is written."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def wants_usage(self) -> bool:
        """Return whether a stream ends with what the answer has cost."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)
