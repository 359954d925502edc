"""B17: options that work alone failed in pairs. Every pair of options runs, or is refused and the refusal names them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
from grammar_world import written

from modelrunner import OutputKind, SamplingParams, StructuredOutputsParams
from modelrunner.errors import RequestError
from modelrunner.testing import Driver, EngineProbe, P, dense
from modelrunner.testing.byte_tokenizer import EOS, FIRST_BYTE

pytest.importorskip("xgrammar")
TOKENS = 12
LETTERS = [FIRST_BYTE + value for value in b'abcdexy"{}: 0123456789truefalsn']
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
CHECKS: dict[str, Callable[[str], Any]] = {
    "json": lambda text: isinstance(json.loads(text)["n"], int),
    "regex": lambda text: re.fullmatch("[a-e]{2,7}x?", text),
    "grammar": lambda text: re.fullmatch("a+b", text),
    "choice": lambda text: text in ("abcd", "ab", "xy"),
    "json_object": lambda text: isinstance(json.loads(text), dict),
}
GRAMMARS = {
    "json": SCHEMA,
    "regex": "[a-e]{2,7}x?",
    "grammar": 'root ::= "a" root | "ab"',
    "choice": ["abcd", "ab", "xy"],
    "json_object": True,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.05},
    "seed": {"seed": 5},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 0.7},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "logit_bias": {"logit_bias": {LETTERS[0]: 3, LETTERS[1]: -3}},
    "allowed_token_ids": {"allowed_token_ids": [*LETTERS, EOS]},
    "bad_words": {"bad_words": ["cd", [LETTERS[2]]]},
    "min_tokens": {"min_tokens": 4},
    "max_tokens": {"max_tokens": 7},
    "ignore_eos": {"ignore_eos": True},
    "stop": {"stop": ["b"]},
    "include_stop": {"stop": ["d"], "include_stop_str_in_output": True},
    "stop_token_ids": {"stop_token_ids": [LETTERS[4]]},
    "special": {"skip_special_tokens": False},
    "detokenize": {"detokenize": False},
    "stream": {"output_kind": OutputKind.DELTA},
    "logprobs": {"logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 1},
    **{f"structured_outputs.{kind}": {"structured_outputs": StructuredOutputsParams(**{kind: value})} for kind, value in GRAMMARS.items()},
}
REQUEST_OPTIONS: dict[str, dict[str, Any]] = {"priority": {"priority": 1}, "salt": {"cache_salt": "s"}, "deadline": {"deadline": 600.0}}
PAIRS = [pair for pair in combinations([*OPTIONS, *REQUEST_OPTIONS], 2) if not all(name.startswith("structured") for name in pair)]


def asked(pair: tuple[str, str]) -> tuple[SamplingParams, dict[str, Any]]:
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": TOKENS}
    for name in pair:
        fields |= OPTIONS.get(name, {})
    return SamplingParams(**fields), {key: value for name in pair for key, value in REQUEST_OPTIONS.get(name, {}).items()}


def said(name: str) -> str:
    """The option as an error names it."""
    return "stop" if name == "include_stop" else name.split(".")[0]


def drawn(params: SamplingParams) -> bool:
    return params.temperature > 0 and params.seed is None


def run(driver: Driver, pairs: list[tuple[str, str]], at_once: int) -> dict[tuple[str, str], Any]:
    """The whole output of each pair that is not refused."""
    found: dict[tuple[str, str], Any] = {}
    refused: dict[tuple[str, str], str] = {}
    for start in range(0, len(pairs), at_once):
        for pair in pairs[start : start + at_once]:
            try:
                params, others = asked(pair)
                driver.add(" ".join(pair), P(14, 1), params, **others)
            except RequestError as error:
                refused[pair] = str(error)
                continue
            found[pair] = None
        driver.finish()
    assert [(pair, text) for pair, text in refused.items() if not all(said(name) in text for name in pair)] == []
    for pair in found:
        outputs = [output.outputs[0] for output in driver.outputs[" ".join(pair)]]
        last, delta = outputs[-1], "stream" in pair
        ids = [token for output in outputs for token in output.token_ids] if delta else list(last.token_ids)
        text = "".join(output.text for output in outputs) if delta else last.text
        found[pair] = (ids, text, last.finish_reason, last.stop_reason)
    return found


@pytest.mark.slow
def test_every_pair_of_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together and overlapped as alone and in the plain loop; outputs are inside what the options allow."""
    monkeypatch.setenv("MODELRUNNER_GRAMMAR__MAX_WHITESPACE", "0")
    subject = dense()
    plain = Driver(subject.engine(depth=1, rows=1, prefix=False, chunked=False))
    mixed = Driver(subject.engine(depth=2, rows=16, pages=256, tokens=64, policy="priority"))
    want, got = run(plain, PAIRS, 1), run(mixed, PAIRS, 64)
    assert want.keys() == got.keys()
    constrained = 0
    for pair, (ids, text, reason, stop) in got.items():
        params, _ = asked(pair)
        if not drawn(params):
            assert (ids, text, reason, stop) == want[pair], pair
        assert reason in ("stop", "length", "error"), pair
        assert len(ids) <= (params.max_tokens or 0), pair
        if params.allowed_token_ids is not None:
            assert set(ids) <= set(params.allowed_token_ids), pair
        if reason == "error":
            assert all(said(name) in str(stop) for name in pair), (pair, stop)
        if params.structured_outputs is not None and reason == "stop" and stop is None:
            constrained += 1
            assert CHECKS[params.structured_outputs.kind](written(ids)), (pair, written(ids))
    assert constrained > 40
    EngineProbe(plain).assert_clean()
    EngineProbe(mixed).assert_clean()
