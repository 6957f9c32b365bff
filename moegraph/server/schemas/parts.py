"""Objects inside of bodies that are read one by one, because their type says what they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from pydantic import BeforeValidator, PlainValidator, ValidationError

from ..errors import ApiError, from_validation
from .fields import Body, wrong

Object = dict[str, Any]


def _content(value: object) -> object:
    """Check by hand: for a union, pydantic would name its members as if they were fields."""
    if isinstance(value, str) or (
        isinstance(value, list) and all(isinstance(part, dict) for part in value)
    ):
        return value
    raise wrong("expected a text, or a list of objects")


Texts = str | list[Object]


def contents(form: Any) -> PlainValidator:
    """Return what checks `Texts`; form: what they are, for the OpenAPI document."""
    return PlainValidator(_content, json_schema_input_type=form)


def seen_as(form: Any) -> BeforeValidator:
    """Return what tells the OpenAPI document the form of an object that `read` checks."""
    return BeforeValidator(lambda value: value, json_schema_input_type=form)


def kind_of(value: Mapping[str, Any]) -> str:
    """Return the type that an object says it has; "" if that is no word."""
    kind = value.get("type")
    return kind if isinstance(kind, str) else ""


def text_parts(texts: Sequence[str]) -> Texts:
    """Return texts as the content of a message whose parts the template joins."""
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


T = TypeVar("T", bound=Body)


def read(model: type[T], value: Any, where: str) -> T:
    """Return an object that lies at this place of a body.

    Raises:
        ApiError: it does not fit; the message names the field.
    """
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
    """Refuse a field.

    Raises:
        ApiError: always.
    """
    raise ApiError(400, f"{param}: {message}", param=param, code="invalid_value")
