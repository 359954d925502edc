"""B22: the prompt's log-probs beside the output's failed, because the top list looked up a prompt token in the wrong table."""

from __future__ import annotations

import pytest

from modelrunner import LLM, SamplingParams
from modelrunner.errors import RequestError
from modelrunner.testing import dense, options
from modelrunner.testing.subjects import REFERENCE

PARAMS = SamplingParams(max_tokens=2, temperature=0, logprobs=3, prompt_logprobs=3)


def test_prompt_and_output_are_scored_together() -> None:
    with LLM(dense().model, plugins=dense().plugins, **options(device="deferred_cpu", tokens=8)) as llm:
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode("One two three")
        outputs = [*llm.generate("One two three", PARAMS), *llm.generate([ids, "One two three four"], PARAMS)]
    with LLM(dense().model, plugins=dense().plugins, **options(**REFERENCE)) as alone:
        wanted = [alone.generate(prompt, PARAMS)[0] for prompt in ("One two three", "One two three", "One two three four")]
    for output, want in zip(outputs, wanted, strict=True):
        everything = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        found, other = ([*(each.prompt_logprobs or ()), *(each.outputs[0].logprobs or ())] for each in (output, want))
        assert len(found) == len(everything)
        assert found[0] is None
        for token, one, reference in zip(everything[1:], found[1:], other[1:], strict=True):
            assert one is not None
            assert reference is not None
            assert token in one
            assert {each: given.logprob for each, given in one.items()} == pytest.approx(
                {each: given.logprob for each, given in reference.items()}, abs=1e-4
            )
            text = llm.tokenizer.decode([token], skip_special_tokens=False)
            assert one[token].decoded_token == text


def test_no_new_token_is_refused() -> None:
    with pytest.raises(RequestError, match=r"max_tokens: got 0; accepted: an integer >= 1"):
        SamplingParams(max_tokens=0, prompt_logprobs=3)
