"""Requests with options at random, any number together, in engines with settings at random: each gives what it gives alone.

They come between steps, are preempted and aborted, share prefixes, have several answers, grammars, drafts, streams and log-probs. A run
is named by its seed; `MIXTURES=500 pytest tests/equalities/test_random_mixture.py` makes more of them than the usual few.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest

from modelrunner import CompletionOutput, RequestOutput, SamplingParams, StructuredOutputsParams
from modelrunner.errors import RequestError
from modelrunner.request import OutputKind
from modelrunner.testing import Driver, EngineProbe, P, R, dense

pytest.importorskip("xgrammar")
MIXTURES = int(os.environ.get("MIXTURES", "6"))
FINAL = OutputKind.FINAL_ONLY
NUMBER = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["a"]}
SHAPES = (
    StructuredOutputsParams(choice=["alpha", "beta", "gamma delta"]),
    StructuredOutputsParams(regex="[a-c]{2,6}(x|yy)"),
    StructuredOutputsParams(json=NUMBER),
    StructuredOutputsParams(json_object=True),
    StructuredOutputsParams(grammar='root ::= "(" root ")" | "x"'),
)
LOGPROB = 1e-3  # as wide as chunks and batches may differ in float32


def some_params(rng: random.Random) -> SamplingParams:
    """Every option comes now and then, beside any others."""
    choose = rng.choice
    longest = rng.randint(1, 24)
    drawn = {"temperature": choose((0.5, 1.0, 1.3)), "seed": choose((rng.randrange(2**31), 2**63 - 1, -(2**63), 0))}
    values: dict[str, Any] = {"max_tokens": longest, "output_kind": choose(tuple(OutputKind))} | choose(({"temperature": 0}, drawn))
    now_and_then: tuple[dict[str, Any], ...] = (
        {"n": rng.randint(2, 3)},
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.1, "frequency_penalty": 0.7},
        {"top_p": 0.8},
        {"top_k": 5},
        {"min_p": 0.05},
        {"logit_bias": {rng.randint(3, 258): choose((5, -100, 20)) for _ in range(3)}},
        {"logprobs": choose((0, 1, 3, 20))},
        {"prompt_logprobs": choose((0, 2))},
        {"num_draft_tokens": choose((0, 1, 2, 9))},
        {"stop": choose((["a"], ["e", "xyz"], ["th", "q"])), "include_stop_str_in_output": choose((True, False))},
        {"stop_token_ids": [rng.randint(3, 258) for _ in range(12)]},
        {"min_tokens": min(longest, rng.randint(1, 6))},
        {"ignore_eos": True},
        choose(
            (
                {"allowed_token_ids": list(range(20, 200))},
                {"bad_words": ["e", [rng.randint(3, 258), rng.randint(3, 258)]]},
                {"structured_outputs": choose(SHAPES)},
                {"structured_outputs": choose(SHAPES)},
            )
        ),
    )
    for option in now_and_then:
        if rng.random() < 0.22:
            values |= option
    return SamplingParams(**values)


def some_settings(rng: random.Random, seed: int) -> dict[str, Any]:
    """In the short words of `testing.options`. Pages are often too few for all rows."""
    tokens = rng.choice((16, 32, 64, 512))
    values: dict[str, Any] = {
        "depth": rng.choice((1, 2, 3)),
        "rows": rng.choice((2, 4, 8)),
        "pages": rng.choice((14, 20, 60)),
        "tokens": tokens,
        "mixed_tokens": min(tokens, 512),
        "prefix": rng.random() < 0.6,
        "policy": rng.choice(("fcfs", "priority")),
    }
    if rng.random() < 0.7:
        values |= {"device": "deferred_cpu", "device_seed": seed, "captures": rng.random() < 0.5}
    if rng.random() < 0.6:
        values |= {"drafter": "ngram", "drafts": rng.choice((1, 3, 5)), "spare_tokens": rng.choice((None, 8))}
    return values


@dataclass
class Mixture:
    """A run. wanted: request -> prompt and parameters."""

    seed: int
    wanted: dict[str, tuple[list[int], SamplingParams]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.driver = Driver(dense().engine(**some_settings(self.rng, self.seed)))
        self.probe = EngineProbe(self.driver)
        self.probe.poison_freed_pages()

    def run(self) -> None:
        rng = self.rng
        for number in range(rng.randint(4, 12)):
            self.submit(str(number))
            for _ in range(rng.randint(0, 4)):
                self.driver.step()
            if rng.random() < 0.1:
                self.driver.engine.abort(rng.choice(list(self.driver.engine.requests) or ["none"]))
            if rng.random() < 0.2:
                self.preempt()
        self.driver.finish()
        self.probe.assert_clean()
        self.driver.engine.close()

    def submit(self, name: str) -> None:
        rng = self.rng
        prompt = rng.choice((P(rng.randint(1, 60), rng.randint(0, 3)), R(rng.randint(1, 8)), P(33, 1), P(32, 1)))
        more: dict[str, Any] = {"priority": rng.randint(-2, 2), "cache_salt": rng.choice((None, None, "a", "b"))}
        params = some_params(rng)
        try:
            self.driver.add(name, prompt, params, **more)
        except RequestError as error:
            assert "needs cache for" in str(error)  # noqa: PT017  the only thing that may be wrong with it
            return
        self.wanted[name] = prompt, params

    def preempt(self) -> None:
        self.probe.drain()
        running = [request.id for request in self.driver.engine.requests.values() if request.row >= 0]
        if running:
            self.driver.engine.scheduler.preempt(self.rng.choice(running))

    def compare(self) -> Counter[str]:
        """Compare every answer. Returns how often what must have happened did."""
        stats = self.driver.engine.scheduler.stats
        seen = Counter(preempted=stats.preemptions, cached=stats.cached_tokens, kept=stats.num_accepted, held=stats.held)
        for name, (prompt, params) in self.wanted.items():
            alone, outputs = in_peace(tuple(prompt), params), self.driver.outputs[name]
            for index in range(params.n):
                seen[compare_choice(joined(outputs, index, params.output_kind), joined([alone], index))] += 1
            aborted = outputs[-1].outputs[0].finish_reason == "abort"
            if params.prompt_logprobs is not None and not aborted:
                told = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
                compare_logprobs(told[-1], alone.prompt_logprobs)
        return seen


@dataclass
class Joined:
    """All that outputs said of one answer."""

    token_ids: list[int]
    text: str
    end: tuple[Any, Any]
    logprobs: list[Any]


def joined(outputs: Sequence[RequestOutput], index: int, kind: OutputKind = FINAL) -> Joined:
    choices = [choice for output in outputs for choice in output.outputs if choice.index == index]
    last: CompletionOutput = choices[-1]
    pieces = choices if kind is OutputKind.DELTA else [last]
    return Joined(
        [token for piece in pieces for token in piece.token_ids],
        "".join(piece.text for piece in pieces),
        (last.finish_reason, last.stop_reason),
        [found for piece in pieces for found in piece.logprobs or ()],
    )


def compare_choice(got: Joined, alone: Joined) -> str:
    """An aborted answer is a beginning; of one that ended in an error, the grammar and the bans together left nothing. Returns the end."""
    reason = str(got.end[0])
    if reason == "abort":
        assert got.token_ids == alone.token_ids[: len(got.token_ids)]
    elif "error" in (reason, alone.end[0]):
        assert got.end == alone.end
    else:
        assert (got.token_ids, got.text, got.end) == (alone.token_ids, alone.text, alone.end)
        compare_logprobs(got.logprobs, alone.logprobs)
    return reason


def compare_logprobs(got: Any, alone: Any) -> None:
    assert len(got) == len(alone)
    for mine, other in zip(got, alone, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None:
            token = next(iter(mine))
            assert token == next(iter(other))
            assert mine[token].logprob == pytest.approx(other[token].logprob, abs=LOGPROB)


@lru_cache(maxsize=1)
def quiet() -> Driver:
    """An engine in which every request runs alone, step after step."""
    return Driver(dense().engine(depth=1, rows=8, pages=400, prefix=False, chunked=False))


@lru_cache(maxsize=4096)
def in_peace(prompt: tuple[int, ...], params: SamplingParams) -> RequestOutput:
    driver = quiet()
    name = str(len(driver.outputs))
    driver.add(name, list(prompt), params.model_copy(update={"output_kind": FINAL, "num_draft_tokens": 0}))
    driver.finish()
    return driver.final(name)


def test_each_request_gives_what_it_gives_alone() -> None:
    seen: Counter[str] = Counter()
    for seed in range(MIXTURES):
        mixture = Mixture(seed)
        mixture.run()
        try:
            seen += mixture.compare()
        except AssertionError as error:
            error.add_note(f"in the mixture of seed {seed}")
            raise
    for event in ("preempted", "cached", "kept", "stop", "length", "abort"):
        assert seen[event] > 0, f"without it nothing was tested: {event} of {dict(seen)}"
