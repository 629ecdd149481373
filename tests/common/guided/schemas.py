"""Schemas of the kinds that people write: functions, Kubernetes objects, pydantic models, recursion, bounds."""

import random
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field


class Address(BaseModel):
    street: str = Field(max_length=12)
    zip_code: str = Field(pattern=r"^[0-9]{5}$")


class Person(BaseModel):
    name: str = Field(min_length=1, max_length=10)
    age: int = Field(ge=0, le=130)
    email: str | None = Field(default=None, max_length=8)
    addresses: list[Address] = Field(max_length=2)


class Team(BaseModel):
    title: Literal["red", "blue"]
    members: list[Person] = Field(max_length=2)
    score: float = Field(gt=0, lt=10)


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    tricks: list[Literal["sit", "roll"]] = Field(max_length=3)


class Owner(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


class Tree(BaseModel):
    value: int = Field(ge=0, le=9)
    children: list["Tree"] = Field(default_factory=list, max_length=1)


def function(name: str, **parameters: Any) -> dict[str, Any]:
    """A call with named arguments, as tools have them."""
    return _closed(name={"const": name}, arguments=_closed(**parameters))


def _closed(**properties: Any) -> dict[str, Any]:
    """All of these properties and no others."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


_WORD = {"type": "string", "pattern": "^[a-z]{1,8}$"}
_LABELS = {"type": "object", "additionalProperties": _WORD, "maxProperties": 2}
_PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
_CONTAINER = {
    "type": "object",
    "properties": {
        "name": _WORD,
        "image": _WORD,
        "ports": {"type": "array", "maxItems": 2, "items": {"type": "object", "properties": {"containerPort": _PORT},
                  "required": ["containerPort"], "additionalProperties": False}},
    },
    "required": ["name", "image"],
    "additionalProperties": False,
}  # fmt: skip
_POD = {
    "type": "object",
    "properties": {
        "apiVersion": {"const": "v1"},
        "kind": {"const": "Pod"},
        "metadata": {"type": "object", "properties": {"name": _WORD, "labels": _LABELS}, "required": ["name"],
                     "additionalProperties": False},
        "spec": {"type": "object", "properties": {"containers": {"type": "array", "minItems": 1, "maxItems": 2,
                 "items": _CONTAINER}, "restartPolicy": {"enum": ["Always", "Never"]}}, "required": ["containers"],
                 "additionalProperties": False},
    },
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
}  # fmt: skip

SCHEMAS: dict[str, dict[str, Any]] = {
    **{model.__name__: model.model_json_schema() for model in (Address, Person, Team, Cat, Owner, Tree)},
    "pod": _POD,
    "weather": function("get_weather", city=_WORD, days={"type": "integer", "minimum": 1, "maximum": 7}),
    "no arguments": function("now"),
    "booking": function(
        "book",
        date={"type": "string", "format": "date"},
        at={"type": "string", "format": "time"},
        seats={"type": "array", "items": {"type": "integer", "exclusiveMinimum": 0, "maximum": 99}, "maxItems": 3},
        note={"anyOf": [{"type": "null"}, _WORD]},
    ),
    "formats": {
        "type": "object",
        "properties": {name: {"type": "string", "format": name} for name in ("uuid", "ipv4", "date-time")},
        "required": ["uuid", "ipv4", "date-time"],
        "additionalProperties": False,
    },
    "numbers": {
        "type": "array",
        "prefixItems": [
            {"type": "number", "minimum": -1.5, "maximum": 2.25},
            {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100},
            {"type": "integer", "exclusiveMinimum": -3, "exclusiveMaximum": 3},
        ],
        "items": False,
        "minItems": 3,
    },
    "union": {"anyOf": [{"type": "integer", "minimum": 5, "maximum": 9}, _WORD, {"type": "null"}]},
    "all of": {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 44}]},
    "list": {
        "$ref": "#/$defs/node",
        "$defs": {"node": {"anyOf": [{"type": "null"}, _closed(next={"$ref": "#/$defs/node"})]}},
    },
}  # fmt: skip


def random_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """Of bounded size; every keyword in it is enforced."""
    leaves = (_integer, _number, _string, _choice, lambda _: {"type": "boolean"}, lambda _: {"type": "null"})
    if depth == 0:
        return rng.choice(leaves)(rng)
    kind = rng.choice(("object", "object", "array", "union", "leaf"))
    if kind == "leaf":
        return rng.choice(leaves)(rng)
    if kind == "array":
        least = rng.randint(0, 2)
        items = random_schema(rng, depth - 1)
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + rng.randint(0, 2)}
    if kind == "union":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randint(1, 3))]}
    names = rng.sample(["id", "name", "a b", "größe", "x-y", "nested", 'q"t'], rng.randint(1, 4))
    properties = {name: random_schema(rng, depth - 1) for name in names}
    required = [name for name in names if rng.random() < 0.6]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _integer(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}


def _number(rng: random.Random) -> dict[str, Any]:
    low = round(rng.uniform(-50, 50), 2)
    return {"type": "number", rng.choice(("minimum", "exclusiveMinimum")): low, "maximum": low + rng.randint(1, 9)}


def _string(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.5:
        least = rng.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 4)}
    return {"type": "string", "pattern": rng.choice(("^[a-z]{2,4}$", "^(ab|cd)+$", "^x?y*z$", "^[0-9]{3}-[0-9]{2}$"))}


def _choice(rng: random.Random) -> dict[str, Any]:
    return {"enum": rng.sample(["red", 1, None, True, "grün", 2.5, ""], rng.randint(1, 4))}
