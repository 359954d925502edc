"""B52: kernels were still compiled when the first real requests came, and again at each new class of shapes."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch
from mm_world import made, prepared
from tiny_mm import mm

from modelrunner import Engine, OutputKind, SamplingParams
from modelrunner.testing import ByteTokenizerPlugin, Driver, EngineProbe, P, options, tiny_dense

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)
SAMPLED = GREEDY.model_copy(update={"temperature": 0.8, "seed": 1})
FILTERED = SAMPLED.model_copy(update={"top_k": 20, "top_p": 0.9, "min_p": 0.01})
EDITS = {"repetition_penalty": 1.2, "logit_bias": {9: 1.5}, "bad_words": [[11, 12]], "min_tokens": 3}
EDITED = GREEDY.model_copy(update=EDITS)
EDITED_DRAWS = SAMPLED.model_copy(update=EDITS)
BIASED = SAMPLED.model_copy(update={"logit_bias": {9: 1.5}})
ALLOWED = SAMPLED.model_copy(update={"allowed_token_ids": list(range(20, 90))})
LOGPROBS = GREEDY.model_copy(update={"logprobs": 5})
PROMPTS = LOGPROBS.model_copy(update={"prompt_logprobs": 3})
STEP = 64  # tokens at most, so that a longer prompt is cut


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Kernels that were built, or fetched from the cache of built ones, by name."""
    from triton import knobs

    counts: Counter[str] = Counter()

    def listener(*, src: Any, **_: Any) -> None:
        counts[src.name] += 1

    monkeypatch.setattr(knobs.compilation, "listener", listener)
    return counts


@pytest.mark.parametrize(("dtype", "vocab"), [("bfloat16", 151_936), ("float32", 331)])
def test_nothing_is_built_once_the_engine_is_ready(built: Counter[str], dtype: str, vocab: int) -> None:
    """Of a large vocabulary the kernels that choose tokens are others for few rows than for many."""
    settings = options(device="cuda", rows=32, pages=200, tokens=STEP, policy="priority")
    model = {"name": str(tiny_dense(vocab_size=vocab)), "dtype": dtype}
    driver = Driver(Engine({"model": model} | settings, plugins=[ByteTokenizerPlugin()]))
    probe = EngineProbe(driver)
    built.clear()

    def run(label: str, *requests: tuple[int, SamplingParams]) -> float:
        begun = time.monotonic()
        for k, (length, params) in enumerate(requests):
            driver.add(f"{label}{k}", P(length, 7 * k + len(label)), params)
        driver.finish()
        assert not built, f"{label}: {dict(built)}"
        return time.monotonic() - begun

    first = run("first", (20, GREEDY))
    again = max(run("repeat " + "." * k, (20, GREEDY)) for k in range(3))
    assert first <= 2 * again + 0.01
    run("seven", *[(5 + 3 * k, GREEDY) for k in range(7)])
    run("sixteen", *[(16, GREEDY)] * 16)
    run("one token", (1, GREEDY))
    run("chunks", (150, GREEDY), (200, SAMPLED))
    run("sampled", (16, SAMPLED), (17, GREEDY))
    run("filtered", (31, FILTERED), (32, SAMPLED), (33, GREEDY))
    run("many filtered", *[(5 + k % 3, FILTERED) for k in range(32)])
    run("edited", (20, EDITED), (21, GREEDY))
    run("edited and sampled", (20, EDITED_DRAWS), (21, SAMPLED), (22, BIASED))
    run("edited and filtered", *[(5, EDITED_DRAWS), (6, FILTERED), (7, ALLOWED)] * 10)
    run("masks", (20, ALLOWED), (21, GREEDY))
    run("many masks", *[(20, ALLOWED)] * 30)
    run("log-probs", (20, LOGPROBS), (21, GREEDY))
    run("log-probs beside masks", (20, LOGPROBS), (21, ALLOWED), (22, FILTERED))
    run("log-probs of prompts", (20, PROMPTS), (150, PROMPTS), (33, GREEDY))
    driver.add("low", P(40, 1), GREEDY.model_copy(update={"output_kind": OutputKind.CUMULATIVE}), priority=1)
    driver.step_until(lambda: driver.num_tokens("low") >= 3)
    probe.drain()
    probe.preempt("low")
    driver.finish()
    assert driver.engine.scheduler.stats.preemptions == 1
    assert not built, dict(built)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nothing_is_built_for_images(built: Counter[str], dtype: str) -> None:
    """Of the sizes that come, cut by chunks and not, beside text and alone."""
    subject = mm()
    settings = options(device="cuda", rows=8, pages=64, tokens=STEP) | {"media": {"arena_tokens": 100}}
    driver = Driver(Engine({"model": {"name": subject.model, "dtype": dtype}} | settings, plugins=subject.plugins))
    requests = [made((5 + i, (3 + i, 4 + 2 * i), 9), i) for i in range(5)]
    built.clear()
    for number, one in enumerate(requests):
        driver.engine.add_request(str(number), prepared(driver, one), GREEDY)
        driver.outputs[str(number)] = []
        driver.add(f"text{number}", P(20 + number, number), SAMPLED)
        if number % 2:
            driver.finish()
    driver.finish()
    assert driver.engine.media.num_encoded == 5
    assert not built, dict(built)
