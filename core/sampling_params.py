"""SamplingParams: how one request is sampled. Everything that needs no model is checked here, at construction."""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, InstanceOf, StrictBool, ValidationError

from modelrunner.errors import CheckpointError, RequestError
from modelrunner.sampling_values import read_processors
from modelrunner.structured_outputs import StructuredOutputsParams, read_structured_outputs

if TYPE_CHECKING:
    from modelrunner.checkpoint import ModelCard

SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
INT32_MAX = 2**31 - 1
FLOAT32_MAX = 3.4028234e38
LEAST_PENALTY = 1e-6  # of repetitions: a logit over less may be infinite
MAX_BIAS = 100.0
MAX_CHOICES = 1024
MOST_TOKENS = 2**31 - 1  # more are as many
SHOWN_CHARACTERS = 60


class OutputKind(StrEnum):
    """Which outputs `Engine.step` returns for a request: all text so far each time, only what is new, or only the end."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


def shown(value: object) -> str:
    """`value` for an error message: short, ASCII, and never a bare NaN or Infinity, which would break JSON that embeds it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "a number that is not finite"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**SHOWN_CHARACTERS:
        return f"an integer of more than {SHOWN_CHARACTERS} digits"
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        return f"a {type(value).__name__} of length {len(value)}"
    text = ascii(value)
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}..."


def as_int(value: object) -> int:
    """`value` as an int. Raises ValueError for what only looks like one (True, 5.0, "5"); numpy integers are fine."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError("not an integer")
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError("not an integer") from None


def as_float(value: object) -> float:
    """`value` as a finite float. Raises ValueError for True, text, NaN, infinities and integers beyond a float."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise ValueError("not a number")
    try:
        number = float(value)
    except (TypeError, OverflowError):
        raise ValueError("not a number that fits") from None
    if not math.isfinite(number):
        raise ValueError("not finite")
    return number


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError("out of range")


def _temperature(value: object) -> float:
    number = as_float(value)
    _require(0.0 <= number <= FLOAT32_MAX)
    return number


def _top_p(value: object) -> float:
    number = as_float(value)
    _require(0.0 < number <= 1.0)
    return number


def _min_p(value: object) -> float:
    number = as_float(value)
    _require(0.0 <= number <= 1.0)
    return number


def _top_k(value: object) -> int:
    number = as_int(value)
    _require(-1 <= number <= INT32_MAX)
    return number


def _seed(value: object) -> int | None:
    if value is None:
        return None
    number = as_int(value)
    _require(SEED_MIN <= number <= SEED_MAX)
    return number


def _n(value: object) -> int:
    number = as_int(value)
    _require(1 <= number <= MAX_CHOICES)
    return number


def _max_tokens(value: object) -> int | None:
    if value is None:
        return None
    number = as_int(value)
    _require(number >= 1)
    return min(number, MOST_TOKENS)


def _stop(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, (list, tuple)):
        raise ValueError("not a list")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ValueError(f"it contains {shown(string)}")
    return tuple(dict.fromkeys(strings))


def _stop_token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        raise ValueError("not a list")
    ids = []
    for item in value:
        try:
            number = as_int(item)
            _require(number >= 0)
        except ValueError:
            raise ValueError(f"it contains {shown(item)}") from None
        ids.append(number)
    return tuple(dict.fromkeys(ids))


def _penalty(value: object) -> float:
    number = as_float(value)
    _require(-2.0 <= number <= 2.0)
    return number


def _repetition_penalty(value: object) -> float:
    number = as_float(value)
    _require(LEAST_PENALTY <= number <= FLOAT32_MAX)
    return number


def _logprobs(value: object) -> int | None:
    if value is None:
        return None
    number = as_int(value)
    _require(-1 <= number <= INT32_MAX)
    return number


def _min_tokens(value: object) -> int:
    number = as_int(value)
    _require(number >= 0)
    return min(number, MOST_TOKENS)


def _logit_bias(value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError("not a mapping")
    bias = {}
    for key, item in value.items():
        try:
            token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else as_int(key)  # JSON has text for keys
            number = as_float(item)
            _require(token_id >= 0 and abs(number) <= MAX_BIAS)
        except ValueError:
            raise ValueError(f"it contains {shown(key)}: {shown(item)}") from None
        bias[token_id] = number
    return bias


def _allowed_token_ids(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = _stop_token_ids(value)
    _require(bool(ids))
    return ids


def _bad_words(value: object) -> tuple[str | tuple[int, ...], ...]:
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ValueError("not a list")
    words: list[str | tuple[int, ...]] = []
    for item in value:
        try:
            word = item if isinstance(item, str) else _repeated_ids(item)
        except ValueError:
            word = ()
        if not (word.strip() if isinstance(word, str) else word):
            raise ValueError(f"it contains {shown(item)}")
        words.append(word)
    return tuple(dict.fromkeys(words))


def _repeated_ids(value: Any) -> tuple[int, ...]:
    """`value` as token ids, of which one may stand twice."""
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable):
        raise ValueError("not a list")
    ids = tuple(as_int(item) for item in value)
    _require(all(number >= 0 for number in ids))
    return ids


def _num_draft_tokens(value: object) -> int | None:
    if value is None:
        return None
    number = as_int(value)
    _require(0 <= number <= INT32_MAX)
    return number


def _extra_args(value: object) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError("not a mapping")
    for name in value:
        if not isinstance(name, str):
            raise ValueError(f"it contains the key {shown(name)}")
    return dict(value)


ACCEPTED = {
    "n": f"an integer from 1 to {MAX_CHOICES}",
    "temperature": "a finite number >= 0 (0: greedy)",
    "top_p": "a number in (0, 1]",
    "top_k": "an integer >= 1, or 0 or -1 for all tokens",
    "min_p": "a number in [0, 1]",
    "seed": "an integer of 64 bits with a sign (-2**63 to 2**63 - 1), or None for a random one",
    "repetition_penalty": "a finite number of at least 1e-6 (1: none)",
    "presence_penalty": "a number in [-2, 2] (0: none)",
    "frequency_penalty": "a number in [-2, 2] (0: none)",
    "logit_bias": "a mapping of token ids (integers >= 0) to numbers in [-100, 100], or None",
    "allowed_token_ids": "a list of token ids (integers >= 0), not empty, or None for all",
    "bad_words": "a list of words, strings with more than white space, or lists of token ids, not empty",
    "min_tokens": "an integer >= 0, at most max_tokens",
    "max_tokens": "an integer >= 1, or None for as many as the context holds",
    "stop": "a string or a list of strings, none of them empty",
    "stop_token_ids": "a list of token ids (integers >= 0)",
    "logits_processors": "a list of names of logits processors and of functions f(prompt_ids, output_ids, logits), or a mapping of names "
    "to mappings of arguments",
    "structured_outputs": "StructuredOutputsParams, or None",
    **dict.fromkeys(("logprobs", "prompt_logprobs"), "an integer >= 0, -1 for the whole vocabulary, or None for none"),
    "num_draft_tokens": "an integer >= 0 (0: no drafts), or None for as many as the engine proposes",
    "extra_args": "a mapping of names of taps to their arguments",
    "output_kind": ", ".join(repr(kind.value) for kind in OutputKind),
    **dict.fromkeys(("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"), "True or False"),
}
# Names that other engines have, or had, for what is asked for here in another way.
ELSEWHERE = {
    **{f"guided_{kind}": f"structured_outputs={{{kind!r}: ...}}" for kind in ("json", "regex", "grammar", "choice")},
    "guided_decoding": "structured_outputs",
    "max_new_tokens": "max_tokens",
    "do_sample": "temperature (0: greedy)",
    **dict.fromkeys(("use_beam_search", "num_beams", "length_penalty"), "LLM.beam_search"),
}


class SamplingParams(BaseModel):
    """How to sample one request; names and meanings are those that vLLM's users know. Immutable.

    n: answers wanted, each drawn independently; the prompt is computed once.
    temperature: divides the logits; 0 is greedy. top_k: sample among the k likeliest tokens; 0 or -1 for all.
    top_p: among the likeliest tokens that together hold this probability. min_p: among tokens at least this fraction as likely as the best.
    seed: the same seed and prompt give the same text; None draws a new one for each request.
    repetition_penalty: above 1, tokens of prompt and output become less likely (Keskar et al. 2019). presence_penalty, frequency_penalty:
    taken off the logits of tokens of the output, once or as often as they occurred. logit_bias: added to the logits of these ids.
    allowed_token_ids: the only ids that may be sampled. bad_words: words that the output may not hold, as text (then with and without a
    leading space) or as ids; only the last token of one is banned, where the others came before it. min_tokens: until then nothing ends
    the output, neither a stop id nor a stop string.
    max_tokens: most output tokens; None for as many as the context holds. ignore_eos: go on past end-of-sequence ids.
    stop: strings that end the output where the first of them is complete; the text ends before it, or after it with
    `include_stop_str_in_output`. stop_token_ids: ids that end the output, itself the last token; its text is part of the output unless
    it is a special token. skip_special_tokens: leave special tokens out of the text. detokenize: False for ids only.
    structured_outputs: what the output must look like: a JSON schema, a regular expression, a grammar or one of some texts.
    logprobs: report the log-prob of each output token, and of this many likeliest ones beside it; 0 for its own alone, -1 for the whole
    vocabulary, None for nothing. prompt_logprobs: the same for each token of the prompt but the first. The setting sampler.max_logprobs
    bounds both.
    output_kind: what `Engine.step` reports (`LLM` always waits for the end).
    logits_processors: what else changes the logits, after penalties: names of processors that plugins bring, in a list or with their
    arguments, `{"no_repeat": {"size": 3}}`, and, in a list, Python functions f(prompt_ids, output_ids, logits) -> logits, which are slow.
    num_draft_tokens: most tokens that speculative decoding proposes a step; 0 for none, None or more than the setting
    speculation.num_tokens for as many as that says. It changes the speed, not the result; nothing without a drafter.
    extra_args: what the request asks of plugins, by the names of their taps; the values are numbers, text, lists and mappings.

    Raises RequestError naming the parameter, what was given and what is accepted.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    n: Annotated[int, BeforeValidator(_n)] = 1
    temperature: Annotated[float, BeforeValidator(_temperature)] = 1.0
    top_p: Annotated[float, BeforeValidator(_top_p)] = 1.0
    top_k: Annotated[int, BeforeValidator(_top_k)] = 0
    min_p: Annotated[float, BeforeValidator(_min_p)] = 0.0
    seed: Annotated[int | None, BeforeValidator(_seed)] = None
    repetition_penalty: Annotated[float, BeforeValidator(_repetition_penalty)] = 1.0
    presence_penalty: Annotated[float, BeforeValidator(_penalty)] = 0.0
    frequency_penalty: Annotated[float, BeforeValidator(_penalty)] = 0.0
    logit_bias: Annotated[Mapping[int, float] | None, BeforeValidator(_logit_bias)] = None
    allowed_token_ids: Annotated[tuple[int, ...] | None, BeforeValidator(_allowed_token_ids)] = None
    bad_words: Annotated[tuple[str | tuple[int, ...], ...], BeforeValidator(_bad_words)] = ()
    min_tokens: Annotated[int, BeforeValidator(_min_tokens)] = 0
    max_tokens: Annotated[int | None, BeforeValidator(_max_tokens)] = 16
    ignore_eos: StrictBool = False
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop)] = ()
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(_stop_token_ids)] = ()
    include_stop_str_in_output: StrictBool = False
    skip_special_tokens: StrictBool = True
    detokenize: StrictBool = True
    structured_outputs: Annotated[InstanceOf[StructuredOutputsParams] | None, BeforeValidator(read_structured_outputs)] = None
    output_kind: OutputKind = OutputKind.CUMULATIVE
    logits_processors: Annotated[Mapping[str, Mapping[str, Any]], BeforeValidator(read_processors)] = Field(default_factory=dict)
    logprobs: Annotated[int | None, BeforeValidator(_logprobs)] = None
    prompt_logprobs: Annotated[int | None, BeforeValidator(_logprobs)] = None
    num_draft_tokens: Annotated[int | None, BeforeValidator(_num_draft_tokens)] = None
    extra_args: Annotated[Mapping[str, Any], BeforeValidator(_extra_args)] = Field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(tuple(value for name, value in self.__dict__.items() if not isinstance(value, Mapping)))  # which may hold lists

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise RequestError(_message(error)) from None
        if self.stop and not self.detokenize:
            raise RequestError(
                "stop: stop strings are looked for in the text, and detokenize is False; accepted: stop_token_ids, or detokenize=True"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens: got {shown(self.min_tokens)}, and max_tokens is {shown(self.max_tokens)}; accepted: {ACCEPTED['min_tokens']}"
            )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy, with the parameters of `update` in place of its own. They are checked as at construction (pydantic's own does not)."""
        copied = super().model_copy(deep=deep)
        if not update:
            return copied
        return type(self)(**{**{name: getattr(copied, name) for name in copied.model_fields_set}, **update})


def _message(error: ValidationError) -> str:
    """Every wrong parameter, one after the other."""
    parts = []
    for detail in error.errors(include_url=False):
        name = str(detail["loc"][0])
        if detail["type"] == "extra_forbidden":
            near = [ELSEWHERE[name]] if name in ELSEWHERE else difflib.get_close_matches(name, ACCEPTED, n=2, cutoff=0.6)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            parts.append(f"{shown(name)} is not a sampling parameter{hint} (accepted: {', '.join(sorted(ACCEPTED))})")
            continue
        reason = str(detail["msg"]).removeprefix("Value error, ")
        if isinstance(detail.get("ctx", {}).get("error"), RequestError):
            parts.append(reason)
            continue
        why = f" ({reason})" if reason.startswith("it contains") else ""
        parts.append(f"{name}: got {shown(detail['input'])}{why}; accepted: {ACCEPTED[name]}")
    return "; ".join(parts)


GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def default_params(card: ModelCard) -> SamplingParams:
    """The parameters that apply when a caller gives none: our defaults, with those that the checkpoint's generation_config.json sets.

    Raises CheckpointError when that file holds a value that cannot be used.
    """
    chosen = {name: card.generation[name] for name in GENERATION_DEFAULTS if card.generation.get(name) is not None}
    try:
        return SamplingParams(**chosen)
    except RequestError as error:
        raise CheckpointError(f"{card.path}: the default sampling parameters in generation_config.json: {error}") from None
