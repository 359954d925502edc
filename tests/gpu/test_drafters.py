"""Drafters with weights on a GPU: steps with them as graphs give what eager ones give, and the tokens are the target's own."""

from __future__ import annotations

import pytest
import torch

from modelrunner import SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, R, assert_same
from tests.model_states.drafters.engines import KINDS, Watch, start, subject

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.7, top_p=0.9, seed=7, max_tokens=24, ignore_eos=True)
REQUESTS = [(P(3 + 11 * k, k % 3) if k % 3 else R(4 + k), SAMPLED if k % 3 == 2 else GREEDY) for k in range(8)]


def run(driver: Driver) -> list[tuple[int, ...]]:
    probe = EngineProbe(driver)
    for k, (prompt, params) in enumerate(REQUESTS):
        driver.add(str(k), prompt, params)
        driver.step()
    driver.finish()
    probe.assert_clean()
    return [tuple(driver.result(str(k)).token_ids) for k in range(len(REQUESTS))]


def cuda(kind: str, dtype: str, k: int = 3, eager: bool = False, **short: object) -> Driver:
    graphs = {"eager": eager, "bucket_rows": (1, 2, 4, 8), "bucket_tokens": (16, 32, 64, 128)}
    more = {"graphs": graphs, "model": {"name": subject().model, "dtype": dtype}}
    return start(kind, k=k, more=more, device="cuda", rows=8, pages=256, **short)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_targets_and_proposals_the_papers(kind: str) -> None:
    """In float32: as graphs, and eagerly, where each proposal is seen."""
    eager = cuda(kind, "float32", eager=True, tokens=48)
    watch = Watch.of(eager)
    graphs = cuda(kind, "float32", tokens=48)
    assert "captured" in graphs.engine.assembly.resolved.graphs
    for driver in (eager, graphs):
        for (prompt, params), tokens in zip(REQUESTS, run(driver), strict=True):
            if params is GREEDY:
                name = str(REQUESTS.index((prompt, params)))
                assert_same(subject(), prompt, params, driver.result(name))
                assert len(tokens) == 24
        assert sum(driver.engine.scheduler.stats.accepted_at) > 0 or kind == "medusa"
    watch.check_inputs()
    assert watch.check_proposals(kind) > 50


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_propose_what_eager_steps_propose(kind: str, k: int) -> None:
    """In bfloat16: the same numbers of drafts are accepted, so they were the same; a fixed batch, so that the steps are the same too."""
    found = []
    for eager in (True, False):
        driver = cuda(kind, "bfloat16", k, eager)
        for number, (prompt, params) in enumerate(REQUESTS):
            driver.add(str(number), prompt, params)
        driver.finish()
        stats = driver.engine.scheduler.stats
        tokens = [tuple(driver.result(str(number)).token_ids) for number in range(len(REQUESTS))]
        found.append((tokens, stats.drafted_at, stats.accepted_at))
    assert found[0] == found[1]
