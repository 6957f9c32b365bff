"""What an answer must look like: response_format, json_schema and grammar."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from ...engine.chat import Format
from ..body import json_depth
from ..errors import ApiError
from ..limits import LIMITS
from .fields import Body, wrong

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
            raise ApiError(
                400, "response_format.type is not text, json_object or json_schema",
                param="response_format.type", code="invalid_value",
            )  # fmt: skip
        schema, is_strict = self.schema_, False
        if self.json_schema is not None and self.json_schema.schema_ is not None:
            schema, is_strict = self.json_schema.schema_, self.json_schema.strict is True
        if schema is not None:
            return schema_format(schema, is_strict)
        if self.type == "json_object":
            return Format("json_object")
        raise ApiError(
            400, "response_format.json_schema.schema: this field is required",
            param="response_format.json_schema.schema", code="invalid_value",
        )  # fmt: skip


class Formatted(Body):
    """Fields that constrain the text of an answer."""

    response_format: ResponseFormat | None = None
    json_schema: Schema | None = None
    grammar: Grammar | None = None

    def format(self) -> Format | None:
        """Return the format that the request asks for.

        Raises:
            ApiError: it asks for several.
        """
        found = [] if self.response_format is None else [self.response_format.format()]
        if self.json_schema is not None:
            found.append(schema_format(self.json_schema, is_strict=False))
        if self.grammar:
            kind = "lark" if self.grammar.lstrip().startswith(_LARK) else "gbnf"
            found.append(Format(kind, self.grammar))
        formats = [one for one in found if one is not None]
        if len(formats) > 1:
            raise ApiError(
                400, "response_format, json_schema and grammar exclude one another; give one",
                param="grammar", code="invalid_value",
            )  # fmt: skip
        return formats[0] if formats else None
