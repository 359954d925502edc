"""B38: a drafter from another tokenizer family was accepted without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from modelrunner import Engine, SamplingParams, hookimpl
from modelrunner.checkpoint import ModelCard
from modelrunner.errors import ModelRunnerError
from modelrunner.offers import Offer
from modelrunner.testing import ByteTokenizer, P, assert_same, options
from modelrunner.text import Tokenizer
from tests.model_states.drafters import heads
from tests.model_states.drafters.engines import Watch, start, subject, target


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("draft_model", heads.TARGET | {"vocab_size": 300}, r"draft model .*other has a vocabulary of 300 ids, target .*target one of 331"),
        ("eagle", heads.eagle_config(hidden_size=32), r"drafter .*other has hidden_size 32, target .*target has 64"),
    ],
)
def test_another_size_is_refused_at_start(kind: str, config: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = heads.write(tmp_path / "other", config, {})
    with pytest.raises(ModelRunnerError, match=message):
        start(kind, folder)


class Swapped(ByteTokenizer):
    """Ids 10 and 11 mean each other's byte."""

    def token_bytes(self) -> list[bytes]:
        spelled = super().token_bytes()
        spelled[10], spelled[11] = spelled[11], spelled[10]
        return spelled


class Tokenizers:
    """One tokenizer for the target, another one for the drafter."""

    MODELRUNNER_API = ">=1,<2"

    @hookimpl
    def tokenizer(self, card: ModelCard) -> Offer[Tokenizer]:
        return Offer("by card", lambda: Swapped(331) if card.path.name == "swapped" else ByteTokenizer(331))


def test_ids_that_mean_something_else_are_refused_at_start(tmp_path: Path) -> None:
    folder = heads.write(tmp_path / "swapped", heads.TARGET, heads.draft_model_tensors())
    settings = {"model": {"name": str(target())}, "speculation": {"drafter": "draft_model", "model": str(folder)}} | options()
    message = r"target .*target and drafter .*swapped do not share a vocabulary \(of 331 and 331 ids\): id 10 is b'\\x07' in"
    with pytest.raises(ModelRunnerError, match=message):
        Engine(settings, plugins=[Tokenizers()])


def test_a_vocabulary_of_its_own_with_a_map_is_legal(device: str) -> None:
    driver = start("eagle3", device=device, more={"graphs": {"eager": True}})
    watch, params = Watch.of(driver), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompts = [P(20, s) for s in range(3)]
    for s, prompt in enumerate(prompts):
        driver.add(str(s), prompt, params)
    driver.finish()
    for s, prompt in enumerate(prompts):
        assert_same(subject(), prompt, params, driver.result(str(s)))
    assert sum(driver.engine.scheduler.stats.accepted_at) > 0
    allowed = set(heads.draft_ids().tolist())
    assert {draft for found in watch.proposals.values() for drafts in found for draft in drafts} <= allowed | {-1}
