"""B16: an id outside the vocabulary, or a list longer than a preallocated device row, raised inside the worker and stopped the service."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from modelrunner import Engine, SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, ScriptedPlugin, constant, dense, options, ref

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


BAD: list[tuple[str, Any, str]] = [
    ("logit_bias", {331: 1}, "logit_bias: got 331; accepted: 0 to 330"),
    ("logit_bias", {-1: 1}, "logit_bias: .*it contains -1: 1"),
    ("logit_bias", {"abc": 1}, "logit_bias: .*it contains 'abc': 1"),
    ("logit_bias", dict.fromkeys(range(1500), 1.0), "logit_bias: got (331|1500)"),
    ("allowed_token_ids", [], "allowed_token_ids: got a list of length 0"),
    ("allowed_token_ids", [5, 400], "allowed_token_ids: got 400; accepted: 0 to 330"),
    ("bad_words", [(331,)], "bad_words: got 331; accepted: 0 to 330"),
    ("bad_words", [f"{number}" for number in range(5000)], r"bad_words: got \d+ sequences.*at most 128 .*sampler.max_bad_words"),
]


def test_bad_stop_ids_are_refused_while_another_request_runs() -> None:
    driver = Driver(dense().engine())
    driver.add("s", P(10, 1), PARAMS)
    driver.step_until(lambda: driver.num_tokens("s") >= 4)
    with pytest.raises(ValueError, match=r"stop_token_ids: got 331; accepted: 0 to 330"):
        driver.add("a", P(5, 2), SamplingParams(stop_token_ids=[5, 331, 400]))
    with pytest.raises(ValueError, match=r"stop_token_ids: .*it contains -1"):
        SamplingParams(stop_token_ids=[5, -1])
    with pytest.raises(ValueError, match=r"stop_token_ids: got 301 ids.*accepted: at most 64"):
        driver.add("b", P(5, 2), SamplingParams(stop_token_ids=list(range(3, 303))))
    for name, given, says in BAD:
        with pytest.raises(ValueError, match=says):
            driver.add("c", P(5, 2), SamplingParams(**{name: given}))
    driver.finish()
    assert list(driver.result("s").token_ids) == list(ref(dense(), P(10, 1), PARAMS).token_ids)
    EngineProbe(driver).assert_clean()


def test_the_longest_list_has_its_full_meaning() -> None:
    """The last id of a full list ends the output like any other."""
    free = ref(dense(), P(10, 1), PARAMS)
    last = free.token_ids[5]
    others = [token for token in range(3, 331) if token not in free.token_ids][:62]
    driver = Driver(dense().engine())
    driver.add("a", P(10, 1), PARAMS.model_copy(update={"ignore_eos": False, "stop_token_ids": (*others, last)}))
    driver.finish()
    result = driver.result("a")
    assert list(result.token_ids) == list(free.token_ids[: free.token_ids.index(last) + 1])
    assert (result.finish_reason, result.stop_reason) == ("stop", last)
    EngineProbe(driver).assert_clean()


def test_long_lists_of_a_larger_vocabulary() -> None:
    """3,000 allowed ids and a full bias have their whole meaning; a longer bias is refused with the limit."""
    logits = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    best = logits.argsort(descending=True).tolist()
    driver = Driver(Engine({"model": {"name": "scripted"}} | options(), plugins=[ScriptedPlugin(constant(logits), vocab_size=4096)]))
    allowed = best[4096 - 3000 :]
    bias = dict.fromkeys(best[:400], -100.0) | {best[450]: 50.0}
    driver.add("a", P(10, 1), PARAMS.model_copy(update={"allowed_token_ids": allowed}))
    driver.add("b", P(10, 1), PARAMS.model_copy(update={"logit_bias": bias}))
    driver.add("c", P(10, 1), PARAMS.model_copy(update={"logit_bias": dict.fromkeys(best[:512], -100.0)}))
    with pytest.raises(ValueError, match=r"logit_bias: got 513 ids; accepted: at most 512 \(setting sampler.max_logit_bias\)"):
        driver.add("d", P(10, 1), SamplingParams(logit_bias=dict.fromkeys(range(513), 1.0)))
    driver.finish()
    for name, token in (("a", allowed[0]), ("b", best[450]), ("c", best[512])):
        assert set(driver.result(name).token_ids) == {token}
    EngineProbe(driver).assert_clean()
