"""Beam search over `LLM.generate`: the likeliest answers to a prompt, found by keeping the best few beginnings at each length.

Each length is one call of `generate` for a single token of every beam, with the log-probs of the likeliest ones; beams of one prompt find
each other's full pages in the prefix cache. What counts, and in which order, is as in transformers with `early_stopping="never"`: of the
candidates of one length, those among the best `beam_width` that end are finished, and the best `beam_width` that do not end go on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

from modelrunner.errors import RequestError
from modelrunner.request import RequestOutput
from modelrunner.sampling_params import ACCEPTED, SamplingParams, as_float, as_int, shown

MAX_WIDTH = 1024
MAX_LENGTH_PENALTY = 32  # a length to this power is a number
WHOLE_VOCABULARY = -1
AS_IT_IS = (0.0, 1.0)  # temperatures that leave the model's log-probs alone
Candidate = tuple[float, "Beam", int]  # log-prob of the whole, the beam that it continues, and the token


@dataclass(frozen=True)
class BeamSearchParams:
    """How to search. Raises RequestError naming the parameter, what was given and what is accepted.

    beam_width: beams kept, and sequences returned; it needs the log-probs of twice as many tokens, or more where several ids end an output
    (`check_logprobs`). max_tokens: most output tokens; None for as many as the context holds. ignore_eos: go on past end-of-sequence ids.
    temperature: divides the logits before their log-probs are taken; 0 for none of that, as 1 (others need the whole vocabulary's log-probs
    of every beam, `sampler.max_logprobs=-1`, and time). length_penalty: a sequence of n output tokens scores its log-prob /
    n**length_penalty: above 0 it helps long ones.
    """

    beam_width: int
    max_tokens: int | None = 16
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        check("beam_width", self.beam_width, as_int, lambda value: 1 <= value <= MAX_WIDTH, f"an integer from 1 to {MAX_WIDTH}")
        if self.max_tokens is not None:
            check("max_tokens", self.max_tokens, as_int, lambda value: value >= 1, ACCEPTED["max_tokens"])
        check("ignore_eos", self.ignore_eos, lambda value: value, lambda value: isinstance(value, bool), "True or False")
        check("temperature", self.temperature, as_float, lambda value: value >= 0, "a finite number >= 0 (0: the model's own log-probs)")
        most = MAX_LENGTH_PENALTY
        check("length_penalty", self.length_penalty, as_float, lambda value: -most <= value <= most, f"a number from -{most} to {most}")


def check(name: str, value: Any, read: Callable[[Any], Any], holds: Callable[[Any], bool], accepted: str) -> None:
    """Raise RequestError unless `value` can be read and is accepted."""
    try:
        good = holds(read(value))
    except (ValueError, TypeError):
        good = False
    if not good:
        raise RequestError(f"{name}: got {shown(value)}; accepted: {accepted}")


def check_logprobs(params: BeamSearchParams, eos: Iterable[int], limit: int) -> None:
    """Raise RequestError for a search that needs more log-probs than the engine gives. eos: ids that end an output. limit: the setting
    sampler.max_logprobs, in tokens; -1 for any number."""
    if limit == WHOLE_VOCABULARY:
        return
    if params.temperature not in AS_IT_IS:
        raise RequestError(
            f"temperature: got {shown(params.temperature)}, which needs the log-probs of the whole vocabulary; accepted: 0 or 1, or any "
            f"with the setting sampler.max_logprobs=-1 (it is {limit})"
        )
    ending = frozenset() if params.ignore_eos else frozenset(eos)
    needed, each = num_candidates(params.beam_width, ending), num_candidates(1, ending)
    if needed > limit:
        possible = f"1 to {limit // each}" if limit >= each else "none"
        raise RequestError(
            f"beam_width: got {params.beam_width}, which needs the log-probs of {needed} tokens, {each} for each beam; accepted with the "
            f"setting sampler.max_logprobs={limit}: {possible}; with max_logprobs=-1 any up to {MAX_WIDTH}"
        )


def num_candidates(beam_width: int, eos: frozenset[int]) -> int:
    """Candidates of one length that count: enough for `beam_width` of them not to end."""
    return max(2, 1 + len(eos)) * beam_width


@dataclass(frozen=True)
class BeamSearchSequence:
    """One answer. tokens: prompt and output ids. text: theirs, None without a tokenizer. cum_logprob: of the output. score: what sequences
    are ordered by. finish_reason: `stop` for an end-of-sequence id, its last token, or `length`."""

    tokens: list[int]
    num_prompt_tokens: int
    cum_logprob: float
    score: float
    finish_reason: str
    text: str | None = None

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]


@dataclass(frozen=True)
class BeamSearchOutput:
    """Sequences of one prompt, the best first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True)
class Beam:
    """A beginning. tokens: prompt and output so far."""

    tokens: list[int]
    cum_logprob: float = 0.0


@dataclass
class Search:
    """The search for one prompt. limit: output tokens. live: beams that go on, the best first."""

    prompt: list[int]
    params: BeamSearchParams
    eos: frozenset[int]
    limit: int
    live: list[Beam] = field(default_factory=list)
    finished: list[BeamSearchSequence] = field(default_factory=list)
    length: int = 0  # output tokens of each live beam

    def __post_init__(self) -> None:
        self.live = [Beam(self.prompt)]

    def advance(self, found: Iterable[dict[int, float]]) -> None:
        """Take a token more. found: for each live beam, log-probs of its likeliest next tokens."""
        self.length += 1
        candidates: list[Candidate] = [
            (beam.cum_logprob + logprob, beam, token)
            for beam, logprobs in zip(self.live, found, strict=True)
            for token, logprob in logprobs.items()
        ]
        candidates.sort(key=lambda candidate: -candidate[0])  # of equals the one of the better beam, then the likelier token, stays first
        self.live = []
        for place, (cum_logprob, beam, token) in enumerate(candidates[: self.kept]):
            ends = "stop" if token in self.eos else "length" if self.length == self.limit else ""
            if ends and place < self.params.beam_width:
                self.finished.append(self.sequence([*beam.tokens, token], cum_logprob, ends))
            elif not ends and len(self.live) < self.params.beam_width:
                self.live.append(Beam([*beam.tokens, token], cum_logprob))
        self.finished.sort(key=lambda sequence: -sequence.score)
        del self.finished[self.params.beam_width :]
        if len(self.finished) == self.params.beam_width and self.live and self.best_to_come() <= self.finished[-1].score:
            self.live = []

    @property
    def kept(self) -> int:
        """See `num_candidates`."""
        return num_candidates(self.params.beam_width, self.eos)

    def best_to_come(self) -> float:
        """No sequence that a live beam may still become scores more: its log-prob only falls."""
        length = self.limit if self.params.length_penalty > 0 else self.length
        return self.live[0].cum_logprob / float(length**self.params.length_penalty)

    def sequence(self, tokens: list[int], cum_logprob: float, reason: str) -> BeamSearchSequence:
        score = cum_logprob / float(self.length**self.params.length_penalty)
        return BeamSearchSequence(tokens, len(self.prompt), cum_logprob, score, reason)


def next_tokens(output: RequestOutput, params: BeamSearchParams, count: int) -> dict[int, float]:
    """Log-probs of the `count` likeliest next tokens, the likeliest first."""
    (entry,) = output.outputs[0].logprobs or ({},)
    ranked = sorted(entry.items(), key=lambda item: item[1].rank or 0)
    logprobs = np.array([held.logprob for _, held in ranked])
    if params.temperature not in AS_IT_IS:
        logprobs = logprobs / params.temperature
        logprobs -= logprobs.max() + np.log(np.exp(logprobs - logprobs.max()).sum())
    return dict(zip([token for token, _ in ranked[:count]], logprobs[:count].tolist(), strict=True))


Generate = Callable[[Sequence[dict[str, Any]], SamplingParams], Sequence[RequestOutput]]


def search(
    generate: Generate,
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    eos: Iterable[int],
    max_model_len: int,
    *,
    use_tqdm: bool = False,
) -> list[Search]:
    """Run the searches of all prompts together. generate: `LLM.generate` for prompts of token ids. use_tqdm: show a bar of the output's
    length, on a terminal."""
    ids = frozenset() if params.ignore_eos else frozenset(eos)
    rooms = [max_model_len - len(prompt) for prompt in prompts]
    limits = rooms if params.max_tokens is None else [min(params.max_tokens, room) for room in rooms]
    searches = [Search(prompt, params, ids, limit) for prompt, limit in zip(prompts, limits, strict=True)]
    count = max((each.kept for each in searches), default=0)
    whole = params.temperature not in AS_IT_IS
    step = SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, logprobs=WHOLE_VOCABULARY if whole else count, detokenize=False
    )  # fmt: skip
    with tqdm(total=max(limits, default=0), desc="Beam search", unit="token", disable=not use_tqdm or not sys.stderr.isatty()) as bar:
        while going := [each for each in searches if each.live]:
            outputs = iter(generate([{"prompt_token_ids": beam.tokens} for each in going for beam in each.live], step))
            for each in going:
                each.advance([next_tokens(next(outputs), params, count) for _ in each.live])
            bar.update()
    return searches
