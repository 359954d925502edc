"""B26: compiling a deeply nested or cyclic schema had no limit and held the whole engine for minutes."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import time
from typing import Any

import psutil
import pytest
from engine_world import last, run, start
from grammar_world import written

from modelrunner import SamplingParams, StructuredOutputsParams
from modelrunner.testing import P, assert_same, dense

pytest.importorskip("xgrammar")
COPIES = 8


def nested(depth: int = 12, branches: int = 4) -> dict[str, Any]:
    """oneOf in oneOf: each level is defined once, so that the text stays short while what it stands for has 4 ** 12 leaves."""
    levels: dict[str, Any] = {f"L{depth}": {"type": "integer", "minimum": 0, "maximum": 9}}
    for level in range(depth):
        inner = {"$ref": f"#/$defs/L{level + 1}"}
        forms = [{"type": "object", "properties": {f"k{i}": inner}, "required": [f"k{i}"]} for i in range(branches)]
        levels[f"L{level}"] = {"oneOf": forms}
    return {"$ref": "#/$defs/L0", "$defs": levels}


COSTLY = {
    "oneOf": StructuredOutputsParams(json=nested()),
    "regex": StructuredOutputsParams(regex="(a|b){1,500}(c|d){1,500}"),
    "maxItems": StructuredOutputsParams(
        json={"type": "array", "items": {"type": "integer", "maximum": 9, "minimum": 0}, "maxItems": 10**18}
    ),
    "itself": StructuredOutputsParams(json={"$ref": "#"}),
}
STREAM = P(20, 1), SamplingParams(temperature=0, max_tokens=200, ignore_eos=True, output_kind="delta")


def test_costly_grammars_do_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELRUNNER_GRAMMAR__MAX_WHITESPACE", "0")
    subject = dense()
    llm = start(subject, depth=2, rows=64, pages=1024)
    compile_limit = llm.settings.grammar.compile_limit

    async def go() -> None:
        assert llm.pid is not None
        easy = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["a"]))
        await last(llm, P(9, 1), easy)  # loads the library, which stays
        process, gaps, ids = psutil.Process(llm.pid), [], []
        before = process.memory_info().rss

        async def stream() -> None:
            at = time.monotonic()
            async for output in llm.generate(*STREAM):
                ids.extend(output.outputs[0].token_ids)
                gaps.append(time.monotonic() - at)
                at = time.monotonic()

        async def costly(params: StructuredOutputsParams, seed: int) -> tuple[StructuredOutputsParams, Any, float]:
            begun = time.monotonic()
            output = await last(llm, P(12, seed), SamplingParams(seed=seed, max_tokens=60, structured_outputs=params))
            return params, output.outputs[0], time.monotonic() - begun

        streaming = asyncio.create_task(stream())
        while len(ids) < 5:
            await asyncio.sleep(0.01)
        results = await asyncio.gather(*(costly(params, seed) for params in COSTLY.values() for seed in range(COPIES)))
        assert not streaming.done(), "the costly requests did not fall into the stream"
        await streaming
        assert max(gaps[5:]) < 1.0
        for params, result, seconds in results:
            assert seconds < compile_limit + 60, "the limit, and the time of 60 tokens on a slow machine"
            if params is COSTLY["itself"]:
                assert result.finish_reason == "error"
                assert "ircular" in str(result.stop_reason)
                continue
            assert result.finish_reason in ("stop", "length")
            text = written(result.token_ids)
            if params is COSTLY["regex"]:
                assert re.fullmatch("[ab]*[cd]*", text)
            elif result.finish_reason == "stop":
                json.loads(text)
        assert llm.health()
        assert_same(subject, STREAM[0], STREAM[1], await whole())
        gc.collect()
        assert process.memory_info().rss - before < 50 << 20

    async def whole() -> Any:
        return (await last(llm, STREAM[0], STREAM[1].model_copy(update={"output_kind": "final_only"}))).outputs[0]

    try:
        run(go())
    finally:
        llm.close()
