"""B61: a processor from an entry point was not counted among what needs output tokens, so with overlap it was given placeholders."""

from __future__ import annotations

import importlib
from itertools import pairwise
from typing import Any

import pytest
import torch
from plugin_site import PluginSite

from modelrunner import SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, assert_tokens, dense

TOKENS, REQUESTS = 40, 8


def params(tag: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logits_processors={"pairs": {"tag": tag}})


def prompt(tag: int) -> list[int]:
    return P(10 + tag, tag)


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """Plain Python over transformers' logits."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(dense().model, dtype=torch.float32).eval()
    found = []
    for tag in range(REQUESTS):
        output: list[int] = []
        for _ in range(TOKENS):
            with torch.no_grad():
                logits = model(torch.tensor([prompt(tag) + output])).logits[0, -1].clone()
            before = (output or prompt(tag))[-1]
            logits[[b for a, b in pairwise(output) if a == before]] = -torch.inf
            output.append(int(logits.argmax()))
        found.append(output)
    return found


@pytest.mark.parametrize("captures", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_history_is_what_was_emitted(depth: int, captures: bool, device: str, plugin_site: PluginSite, wanted: list[list[int]]) -> None:
    """Four rows, eight requests, one of them preempted: the rows change hands, and each call knows whose they are."""
    if captures and device != "deferred_cpu":
        pytest.skip("the processor reads back what it is shown, which a CUDA graph cannot")
    plugin_site.install("acme-pairs")
    subject = dense()
    driver = Driver(subject.engine(depth=depth, rows=4, device=device, captures=captures))
    shown = importlib.import_module("acme_pairs").shown
    shown.clear()
    probe = EngineProbe(driver)
    for tag in range(REQUESTS):
        driver.add(str(tag), prompt(tag), params(tag))
    driver.step_until(lambda: driver.num_tokens("1") > 8)
    probe.preempt("1")
    driver.finish()
    assert probe.counters().preemptions == 1
    for tag in range(REQUESTS):
        got = list(driver.result(str(tag)).token_ids)
        assert_tokens(subject, prompt(tag), got, wanted[tag], greedy=False)
        assert len(set(pairwise(got))) == TOKENS - 1
        histories = [(tokens, start) for name, tokens, start in shown if name == tag]
        emitted = [tuple(prompt(tag) + got[:i]) for i in range(TOKENS)]
        assert [tokens for tokens, _ in histories] == emitted, "what the plugin was shown is not what was emitted"
        assert {start for _, start in histories} == {len(prompt(tag))}
    probe.assert_clean()


def test_it_matters() -> None:
    """Without the plugin, pairs repeat."""
    driver = Driver(dense().engine())
    for tag in range(REQUESTS):
        driver.add(str(tag), prompt(tag), params(tag).model_copy(update={"logits_processors": {}}))
    driver.finish()
    repeating = [tag for tag in range(REQUESTS) if len(set(pairwise(driver.result(str(tag)).token_ids))) < TOKENS - 1]
    assert len(repeating) > REQUESTS // 2, repeating
