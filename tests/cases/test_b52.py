"""B52: kernels were still compiled when the first real requests came, and again at each new class of shapes."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch
from draft_world import DrawingPlugin
from grammar_world import TablePlugin
from mm_world import made, prepared
from tiny_mm import mm

from modelrunner import Engine, OutputKind, SamplingParams, StructuredOutputsParams
from modelrunner.testing import ByteTokenizerPlugin, Driver, EngineProbe, P, options, tiny_dense
from tests.model_states.drafters.engines import KINDS, head, target

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


class Ready:
    """An engine that has started: whatever it is asked for, nothing is built."""

    def __init__(self, driver: Driver, built: Counter[str]) -> None:
        self.driver, self.probe, self.built = driver, EngineProbe(driver), built
        built.clear()

    def run(self, label: str, *requests: tuple[int, SamplingParams]) -> float:
        """Requests of so many tokens, all at once. Returns the seconds that they took."""
        begun = time.monotonic()
        for k, (length, params) in enumerate(requests):
            self.driver.add(f"{label}{k}", P(length, 7 * k + len(label)), params)
        self.driver.finish()
        assert not self.built, f"{label}: {dict(self.built)}"
        return time.monotonic() - begun

    def run_all(self) -> None:
        run = self.run
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

    def preempt(self) -> None:
        driver = self.driver
        driver.add("low", P(40, 1), GREEDY.model_copy(update={"output_kind": OutputKind.CUMULATIVE, "max_tokens": 60}), priority=1)
        driver.step_until(lambda: driver.num_tokens("low") >= 3)
        self.probe.drain()
        self.probe.preempt("low")
        driver.finish()
        assert driver.engine.scheduler.stats.preemptions == 1
        assert not self.built, dict(self.built)


@pytest.mark.parametrize(("dtype", "vocab"), [("bfloat16", 151_936), ("float32", 331)])
def test_nothing_is_built_once_the_engine_is_ready(built: Counter[str], dtype: str, vocab: int) -> None:
    """Of a large vocabulary the kernels that choose tokens are others for few rows than for many."""
    settings = options(device="cuda", rows=32, pages=200, tokens=STEP, policy="priority")
    model = {"name": str(tiny_dense(vocab_size=vocab)), "dtype": dtype}
    ready = Ready(Driver(Engine({"model": model} | settings, plugins=[ByteTokenizerPlugin()])), built)
    ready.run_all()
    ready.preempt()


DRAFTERS: list[tuple[str, str, dict[str, Any]]] = [
    ("ngram", "float32", {}),
    *((kind, "bfloat16", {}) for kind in ("ngram", *KINDS)),
    ("ngram", "bfloat16", {"adaptive": True, "spare_tokens": 24}),
    ("eagle3", "bfloat16", {"off_above_rows": 6, "acceptance": "typical"}),
    ("drawing", "bfloat16", {}),
]


@pytest.mark.parametrize(("kind", "dtype", "more"), DRAFTERS, ids=lambda value: "-".join(value) if isinstance(value, dict) else value)
def test_nothing_is_built_for_drafts(built: Counter[str], kind: str, dtype: str, more: dict[str, Any]) -> None:
    """In steps with as many drafts as there may be, with fewer and with none, and of rows with a grammar."""
    settings = options(device="cuda", rows=32, pages=200, tokens=STEP, policy="priority")
    speculation = {"drafter": kind, "num_tokens": 3, "model": head(kind) if kind in KINDS else ""} | more
    plugins = [ByteTokenizerPlugin(), TablePlugin(), DrawingPlugin({40: 0.5, 60: 0.5})]
    model = {"name": str(target()), "dtype": dtype}
    ready = Ready(Driver(Engine({"model": model, "speculation": speculation} | settings, plugins=plugins)), built)
    ready.run_all()
    guided = SamplingParams(temperature=0, max_tokens=30, structured_outputs=StructuredOutputsParams(choice=["abcabcabcabc", "abcd"]))
    followed = guided.model_copy(update={"allowed_token_ids": list(range(331)), "presence_penalty": 0.5})
    ready.run("grammar", (20, guided), (21, GREEDY), (22, guided.model_copy(update={"temperature": 1.0, "logprobs": 2})))
    ready.run("grammar and more", (20, followed), (5, FILTERED), (150, guided))
    ready.run("many grammars", *[(5 + k % 3, guided) for k in range(32)])
    for count in (0, 1, 2):
        fewer = GREEDY.model_copy(update={"num_draft_tokens": count})
        ready.run(f"at most {count}", (20, fewer), (21, fewer.model_copy(update={"temperature": 0.8, "seed": 3})))
        ready.run(f"at most {count} beside more", *[(4 + k, (fewer, SAMPLED)[k % 2]) for k in range(9)])
    ready.preempt()
    assert ready.driver.engine.scheduler.stats.num_drafted


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
