"""modelrunner: an LLM execution engine whose core knows no model.

Exports are lazy, so that importing a part of the package (or listing plugins) does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from modelrunner.async_llm import AsyncLLM
    from modelrunner.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from modelrunner.engine import Engine
    from modelrunner.hookspecs import hookimpl
    from modelrunner.llm import LLM
    from modelrunner.logits_processors import LogitsProcessor
    from modelrunner.logprobs import Logprob
    from modelrunner.observers import Observer, RequestFinish, RequestStart, StepReport
    from modelrunner.offers import Decline, Offer
    from modelrunner.request import CompletionOutput, OutputKind, RequestOutput, SamplingParams
    from modelrunner.settings import RunnerSettings
    from modelrunner.structured_outputs import StructuredOutputsParams
    from modelrunner.taps import ModelInfo, Result, Tap

__version__ = "0.1.0"

_EXPORTS = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "Engine": "engine",
    "BeamSearchParams": "beam_search",
    "BeamSearchOutput": "beam_search",
    "BeamSearchSequence": "beam_search",
    "SamplingParams": "request",
    "StructuredOutputsParams": "structured_outputs",
    "RequestOutput": "request",
    "CompletionOutput": "request",
    "OutputKind": "request",
    "Logprob": "logprobs",
    "RunnerSettings": "settings",
    "Offer": "offers",
    "Decline": "offers",
    "hookimpl": "hookspecs",
    "LogitsProcessor": "logits_processors",
    "Tap": "taps",
    "Result": "taps",
    "ModelInfo": "taps",
    "Observer": "observers",
    "StepReport": "observers",
    "RequestStart": "observers",
    "RequestFinish": "observers",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "Decline",
    "Engine",
    "LogitsProcessor",
    "Logprob",
    "ModelInfo",
    "Observer",
    "Offer",
    "OutputKind",
    "RequestFinish",
    "RequestOutput",
    "RequestStart",
    "Result",
    "RunnerSettings",
    "SamplingParams",
    "StepReport",
    "StructuredOutputsParams",
    "Tap",
    "hookimpl",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
