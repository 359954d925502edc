"""Requests as users see them: SamplingParams, RequestOutput; and the engine's own Request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from pydantic import BaseModel, ConfigDict


class OutputKind(str, Enum):
    """Which outputs `Engine.step` returns for a request: all text so far each time, only what is new, or only the end."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


class SamplingParams(BaseModel):
    """How to sample. Names and meanings follow vLLM's; validation and fields are completed below."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    output_kind: OutputKind = OutputKind.CUMULATIVE


@dataclass(frozen=True)
class RequestMetrics:
    """Times in seconds of the monotonic clock, counts in tokens."""

    arrival_time: float
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(frozen=True)
class CompletionOutput:
    """One choice. finish_reason: None while running, else `stop`, `length`, `abort`, `timeout` or `error`; stop_reason: the stop string or id."""

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int = 0


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """The engine's record of a request (host). Mutable; owned by the scheduler between add and finish.

    token_ids: prompt, then committed output (output is appended when the row is released; while running it lives in the token log).
    limit: tokens (prompt + output) at which it ends. seed: 64-bit, always set. features: bits of batch.Feature.
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
    columns: Mapping[str, Any] = field(default_factory=dict)
