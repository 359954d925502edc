"""B31: requests of one world hit cache pages of another, since the key did not hold all that the pages depend on."""

from __future__ import annotations

import pytest

from modelrunner import SamplingParams
from modelrunner.errors import RequestError
from modelrunner.testing import Driver, EngineProbe, P, assert_same, dense

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPT = P(40, 1)


def test_salts_keep_worlds_apart() -> None:
    subject = dense()
    driver = Driver(subject.engine(depth=2))
    cached = {}
    for turn in range(2):
        for salt in ("x", None, "y"):
            name = f"{salt}{turn}"
            driver.add(name, PROMPT, PARAMS, cache_salt=salt)
            driver.finish()
            assert_same(subject, PROMPT, PARAMS, driver.result(name))
            cached[name] = driver.final(name).num_cached_tokens
    assert cached == {"x0": 0, "None0": 0, "y0": 0, "x1": 32, "None1": 32, "y1": 32}
    EngineProbe(driver).assert_clean()


@pytest.mark.parametrize("salt", ["", 5])
def test_bad_salts_are_refused(salt: object) -> None:
    subject = dense()
    driver = Driver(subject.engine())
    with pytest.raises(RequestError, match="cache_salt"):
        driver.add("a", PROMPT, PARAMS, cache_salt=salt)
    EngineProbe(driver).assert_alive(subject)
