"""Long steps whose last layer runs for the sampled tokens alone give the tokens of steps in which it runs for all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from modelrunner import Engine, SamplingParams, step_work
from modelrunner.model_states.dense.layers import DenseModel
from modelrunner.testing import ByteTokenizerPlugin, Driver, EngineProbe, P, options, tiny_dense

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
WINDOW = {"architectures": ["MistralForCausalLM"], "sliding_window": 20}
GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")])


def tokens(params: SamplingParams, model: dict[str, Any], **short: Any) -> list[tuple[int, ...]]:
    settings = {"model": {"name": str(tiny_dense(**model)), "dtype": "float32"}} | options(**short) | {"graphs": {"eager": True}}
    driver = Driver(Engine(settings, plugins=[ByteTokenizerPlugin()]))
    for k in range(7):
        driver.add(str(k), P(5 + 17 * k, k), params)
    driver.finish()
    EngineProbe(driver).assert_clean()
    return [tuple(driver.result(str(k)).token_ids) for k in range(7)]


@pytest.fixture
def narrowed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Tokens of each step that was narrowed, and what was left of them. From now on short ones are too."""
    seen: list[tuple[int, int]] = []
    plain = DenseModel.narrowed

    def watched(self: DenseModel, total: torch.Tensor, cos_sin: torch.Tensor, attention: Any, sampled: torch.Tensor) -> torch.Tensor:
        out = plain(self, total, cos_sin, attention, sampled)
        seen.append((total.shape[0], out.shape[0]))
        return out

    monkeypatch.setattr(DenseModel, "narrowed", watched)
    monkeypatch.setattr(step_work, "NARROWED", 1)
    return seen


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("model", [{}, WINDOW], ids=["full", "window"])
@pytest.mark.parametrize("short", [{}, {"tokens": 48, "depth": 1}, {"tokens": 96, "depth": 3}], ids=["whole", "chunks", "deep"])
def test_the_last_layer_of_sampled_tokens_alone(
    short: dict[str, Any], model: dict[str, Any], params: SamplingParams, device: str, request: Any
) -> None:
    want = tokens(params, model, device=device, **short)
    seen = request.getfixturevalue("narrowed")
    assert tokens(params, model, device=device, **short) == want
    assert seen
    assert all(left * 4 <= whole for whole, left in seen)


def test_short_steps_are_not_narrowed(narrowed: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_work, "NARROWED", 2048)
    tokens(GREEDY, {})
    assert not narrowed


def test_whoever_wants_more_gets_all_tokens(narrowed: list[tuple[int, int]]) -> None:
    """Log-probs of a prompt need its hidden states."""
    asking = GREEDY.model_copy(update={"prompt_logprobs": 2})
    tokens(asking, {})
    assert not narrowed
    tokens(GREEDY.model_copy(update={"logprobs": 2}), {})
    assert narrowed
