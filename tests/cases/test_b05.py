"""B05: sampling settings and seeds belonged to a batch row instead of a request, so a reused row kept its former owner's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hybrid import hybrid

from modelrunner import SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, Subject, assert_same, dense, ref


def params(subject: Subject, k: int) -> SamplingParams:
    """By k mod 9: greedy, three ways to sample, a stop id, a penalty, a bias and a ban, none of which may act on a later owner."""
    common = {"max_tokens": 1 + (13 * k) % 23, "ignore_eos": True}
    plain = SamplingParams(temperature=0, **common)
    match k % 9:
        case 1:
            return SamplingParams(temperature=0.8, seed=k, **common)
        case 2:
            return SamplingParams(temperature=1.2, top_p=0.6, seed=k, **common)
        case 3:
            output = ref(subject, prompt(k), plain).token_ids
            return SamplingParams(temperature=0, stop_token_ids=(output[min(2, len(output) - 1)], 50), **common)
        case 4:
            return SamplingParams(temperature=0, repetition_penalty=1.5, **common)
        case 5:
            return SamplingParams(temperature=0, logit_bias={50: 100}, **common)
        case 6:
            return SamplingParams(temperature=0, bad_words=[ref(subject, prompt(k), plain).token_ids[:1]], **common)
        case 7:
            return SamplingParams(temperature=1, top_k=5, min_p=0.2, seed=k, **common)
    return plain


def prompt(k: int) -> list[int]:
    return P(5 + k % 17, k)


@pytest.mark.parametrize("model", [dense, hybrid])
def test_row_reuse_leaks_nothing(model: Callable[[], Subject], device: str) -> None:
    subject = model()
    driver = Driver(subject.engine(rows=4, depth=2, device=device))
    probe = EngineProbe(driver)
    probe.poison_freed_pages()
    wanted = {k: params(subject, k) for k in range(40)}
    for k, wish in wanted.items():
        driver.add(f"r{k}", prompt(k), wish)
    driver.finish()
    for k, wish in wanted.items():
        assert_same(subject, prompt(k), wish, driver.result(f"r{k}"))
    assert all(50 in driver.result(f"r{k}").token_ids for k in wanted if k % 9 == 5)
    assert any(driver.result(f"r{k}").finish_reason == "stop" for k in wanted)
    probe.assert_clean()
