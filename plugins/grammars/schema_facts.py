"""What can be said of a JSON schema without a document: which keywords assert something, of which types, and which types may come out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import combinations
from typing import Any

from modelrunner.plugins.grammars.expressions import prefix

MODES = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")  # the first of these that a schema has is all that XGrammar looks at
EVERYTHING = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
NUMBERS, STRING = frozenset({"integer", "number"}), frozenset({"string"})
ARRAY, OBJECT = frozenset({"array"}), frozenset({"object"})
# Keywords that assert something of documents of some types, or of all.
APPLIES: dict[str, frozenset[str]] = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), NUMBERS),
    **dict.fromkeys(("pattern", "minLength", "maxLength"), STRING),
    **dict.fromkeys(("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems", "contains"), ARRAY),
    **dict.fromkeys(("properties", "required", "additionalProperties", "patternProperties", "propertyNames"), OBJECT),
    **dict.fromkeys(("minProperties", "maxProperties", "unevaluatedProperties"), OBJECT),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), OBJECT),
    **dict.fromkeys(("type", "not", "if", "$dynamicRef", "$recursiveRef", *MODES), EVERYTHING),
}
NOWHERE = ("not", "if", "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef")  # honoured
NOT_ELSEWHERE = frozenset({*NOWHERE, "uniqueItems", "contains", "propertyNames", "unevaluatedItems", "unevaluatedProperties"})  # llguidance
EMPTY = {"items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "propertyNames", "contains"}  # if True or {}
DEEPEST = 64


def asserts(keyword: str, schema: Mapping[str, Any]) -> bool:
    """Whether the schema has the keyword, and it excludes anything."""
    if keyword not in schema:
        return False
    value = schema[keyword]
    if keyword == "if":
        return "then" in schema or "else" in schema
    if keyword == "contains":
        return schema.get("minContains", 1) != 0 or "maxContains" in schema
    if keyword in EMPTY:
        return value is not True and value != {}
    if keyword in ("uniqueItems", "not"):
        return value is not False
    if keyword.startswith("min") and keyword != "minimum":
        return bool(value != 0)
    return keyword in MODES or keyword == "type" or value not in ({}, [])


def own_keys(schema: object) -> list[str]:
    """The keywords of a schema that assert something."""
    return [name for name in APPLIES if asserts(name, schema)] if isinstance(schema, Mapping) else []


def pointer_of(key: str) -> str:
    """A key as a part of a JSON pointer."""
    return key.replace("~", "~0").replace("/", "~1")


def inner(root: object, uri: str) -> Any:
    """What `#/...` refers to, found as XGrammar finds it; None where it finds nothing."""
    for part in filter(None, uri[1:].split("/")):
        if not isinstance(root, Mapping) or part not in root:
            return None
        root = root[part]
    return root


def type_of(value: object) -> str:
    """The narrowest type of a value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    return {int: "integer", str: "string", list: "array"}.get(type(value), "object")


def types_of(schema: object, root: object, implied: str = "", depth: int = 0) -> frozenset[str]:
    """The types of the documents that XGrammar writes for a schema; all where that takes a longer look. implied: if it names none."""
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        return EVERYTHING
    mode = next((name for name in MODES if name in schema), "type")
    argument = schema.get(mode)
    if mode == "$ref":
        return types_of(inner(root, argument), root, "", depth + 1) if isinstance(argument, str) and argument[:1] == "#" else EVERYTHING
    if mode == "const":
        return frozenset({type_of(argument)})
    if mode == "type":
        given = [argument] if isinstance(argument, str) else argument or ([implied] if implied else _untyped(schema))
        names = EVERYTHING.intersection(each for each in given if isinstance(each, str))
        return frozenset(names) | (NUMBERS if "number" in names else frozenset())
    if not isinstance(argument, list) or not argument or (mode == "allOf" and len(argument) > 1):
        return EVERYTHING
    if mode == "enum":
        return frozenset(map(type_of, argument))
    return frozenset[str]().union(*(types_of(each, root, "", depth + 1) for each in argument))


def _untyped(schema: Mapping[str, Any]) -> frozenset[str]:
    """What a schema without a type is taken for."""
    if not schema.keys().isdisjoint(("properties", "additionalProperties", "unevaluatedProperties")):
        return OBJECT
    return EVERYTHING if schema.keys().isdisjoint(("items", "prefixItems", "unevaluatedItems")) else ARRAY


def holds(keyword: str, argument: Any, value: Any) -> bool:
    """Whether a keyword is sure to hold of a value. `pattern-not`: that the expression is sure not to match it."""
    if type_of(value) not in APPLIES.get(keyword, EVERYTHING):
        return True
    try:
        match keyword:
            case "type":
                return type_of(value) in types_of({"type": argument}, None)
            case "pattern":
                return re.search(argument, value) is not None
            case "pattern-not":
                return re.search(argument, value) is None
            case "minLength" | "minItems" | "minProperties":
                return bool(len(value) >= argument)
            case "maxLength" | "maxItems" | "maxProperties":
                return bool(len(value) <= argument)
            case "minimum":
                return bool(value >= argument)
            case "maximum":
                return bool(value <= argument)
            case "exclusiveMinimum":
                return bool(value > argument)
            case "exclusiveMaximum":
                return bool(value < argument)
            case "enum":
                return any(equal(value, each) for each in argument)
            case "required":
                return all(name in value for name in argument)
    except (TypeError, re.error):
        return False
    return False


def equal(one: object, other: object) -> bool:
    """Whether two values are the same in JSON: 1 and 1.0 are, 1 and true are not."""
    return one == other and type_of(one) == type_of(other)


def overlapping(one: str, other: str) -> bool:
    """Whether two expressions may match the same key: not if both begin with letters that part them."""
    first, second = prefix(one), prefix(other)
    return first.startswith(second) or second.startswith(first)


def could_both_match(branches: list[Any], root: object) -> tuple[int, int] | None:
    """Two branches of a `oneOf` that plainly match the same documents: equal ones, one that asserts nothing, or constants and bare types of
    which one is in both."""
    for (i, one), (j, other) in combinations(enumerate(_followed(each, root) for each in branches), 2):
        if one is False or other is False:
            continue
        if one == other or not own_keys(one) or not own_keys(other):
            return i, j
        (values, types), (more_values, more_types) = _plain(one), _plain(other)
        if types & more_types or any(type_of(each) in more_types for each in values) or any(type_of(each) in types for each in more_values):
            return i, j
        if any(equal(each, value) for each in values for value in more_values):
            return i, j
    return None


def _followed(branch: Any, root: object) -> Any:
    """What a branch refers to, if it does nothing else."""
    for _ in range(DEEPEST):
        if not isinstance(branch, Mapping) or own_keys(branch) != ["$ref"] or not isinstance(uri := branch["$ref"], str):
            return branch
        found = inner(root, uri) if uri[:1] == "#" else None
        if found is None:
            return branch
        branch = found
    return branch


def _plain(branch: Mapping[str, Any]) -> tuple[list[Any], frozenset[str]]:
    """The values of a branch that lists them, and the types of one that says no more."""
    keys = own_keys(branch)
    if keys in (["const"], ["type", "const"]):
        return [branch["const"]], frozenset()
    if keys in (["enum"], ["type", "enum"]) and isinstance(branch["enum"], list):
        return branch["enum"], frozenset()
    return [], types_of(branch, None) if keys == ["type"] else frozenset()
