"""B37: requests longer than the drafter's position table read past its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelrunner import SamplingParams
from modelrunner.testing import EngineProbe, P, assert_same
from tests.model_states.drafters import heads
from tests.model_states.drafters.engines import Watch, start, subject

LIMIT, TOKENS = 64, 20
LENGTHS = (60, 63, 64, 65, 120, 250)


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "draft_model"])
def test_beyond_its_context_a_drafter_is_silent(kind: str, eager: bool, device: str, tmp_path: Path) -> None:
    config, tensors = {
        "eagle": (heads.eagle_config(), heads.eagle_tensors()),
        "eagle3": (heads.EAGLE3, heads.eagle3_tensors()),
        "draft_model": (heads.TARGET, heads.draft_model_tensors()),
    }[kind]
    folder = heads.write(tmp_path / "short", {**config, "max_position_embeddings": LIMIT}, tensors)
    driver = start(kind, folder, device=device, rows=6, pages=256, more={"graphs": {"eager": eager}})
    drafter = driver.engine.runner.parts.drafter
    assert drafter is not None
    assert drafter.module is not None
    assert {buffer.shape[0] for name, buffer in drafter.module.named_buffers() if name.endswith("cos_sin")} == {LIMIT}
    watch, probe = Watch.of(driver) if eager else None, EngineProbe(driver)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    prompts = {str(length): P(length - TOKENS, length) for length in LENGTHS}
    for name, prompt in prompts.items():
        driver.add(name, prompt, params)
    driver.finish()
    for name, prompt in prompts.items():
        assert_same(subject(), prompt, params, driver.result(name))
    probe.assert_clean()
    if watch is None:
        return
    longest = max(len(known) + sum(draft >= 0 for draft in found[0]) for known, found in watch.proposals.items())
    assert LIMIT - 5 <= longest <= LIMIT + 1
