"""Speculative decoding on a GPU: captured steps with drafts are the eager ones, tokens are those without drafts, and nothing waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mirror_drafter import MirrorPlugin

from modelrunner import Engine, OutputKind, SamplingParams
from modelrunner.request import Request
from modelrunner.testing import ByteTokenizerPlugin, Driver, EngineProbe, P, R, ScriptDrafterPlugin, options, tiny_dense

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=40, ignore_eos=True)
EDITED = SamplingParams(temperature=0, frequency_penalty=0.5, bad_words=[[60, 61]], max_tokens=40, ignore_eos=True)
PROMPTS = [P(5 + 11 * k, k) for k in range(6)] + [R(6)]


def start(drafter: str | None, plugins: tuple[object, ...] = (), eager: bool = False, dtype: str = "float32", **short: Any) -> Driver:
    buckets = {"bucket_rows": (1, 2, 4, 8), "bucket_tokens": (16, 32, 64, 512)}
    settings = options(device="cuda", drafter=drafter, **short) | {"graphs": {"eager": eager} | buckets}
    model = {"name": str(tiny_dense()), "dtype": dtype}
    return Driver(Engine({"model": model} | settings, plugins=[ByteTokenizerPlugin(), *plugins]))


def tokens(driver: Driver, params: SamplingParams) -> list[list[int]]:
    for k, prompt in enumerate(PROMPTS):
        driver.add(str(k), prompt, params)
    driver.finish()
    EngineProbe(driver).assert_clean()
    found = [list(driver.result(str(k)).token_ids) for k in range(len(PROMPTS))]
    driver.engine.close()
    return found


def script(outputs: list[list[int]], wrong: int) -> ScriptDrafterPlugin:
    """Proposes `outputs`, of which every `wrong`th token is another one."""

    def propose(request: Request) -> list[int]:
        output = outputs[int(request.id)]
        return [(token + 1) % 331 if place % wrong == wrong - 1 else token for place, token in enumerate(output)]

    return ScriptDrafterPlugin(propose)


@pytest.mark.parametrize("params", [GREEDY, DRAWN, EDITED], ids=["greedy", "drawn", "edited"])
def test_tokens_are_those_without_drafts(params: SamplingParams) -> None:
    """In float32, where a step of other shape changes no choice."""
    plain = tokens(start(None), params)
    for drafter, plugins in (("ngram", ()), ("script", (script(plain, 3),)), ("script", (script(plain, 99),))):
        assert tokens(start(drafter, plugins, depth=3), params) == plain, drafter


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("drafter", ["ngram", "script", "mirror"])
def test_a_graph_is_its_eager_step_and_depth_changes_nothing(drafter: str, dtype: str) -> None:
    """On the same padded buckets, bit for bit; prompts in chunks beside rows that draft."""
    given = [[int(token) for token in torch.randint(3, 331, (40,), generator=torch.Generator().manual_seed(k))] for k in range(7)]
    plugins = {"ngram": (), "script": (script(given, 99),), "mirror": (MirrorPlugin(),)}[drafter]
    short = {"tokens": 48, "mixed_tokens": 48, "dtype": dtype}
    want = tokens(start(drafter, plugins, eager=True, depth=1, **short), GREEDY)
    graphs = start(drafter, plugins, depth=1, **short)
    assert "captured" in graphs.engine.assembly.resolved.graphs
    assert tokens(graphs, GREEDY) == want
    assert tokens(start(drafter, plugins, depth=3, eager=True, **short), GREEDY) == tokens(
        start(drafter, plugins, depth=3, **short), GREEDY
    )


def test_a_drafters_own_cache_is_right() -> None:
    driver = start("mirror", (MirrorPlugin(),), tokens=48, mixed_tokens=48)
    for k, prompt in enumerate(PROMPTS):
        driver.add(str(k), prompt, GREEDY)
    driver.finish()
    stats = driver.engine.scheduler.stats
    assert stats.num_accepted >= 0.95 * stats.num_drafted > 100


def test_steps_with_drafts_wait_for_nothing() -> None:
    driver = start("ngram")
    long = replace_output(GREEDY, 200)
    for k in range(8):
        driver.add(str(k), P(4, k), long)
    for _ in range(12):
        driver.engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            driver.engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def replace_output(params: SamplingParams, max_tokens: int) -> SamplingParams:
    return params.model_copy(update={"max_tokens": max_tokens, "output_kind": OutputKind.FINAL_ONLY})
