"""From what a client may state (schema, regex, choice, grammar) to the text of one grammar; whether it can be used.

Whatever is not enforced is refused, never ignored: a keyword of JSON Schema that the library does not know is a
GrammarError that names it. Pure but for the library's compiler, whose work is bounded by LIMITS.
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, StructTag, grammar_from

MAX_GRAMMAR_BYTES = 256 << 10
MAX_CHOICES = 1000
# The library's own bounds. Without `precompute_large_lexemes` a repetition of repetitions goes on for minutes.
LIMITS = LLParserLimits(initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, verbose_errors=False)
# Of this thread's processor time: every worker that gets a grammar compiles it once more.
MAX_COMPILE_S = 0.5
# Unbounded white space lets a small model fill its budget with line breaks.
_WHITE_SPACE = r"[\x20\x0A\x0D\x09]{0,8}"
_LONG_QUOTATION = re.compile(r'"(?:[^"\\]|\\.){40,}"')


class GrammarError(ValueError):
    """Why a grammar cannot be used, in words for the client that stated it."""


def of_json_schema(schema: str | Mapping[str, Any] | bool) -> str:
    """`schema`: JSON text or what it stands for."""
    value = _parsed(schema) if isinstance(schema, str) else schema
    if value is False:
        raise GrammarError("Unsatisfiable schema: false allows nothing")
    value = {} if value is True else value
    if not isinstance(value, Mapping):
        raise GrammarError("the schema must be an object or a boolean")
    options: Any = {"whitespace_pattern": _WHITE_SPACE, "coerce_one_of": _has_disjoint_branches(value)}
    try:
        return _bounded(LLMatcher.grammar_from_json_schema(json.dumps(value), overrides=options))
    except ValueError as error:
        raise GrammarError(str(error)) from error


def of_json_object() -> str:
    """Any JSON object."""
    return of_json_schema({"type": "object"})


def of_regex(pattern: str) -> str:
    """The whole output matches `pattern`, in the syntax of Rust's regex."""
    return _bounded(grammar_from("regex", pattern))


def of_choice(choices: Sequence[str]) -> str:
    """The output is one of `choices`."""
    if not 0 < len(choices) <= MAX_CHOICES:
        raise GrammarError(f"expected 1 to {MAX_CHOICES} choices, got {len(choices)}")
    if "" in choices:
        raise GrammarError("a choice is empty")
    return _bounded(grammar_from("choice", json.dumps(list(dict.fromkeys(choices)))))


def of_grammar(text: str) -> str:
    """A grammar in Lark's or llama.cpp's (GBNF) notation."""
    try:
        return _bounded(grammar_from("grammar", text))
    except ValueError as error:
        raise GrammarError(str(error)) from error


def of_structural_tags(tags: Sequence[Mapping[str, Any]]) -> str:
    """Free text in which whatever begins like a tag goes on as the tag says: {begin, schema, end, trigger}."""
    try:
        parts = [
            StructTag(trigger=tag["trigger"], begin=tag["begin"], grammar=json.dumps(tag["schema"]), end=tag["end"])
            for tag in tags
        ]
    except (KeyError, TypeError, AssertionError) as error:
        raise GrammarError(f"a structural tag needs trigger, begin, schema and end: {error}") from error
    if not parts:
        raise GrammarError("no structural tag is given")
    return _bounded(StructTag.to_grammar(parts, assume_special=False))


def combined(lark: str, parts: Mapping[str, str]) -> str:
    """One grammar of several: `lark` refers to each of `parts`, grammars of this module, as `@name`."""
    grammars: list[dict[str, Any]] = [{"name": "", "lark_grammar": lark}]
    for name, text in parts.items():
        if not text.startswith("{"):
            grammars.append({"name": name, "lark_grammar": text})
            continue
        try:
            (part,) = json.loads(text)["grammars"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:  # a client's own, in the library's JSON
            raise GrammarError("a grammar in parts does not go with tools or a thought") from error
        grammars.append({**part, "name": name})
    return _bounded(json.dumps({"grammars": grammars}))


def check(grammar: str, tokenizer: LLTokenizer | None = None) -> None:
    """Compile it, and look for a token that an output may begin with. Raises GrammarError that says what is wrong."""
    is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer, limits=LIMITS)
    if is_error:
        raise GrammarError(_plain(messages[0]))
    if tokenizer is None:
        return
    started_s = time.thread_time()
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    begins = any(matcher.compute_bitmask())
    if matcher.is_error():
        raise GrammarError(_plain(matcher.get_error()))
    if not begins:
        raise GrammarError("no output fits it")
    if time.thread_time() - started_s > MAX_COMPILE_S:
        raise GrammarError(f"it takes more than {MAX_COMPILE_S} s to compile")


def _plain(message: str) -> str:
    """The first line and the error's own, long quotations left out: they repeat the grammar."""
    lines = message.strip().split("\n")
    said = [lines[0], *[line for line in lines[1:] if line.startswith("error: ")]]
    return _LONG_QUOTATION.sub('"..."', " ".join(said))[:500]


def _bounded(grammar: str) -> str:
    if len(grammar.encode()) > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"the grammar has {len(grammar.encode())} bytes, at most {MAX_GRAMMAR_BYTES} are allowed")
    return grammar


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the schema is no JSON: {error}") from error


def _has_disjoint_branches(schema: Any) -> bool:
    """Whether every oneOf can be taken for an anyOf: no value fits two of its branches."""
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            branches = value.get("oneOf")
            if isinstance(branches, list) and not _are_disjoint(branches, schema):
                return False
            pending.extend(value.values())
        elif isinstance(value, list):
            pending.extend(value)
    return True


def _are_disjoint(branches: Sequence[Any], root: Any) -> bool:
    """By their types, or by a required property that has another constant in each."""
    resolved = [_resolved(branch, root) for branch in branches]
    if not all(isinstance(branch, Mapping) for branch in resolved):
        return False
    kinds = [_types_of(branch) for branch in resolved]
    if all(kinds) and sum(map(len, kinds)) == len(frozenset().union(*kinds)):
        return True
    return any(_tells_apart(name, resolved) for name in resolved[0].get("required", ()))


def _types_of(branch: Mapping[str, Any]) -> frozenset[str]:
    """JSON types that fit; an integer is a number too. Empty: unknown."""
    if "const" in branch or "enum" in branch:
        return frozenset(json.dumps(value, sort_keys=True) for value in branch.get("enum", [branch.get("const")]))
    kind = branch.get("type")
    names = frozenset([kind] if isinstance(kind, str) else kind or ())
    return names | {"integer"} if "number" in names else names


def _tells_apart(name: str, branches: Sequence[Mapping[str, Any]]) -> bool:
    values: list[str] = []
    for branch in branches:
        constraint = branch.get("properties", {}).get(name)
        if not isinstance(constraint, Mapping):
            return False
        found = constraint.get("enum", [constraint["const"]] if "const" in constraint else [])
        if branch.get("type") != "object" or name not in branch.get("required", ()) or not found:
            return False
        values += [json.dumps(value, sort_keys=True) for value in found]
    return len(values) == len(set(values))


def _resolved(branch: Any, root: Any) -> Any:
    """Follows a reference within the schema."""
    for _ in range(8):
        reference = branch.get("$ref") if isinstance(branch, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        branch = root
        for part in reference[2:].split("/"):
            branch = branch.get(part) if isinstance(branch, Mapping) else None
    return branch
