"""B15: a banned word came out with a leading space, because that form has another number of tokens."""

from __future__ import annotations

import pytest
import torch

from modelrunner import Engine, SamplingParams
from modelrunner.errors import RequestError
from modelrunner.testing import ByteTokenizer, Driver, EngineProbe, P, ScriptedPlugin, by_position, dense, options

SPACED, FIRST, OTHER = 259, 260, 200  # ' abc', 'ab', and an unrelated id
LAST = 3 + ord("c")


def scripted(best: list[int]) -> Driver:
    """A model that wants these ids in turn, and OTHER next to each."""
    logits = torch.zeros(len(best), 331)
    for place, token in enumerate(best):
        logits[place, token], logits[place, OTHER] = 9.0, 5.0
    tokenizer = ByteTokenizer(331, merged=[b" abc", b"ab"])
    plugin = ScriptedPlugin(by_position(logits), tokenizer=tokenizer)
    return Driver(Engine({"model": {"name": "scripted"}} | options(), plugins=[plugin]))


def test_neither_form_comes_out() -> None:
    assert ByteTokenizer(331, merged=[b" abc", b"ab"]).encode("abc", False) == [FIRST, LAST]
    driver = scripted([SPACED, FIRST, LAST] * 4)
    driver.add("free", [5], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    driver.add("banned", [5], SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, bad_words=["abc"]))
    driver.finish()
    assert driver.result("free").text.count("abc") > 3
    ids = list(driver.result("banned").token_ids)
    assert ids[:6] == [OTHER, FIRST, OTHER, OTHER, FIRST, OTHER], "the first token of the longer form may stand alone"
    assert "abc" not in driver.result("banned").text
    EngineProbe(driver).assert_clean()


@pytest.mark.parametrize("words", [[""], [" "], ["\t\n"], ["fine", ""]])
def test_words_of_nothing_are_refused(words: list[str]) -> None:
    with pytest.raises(RequestError, match=r"bad_words: .*it contains"):
        SamplingParams(bad_words=words)


def test_a_word_beyond_the_limit_is_refused_with_the_limit() -> None:
    driver = Driver(dense().engine())
    with pytest.raises(
        RequestError, match=r"bad_words: a word has 10001 tokens; accepted: at most 8 \(setting sampler.max_bad_word_tokens"
    ):
        driver.add("a", P(5, 1), SamplingParams(bad_words=["#" * 10_000]))
    EngineProbe(driver).assert_alive(dense())
