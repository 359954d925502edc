"""A request for which no token is possible says so, where, and which of its options change the logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from modelrunner import SamplingParams
from modelrunner.testing import Driver, EngineProbe, P, assert_same, dense
from modelrunner.testing.byte_tokenizer import EOS

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def nan(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits * (float("nan") if len(output_ids) == 2 else 1)


def nothing(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits - torch.inf


CASES: list[tuple[dict[str, Any], str, int, str]] = [
    ({"allowed_token_ids": [5], "bad_words": [[5]]}, "allowed_token_ids and bad_words", 0, "Together they leave none"),
    ({"allowed_token_ids": [5], "bad_words": [[5, 5]]}, "allowed_token_ids and bad_words", 1, "Together they leave none"),
    ({"allowed_token_ids": [EOS], "ignore_eos": False, "min_tokens": 3}, "allowed_token_ids and min_tokens", 0, "Together they leave none"),
    (
        {"allowed_token_ids": [5], "bad_words": [[5, 5]], "min_tokens": 1, "repetition_penalty": 1.2},
        "allowed_token_ids and bad_words and repetition_penalty",
        1,
        "Together they leave none",
    ),
]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("drafter", [None, "ngram"])
@pytest.mark.parametrize(("given", "names", "length", "cause"), CASES)
def test_options_that_leave_no_token_are_named(
    given: dict[str, Any], names: str, length: int, cause: str, drafter: str | None, temperature: float
) -> None:
    driver = Driver(dense().engine(drafter=drafter))
    driver.add("good", P(9, 2), GREEDY)
    driver.add("bad", P(9, 1), GREEDY.model_copy(update={"temperature": temperature, "seed": 1, **given}))
    driver.finish()
    bad = driver.result("bad")
    assert (bad.finish_reason, len(bad.token_ids)) == ("error", length)
    assert str(bad.stop_reason).startswith(f"{names}: no token is possible after {length} output tokens. {cause}")
    assert_same(dense(), P(9, 2), GREEDY, driver.result("good"))
    EngineProbe(driver).assert_clean()


@pytest.mark.parametrize(("function", "length"), [(nan, 2), (nothing, 0)])
def test_a_processor_that_leaves_no_token_is_named(function: Any, length: int) -> None:
    """The record cannot tell NaN from a row of -inf: both are named."""
    with dense().llm() as llm:
        (output,) = llm.generate([P(9, 1)], GREEDY.model_copy(update={"logits_processors": [function]}))
    (bad,) = output.outputs
    assert (bad.finish_reason, len(bad.token_ids)) == ("error", length)
    assert bad.stop_reason == (
        f"logits_processors: no token is possible after {length} output tokens. It leaves none (all logits are -inf), "
        "or the model or a logits processor gave NaN or +inf"
    )


def test_nan_of_the_model_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = dense().engine()
    logits = engine.runner.state.logits
    monkeypatch.setattr(engine.runner.state, "logits", lambda hidden: logits(hidden) * torch.nan)
    driver = Driver(engine)
    driver.add("bad", P(9, 1), GREEDY)
    driver.finish()
    bad = driver.result("bad")
    assert (bad.finish_reason, bad.stop_reason) == (
        "error",
        "no token is possible after 0 output tokens: the model gave NaN or +inf among the logits, or -inf alone",
    )
