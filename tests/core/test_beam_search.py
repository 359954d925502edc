"""Beam search finds what transformers' finds: sequences and scores, with and without an early end, several prompts at once."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from modelrunner import LLM, BeamSearchParams, SamplingParams
from modelrunner.beam_search import check_logprobs
from modelrunner.errors import RequestError
from modelrunner.testing import P, dense, options

COMMON = 223  # an id that the tiny model says often: here it ends an output
PROMPTS = [P(12, 1), P(20, 1), P(33, 4)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(dense().model, tmp_path_factory.mktemp("beam") / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": COMMON, "pad_token_id": 0}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": COMMON}))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*max_model_len.*")
        with LLM(str(folder), skip_tokenizer_init=True, sampler={"max_logprobs": -1}, **options(rows=16, pages=256)) as llm:
            yield llm


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def theirs(oracle: Any, prompt: list[int], params: BeamSearchParams) -> list[tuple[list[int], float]]:
    """(output ids, score) of transformers' sequences, the best first."""
    found = oracle.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=params.beam_width,
        num_return_sequences=params.beam_width,
        max_new_tokens=params.max_tokens,
        length_penalty=params.length_penalty,
        early_stopping="never",
        do_sample=False,
        eos_token_id=None if params.ignore_eos else COMMON,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    outputs = []
    for ids, score in zip(found.sequences[:, len(prompt) :].tolist(), found.sequences_scores.tolist(), strict=True):
        end = ids.index(COMMON) + 1 if COMMON in ids and not params.ignore_eos else len(ids)
        outputs.append((ids[:end], score))
    return outputs


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -1.0])
@pytest.mark.parametrize(("beam_width", "ignore_eos"), [(2, False), (4, False), (4, True)])
def test_the_sequences_are_those_of_transformers(llm: LLM, oracle: Any, beam_width: int, ignore_eos: bool, length_penalty: float) -> None:
    params = BeamSearchParams(beam_width, 12, ignore_eos=ignore_eos, length_penalty=length_penalty)
    for prompt, output in zip(PROMPTS, llm.beam_search(PROMPTS, params), strict=True):
        want = theirs(oracle, prompt, params)
        got = [(sequence.output_token_ids, sequence.score) for sequence in output.sequences]
        assert [ids for ids, _ in got] == [ids for ids, _ in want]
        assert [score for _, score in got] == pytest.approx([score for _, score in want], abs=1e-4)
        for sequence in output.sequences:
            assert sequence.tokens[: len(prompt)] == prompt
            assert sequence.finish_reason == ("stop" if sequence.tokens[-1] == COMMON and not ignore_eos else "length")
    llm.engine.scheduler.check()


def test_some_end_early(llm: LLM) -> None:
    """Otherwise the test above would show little."""
    outputs = llm.beam_search(PROMPTS, BeamSearchParams(4, 12))
    reasons = [sequence.finish_reason for output in outputs for sequence in output.sequences]
    assert set(reasons) == {"stop", "length"}


def test_temperature_divides_the_logits(llm: LLM, oracle: Any) -> None:
    """Checked by adding the log-probs of the sequences up."""
    (output,) = llm.beam_search([PROMPTS[0]], BeamSearchParams(3, 6, temperature=2.5))
    for sequence in output.sequences:
        with torch.inference_mode():
            logits = oracle(torch.tensor([sequence.tokens])).logits[0, len(PROMPTS[0]) - 1 : -1]
        logprobs = torch.log_softmax(logits / 2.5, -1).gather(1, torch.tensor(sequence.output_token_ids)[:, None])
        assert sequence.cum_logprob == pytest.approx(float(logprobs.sum()), abs=1e-4)
    assert [s.score for s in output.sequences] == sorted((s.score for s in output.sequences), reverse=True)


def test_beams_share_their_pages(llm: LLM) -> None:
    stats = llm.engine.scheduler.stats
    before, prompt = stats.computed_tokens, P(100, 77)
    llm.beam_search([prompt], BeamSearchParams(4, 8, ignore_eos=True))
    assert stats.computed_tokens - before <= len(prompt) + 7 * 4 * 16, "a beam computes at most a page anew for each token"


def test_text_and_limits() -> None:
    with dense().llm() as llm:
        text = "ab"
        (output,) = llm.beam_search(text, BeamSearchParams(2, 3))
        assert [sequence.text is not None and sequence.text.startswith(text) for sequence in output.sequences] == [True, True]
        (full,) = llm.beam_search([P(254, 1)], BeamSearchParams(2, 10))
        assert {len(sequence.tokens) for sequence in full.sequences} == {256}
        with pytest.raises(RequestError, match=r"prompts\[1\]: prompt: it is empty"):
            llm.beam_search([[1], []], BeamSearchParams(2, 3))
        (usual,) = llm.beam_search([[1]], BeamSearchParams(10, ignore_eos=True))
        assert {len(sequence.output_token_ids) for sequence in usual.sequences} == {SamplingParams().max_tokens}
        (whole,) = llm.beam_search([P(250, 1)], BeamSearchParams(1, max_tokens=None, ignore_eos=True))
        assert {len(sequence.tokens) for sequence in whole.sequences} == {256}
        with pytest.raises(RequestError, match=r"^beam_width: got 11, .* of 22 tokens, .* sampler\.max_logprobs=20: 1 to 10; .*=-1 any"):
            llm.beam_search([[1]], BeamSearchParams(11, 3))
        with pytest.raises(RequestError, match=r"^temperature: got 0\.5, .* accepted: 0 or 1, or any with .*max_logprobs=-1 \(it is 20\)"):
            llm.beam_search([[1]], BeamSearchParams(2, 3, temperature=0.5))
        with pytest.raises(RequestError, match="params: got a dict"):
            llm.beam_search([[1]], {"beam_width": 2})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_width", 0),
        ("beam_width", 2.0),
        ("max_tokens", 0),
        ("ignore_eos", 1),
        ("temperature", -1),
        ("temperature", math.nan),
        ("length_penalty", "x"),
        ("length_penalty", 1e308),
    ],
)
def test_wrong_parameters_are_refused(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"^{name}: got .*; accepted: "):
        BeamSearchParams(**{"beam_width": 2, name: value})


def test_several_ids_that_end_an_output_need_more_log_probs() -> None:
    check_logprobs(BeamSearchParams(5), {1, 2, 3}, 20)
    check_logprobs(BeamSearchParams(10, ignore_eos=True), {1, 2, 3}, 20)
    check_logprobs(BeamSearchParams(1000, temperature=0.5), {1, 2, 3}, -1)
    with pytest.raises(RequestError, match=r"24 tokens, 4 for each beam; .*: 1 to 5; "):
        check_logprobs(BeamSearchParams(6), {1, 2, 3}, 20)
    with pytest.raises(RequestError, match=r"sampler\.max_logprobs=1: none; "):
        check_logprobs(BeamSearchParams(1), {1}, 1)
