"""The fields of the OpenAI API and of vLLM's dialect that constrain an output. Pure: no IO."""

from collections.abc import Iterator
from typing import Any, Literal, Protocol

import msgspec

from common.values.errors import InvalidRequest
from router.request.constraint import Constraint


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`response_format.json_schema`. A schema is always enforced, whatever `strict` says."""

    name: str
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class TagStructure(msgspec.Struct, forbid_unknown_fields=True):
    """One tag: text from `begin` to `end` holds JSON of `schema`."""

    begin: str
    end: str
    schema: dict[str, Any] | bool


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`structures` and `triggers` belong to the type structural_tag."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    structures: list[TagStructure] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`; one of them."""

    json: str | dict[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class ConstrainedBody(Protocol):
    """A constraint under whatever name a client knows it."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None
    guided_json: str | dict[str, Any] | bool | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None


def constraint_of(body: ConstrainedBody) -> Constraint | None:
    """Raises InvalidRequest when a body states more than one."""
    found = list(_stated(body))
    if len(found) > 1:
        names = " and ".join(constraint.param for constraint in found)
        raise InvalidRequest(f"an output can be constrained in one way only, not by {names}", param=found[1].param)
    return found[0] if found else None


def _stated(body: ConstrainedBody) -> Iterator[Constraint]:
    if body.response_format is not None:
        yield from _of_response_format(body.response_format)
    if body.structured_outputs is not None:
        yield from _of_structured_outputs(body.structured_outputs)
    if body.guided_json is not None:
        yield Constraint("json_schema", body.guided_json, "guided_json")
    if body.guided_regex is not None:
        yield Constraint("regex", body.guided_regex, "guided_regex")
    if body.guided_choice is not None:
        yield Constraint("choice", body.guided_choice, "guided_choice")
    if body.guided_grammar is not None:
        yield Constraint("grammar", body.guided_grammar, "guided_grammar")


def _of_response_format(stated: ResponseFormat) -> Iterator[Constraint]:
    match stated.type:
        case "json_object":
            yield Constraint("json_object", None, "response_format")
        case "json_schema":
            if stated.json_schema is None or stated.json_schema.schema is None:
                raise InvalidRequest("the type json_schema needs a schema", param="response_format.json_schema.schema")
            yield Constraint("json_schema", stated.json_schema.schema, "response_format.json_schema.schema")
        case "structural_tag":
            yield Constraint("structural_tag", _tags(stated), "response_format.structures")
        case "text":
            return


def _tags(stated: ResponseFormat) -> list[dict[str, Any]]:
    """Each structure with the trigger that it begins with."""
    tags = []
    for structure in stated.structures or ():
        trigger = next((each for each in stated.triggers or () if each and structure.begin.startswith(each)), None)
        if trigger is None:
            raise InvalidRequest("a structure begins with none of the triggers", param="response_format.triggers")
        tags.append({**msgspec.structs.asdict(structure), "trigger": trigger})
    return tags


def _of_structured_outputs(stated: StructuredOutputs) -> Iterator[Constraint]:
    if stated.json is not None:
        yield Constraint("json_schema", stated.json, "structured_outputs.json")
    if stated.json_object:
        yield Constraint("json_object", None, "structured_outputs.json_object")
    if stated.regex is not None:
        yield Constraint("regex", stated.regex, "structured_outputs.regex")
    if stated.choice is not None:
        yield Constraint("choice", stated.choice, "structured_outputs.choice")
    if stated.grammar is not None:
        yield Constraint("grammar", stated.grammar, "structured_outputs.grammar")
