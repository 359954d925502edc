"""B18: when chunks of prompts, whose sample is thrown away, shared a step, log-probs were taken from the wrong rows."""

from __future__ import annotations

import pytest

from modelrunner import SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, assert_same, dense, ref

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


def test_rows_line_up_with_chunks(device: str) -> None:
    driver = Driver(dense().engine(depth=2, tokens=24, mixed_tokens=24, device=device))
    probe = EngineProbe(driver)
    asked = [(P(10, 1), 0), (P(25, 2), 1), (P(40, 3), 5), (P(55, 4), 20), (P(70, 5), None)]
    params = [PARAMS.model_copy(update={"logprobs": number}) for _, number in asked]
    for i, (prompt, _) in enumerate(asked):
        driver.add(str(i), prompt, params[i])
        driver.step()
        driver.step()
    driver.finish()
    for i, (prompt, number) in enumerate(asked):
        result, want = driver.result(str(i)), ref(dense(), prompt, params[i])
        assert_same(dense(), prompt, params[i], result)
        if number is None:
            assert result.logprobs is None
            continue
        assert result.logprobs is not None
        assert want.logprobs is not None
        assert len(result.logprobs) == len(result.token_ids) == 20
        for token, found, other in zip(result.token_ids, result.logprobs, want.logprobs, strict=True):
            assert len(found) == max(number, 1)  # greedy: the sampled token is the likeliest
            assert (next(iter(found)), list(found)) == (token, list(other))
            for each, given in found.items():
                assert given.logprob == pytest.approx(other[each].logprob, abs=1e-4)
                assert given.rank == other[each].rank
    probe.assert_clean()
