"""B12: NaN passed range checks, tiny temperatures overflowed to empty text, and a seed outside 64 bits killed the engine."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from modelrunner import SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, dense

BAD: list[tuple[str, Any]] = [
    ("temperature", math.nan), ("temperature", math.inf), ("temperature", -0.1), ("top_p", -0.1), ("top_p", 1.5), ("top_p", math.nan),
    ("min_p", -1), ("min_p", math.nan), ("seed", 2**63), ("seed", -(2**63) - 1), ("seed", 10**20), ("seed", "7x"), ("max_tokens", -1),
    ("repetition_penalty", 0), ("repetition_penalty", math.nan), ("n", 0), ("n", -1), ("n", 1.5), ("n", 10**20),
]  # fmt: skip


def run(**params: Any) -> tuple[list[int], str]:
    """(ids, text) of eight tokens after a fixed prompt."""
    driver = Driver(dense().engine())
    driver.add("a", P(12, 1), SamplingParams(max_tokens=8, ignore_eos=True, **params))
    driver.finish()
    EngineProbe(driver).assert_clean()
    result = driver.result("a")
    return list(result.token_ids), result.text


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{name}={value}" for name, value in BAD])
def test_a_bad_value_is_refused_by_the_fields_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name}: ") as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert "nan" not in message.lower()
    assert json.loads(json.dumps(message, allow_nan=False)) == message


@pytest.mark.parametrize("temperature", [1e-4, 1e-5])
def test_tiny_temperatures_give_the_greedy_tokens(temperature: float) -> None:
    greedy = run(temperature=0)
    assert run(temperature=temperature, seed=3) == greedy
    assert greedy[1]


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_the_ends_of_the_seeds_range_repeat_their_text(seed: int) -> None:
    assert run(temperature=1.0, seed=seed) == run(temperature=1.0, seed=seed)
