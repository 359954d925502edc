"""Random JSON schemas and the small real model at temperature 1: every output is a document that satisfies its schema.

`SCHEMAS=200 pytest -s tests/plugins/test_real_schemas.py` takes as many, some minutes.
"""

from __future__ import annotations

import json
import os
import random

import pytest
from random_schemas import schema_of

from modelrunner import LLM, SamplingParams, StructuredOutputsParams
from modelrunner.plugins.demo_model import demo_file

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("xgrammar")


@pytest.mark.skipif(demo_file() is None, reason="the demo model is not installed")
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_documents_satisfy_their_schemas() -> None:
    rng, count = random.Random(7), int(os.environ.get("SCHEMAS", "12"))
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
    with LLM("", max_model_len=640, grammar={"max_whitespace": 2, "automaton_memory": 1024}, scheduler={"max_rows": 64}) as llm:
        outputs = llm.chat(conversations, params)
        held, tokens = llm.engine.scheduler.stats.held, llm.engine.scheduler.stats.generated_tokens
        assert llm.engine.guides.ways == {"device": count}
    documents = [output.outputs[0] for output in outputs]
    assert [document.finish_reason for document in documents] == ["stop"] * count, [
        (document.finish_reason, document.stop_reason, document.text[:80]) for document in documents if document.finish_reason != "stop"
    ]
    for schema, document in zip(schemas, documents, strict=True):
        jsonschema.validate(json.loads(document.text), schema)
    assert held == 0
    print(f"{count} documents, {tokens} tokens")
    assert len({document.text for document in documents}) > count // 2
