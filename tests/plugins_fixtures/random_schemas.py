"""Random JSON schemas."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("name", "age", "city", "tags", "score", "address", "id", "kind", "active", "size")
WORDS = ("red", "green", "blue", "small", "large", "Paris", "Oslo", "cat", "dog")


def schema_of(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of up to three levels whose documents are short."""
    kinds = ("integer", "number", "boolean", "string", "enum", "const", "pattern", "null", "anyOf")
    kind = rng.choice(kinds if depth > 1 else (*kinds, *["object"] * 6, *["array"] * 4)) if depth else rng.choice(("object", "array"))
    if kind == "object":
        names = rng.sample(NAMES, rng.randint(1, 4))
        required = [name for name in names if rng.random() < 0.7]
        properties = {name: schema_of(rng, depth + 1) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if kind == "array":
        low = rng.randint(0, 2)
        return {"type": "array", "items": schema_of(rng, depth + 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if kind == "integer":
        low = rng.randint(-100, 100)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(1, 12)}
    if kind == "anyOf":
        return {"anyOf": [schema_of(rng, depth + 1) for _ in range(2)]}
    plain: dict[str, dict[str, Any]] = {
        "number": {"type": "number", "minimum": 0, "maximum": 1},
        "boolean": {"type": "boolean"},
        "null": {"type": "null"},
        "enum": {"enum": rng.sample(WORDS, 3)},
        "const": {"const": rng.choice([7, "fixed", None, True])},
        "pattern": {"type": "string", "pattern": "^[A-Z][a-z]{2,5}-[0-9]{2}$"},
    }
    return plain[kind]
