"""Host work follows what changes, not how many rows run: a steady step costs the same Python calls at 16 and at 512 rows."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import modelrunner.kernels
from modelrunner import Engine, OutputKind, SamplingParams
from modelrunner.kernels.norm import rms_norm
from modelrunner.plugins.bench import host
from modelrunner.testing import Driver, P, mixed, options, scripted

KERNELS = str(Path(modelrunner.kernels.__file__).parent)
DRAFTS = 3
STEPS = 32  # two pages of tokens: every row grows twice
PARAMS = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY)


class CallCounter:
    """Counts calls of Python and C functions, but not those inside an operation: that is the device's work, which a CPU does in slices
    of its cache's size. The call of the operation itself counts."""

    def __init__(self) -> None:
        self.calls = 0
        self._inside = 0

    def __call__(self, frame: FrameType, kind: str, argument: Any) -> None:
        if self._inside == 0:
            self.calls += kind in ("call", "c_call")
        if kind in ("call", "return") and frame.f_code.co_filename.startswith(KERNELS):
            self._inside += 1 if kind == "call" else -1


def calls_per_step(rows: int, depth: int, params: SamplingParams = PARAMS) -> float:
    """Calls that the interpreter makes in one steady decode step."""
    subject = scripted(mixed(), "host-work")
    # On a CPU attention goes by rows in Python, as part of the device's work; the paged one does not.
    settings = options(rows=512, pages=512 * 12, tokens=2048, depth=depth) | {"pin": {"attention_backend": "paged"}}
    driver = Driver(Engine({"model": {"name": subject.model}} | settings, plugins=subject.plugins))
    for k in range(rows):
        driver.add(str(k), P(2 + k % 16, k), params)
    for _ in range(20):  # prompts, first pages, one-time work
        driver.step()
    count = CallCounter()
    sys.setprofile(count)
    try:
        for _ in range(STEPS):
            assert driver.engine.step() == []
    finally:
        sys.setprofile(None)
    return count.calls / STEPS


def test_python_calls_do_not_grow_with_rows() -> None:
    for depth in (1, 2):
        few, many = calls_per_step(16, depth), calls_per_step(512, depth)
        assert abs(many - few) <= 0.1 * few, f"depth {depth}: {few:.0f} calls a step at 16 rows, {many:.0f} at 512"


def test_the_counter_sees_a_loop_over_rows() -> None:
    """Streaming is allowed to cost per row, so it must show up here; otherwise the test above could not fail."""
    streaming = PARAMS.model_copy(update={"stop": ("never there",)})
    assert calls_per_step(512, 1, streaming) > 2 * calls_per_step(16, 1, streaming)


def test_the_counter_passes_over_the_inside_of_operations_only() -> None:
    noise = torch.randn(4, 8)

    def calls(function: Callable[..., object]) -> int:
        count = CallCounter()
        sys.setprofile(count)
        try:
            function(noise, torch.ones(8), 1e-5)
        finally:
            sys.setprofile(None)
        return count.calls

    def two_operations(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        rms_norm(rms_norm(x, weight, eps), weight, eps)

    assert calls(two_operations) - calls(rms_norm) == 2  # the function itself and the second operation


def executed_per_step(rows: int, drafts: int, steps: int = 32) -> tuple[float, float]:
    """Bytecode instructions, and calls of Python and C functions, of a steady step without a device; some of the drafts are kept."""
    speculation = {"speculation.drafter": "ngram", "speculation.num_tokens": drafts} if drafts else None
    engine, device = host.make_engine([rows], speculation, DRAFTS)
    host.decode(engine, rows, host.context(DRAFTS) // 2)
    device.hidden = True
    host.spend(engine, device, steps)
    instructions = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal instructions
        frame.f_trace_opcodes = True
        instructions += event == "opcode"
        return trace

    calls, traced = CallCounter(), sys.gettrace()
    try:
        sys.settrace(trace)
        for _ in range(steps):
            engine.step()
        sys.settrace(traced)
        sys.setprofile(calls)
        for _ in range(steps):
            engine.step()
    finally:
        sys.settrace(traced)
        sys.setprofile(None)
    stats = engine.scheduler.stats
    assert stats.num_accepted > stats.num_drafted // 4 if drafts else stats.num_drafted == 0
    engine.close()
    return instructions / steps, calls.calls / steps


def test_a_step_with_drafts_is_little_more_work_for_the_host() -> None:
    """A row gets several tokens in it, and how many is not known before; but all that is counted in arrays, as a whole. A row's pages are
    full sooner, but of several rows those that soon need one get it together: such a step is less work than a plain one."""
    for rows, bound in (1, 1.15), (16, 1), (256, 1):
        plain, drafting = executed_per_step(rows, 0), executed_per_step(rows, DRAFTS)
        for more, few in zip(drafting, plain, strict=True):
            assert 0 < more <= bound * few, f"{rows} rows: {drafting} instructions and calls with drafts, {plain} without"


def test_work_with_drafts_does_not_grow_with_rows() -> None:
    (few, few_calls), (many, many_calls) = executed_per_step(64, DRAFTS), executed_per_step(512, DRAFTS)
    assert abs(many - few) <= 0.05 * few
    assert abs(many_calls - few_calls) <= 0.05 * few_calls
