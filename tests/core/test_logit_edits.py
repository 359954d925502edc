"""Allow lists, biases, bans and penalties give what the logits processors of transformers give, in the operation and in the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from modelrunner import Engine, SamplingParams
from modelrunner.errors import RequestError
from modelrunner.kernels.logits import count_tokens, edit_logits
from modelrunner.sampler.allowed import bitmask
from modelrunner.testing import Driver, EngineProbe, P, dense, options, ref

VOCAB = 331
EOS = 2


def edited(params: SamplingParams, prompt: Sequence[int], output: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """By transformers, in the documented order: allow list, bias, minimum length, bad words, penalties. logits: [V]."""
    x, everything = logits.float().unsqueeze(0), torch.tensor([[*prompt, *output]])
    written = torch.tensor([list(output)], dtype=torch.int64)
    if params.allowed_token_ids is not None:
        others = [token for token in range(VOCAB) if token not in params.allowed_token_ids]
        x = SuppressTokensLogitsProcessor(others, device="cpu")(everything, x)
    if params.logit_bias:
        x = SequenceBiasLogitsProcessor([[[token], value] for token, value in params.logit_bias.items()])(everything, x)
    if params.min_tokens:
        x = MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, list(params.stop_token_ids), device="cpu")(everything, x)
    for word in params.bad_words:
        assert isinstance(word, tuple)
        x = NoBadWordsLogitsProcessor([list(word)], None)(written, x)
    if params.repetition_penalty != 1:
        x = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(everything, x)
    times = torch.bincount(written[0], minlength=VOCAB).float()
    return (x - params.frequency_penalty * times - params.presence_penalty * (times > 0))[0]


@pytest.fixture(scope="module")
def oracle() -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(dense().model, dtype=torch.float32)
    return model.eval()


def greedy(oracle: Any, params: SamplingParams, prompt: Sequence[int], count: int) -> list[int]:
    """What transformers' model generates with these parameters."""
    output: list[int] = []
    with torch.inference_mode():
        for _ in range(count):
            logits = oracle(torch.tensor([[*prompt, *output]])).logits[0, -1]
            output.append(int(edited(params, prompt, output, logits).argmax()))
            if output[-1] in params.stop_token_ids:
                break
    return output


def asked(output: Sequence[int]) -> list[dict[str, Any]]:
    """Parameters that each change the plain greedy output, and some together."""
    return [
        {"repetition_penalty": 1.4},
        {"repetition_penalty": 0.7},
        {"presence_penalty": 1.9},
        {"frequency_penalty": 1.1},
        {"logit_bias": {50: 100}},
        {"logit_bias": {output[2]: -100.0, 7: 1.5, 330: 0.25}},
        {"allowed_token_ids": [3, 40, 77, 200, 330]},
        {"bad_words": [(output[3], output[4])]},
        {"bad_words": [(output[0],), (output[1], output[2], output[3])]},
        {"min_tokens": 6, "stop_token_ids": (output[1],)},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "logit_bias": {output[2]: -3.0}, "bad_words": [(output[4],)]},
        {"allowed_token_ids": [*range(3, 60)], "presence_penalty": -1.0, "logit_bias": {12: 4.0}, "min_tokens": 3, "stop_token_ids": (12,)},
    ]


@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("settings", [{"depth": 2, "captures": True}, {"depth": 3, "tokens": 8}, {"depth": 1}], ids=str)
def test_the_engine_edits_as_transformers_does(oracle: Any, number: int, settings: dict[str, Any]) -> None:
    prompt = P(12, 1)
    plain = greedy(oracle, SamplingParams(), prompt, 16)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, **asked(plain)[number])
    want = greedy(oracle, params, prompt, 16)
    assert want != plain
    driver = Driver(dense().engine(rows=4, device="deferred_cpu", **settings))
    driver.add("edited", prompt, params)
    driver.add("plain", prompt, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    driver.finish()
    assert list(driver.result("edited").token_ids) == want
    assert list(driver.result("plain").token_ids) == plain
    EngineProbe(driver).assert_clean()


@pytest.mark.parametrize("number", range(12))
def test_distributions_are_those_of_transformers(number: int, rng: np.random.Generator) -> None:
    """The operation alone, with an output in the middle of its way: probabilities within 1e-5."""
    prompt, output = P(9, 1), [int(token) for token in rng.integers(3, 40, 14)]
    params = SamplingParams(**asked([*output[-4:], 5, 6])[number])
    logits = torch.from_numpy(rng.normal(size=(1, VOCAB)) * 3).float()
    want = edited(params, prompt, output, logits[0])
    got = edit_logits(logits, torch.tensor([0], dtype=torch.int32), *arguments(params, prompt, output))[0]
    torch.testing.assert_close(got.softmax(0), want.softmax(0), rtol=0, atol=1e-5)


def arguments(params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> list[Any]:
    """Of `edit_logits` behind logits and rows, for a table of one row with seat 0."""

    def line(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype).unsqueeze(0)

    total, one = len(prompt) + len(output), torch.zeros(1, dtype=torch.int32)
    known, prompt_len, token_ids = one + total, one + len(prompt), line([*prompt, *output, -9])
    masks, biases = torch.zeros(2, 11, dtype=torch.int32), torch.full((2, 6), -1, dtype=torch.int32)
    if params.allowed_token_ids is not None:
        words = torch.from_numpy(bitmask(params.allowed_token_ids))
        masks[0, : words.numel()] = words
    for place, (token, value) in enumerate((params.logit_bias or {}).items()):
        biases[0, place], biases[0, 3 + place] = token, torch.tensor(value, dtype=torch.float32).view(torch.int32)
    words = [[-1] * (3 - len(word)) + list(word) for word in params.bad_words if isinstance(word, tuple)]
    counts = torch.zeros(2, VOCAB, dtype=torch.int32)
    count_tokens(one, one == 0, one, one.clone(), prompt_len, known, token_ids, counts)
    given = [
        (one, masks) if params.allowed_token_ids is not None else None,
        (one, biases),
        (one, line([*params.stop_token_ids, -1]), prompt_len + params.min_tokens),
        (one, line([*words, [-1] * 3])),
        (one, counts, *(torch.tensor([v]) for v in (params.repetition_penalty, params.presence_penalty, params.frequency_penalty))),
    ]
    return [known, prompt_len, token_ids, *given]


def with_seats(penalty_seats: int) -> Engine:
    settings = options(rows=3, depth=1, device="deferred_cpu") | {"sampler": {"penalty_seats": penalty_seats}}
    return Engine({"model": {"name": dense().model}} | settings, plugins=dense().plugins)


def test_preempted_requests_keep_their_counts() -> None:
    """The seat of a request that resumes is filled anew, by another's leavings or not."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.4)
    driver = Driver(with_seats(2))
    for name in "abcd":
        driver.add(name, P(10, ord(name)), params)
    driver.step_until(lambda: driver.num_tokens("a") >= 7)
    assert driver.engine.scheduler.num_running == 2, "the third row waits for a seat"
    driver.step_until(lambda: driver.engine.scheduler.num_in_flight == 0)
    assert driver.engine.scheduler.preempt("a")
    driver.finish()
    for name in "abcd":
        assert list(driver.result(name).token_ids) == list(ref(dense(), P(10, ord(name)), params).token_ids)
    EngineProbe(driver).assert_clean()


def test_without_seats_a_request_that_needs_one_is_refused() -> None:
    driver = Driver(with_seats(0))
    with pytest.raises(RequestError, match=r"needs a seat in \['token_counts'\]"):
        driver.add("a", P(5, 1), SamplingParams(presence_penalty=1.0))


def test_min_tokens_delays_stop_strings() -> None:
    """A stop string counts only in the text behind the first min_tokens tokens."""
    free = ref(dense(), P(8, 5), SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    early = next(character for character in free.text if free.text.count(character) == 1)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=early)
    assert ref(dense(), P(8, 5), params).finish_reason == "stop"
    kept = ref(dense(), P(8, 5), params.model_copy(update={"min_tokens": 24}))
    assert (kept.text, kept.finish_reason) == (free.text, "length")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty: got 0; accepted: a finite number of at least 1e-6"),
        ({"repetition_penalty": 1e-38}, "repetition_penalty: got 1e-38; accepted: a finite number of at least 1e-6"),
        ({"presence_penalty": 2.5}, r"presence_penalty: got 2\.5; accepted: a number in \[-2, 2\]"),
        ({"frequency_penalty": "x"}, "frequency_penalty: got 'x'"),
        ({"logit_bias": {"abc": 1}}, "logit_bias: .*it contains 'abc': 1"),
        ({"logit_bias": {3: 101}}, "logit_bias: .*it contains 3: 101"),
        ({"logit_bias": [3]}, "logit_bias: got a list of length 1"),
        ({"allowed_token_ids": []}, "allowed_token_ids: got a list of length 0"),
        ({"bad_words": "abc"}, "bad_words: got 'abc'"),
        ({"bad_words": ["a", " "]}, "bad_words: .*it contains ' '"),
        ({"bad_words": [[]]}, "bad_words: .*it contains a list of length 0"),
        ({"min_tokens": -1}, "min_tokens: got -1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens: got 5, and max_tokens is 4"),
    ],
)
def test_bad_values_are_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        SamplingParams(**given)


def test_json_keys_are_ids() -> None:
    assert SamplingParams(logit_bias={"50": 5, 7: -1}).logit_bias == {50: 5.0, 7: -1.0}
