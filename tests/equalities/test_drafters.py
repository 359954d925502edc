"""Whatever drafts, depth, graphs, chunks, company, the prefix cache, preemption and aborts change no token; and what is drafted is at all
times what the drafter's paper says."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from modelrunner import SamplingParams
from modelrunner.errors import CheckpointError
from modelrunner.testing import EngineProbe, P, R, assert_same
from tests.model_states.drafters import heads
from tests.model_states.drafters.engines import KINDS, Watch, head, start, subject
from tests.model_states.drafters.papers import continued

GREEDY = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.7, top_p=0.9, seed=7, max_tokens=18, ignore_eos=True)
REQUESTS = [(P(3 + 9 * k, k % 2) if k % 4 else R(3 + k), SAMPLED if k % 3 == 2 else GREEDY) for k in range(7)]

CHANGES: dict[str, dict[str, Any]] = {
    "depth 1": {"depth": 1},
    "depth 3": {"depth": 3},
    "graphs": {"captures": True},
    "chunked": {"chunked": True, "tokens": 21, "mixed_tokens": 13},
    "alone": {"rows": 1},
    "prefix cache": {"prefix": True},
    "preempted": {"preempt": True},
    "all": {"depth": 3, "captures": True, "chunked": True, "tokens": 33, "prefix": True, "preempt": True, "pages": 96},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_changes_no_token(kind: str, change: str) -> None:
    run(kind, change)


@pytest.mark.parametrize("change", ["chunked", "prefix cache", "preempted", "all"])
@pytest.mark.parametrize("kind", ["eagle3", "mtp", "eagle"])
def test_nor_with_a_head_that_is_wrong_and_hears_everything(kind: str, change: str) -> None:
    run(kind, change, loud=True)


def run(kind: str, change: str, loud: bool = False) -> None:
    short = {"pages": 160, "rows": 7, "prefix": False, "chunked": False, "depth": 2} | CHANGES[change]
    preempt = short.pop("preempt", False)
    driver = start(kind, head(kind, loud), page_size=8, device="deferred_cpu", **short)
    watch, probe = Watch.of(driver), EngineProbe(driver)
    probe.poison_freed_pages()
    for k, (prompt, params) in enumerate(REQUESTS):
        driver.add(str(k), prompt, params)
        driver.step()
        if preempt and k in (3, 5):
            probe.drain()
            probe.preempt(next(name for name in driver.engine.requests if probe.row_of(name) >= 0))
    driver.add("lost", P(40, 1), GREEDY)
    for _ in range(3):
        driver.step()
    driver.engine.abort("lost")
    driver.finish()
    driver.add("again", *REQUESTS[5])
    driver.finish()
    assert_same(subject(), *REQUESTS[5], driver.result("again"))
    for k, (prompt, params) in enumerate(REQUESTS):
        assert_same(subject(), prompt, params, driver.result(str(k)))
    probe.assert_clean()
    counters = probe.counters()
    assert (counters.cached_tokens > 0) == short["prefix"] or preempt
    assert (counters.preemptions > 0) == preempt
    watch.check_inputs()
    assert watch.check_proposals(kind, loud) > 50


def test_new_weights_reach_a_module_that_came_with_the_old_ones() -> None:
    """And a drafter with a checkpoint of its own keeps what it has."""
    tensors = heads.target_tensors() | heads.mtp_tensors()
    for kind in ("mtp", "eagle"):
        driver = start(kind)
        drafter = driver.engine.runner.parts.drafter
        assert drafter is not None
        assert drafter.module is not None
        before = {name: tensor.clone() for name, tensor in drafter.module.state_dict().items()}
        driver.engine.update_weights({**tensors, **heads.mtp_tensors(loud=True)}.items())
        changed = [name for name, tensor in drafter.module.state_dict().items() if not torch.equal(tensor, before[name])]
        assert changed == (["layer.attention.output.weight", "layer.mlp.down.weight"] if kind == "mtp" else [])
        watch = Watch.of(driver)
        driver.add("a", *REQUESTS[1])
        driver.finish()
        assert_same(subject(), *REQUESTS[1], driver.result("a"))
        assert watch.check_proposals(kind, loud=kind == "mtp") > 10
    driver = start("mtp")
    wrong = {**tensors, "model.mtp_layers.0.input_proj.weight": torch.ones(3, 3)}
    with pytest.raises(CheckpointError, match=r"model.mtp_layers.0.input_proj.weight does not fit the drafter \(projection\): "):
        driver.engine.update_weights(wrong.items())


@pytest.mark.parametrize("seed", range(9))
def test_any_schedule(seed: int) -> None:
    """Arrivals, aborts and preemptions at random, in a cache that is too small for all, with prefixes in common."""
    draw = random.Random(seed)
    kind = ("eagle", "mtp", "eagle3", "draft_model")[seed % 4]
    loud = kind != "draft_model"
    driver = start(
        kind,
        head(kind, loud),
        k=draw.randint(1, 4),
        device="deferred_cpu",
        device_seed=seed,
        captures=draw.random() < 0.5,
        page_size=draw.choice((4, 8, 16)),
        pages=draw.randint(96, 160) // draw.choice((2, 4)),
        rows=draw.randint(2, 5),
        tokens=draw.randint(9, 80),
        depth=draw.randint(1, 3),
    )
    watch, probe = Watch.of(driver), EngineProbe(driver)
    probe.poison_freed_pages()
    wishes = {str(i): (P(draw.randint(1, 60), i % 2), draw.choice((GREEDY, GREEDY, SAMPLED)), draw.randint(0, 20)) for i in range(9)}
    aborted = set()
    for step in range(60):
        for name, (prompt, params, arrival) in wishes.items():
            if arrival == step:
                driver.add(name, prompt, params)
        driver.step()
        running = [name for name in driver.engine.requests if probe.row_of(name) >= 0]
        if running and draw.random() < 0.08:
            aborted.add(gone := draw.choice(running))
            driver.engine.abort(gone)
        elif running and draw.random() < 0.1:
            probe.drain()
            if left := [name for name in driver.engine.requests if probe.row_of(name) >= 0]:
                probe.preempt(draw.choice(left))
    driver.finish()
    for name, (prompt, params, _) in wishes.items():
        if name not in aborted:
            assert_same(subject(), prompt, params, driver.result(name))
    probe.assert_clean()
    watch.check_inputs()
    assert watch.check_proposals(kind, loud) > 50


@pytest.mark.parametrize("change", ["depth 3", "graphs", "prefix cache", "all"])
def test_a_draft_model_that_sees_a_window_has_pages_of_its_own(change: str, tmp_path: Path) -> None:
    """No group of the target sees as much, so there is none in whose pages it could lie; what lies behind the window is given back."""
    from transformers import MistralConfig, MistralForCausalLM

    config = heads.TARGET | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24}
    folder = heads.write(tmp_path / "window", config, heads.draft_model_tensors())
    small = MistralForCausalLM(MistralConfig(**{name: value for name, value in config.items() if name != "architectures"}))
    small.load_state_dict(heads.draft_model_tensors())
    short = {"pages": 200, "rows": 7, "prefix": False, "chunked": False, "depth": 2} | CHANGES[change]
    preempt = short.pop("preempt", False)
    driver = start("draft_model", folder, page_size=8, device="deferred_cpu", **short)
    assert [layout.name for layout in driver.engine.assembly.layouts] == ["full", "draft.sliding"]
    watch, probe = Watch.of(driver), EngineProbe(driver)
    probe.poison_freed_pages()
    for k, (prompt, params) in enumerate(REQUESTS):
        driver.add(str(k), prompt, params)
        driver.step()
        if preempt and k == 5:
            probe.drain()
            probe.preempt(next(name for name in driver.engine.requests if probe.row_of(name) >= 0))
    driver.finish()
    for k, (prompt, params) in enumerate(REQUESTS):
        assert_same(subject(), prompt, params, driver.result(str(k)))
    probe.assert_clean()
    watch.check_inputs()
    for known, found in watch.proposals.items():
        want = continued(small.float().eval(), known, len(found[0]))
        for drafts in found:
            places = zip(drafts, want, strict=True)
            differ = next((lead for draft, (token, lead) in places if draft != token), 0.0)
            assert differ < 1e-4, f"{drafts} after {known}; {want} is expected"
