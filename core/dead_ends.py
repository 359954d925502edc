"""Requests that ended because no token was possible: what they are told.

A row ends so when its best logit is not finite: all are -inf, or one is NaN or +inf. Its record says no more than that, so the message
names both, and the options of the request that change logits.
"""

from __future__ import annotations

from collections.abc import Iterable

from modelrunner.request import Request
from modelrunner.sampling_params import SamplingParams

EDITING = (
    "structured_outputs",
    "allowed_token_ids",
    "logit_bias",
    "min_tokens",
    "bad_words",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logits_processors",
)


def say_why(ended: Iterable[Request]) -> None:
    """Give those that ended with an error and without a reason a `stop_reason`."""
    for request in ended:
        if request.finish_reason == "error" and request.stop_reason is None:
            request.stop_reason = no_token(request)


def no_token(request: Request) -> str:
    """Why a request found no token for the place behind its output."""
    length = len(request.output_token_ids)
    if options := editing(request.params, length):
        all_of_them = "Together they leave" if options[1:] else "It leaves"
        makers = "the model or a logits processor" if "logits_processors" in options else "the model"
        return (
            f"{' and '.join(options)}: no token is possible after {length} output tokens. "
            f"{all_of_them} none (all logits are -inf), or {makers} gave NaN or +inf"
        )
    return f"no token is possible after {length} output tokens: the model gave NaN or +inf among the logits, or -inf alone"


def editing(params: SamplingParams, length: int) -> list[str]:
    """The options that change the logits after `length` output tokens."""
    fields = SamplingParams.model_fields
    plain = {name: fields[name].get_default(call_default_factory=True) for name in EDITING}
    found = [name for name in EDITING if (value := getattr(params, name)) is not None and value != plain[name]]
    return [name for name in found if name != "min_tokens" or length < params.min_tokens]
