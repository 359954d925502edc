"""10,000 short requests through one LLM: memory stays flat and nothing is left behind."""

from __future__ import annotations

import gc
import tracemalloc

import psutil
import pytest

from modelrunner import SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, mixed, scripted

CALLS = 10
REQUESTS_PER_CALL = 1000
PYTHON_GROWTH = 200_000  # bytes: caches of the interpreter and of libraries still settle
PROCESS_GROWTH = 30_000_000  # bytes: the allocator's fragmentation


@pytest.mark.slow
def test_memory_is_flat_over_10000_requests() -> None:
    llm = scripted(mixed(), "soak").llm(rows=64, pages=400, tokens=512)
    process = psutil.Process()
    tracemalloc.start()
    python, resident = [], []
    for call in range(CALLS):
        numbers = range(call * REQUESTS_PER_CALL, (call + 1) * REQUESTS_PER_CALL)
        prompts = [{"prompt_token_ids": P(3 + k % 37, k)} for k in numbers]
        params = [
            SamplingParams(temperature=k % 2, seed=k, max_tokens=1 + k % 7, ignore_eos=True, stop=("zzzz",) if k % 5 == 0 else ())
            for k in numbers
        ]
        results = llm.generate(prompts, params, use_tqdm=False)
        assert [len(result.outputs[0].token_ids) for result in results] == [wish.max_tokens for wish in params]
        del results, prompts, params
        gc.collect()
        python.append(tracemalloc.get_traced_memory()[0])
        resident.append(process.memory_info().rss)
    tracemalloc.stop()
    assert python[-1] - python[0] < PYTHON_GROWTH, f"bytes held by Python after each 1,000 requests: {python}"
    assert resident[-1] - resident[0] < PROCESS_GROWTH, f"resident bytes after each 1,000 requests: {resident}"
    EngineProbe(Driver(llm.engine)).assert_clean()
