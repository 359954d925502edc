"""Log-probs on a GPU: transformers' numbers, the same in graphs, no waiting, and prompts of any length in the same memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from modelrunner import Engine, SamplingParams
from modelrunner.testing import ByteTokenizerPlugin, Driver, EngineProbe, P, options, tiny_dense

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

ASKS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=5)
WAITS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaMalloc", "cudaFree", "cudaHostAlloc", "cuModuleLoad")
MIB = 2**20


def start(model: str, dtype: str, eager: bool = False, settings: dict[str, Any] | None = None, **short: Any) -> Driver:
    """Few shapes of graphs: steps with prompts of each size have attention kernels of their own, which take their time to build."""
    graphs = {"eager": eager, "bucket_rows": (1, 8), "bucket_tokens": (48,)}
    given = options(device="cuda", **{"tokens": 48, **short}) | {"graphs": graphs} | (settings or {})
    return Driver(Engine({"model": {"name": model, "dtype": dtype}} | given, plugins=[ByteTokenizerPlugin()]))


def answers(driver: Driver, params: SamplingParams) -> list[Any]:
    """Of a fixed batch: output ids, their log-probs and those of the prompts."""
    for k in range(7):
        driver.add(str(k), P(5 + 11 * k, k), params)
    driver.finish()
    EngineProbe(driver).assert_clean()
    finals = [driver.final(str(k)) for k in range(7)]
    return [(list(final.outputs[0].token_ids), final.outputs[0].logprobs, final.prompt_logprobs) for final in finals]


@pytest.mark.parametrize(("mode", "dtype"), [("raw", "bfloat16"), ("processed", "float32")])
def test_a_graph_gives_the_bits_of_its_eager_step(mode: str, dtype: str) -> None:
    settings = {"sampler": {"logprobs_mode": mode}}
    params = ASKS.model_copy(update={"temperature": 0.8, "top_k": 20, "seed": 3, "repetition_penalty": 1.1, "prompt_logprobs": 2})
    model = str(tiny_dense())
    want = answers(start(model, dtype, eager=True, settings=settings, depth=1), params)
    assert answers(start(model, dtype, settings=settings, depth=2), params) == want


def test_they_are_those_of_transformers() -> None:
    model = str(tiny_dense())
    oracle: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    params = ASKS.model_copy(update={"prompt_logprobs": 3})
    for k, (ids, found, prompt_found) in enumerate(answers(start(model, "float32", depth=2), params)):
        prompt = P(5 + 11 * k, k)
        with torch.inference_mode():
            want = oracle(torch.tensor([[*prompt, *ids]])).logits[0].log_softmax(1)
        assert (len(found), len(prompt_found), prompt_found[0]) == (len(ids), len(prompt), None)
        everything = [*prompt, *ids]
        for position, each in enumerate([*prompt_found[1:], *found], 1):
            assert next(iter(each)) == everything[position]
            for token, given in each.items():
                assert abs(given.logprob - float(want[position - 1, token])) < 1e-3
            best = max(given.logprob for given in each.values())
            assert abs(best - float(want[position - 1].max())) < 1e-3


def test_steps_with_them_wait_for_nothing_but_their_events() -> None:
    from torch.profiler import ProfilerActivity, profile

    driver = start(str(tiny_dense()), "float32", depth=2)
    for k in range(8):
        driver.add(str(k), P(4, k), ASKS.model_copy(update={"max_tokens": 120, "output_kind": "final_only"}))
    for _ in range(12):
        driver.engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            for _ in range(80):
                driver.engine.step()
            torch.cuda.set_sync_debug_mode("default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    calls = {event.key: event.count for event in trace.key_averages()}
    assert calls.get("cudaGraphLaunch", 0) >= 78, calls
    assert calls.pop("cudaDeviceSynchronize", 0) <= 2  # the profiler's own, at its ends
    waits = {name: count for name, count in calls.items() if name.startswith(WAITS)}
    assert not waits, waits


def test_a_prompt_four_times_as_long_takes_no_more_memory() -> None:
    """A vocabulary of which the logits of 32k positions would take 8 GiB."""
    model = str(tiny_dense(vocab_size=64 * 1024, max_position_embeddings=33 * 1024))
    driver = start(model, "float32", eager=True, settings={"sampler": {"max_logprobs": 5}}, pages=2200, rows=2, tokens=2048)

    def peak(length: int, asks: int | None) -> int:
        """Bytes allocated at most while such a prompt runs; the first time builds what was not built yet."""
        for k in range(2):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            driver.add("prompt", P(length, k), ASKS.model_copy(update={"max_tokens": 2, "prompt_logprobs": asks}))
            driver.finish()
        found = driver.final("prompt").prompt_logprobs
        if asks is not None:
            assert found is not None
            assert len(found) == length
            assert all(each is not None and asks <= len(each) <= asks + 1 for each in found[1:])
        return int(torch.cuda.max_memory_allocated())

    short, long, plain = peak(8 * 1024, 5), peak(32 * 1024, 5), peak(32 * 1024, None)
    print(f"allocated at most: 8k {short / MIB:.1f}, 32k {long / MIB:.1f}, 32k without log-probs {plain / MIB:.1f} MiB")
    assert long <= max(short, plain) + MIB


def test_the_whole_vocabulary() -> None:
    driver = start(str(tiny_dense()), "float32", settings={"sampler": {"max_logprobs": -1}}, depth=2)
    driver.add("all", P(20, 1), ASKS.model_copy(update={"max_tokens": 4, "logprobs": -1, "prompt_logprobs": -1}))
    driver.add("five", P(20, 1), ASKS.model_copy(update={"max_tokens": 4}))
    driver.finish()
    final, five = driver.final("all"), driver.result("five").logprobs
    assert final.prompt_logprobs is not None
    assert final.outputs[0].logprobs is not None
    for found in [*final.prompt_logprobs[1:], *final.outputs[0].logprobs]:
        assert found is not None
        assert sorted(found) == list(range(331))
        assert sum(torch.tensor([given.logprob for given in found.values()]).exp()) == pytest.approx(1, abs=1e-4)
    assert five is not None
    for few, found in zip(five, final.outputs[0].logprobs, strict=True):
        for token, given in few.items():
            assert given.rank == found[token].rank
            assert given.logprob == pytest.approx(found[token].logprob, abs=1e-5)
