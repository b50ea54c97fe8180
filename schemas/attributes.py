"""Attributes of a call: read by the tables' rules, and described as models for the API documents.

Both accept both spellings of a name, any case of `auto_pad`, values wrapped as in oneDNN's graph dumps
(`{"type": "s64[]", "value": [2, 2]}`), and null for an absent value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    create_model,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from schemas.broken_rules import BrokenRule, broken_rule, members_rule, number
from schemas.frameworks import format_here
from schemas.rows import MAX_DIMS, AttributeRow, Dialect
from schemas.shapes import INT64_MAX
from schemas.spelling import canonical
from schemas.tables import CalledOperation, find_operation, near_miss

__all__ = ["Attributes", "Given", "attributes_model", "plain_attributes_model", "read_attributes"]


@dataclass(frozen=True, slots=True)
class Given:
    """The attributes of a call by canonical name; None is absent, or invalid if its name is in `bad`."""

    strides: tuple[int, ...] | None = None
    pads_begin: tuple[int, ...] | None = None
    pads_end: tuple[int, ...] | None = None
    dilations: tuple[int, ...] | None = None
    auto_pad: str | None = None
    output_padding: tuple[int, ...] | None = None
    groups: int | None = None
    data_format: str | None = None
    weights_format: str | None = None
    weights_shape: tuple[int, ...] | None = None
    dst_shape: tuple[int, ...] | None = None
    bad: frozenset[str] = frozenset()
    spelled: Mapping[str, str] = field(default_factory=dict)


class Attributes(BaseModel):
    """Base of the models of the API documents, whose JSON Schema has all accepted forms of each attribute."""

    model_config = ConfigDict(extra="forbid")

    called: ClassVar[CalledOperation]

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        described = handler.resolve_ref_schema(handler(schema))
        described["properties"] = _accepted(cls.called, described.get("properties", {}))
        return described


# JSON Schema members of a plain field that `_accepted` replaces.
_REPLACED = ("title", "description", "default")


def _accepted(called: CalledOperation, plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON Schema properties of all accepted forms: both spellings, wrapped or plain."""
    properties: dict[str, Any] = {}
    for row in called.operation.attributes:
        own = {key: value for key, value in plain[row.name].items() if key not in _REPLACED}
        forms = [form for form in own.get("anyOf", [own]) if form != {"type": "null"}]
        if row.name == "auto_pad":
            forms = [{"type": "string", "enum": [*row.choices, "None", *(text.upper() for text in row.choices)]}]
        wrapped = {
            "type": "object",
            "properties": {"type": {"const": row.kind}, "value": forms[0]},
            "required": ["type", "value"],
            "additionalProperties": False,
        }
        nothing = [] if row.required == "yes" else [{"type": "null"}]
        default = row.default_in(called.dialect)
        accepted = {
            "description": row.doc,
            "anyOf": [*forms, wrapped, *nothing],
            **({} if default is None else {"default": default}),
        }
        name = row.spelled(called.dialect)
        properties[name] = accepted
        for other in row.others(called.dialect):
            properties[other] = {**accepted, "description": f"Another spelling of `{name}`."}
    return properties


def read_attributes(called: CalledOperation, attributes: object) -> tuple[Given, list[BrokenRule]]:
    """Return the attributes of a call with defaults, and every rule that they break by themselves.

    A value that breaks a rule is None, with its name in `bad`, so that the rest can still be checked.
    """
    unusable = members_rule(attributes, ["attributes"])
    if unusable is not None:
        return Given(bad=frozenset(called.operation.attribute)), [unusable]
    values, spelled, broken = canonical(called, attributes)
    bad = {called.operation.attribute_spellings[rule["loc"][1]] for rule in broken if _is_known(called, rule)}
    try:
        model = _field_model(called.called_as, partial=bool(bad))
        read = model.model_validate(values)
    except ValidationError as error:
        for rule in error.errors(include_url=False):
            bad.add(str(rule["loc"][0]))
            broken.append(_from_pydantic(called, rule, spelled))
        kept = {name: value for name, value in values.items() if name not in bad}
        read = _field_model(called.called_as, partial=True).model_validate(kept)
    fields = read.__dict__
    if bad:
        fields = {name: value for name, value in fields.items() if name not in bad}
    return Given(**fields, bad=frozenset(bad), spelled=spelled), broken


def _is_known(called: CalledOperation, rule: BrokenRule) -> bool:
    loc = rule["loc"]
    return len(loc) > 1 and loc[1] in called.operation.attribute_spellings


_OTHER_CHANNELS = str.maketrans("IO", "OI")


def _from_pydantic(called: CalledOperation, error: Any, spelled: Mapping[str, str]) -> BrokenRule:
    name, *index = error["loc"]
    row = called.operation.attribute[name]
    written = spelled.get(name) or called.wire_names[name]
    where = f"{written}[{index[0]}]" if index else written
    context = error.get("ctx", {})
    match error["type"]:
        case "greater_than_equal":
            msg = f"{where} must be at least {context['ge']}, but is {number(error['input'])}"
            kind = "greater_than_equal"
        case "less_than_equal":
            msg = f"{where} must be at most {context['le']}, but is {number(error['input'])}"
            kind = "less_than_equal"
        case "too_long":
            msg, kind = f"{where} must have at most {MAX_DIMS} values, but has more", "too_long"
        case "literal_error":
            msg = f"{where} must be one of {', '.join(row.choices)}"
            if (here := format_here(error["input"], row.choices)) is not None:
                msg += f"; use {here}"
                if name == "weights_format" and called.operation.transposed:
                    # JAX's axes are those of the convolution that this one transposes.
                    msg += f", or {here.translate(_OTHER_CHANNELS)} for jax.lax with transpose_kernel=True"
            elif (hint := near_miss(error["input"], row.choices)) is not None:
                msg += f"; did you mean {hint}?"
            kind = "choice"
        case "tuple_type":
            msg, kind = f"{where} must be a list of integers", "list_type"
        case _:
            msg, kind = f"{where} must be an integer", "int_type"
    return broken_rule(["attributes", written, *index], msg, kind)


def _fields(called: CalledOperation, *, partial: bool) -> dict[str, Any]:
    """Return the Pydantic field definitions of an operation's rows; a partial set requires nothing."""
    fields: dict[str, Any] = {}
    for row in called.operation.attributes:
        default = row.default_in(called.dialect)
        if row.required == "yes" and not partial:
            fields[row.name] = (_field_type(row), Field(description=row.doc))
        elif default is None:
            fields[row.name] = (_field_type(row) | None, Field(default=None, description=row.doc))
        else:
            fields[row.name] = (_field_type(row), Field(default=default, description=row.doc))
    return fields


def _field_type(row: AttributeRow) -> Any:
    if row.kind == "string":
        return Literal[row.choices]
    # Strict: neither a bool nor a float with an integral value is an integer here.
    integer = Annotated[int, Field(strict=True, ge=row.minimum, le=INT64_MAX, examples=[row.minimum])]
    if row.kind == "s64":
        return integer
    return Annotated[tuple[integer, ...], Field(max_length=MAX_DIMS, examples=[[row.minimum] * 2])]


@cache
def _field_model(called_as: str, *, partial: bool = False) -> type[BaseModel]:
    called = find_operation(called_as)
    return create_model("Fields", **_fields(called, partial=partial))


@cache
def _public_model(operation: str, dialect: Dialect) -> type[Attributes]:
    row = find_operation(operation).operation
    name = row.spelled(dialect)
    called = find_operation(name)
    model = create_model(
        f"{name}Attributes",
        __base__=Attributes,
        __doc__=f"Attributes of {name}. {row.summary}",
        **_fields(called, partial=False),
    )
    model.called = called
    return model


def attributes_model(called: CalledOperation) -> type[Attributes]:
    """Return the model of an operation's attributes in the dialect of the name it was called by."""
    return _public_model(called.operation.name, called.dialect)


@cache
def plain_attributes_model(called: CalledOperation) -> type[BaseModel]:
    """Return the model of an operation's attributes in one spelling, with plain values, as generated clients send."""
    name = called.operation.name
    fields = _fields(called, partial=False)
    for row in called.operation.attributes:
        if (default := row.default_in(called.dialect)) is not None:
            fields[row.name] = (_field_type(row) | None, Field(None, description=f"{row.doc} By default `{default}`."))
    config = ConfigDict(extra="forbid")
    doc = f"Attributes of {name}. {called.operation.summary}"
    return create_model(f"{name}Attributes", __config__=config, __doc__=doc, **fields)
