"""B27: when the grammar allowed only the end and min_tokens masked it, id 0 came out and the request ended in a server error."""

from __future__ import annotations

from typing import Any

import pytest
from grammar_world import written

from modelrunner import SamplingParams, StructuredOutputsParams
from modelrunner.testing import Driver, EngineProbe, P, R, assert_same, dense
from modelrunner.testing.byte_tokenizer import EOS, FIRST_BYTE

pytest.importorskip("xgrammar")
BOOLEAN = StructuredOutputsParams(json={"type": "boolean"})
A = StructuredOutputsParams(choice=["a"])
NEIGHBOUR = R(5), SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


@pytest.mark.parametrize("drafter", [None, "ngram"])
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("params", "texts"),
    [
        ({"structured_outputs": BOOLEAN, "min_tokens": 40, "max_tokens": 60}, ("true", "false")),
        ({"structured_outputs": BOOLEAN, "min_tokens": 40, "max_tokens": 60, "ignore_eos": True}, ("true", "false")),
        ({"structured_outputs": A, "min_tokens": 5}, ("a",)),
        ({"structured_outputs": A, "max_tokens": 1}, ("a",)),
        ({"structured_outputs": StructuredOutputsParams(regex="b{3,}"), "min_tokens": 9, "logit_bias": {EOS: 100}}, ("b" * 9,)),
        ({"structured_outputs": StructuredOutputsParams(regex="b{3,}"), "logit_bias": {EOS: 100}, "ignore_eos": True}, ("b" * 3,)),
    ],
)
def test_a_complete_grammar_ends_the_output(
    params: dict[str, Any], texts: tuple[str, ...], depth: int, temperature: float, drafter: str | None
) -> None:
    subject = dense()
    driver = Driver(subject.engine(depth=depth, drafter=drafter))
    driver.add("n", *NEIGHBOUR)
    driver.add("a", P(12, 1), SamplingParams(temperature=temperature, seed=3, **params))
    driver.finish()
    result = driver.result("a")
    assert (result.finish_reason, result.stop_reason) == ("stop", None)
    assert written(result.token_ids) in texts
    assert_same(subject, *NEIGHBOUR, driver.result("n"))
    EngineProbe(driver).assert_clean()


B_OR_AS, A_OR_AA = StructuredOutputsParams(regex="b|a+"), StructuredOutputsParams(regex="aa?")
LETTERS = {letter: FIRST_BYTE + ord(letter) for letter in "abtf"}


@pytest.mark.parametrize("drafter", [None, "ngram"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    ("params", "names", "said"),
    [
        ({"structured_outputs": BOOLEAN, "allowed_token_ids": [LETTERS["a"], LETTERS["b"], EOS]}, "allowed_token_ids", ""),
        ({"structured_outputs": A, "bad_words": [[LETTERS["a"]]]}, "bad_words", ""),
        ({"structured_outputs": B_OR_AS, "allowed_token_ids": [LETTERS["a"]], "bad_words": [[LETTERS["a"]] * 2]}, "bad_words", "a"),
        ({"structured_outputs": A_OR_AA, "bad_words": [[LETTERS["a"]] * 2], "min_tokens": 2}, "min_tokens", "a"),
    ],
)
def test_a_contradiction_is_the_requests_error_and_names_the_options(
    params: dict[str, Any], names: str, said: str, depth: int, drafter: str | None
) -> None:
    subject = dense()
    driver = Driver(subject.engine(depth=depth, drafter=drafter))
    driver.add("n", *NEIGHBOUR)
    driver.add("a", P(12, 1), SamplingParams(temperature=1, seed=1, max_tokens=12, **params))
    driver.finish()
    result = driver.result("a")
    assert result.finish_reason == "error"
    assert str(result.stop_reason).startswith("structured_outputs and ")
    assert names in str(result.stop_reason)
    assert "no token" in str(result.stop_reason)
    assert written(result.token_ids) == said
    assert_same(subject, *NEIGHBOUR, driver.result("n"))
    EngineProbe(driver).assert_clean()
