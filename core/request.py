"""Requests as users see them (SamplingParams, RequestOutput), the engine's own Request, and how one becomes the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from modelrunner.errors import CheckpointError, RequestError
from modelrunner.logprobs import Logprob, RequestLogprobs
from modelrunner.media_front import MediaFront, Prepared
from modelrunner.prompts import Prompt, check_ids, checked_salt, prepare_prompt
from modelrunner.sampling_params import INT32_MAX, OutputKind, SamplingParams, as_float, as_int, default_params, shown

if TYPE_CHECKING:
    from modelrunner.automaton_arena import Place
    from modelrunner.checkpoint import ModelCard
    from modelrunner.guides import Guide
    from modelrunner.media import RequestMedia
    from modelrunner.media_messages import Parcel
    from modelrunner.text import Tokenizer

__all__ = [
    "CompletionOutput",
    "Logprob",
    "OutputKind",
    "Prompt",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Status",
    "default_params",
    "make_request",
    "merged_eos",
]

LONGEST_DEADLINE = 366 * 86400  # seconds; a larger number is a moment on a clock


@dataclass(frozen=True)
class RequestMetrics:
    """Times in seconds of the monotonic clock, counts in tokens."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(frozen=True)
class CompletionOutput:
    """One choice. finish_reason: None while running, else `stop`, `length`, `abort`, `timeout` or `error`.

    stop_reason: the stop string or the stop token id that ended it; None for end-of-sequence ids.
    extra: what the request's `extra_args` ask for: name -> array [len(token_ids), ...], an entry per token of `token_ids`.
    logprobs: for each token of `token_ids`, token id -> `Logprob` of that token and the likeliest ones; None if none are asked for, as
    `cumulative_logprob`: the sum of the log-probs of all output tokens up to the last of `token_ids`.
    num_drafted, num_accepted: drafts of speculative decoding that were checked, and those that became output; known at the end.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    extra: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict, compare=False)
    logprobs: Sequence[Mapping[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(frozen=True)
class RequestOutput:
    """What is known of a request. prompt: its text, None when it came as ids.

    num_cached_tokens: prompt tokens that the prefix cache held. weight_version: of the weights that gave the last token (see
    `Engine.update_weights`). prompt_logprobs: for each prompt token, token id -> `Logprob` of that token and the likeliest ones in its
    place; None for the first. None if none are asked for; of outputs of kind `delta` the first has it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0
    weight_version: str = "0"
    prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None = None


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """The engine's record of a request (host). Mutable; owned by the scheduler between add and finish.

    token_ids: prompt, then committed output (output is appended when the row is released; while running it lives in the token log).
    limit: tokens (prompt + output) at which it ends. seed: 64-bit, always set. features: bits of batch.Feature. tap_values: column values
    that taps gave. cache_world: what its cached pages depend on beside tokens, weights and salt. results: a byte record [bytes] uint8 of
    taps per output token. bad_word_ids: every tokenisation of `params.bad_words`. guide, place: of a request with structured output, one
    or the other from when its grammar is compiled. grammar_way: which, and why (see `guides`).
    logprobs: None if it asks for none. failure: what a function of `params.logits_processors` did wrong. choice: which of several answers
    to its prompt. fork: names the requests that share this prompt, of which one computes it. draft_values: column values that the drafter
    gave. num_draft: most drafts that a step checks for it. num_drafted, num_accepted: drafts checked and kept, known when its row is
    released. older: output tokens at the last update of the weights, and the version that gave the last of them. media: of its prompt.
    parcel: these at a front end, to be sent to the engine.
    """

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival: float
    limit: int
    seed: int
    eos_token_ids: tuple[int, ...] = ()
    prompt: str | None = None
    priority: int = 0
    deadline: float | None = None  # monotonic seconds
    cache_salt: str | None = None
    features: int = 0
    sequence: int = 0  # arrival order
    status: Status = Status.WAITING
    row: int = -1
    output_token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_token_time: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    tap_values: dict[str, Any] = field(default_factory=dict)
    cache_world: bytes | None = None
    results: list[npt.NDArray[np.uint8]] = field(default_factory=list)
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    guide: Guide | None = None
    place: Place | None = None
    grammar_way: str | None = None
    logprobs: RequestLogprobs | None = None
    failure: str | None = None
    older: tuple[int, str] = (0, "")
    choice: int = 0
    fork: str | None = None
    draft_values: dict[str, Any] = field(default_factory=dict)
    num_draft: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    media: RequestMedia | None = None
    parcel: Parcel | None = None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Every id that ends the output: end-of-sequence ids unless ignored, then the request's own."""
        eos = () if self.params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*eos, *self.params.stop_token_ids)))


def merged_eos(card: ModelCard, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """End-of-sequence ids named by generation_config.json, the configuration or the tokenizer: any of them ends an output.

    Raises CheckpointError for an entry that is no id.
    """
    found: list[int] = []
    for source in (card.generation, card.config):
        value = source.get("eos_token_id")
        try:
            found.extend(as_int(item) for item in (value if isinstance(value, (list, tuple)) else (value,)) if item is not None)
        except ValueError:
            raise CheckpointError(f"{card.path}: eos_token_id is {shown(value)}; a token id or a list of them is needed") from None
    if tokenizer is not None:
        found.extend(tokenizer.eos_token_ids)
    return tuple(dict.fromkeys(item for item in found if 0 <= item <= INT32_MAX))


def make_request(
    request_id: str,
    prompt: Prompt,
    params: SamplingParams | None,
    *,
    card: ModelCard,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    max_model_len: int,
    seed: int,
    now: float,
    priority: int = 0,
    deadline: float | None = None,
    cache_salt: str | None = None,
    media: MediaFront | None = None,
) -> Request:
    """Check everything a caller can get wrong and build the engine's record of the request.

    prompt: see `prepare_prompt`, which may have been done. params: None for the checkpoint's defaults. vocab_size: the model's.
    max_model_len: prompt + output, in tokens. seed: a fresh 64-bit one, used when `params` names none. now: monotonic seconds. priority:
    lower runs first. deadline: seconds from now after which the request ends with reason `timeout`. cache_salt: requests share cached
    prefixes only with requests of the same salt. media: what media of the prompt are made ready by.
    Raises RequestError that names the argument, what was given and what is accepted.
    """
    if not isinstance(request_id, str) or not request_id:
        raise RequestError(f"request id: got {shown(request_id)}; accepted: a string that is not empty")
    params = _checked_params(params, card)
    prepared = prompt if isinstance(prompt, Prepared) else prepare_prompt(prompt, tokenizer, media)
    _check_together(prepared, params, cache_salt)
    ids, salt = prepared.token_ids, prepared.cache_salt
    check_ids(ids, vocab_size, max_model_len)
    request = Request(
        id=request_id,
        prompt_token_ids=ids,
        params=params,
        arrival=now,
        limit=max_model_len if params.max_tokens is None else min(len(ids) + params.max_tokens, max_model_len),
        seed=seed if params.seed is None else params.seed,
        eos_token_ids=merged_eos(card, tokenizer),
        prompt=prepared.text,
        priority=_checked_priority(priority),
        deadline=_checked_deadline(deadline, now),
        cache_salt=checked_salt(cache_salt if salt is None else salt),
        logprobs=asked_logprobs(params, len(ids), vocab_size),
        media=prepared.media,
    )
    _check_stops(request, tokenizer, vocab_size)
    _check_edits(request, vocab_size)
    request.bad_word_ids = word_ids(params.bad_words, tokenizer, vocab_size)
    return request


def _checked_params(params: object, card: ModelCard) -> SamplingParams:
    """`params`; the checkpoint's defaults for None."""
    if params is None:
        return default_params(card)
    if not isinstance(params, SamplingParams):
        raise RequestError(f"sampling_params: got {shown(params)}; accepted: a SamplingParams")
    return params


def _check_together(prepared: Prepared, params: SamplingParams, cache_salt: str | None) -> None:
    """Refuse arguments that contradict the prompt."""
    if prepared.media is not None and prepared.media.is_embeds and params.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs: a prompt of embeddings (prompt_embeds) has no tokens to give log-probs of; leave one of them out"
        )
    if prepared.cache_salt is not None and cache_salt is not None:
        raise RequestError("cache_salt: given both in the prompt and as an argument; accepted: one of them")


def asked_logprobs(params: SamplingParams, prompt_length: int, vocab_size: int) -> RequestLogprobs | None:
    """The place for what a request asks for. prompt_length: in tokens."""
    if params.logprobs is None and params.prompt_logprobs is None:
        return None
    tops = [None if top is None else vocab_size if top < 0 else min(top, vocab_size) for top in (params.logprobs, params.prompt_logprobs)]
    return RequestLogprobs(tops[0], tops[1], prompt_length)


def _check_stops(request: Request, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    params = request.params
    if params.stop and tokenizer is None:
        raise RequestError("stop: stop strings need text, and there is no tokenizer (skip_tokenizer_init=True); accepted: stop_token_ids")
    for item in params.stop_token_ids:
        if item >= vocab_size:
            raise RequestError(f"stop_token_ids: got {shown(item)}; accepted: 0 to {vocab_size - 1}")


def _check_edits(request: Request, vocab_size: int) -> None:
    """Ids of parameters that change logits are in the vocabulary."""
    for name in ("logit_bias", "allowed_token_ids"):
        for item in getattr(request.params, name) or ():
            if item >= vocab_size:
                raise RequestError(f"{name}: got {shown(item)}; accepted: 0 to {vocab_size - 1}")


def word_ids(words: Sequence[str | tuple[int, ...]], tokenizer: Tokenizer | None, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """The tokenisations of bad words: of a text as it is and with a leading space, since that changes its tokens.

    Raises RequestError for text without a tokenizer, and for an id beyond the vocabulary.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if isinstance(word, tuple):
            if max(word) >= vocab_size:
                raise RequestError(f"bad_words: got {shown(max(word))}; accepted: 0 to {vocab_size - 1}")
            found[word] = None
            continue
        if tokenizer is None:
            raise RequestError("bad_words: got text, and there is no tokenizer (skip_tokenizer_init=True); accepted: lists of token ids")
        bare = word.lstrip(" ")
        for form in (bare, f" {bare}"):
            try:
                ids = tuple(tokenizer.encode(form, add_special_tokens=False))
            except (UnicodeEncodeError, TypeError) as error:
                raise RequestError(f"bad_words: {word!r} cannot be encoded ({error}); accepted: text that UTF-8 can encode") from error
            if ids:
                found[ids] = None
    return tuple(found)


def _checked_priority(priority: object) -> int:
    try:
        number = as_int(priority)
        if abs(number) < 2**63:
            return number
    except ValueError:
        pass
    raise RequestError(f"priority: got {shown(priority)}; accepted: an integer of 64 bits (lower runs first)")


def _checked_deadline(deadline: object, arrival: float) -> float | None:
    if deadline is None:
        return None
    try:
        seconds = as_float(deadline)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= LONGEST_DEADLINE:
        raise RequestError(
            f"deadline: got {shown(deadline)}; accepted: seconds from now, a finite number > 0 and at most {LONGEST_DEADLINE} (a year), or "
            "None. A moment on a clock, such as time.time() + 5, is none: say 5"
        )
    return arrival + seconds
