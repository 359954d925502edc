"""B16: an id outside the vocabulary, or a list longer than a preallocated device row, raised inside the worker and stopped the service."""

from __future__ import annotations

import pytest

from modelrunner import SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, dense, ref

PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


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
