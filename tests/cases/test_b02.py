"""B02: a preempted request gave a token twice, lost one, or resumed from a stale input id while a step was in flight."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from modelrunner import OutputKind, SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, assert_same, dense

REQUESTS = 6


def params(s: int) -> SamplingParams:
    sampled = {"temperature": 1.0, "seed": 100 + s} if s % 2 else {"temperature": 0.0}
    return SamplingParams(max_tokens=40, ignore_eos=True, **sampled)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix", [False, True])
def test_preempted_and_resumed_requests_give_the_same_tokens(depth: int, prefix: bool, device: str) -> None:
    subject = dense()
    driver = Driver(subject.engine(depth=depth, prefix=prefix, pages=12, tokens=32, device=device, device_seed=depth))
    probe = EngineProbe(driver)
    probe.poison_freed_pages()
    for s in range(REQUESTS):
        kind = OutputKind.DELTA if s < 3 else OutputKind.CUMULATIVE
        driver.add(f"r{s}", P(20 + 5 * s, s), params(s).model_copy(update={"output_kind": kind}))
    driver.finish()
    assert probe.counters().preemptions >= 3
    for s in range(REQUESTS):
        outputs = [output.outputs[0] for output in driver.outputs[f"r{s}"]]
        if s < 3:  # pieces, each delivered once and in order
            ids = [token for output in outputs for token in output.token_ids]
            final = replace(outputs[-1], text="".join(output.text for output in outputs), token_ids=ids)
        else:
            final = outputs[-1]
            lists = [list(o.token_ids) for o in outputs]
            assert all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(lists))
        assert len(final.token_ids) == 40
        assert_same(subject, P(20 + 5 * s, s), params(s), final)
    probe.assert_clean()
