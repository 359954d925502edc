"""B08: a counter that was not reset between two batch calls made the second one look up the first one's ids and lose results."""

from __future__ import annotations

import pytest

from modelrunner import LLM, SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, assert_same, dense


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def check(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    results = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert [list(result.prompt_token_ids) for result in results] == prompts
    for prompt, wish, result in zip(prompts, params, results, strict=True):
        assert_same(dense(), prompt, wish, result.outputs[0])
    return [list(result.outputs[0].token_ids) for result in results]


def test_every_result_in_prompt_order_call_after_call() -> None:
    llm = dense().llm(rows=3)
    settings = llm.engine.settings
    before = settings.model_dump()
    check(llm, [P(n, 1) for n in range(5, 15)], [greedy(m) for m in range(10, 0, -1)])  # they end in reverse order
    check(llm, [P(n, 2) for n in range(4, 11)], [greedy(5)] * 7)
    same = check(llm, [P(9, 3)] * 5, [greedy(6)] * 5)
    assert same == [same[0]] * 5
    steps = EngineProbe(Driver(llm.engine)).counters().steps
    with pytest.raises(ValueError, match="331"):
        llm.generate([{"prompt_token_ids": ids} for ids in (P(4, 1), P(4, 2), [5, 331], P(4, 4))], greedy(3), use_tqdm=False)
    probe = EngineProbe(Driver(llm.engine))
    assert probe.counters().steps == steps, "something ran before the invalid prompt was refused"
    probe.assert_clean()
    check(llm, [P(7, 1)], [greedy(4)])
    assert llm.engine.settings is settings
    assert settings.model_dump() == before
