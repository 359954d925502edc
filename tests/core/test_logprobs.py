"""Log-probs are those of transformers, at every position, whatever the schedule; and they cut, stream and travel as tokens do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from modelrunner import Engine, Logprob, SamplingParams
from modelrunner.errors import RequestError, SettingsError
from modelrunner.model_state import No, Yes
from modelrunner.testing import Driver, EngineProbe, P, dense, options

VOCAB = 331
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SCHEDULES: list[dict[str, Any]] = [
    {"depth": 1},
    {"depth": 2, "captures": True},
    {"depth": 3, "tokens": 8},
    {"depth": 2, "tokens": 24, "mixed_tokens": 12, "captures": True, "prefix": False},
]


@pytest.fixture(scope="module")
def oracle() -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(dense().model, dtype=torch.float32)
    return model.eval()


def driven(sampler: Mapping[str, Any] | None = None, **short: Any) -> Driver:
    settings = options(**{"device": "deferred_cpu", "rows": 4} | short) | {"sampler": dict(sampler or {})}
    return Driver(Engine({"model": {"name": dense().model}} | settings, plugins=dense().plugins))


def logits_of(oracle: Any, ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = oracle(torch.tensor([list(ids)])).logits[0].float()
    return found


def check(found: Mapping[int, Logprob], logprobs: torch.Tensor, own: int, top: int) -> None:
    """One position: its own token first, then the likeliest, each with rank and log-prob."""
    assert next(iter(found)) == own
    order = torch.sort(logprobs, descending=True, stable=True).indices.tolist()
    listed = [token for token in found if found[token].rank <= top]  # type: ignore[operator]
    assert sorted(listed, key=lambda token: found[token].rank or 0) == order[:top]
    assert set(found) == {own, *order[:top]}
    for token, given in found.items():
        want = float(logprobs[token])
        assert given.logprob == want if math.isinf(want) else abs(given.logprob - want) < 1e-4
        assert order[(given.rank or 0) - 1] == token


def check_output(oracle: Any, prompt: Sequence[int], output: Any, top: int) -> None:
    """All positions of an output, raw."""
    ids = list(output.token_ids)
    logprobs = logits_of(oracle, [*prompt, *ids]).log_softmax(1)
    assert len(output.logprobs) == len(ids)
    for i, found in enumerate(output.logprobs):
        check(found, logprobs[len(prompt) - 1 + i], ids[i], top)
    assert output.cumulative_logprob == pytest.approx(sum(found[token].logprob for found, token in zip(output.logprobs, ids, strict=True)))


def check_prompt(oracle: Any, prompt: Sequence[int], found: Any, top: int) -> None:
    logprobs = logits_of(oracle, prompt).log_softmax(1)
    assert (len(found), found[0]) == (len(prompt), None)
    for i in range(1, len(prompt)):
        check(found[i], logprobs[i - 1], prompt[i], top)


@pytest.mark.parametrize("settings", SCHEDULES, ids=str)
def test_raw_ones_are_those_of_transformers(oracle: Any, settings: dict[str, Any]) -> None:
    driver = driven(**settings)
    asked = [(P(40, 1), 3, 2), (P(3, 2), 0, 0), (P(21, 3), 20, None), (P(1, 4), None, 5), (P(30, 5), None, None), (P(33, 6), 5, 20)]
    for i, (prompt, top, prompt_top) in enumerate(asked):
        driver.add(str(i), prompt, GREEDY.model_copy(update={"logprobs": top, "prompt_logprobs": prompt_top}))
        driver.step()
    driver.finish()
    for i, (prompt, top, prompt_top) in enumerate(asked):
        final = driver.final(str(i))
        if top is None:
            assert (final.outputs[0].logprobs, final.outputs[0].cumulative_logprob) == (None, None)
        else:
            check_output(oracle, prompt, final.outputs[0], top)
        if prompt_top is None:
            assert final.prompt_logprobs is None
        else:
            check_prompt(oracle, prompt, final.prompt_logprobs, prompt_top)
    EngineProbe(driver).assert_clean()


EDITS: list[dict[str, Any]] = [
    {"allowed_token_ids": [3, 40, 77, 200, 330], "temperature": 0},
    {"logit_bias": {50: 4.0, 7: -100.0}, "repetition_penalty": 1.3, "temperature": 0},
    {"temperature": 0.7},
    {"temperature": 1.5, "top_k": 7},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 1.2, "min_p": 0.1, "repetition_penalty": 1.2},
    {"temperature": 1.0, "top_k": 12, "top_p": 0.8, "allowed_token_ids": list(range(5, 60))},
]


def processed(params: SamplingParams, ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """By transformers. ids: prompt and the output so far. logits: [V]."""
    x, everything = logits.unsqueeze(0), torch.tensor([list(ids)])
    if params.allowed_token_ids is not None:
        others = [token for token in range(VOCAB) if token not in params.allowed_token_ids]
        x = SuppressTokensLogitsProcessor(others, device="cpu")(everything, x)
    if params.logit_bias:
        x = SequenceBiasLogitsProcessor([[[token], value] for token, value in params.logit_bias.items()])(everything, x)
    if params.repetition_penalty != 1:
        x = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(everything, x)
    if params.temperature > 0:
        x = TemperatureLogitsWarper(params.temperature)(everything, x)
        x = MinPLogitsWarper(params.min_p)(everything, x) if params.min_p else x
        x = TopKLogitsWarper(params.top_k)(everything, x) if params.top_k else x
        x = TopPLogitsWarper(params.top_p)(everything, x) if params.top_p < 1 else x
    return x[0].log_softmax(0)


@pytest.mark.parametrize("settings", SCHEDULES[1:3], ids=str)
def test_processed_ones_are_those_of_transformers_processors(oracle: Any, settings: dict[str, Any]) -> None:
    driver = driven({"logprobs_mode": "processed"}, **settings)
    params = [SamplingParams(max_tokens=10, ignore_eos=True, seed=5, logprobs=20, prompt_logprobs=1, **edits) for edits in EDITS]
    for i, each in enumerate(params):
        driver.add(str(i), P(12, i), each)
        driver.step()
    driver.finish()
    for i, each in enumerate(params):
        prompt, final = P(12, i), driver.final(str(i))
        check_prompt(oracle, prompt, final.prompt_logprobs, 1)  # these stay raw
        output = final.outputs[0]
        for j, (token, found) in enumerate(zip(output.token_ids, output.logprobs or (), strict=True)):
            so_far = [*prompt, *output.token_ids[:j]]
            check(found, processed(each, so_far, logits_of(oracle, so_far)[-1]), token, 20)
            assert math.isfinite(found[token].logprob)


def test_raw_ones_ignore_edits(oracle: Any) -> None:
    driver = driven()
    for i, edits in enumerate(EDITS):
        driver.add(str(i), P(12, i), SamplingParams(max_tokens=10, ignore_eos=True, seed=5, logprobs=4, **edits))
    driver.finish()
    for i in range(len(EDITS)):
        check_output(oracle, P(12, i), driver.result(str(i)), 4)


@pytest.mark.parametrize("settings", [{"depth": 1}, {"depth": 3, "tokens": 8, "captures": True}], ids=str)
def test_the_whole_vocabulary(oracle: Any, settings: dict[str, Any]) -> None:
    driver = driven({"max_logprobs": -1}, **settings)
    asked = [(P(9, 1), -1, -1), (P(20, 2), 30, 2), (P(5, 3), 2, 1000), (P(6, 4), None, 21)]
    for i, (prompt, top, prompt_top) in enumerate(asked):
        driver.add(str(i), prompt, GREEDY.model_copy(update={"logprobs": top, "prompt_logprobs": prompt_top, "max_tokens": 4}))
    driver.finish()
    for i, (prompt, top, prompt_top) in enumerate(asked):
        final = driver.final(str(i))
        whole = [VOCAB if number in (-1, 1000) else number for number in (top, prompt_top)]
        if top is not None:
            check_output(oracle, prompt, final.outputs[0], whole[0] or 0)
        check_prompt(oracle, prompt, final.prompt_logprobs, whole[1] or 0)


def test_preempted_requests_have_each_once(oracle: Any) -> None:
    """Also one that gave way in the middle of its prompt."""
    driver = driven(depth=2, tokens=16)
    probe = EngineProbe(driver)
    params = GREEDY.model_copy(update={"logprobs": 3, "prompt_logprobs": 2})
    driver.add("output", P(10, 1), params)
    driver.step_until(lambda: driver.num_tokens("output") >= 4)
    driver.add("prompt", P(70, 2), params)
    driver.step()
    driver.step()
    probe.drain()
    probe.preempt("output")
    probe.preempt("prompt")
    driver.finish()
    for name, prompt in (("output", P(10, 1)), ("prompt", P(70, 2))):
        assert driver.final(name).metrics.num_preemptions == 1
        check_output(oracle, prompt, driver.result(name), 3)
        check_prompt(oracle, prompt, driver.final(name).prompt_logprobs, 2)
    probe.assert_clean()


def test_a_stop_string_cuts_them_too(oracle: Any) -> None:
    driver = driven(depth=3)
    driver.add("plain", P(12, 1), GREEDY)
    driver.finish()
    text = driver.result("plain").text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    driver.add("cut", P(12, 1), GREEDY.model_copy(update={"stop": (stop,), "logprobs": 2}))
    driver.finish()
    cut = driver.result("cut")
    assert cut.finish_reason == "stop"
    assert len(cut.token_ids) < 12
    check_output(oracle, P(12, 1), cut, 2)


def test_deltas_join_to_the_whole() -> None:
    driver = driven(depth=2)
    for kind in ("delta", "cumulative", "final_only"):
        driver.add(kind, P(12, 1), GREEDY.model_copy(update={"output_kind": kind, "logprobs": 2, "prompt_logprobs": 1}))
    driver.finish()
    whole = driver.final("final_only")
    assert driver.final("cumulative").outputs[0].logprobs == whole.outputs[0].logprobs
    assert driver.final("cumulative").prompt_logprobs == whole.prompt_logprobs
    pieces = driver.outputs["delta"]
    assert [found for piece in pieces for found in piece.outputs[0].logprobs or ()] == whole.outputs[0].logprobs
    assert pieces[-1].outputs[0].cumulative_logprob == whole.outputs[0].cumulative_logprob
    assert [piece.prompt_logprobs for piece in pieces] == [whole.prompt_logprobs, *[None] * (len(pieces) - 1)]
    for piece in driver.outputs["cumulative"]:
        assert len(piece.outputs[0].logprobs or ()) == len(piece.outputs[0].token_ids)


def test_texts_of_tokens() -> None:
    driver = driven()
    for name, more in (("text", {}), ("none", {"detokenize": False})):
        driver.add(name, P(12, 1), GREEDY.model_copy(update={"logprobs": 3, **more}))
    driver.finish()
    tokenizer = driver.engine.tokenizer
    assert tokenizer is not None
    for found in driver.result("text").logprobs or ():
        assert {token: entry.decoded_token for token, entry in found.items()} == {
            token: tokenizer.decode([token], skip_special_tokens=False) for token in found
        }
    assert {entry.decoded_token for found in driver.result("none").logprobs or () for entry in found.values()} == {None}


def test_a_step_without_them_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driven(captures=True)
    calls: list[int] = []
    operation = driver.engine.runner.parts.ops.token_logprobs
    monkeypatch.setattr(driver.engine.runner.logprobs.ops, "token_logprobs", lambda *given: calls.append(1) or operation(*given))
    driver.add("plain", P(12, 1), GREEDY)
    driver.finish()
    assert not calls
    driver.add("asks", P(12, 1), GREEDY.model_copy(update={"logprobs": 1}))
    driver.finish()
    assert len(calls) == 12


def test_more_than_the_limit_is_refused() -> None:
    driver = driven({"max_logprobs": 4})
    for name in ("logprobs", "prompt_logprobs"):
        for number, shown in ((5, "5"), (-1, "-1 \\(the whole vocabulary\\)")):
            with pytest.raises(RequestError, match=f"^{name}: got {shown}; accepted: at most 4 \\(setting sampler.max_logprobs"):
                driver.add("a", P(5, 1), GREEDY.model_copy(update={name: number}))
    driver.add("b", P(5, 1), GREEDY.model_copy(update={"logprobs": 4}))
    driver.finish()
    assert len((driver.result("b").logprobs or ())[0]) == 4


@pytest.mark.parametrize("value", [-2, True, 1.0, "3", 2**31])
def test_what_is_no_number_of_them_is_refused(value: Any) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(RequestError, match=f"^{name}: got .*; accepted: an integer >= 0, -1 for the whole vocabulary, or None"):
            SamplingParams(**{name: value})


def test_names_of_the_mode() -> None:
    for given in ("processed", "processed_logprobs"):
        engine = driven({"logprobs_mode": given}).engine
        assert engine.settings.sampler.logprobs_mode == "processed"
    with pytest.raises(SettingsError, match="logprobs_mode"):
        driven({"logprobs_mode": "raw_logits"})


def test_a_state_that_gives_none_for_prompts_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driven()
    state = driver.engine.assembly.state
    monkeypatch.setattr(state, "supports", lambda feature: No("it forgets") if feature == "prompt_logprobs" else Yes())
    with pytest.raises(RequestError, match=r"^prompt_logprobs: .* gives none: it forgets"):
        driver.add("a", P(5, 1), GREEDY.model_copy(update={"prompt_logprobs": 1}))
    driver.add("a", P(5, 1), GREEDY.model_copy(update={"logprobs": 1}))
    driver.finish()
