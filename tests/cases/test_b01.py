"""B01: with steps in flight the sampler saw placeholders for the newest tokens, so penalties and bans had no effect."""

from __future__ import annotations

from itertools import pairwise

import pytest

from modelrunner import SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, assert_same, dense, ref

PLAIN = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


def params(s: int) -> SamplingParams:
    """Two requests for each penalty, one that bans a pair of its own plain output, one without extras."""
    match s:
        case 0 | 1:
            return PLAIN.model_copy(update={"repetition_penalty": 1.3})
        case 2 | 3:
            return PLAIN.model_copy(update={"presence_penalty": 1.5})
        case 4 | 5:
            return PLAIN.model_copy(update={"frequency_penalty": 0.8})
        case 6:
            return PLAIN.model_copy(update={"bad_words": [pair()]})
    return PLAIN


def pair() -> tuple[int, int]:
    output = ref(dense(), P(12, 6), PLAIN).token_ids
    return output[3], output[4]


@pytest.mark.parametrize("captures", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("depth", [1, 2])
def test_penalties_read_the_true_history(depth: int, captures: bool, device: str) -> None:
    subject = dense()
    for s in range(7):
        plain, wanted = (ref(subject, P(12, s), wish).token_ids for wish in (PLAIN, params(s)))
        assert list(plain) != list(wanted), f"prompt {s}: its extras change nothing, which shows nothing"
    driver = Driver(subject.engine(depth=depth, device=device, captures=captures))
    for s in range(8):
        driver.add(f"r{s}", P(12, s), params(s))
    driver.finish()
    for s in range(8):
        assert_same(subject, P(12, s), params(s), driver.result(f"r{s}"))
    ids = list(driver.result("r6").token_ids)
    assert pair() not in set(pairwise(ids))
    EngineProbe(driver).assert_clean()
