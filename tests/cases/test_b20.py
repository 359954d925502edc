"""B20: prompt log-probs were wrong for every prompt up to the largest captured size, and right one token above it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from draft_world import certain
from hybrid import hybrid

from modelrunner import Engine, SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, Subject, dense, options
from tests.model_states.drafters.engines import subject as heads_target

LENGTHS = (20, 64, 127, 128, 129, 200)
PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)


def numbers(driver: Driver, together: bool) -> list[list[float]]:
    """Log-probs of the prompts' tokens, one request after the other, or two in each step."""
    for k, length in enumerate(LENGTHS):
        driver.add(str(k), P(length, k), PARAMS)
        if not together or k % 2:
            driver.finish()
    EngineProbe(driver).assert_clean()
    found = [driver.final(str(k)).prompt_logprobs or () for k in range(len(LENGTHS))]
    prompts = [P(length, k) for k, length in enumerate(LENGTHS)]
    pairs = [zip(one, prompt, strict=True) for one, prompt in zip(found, prompts, strict=True)]
    return [[each[token].logprob for each, token in pair if each] for pair in pairs]


def run_on(subject: Subject, device: str, drafter: str | None) -> None:
    """Graphs and the drafter against neither."""

    def start(eager: bool) -> Driver:
        graphs = {"graphs": {"eager": eager, "max_tokens": 128, "bucket_rows": (1, 2, 4)}}
        speculation = {} if eager else {"drafter": drafter}
        settings = {"model": {"name": subject.model}} | options(rows=4, device=device, captures=True, tokens=512, **speculation) | graphs
        return Driver(Engine(settings, plugins=subject.plugins))

    captured = start(eager=False)
    assert "bodies" in captured.engine.assembly.resolved.graphs
    want = numbers(start(eager=True), together=False)
    assert [len(each) for each in want] == [length - 1 for length in LENGTHS]
    for together in (False, True):
        for one, other in zip(numbers(start(eager=False), together), want, strict=True):
            assert sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(other) < 1e-4


@pytest.mark.parametrize("model", [dense, hybrid])
def test_prompt_logprobs_do_not_jump_at_the_capture_limit(model: Callable[[], Subject], device: str) -> None:
    run_on(model(), device, None)


@pytest.mark.parametrize("drafter", ["script", "ngram"])
def test_prompt_logprobs_beside_a_drafter(drafter: str, device: str) -> None:
    """Whose graphs take hidden states from buffers of their own; compared with graphs off and drafter off."""
    run_on(certain(50, dense()), device, drafter)


def test_prompt_logprobs_beside_a_drafter_that_reads_hidden_states(device: str) -> None:
    """A module for multi-token prediction, run three times."""
    run_on(heads_target(), device, "mtp")
