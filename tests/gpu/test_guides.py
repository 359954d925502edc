"""On a GPU: structured output gives the CPU's tokens, beside rows that go on without it, and nothing synchronises; with masks of the host,
and with automata on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from grammar_world import ChoicePlugin, TablePlugin, written

from modelrunner import SamplingParams, StructuredOutputsParams
from modelrunner.testing import Driver, EngineProbe, P, Subject, dense

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
TEXTS = ["a colour like blue", "a colour like red", "another thing", "xyz" * 8]


@pytest.fixture(autouse=True)
def _float32(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MODELRUNNER_MODEL__DTYPE", "float32")
    yield
    torch.cuda.set_sync_debug_mode("default")


def params(i: int) -> SamplingParams:
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": i} if i % 2 else {"temperature": 0.0}
    if i % 3 == 2:
        return SamplingParams(max_tokens=24, ignore_eos=True, **drawn)
    return SamplingParams(max_tokens=40, structured_outputs=StructuredOutputsParams(choice=TEXTS), **drawn)


RULES = {
    "choice": ["another", "a colour like blue", "a colour like red", "x" * 20],
    "letters": r'root ::= ("<" [^\0-\x1f<>]{1, 12} ">")',
    "pairs": r'root ::= ("{" pair ("," pair){0, 3} "}")' + "\n" + r'pair ::= ("\"" [a-e]{1, 3} "\":" (("-" number) | number | "null"))'
    "\n" + r"number ::= ([0-9] | [1-9] number)",
}


def by_automaton(i: int) -> SamplingParams:
    """Every kind of sampling, and options that take further tokens away or add to logits."""
    more: dict[str, Any] = [{}, {"logprobs": 3}, {"presence_penalty": 0.5}, {"top_p": 0.9, "top_k": 40}, {"min_tokens": 4}][i % 5]
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": i} if i % 2 else {"temperature": 0.0}
    if i % 4 == 3:
        return SamplingParams(max_tokens=24, ignore_eos=True, **drawn)
    kind = list(RULES)[i % 3]
    asked = {"choice": RULES["choice"]} if kind == "choice" else {"grammar": RULES[kind]}
    return SamplingParams(max_tokens=30, structured_outputs=StructuredOutputsParams(**asked), **drawn, **more)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_automata_on_the_device_give_the_cpus_tokens(depth: int) -> None:
    subject = dense()
    guided = Subject(subject.model, "tables", (*subject.plugins, TablePlugin()))
    results = {}
    for device in ("cpu", "cuda"):
        driver = Driver(guided.engine(device=device, depth=depth, rows=16, tokens=48))
        for i in range(16):
            driver.add(f"warm{i}", P(9 + i, 40 + i), by_automaton(i))
        driver.finish()
        torch.cuda.set_sync_debug_mode("error")
        for turn in range(2):
            for i in range(16):
                driver.add(f"r{turn}-{i}", P(5 + 4 * i, i), by_automaton(i))
            late = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(choice=[f"late {turn}", "later"]))
            driver.add(f"r{turn}-16", P(30, 3), late)  # loaded while others run
            driver.finish()
        torch.cuda.set_sync_debug_mode("default")
        results[device] = [driver.result(f"r{turn}-{i}") for turn in range(2) for i in range(16)]
        assert driver.engine.scheduler.stats.held == 0
        assert driver.engine.guides.ways == {"device": 3 * 12 + 2}
        EngineProbe(driver).assert_clean()
    for i, (cpu, cuda) in enumerate(zip(results["cpu"], results["cuda"], strict=True)):
        assert list(cpu.token_ids) == list(cuda.token_ids), i
        assert (cpu.finish_reason, cpu.stop_reason) == (cuda.finish_reason, cuda.stop_reason)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_masked_rows_give_the_cpus_tokens(depth: int) -> None:
    subject = dense()
    guided = Subject(subject.model, "choices", (*subject.plugins, ChoicePlugin()))
    results = {}
    for device in ("cpu", "cuda"):
        driver = Driver(guided.engine(device=device, depth=depth, rows=16, tokens=48))
        for i in range(12):
            driver.add(f"warm{i}", P(9 + i, 40 + i), params(i))
        driver.finish()
        torch.cuda.set_sync_debug_mode("error")
        for i in range(12):
            driver.add(f"r{i}", P(5 + 4 * i, i), params(i))
        driver.finish()
        torch.cuda.set_sync_debug_mode("default")
        results[device] = [driver.result(f"r{i}") for i in range(12)]
        held = driver.engine.scheduler.stats.held
        assert held or depth == 1
        EngineProbe(driver).assert_clean()
    for i, (cpu, cuda) in enumerate(zip(results["cpu"], results["cuda"], strict=True)):
        assert list(cpu.token_ids) == list(cuda.token_ids), i
        if params(i).structured_outputs is not None:
            assert written(cuda.token_ids) in TEXTS
