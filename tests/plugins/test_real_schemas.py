"""Random JSON schemas and the small real model at temperature 1: every output is a document that satisfies its schema."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from modelrunner import LLM, SamplingParams, StructuredOutputsParams
from modelrunner.plugins.demo_model import demo_file

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("xgrammar")

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


@pytest.mark.skipif(demo_file() is None, reason="the demo model is not installed")
@pytest.mark.parametrize(
    "count", [pytest.param(12, id="12"), pytest.param(200, id="200", marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_documents_satisfy_their_schemas(count: int) -> None:
    rng = random.Random(7)
    schemas = [schema_of(rng) for _ in range(count)]
    assert len({json.dumps(schema) for schema in schemas}) > count * 3 // 4
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=200, structured_outputs=StructuredOutputsParams(json=schema))
        for i, schema in enumerate(schemas)
    ]
    conversations = [
        [{"role": "user", "content": f"Answer with a JSON document that satisfies this schema: {json.dumps(schema)[:300]}"}]
        for schema in schemas
    ]
    with LLM("", max_model_len=640, grammar={"max_whitespace": 2}, scheduler={"max_rows": 64}) as llm:
        outputs = llm.chat(conversations, params)
        held, tokens = llm.engine.scheduler.stats.held, llm.engine.scheduler.stats.generated_tokens
    documents = [output.outputs[0] for output in outputs]
    assert [document.finish_reason for document in documents] == ["stop"] * count, [
        (document.finish_reason, document.stop_reason, document.text[:80]) for document in documents if document.finish_reason != "stop"
    ]
    for schema, document in zip(schemas, documents, strict=True):
        jsonschema.validate(json.loads(document.text), schema)
    print(f"{count} documents, {tokens} tokens, rows held {held} times")
    assert len({document.text for document in documents}) > count // 2
