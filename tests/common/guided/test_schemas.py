"""Schemas: nothing that does not fit is let through, and what cannot be enforced is refused by name.

The official suite's groups, then schemas of the kinds that people write, with outputs drawn at random from the grammar
and checked once more by jsonschema.
"""

import json
import random
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from common.guided import grammar
from common.guided.grammar import GrammarError
from tests.common.guided.schemas import SCHEMAS, random_schema
from tests.common.guided.tokens import GUIDED, accepts, new_masks, random_output

SUITE: list[dict[str, Any]] = json.loads((Path(__file__).parent / "data" / "json_schema_suite.json").read_text())
FILES = sorted({group["file"] for group in SUITE})
# Valid values that the library cannot write: numbers written as 1.0, another order of properties, formats that the
# draft takes for mere remarks.
OVER_CONSTRAINED = {"allOf", "const", "enum", "format", "type"}
# Of a recursive schema a walk may be too long; of these at least so many must end.
MIN_ENDED = 3
# Those that jsonschema checks as the standards have them: there is a year 0 in RFC 3339.
FORMATS = jsonschema.FormatChecker(("ipv4", "uuid"))


@cache
def compiled(text: str) -> str | None:
    """The grammar; None when it is refused."""
    try:
        found = grammar.of_json_schema(text)
        grammar.check(found, GUIDED)
    except GrammarError:
        return None
    return found


@pytest.mark.parametrize("name", FILES)
def test_no_value_of_the_official_suite_passes_that_should_not(name: str) -> None:
    masks = new_masks()
    for group in (group for group in SUITE if group["file"] == name):
        if (found := compiled(json.dumps(group["schema"]))) is None:
            continue
        for value, is_valid in group["tests"]:
            is_accepted = accepts(masks, found, json.dumps(value, ensure_ascii=False))
            assert not is_accepted or is_valid, (group["group"], value)
            assert is_accepted or not is_valid or name in OVER_CONSTRAINED, (group["group"], value)


def test_so_much_of_the_official_suite_can_be_used() -> None:
    usable = Counter(compiled(json.dumps(group["schema"])) is not None for group in SUITE)
    assert usable[True] >= 160


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"if": {"type": "string"}, "then": {"minLength": 1}}, "if"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
        ({"oneOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object", "required": ["b"]}]}, "oneOf"),
        ({"type": "string", "format": "json-pointer"}, "format"),
        ({"$ref": "#/nowhere"}, "nowhere"),
        ({"$ref": "https://example.com/schema"}, "example.com"),
        ({"type": "string", "minLength": 3, "maxLength": 1}, "Unsatisfiable"),
        ({"enum": []}, "Unsatisfiable"),
        (False, "Unsatisfiable"),
        ({"type": "strin"}, "strin"),
        ('{"type":', "no JSON"),
        ("[1]", "object"),
        ("[" * 100_000, "no JSON"),
    ],
)  # fmt: skip
def test_what_cannot_be_enforced_is_refused_and_named(schema: Any, named: str) -> None:
    with pytest.raises(GrammarError, match=named):
        grammar.check(grammar.of_json_schema(schema), GUIDED)


@pytest.mark.parametrize(
    "branches",
    [
        [{"type": "string"}, {"type": "integer"}],
        [{"type": "null"}, {"$ref": "#/$defs/A"}],
        [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        [{"const": 1}, {"enum": [2, 3]}],
    ],
)
def test_one_of_is_enforced_where_no_value_fits_two_branches(branches: list[Any]) -> None:
    def tagged(kind: str, other: dict[str, Any]) -> dict[str, Any]:
        properties = {"kind": {"const": kind}, "value": other}
        return {
            "type": "object",
            "properties": properties,
            "required": ["kind", "value"],
            "additionalProperties": False,
        }

    definitions = {"A": tagged("a", {"type": "integer"}), "B": tagged("b", {"type": "string", "maxLength": 5})}
    schema = {"$defs": definitions, "oneOf": branches}
    found, masks, rng = grammar.of_json_schema(schema), new_masks(), random.Random(3)
    grammar.check(found, GUIDED)
    outputs = [text for _ in range(8) if (text := random_output(masks, found, rng)) is not None]
    assert outputs
    for text in outputs:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_random_outputs_fit_schemas_that_people_write(name: str) -> None:
    schema = SCHEMAS[name]
    found, masks, rng = grammar.of_json_schema(schema), new_masks(), random.Random(name)
    grammar.check(found, GUIDED)
    outputs = [text for _ in range(10) if (text := random_output(masks, found, rng)) is not None]
    assert len(outputs) >= MIN_ENDED
    for text in outputs:
        jsonschema.validate(json.loads(text), schema, format_checker=FORMATS)


@pytest.mark.parametrize("block", range(10))
def test_random_outputs_fit_three_hundred_random_schemas(block: int) -> None:
    masks, num_ended = new_masks(), 0
    for number in range(30 * block, 30 * block + 30):
        rng = random.Random(number)
        schema = random_schema(rng, depth=1 + number % 4)
        found = grammar.of_json_schema(schema)
        grammar.check(found, GUIDED)
        if (text := random_output(masks, found, rng)) is not None:
            num_ended += 1
            jsonschema.validate(json.loads(text), schema)
    assert num_ended >= 20
