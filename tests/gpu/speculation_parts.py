"""What a step with drafts is made of, each part in a graph of its own, and a drafter and a coin that cost next to nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from modelrunner import Engine
from modelrunner.batch import EMPTY_PATCH, Batch, Feature, Plan
from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Offer
from modelrunner.sampler import Sampler
from modelrunner.speculation import Drafter, DrafterNeeds, DraftStep
from modelrunner.step_buffers import Shape
from modelrunner.step_logprobs import NOTHING
from modelrunner.step_work import no_tap

TOKEN = 7
VERIFIED = Sampler.sample
RATES: dict[torch.device, torch.Tensor] = {}  # heads in a thousand

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None  # a dry run without it
else:

    @triton.jit
    def coin_kernel(counts_ptr, rows_ptr, computed_ptr, query_ptr, samples_ptr, rate_ptr, SLOTS: tl.constexpr):
        """Program r: row r, of SLOTS lines."""
        line = tl.program_id(0) * SLOTS
        rate = tl.load(rate_ptr)
        run = tl.load(rate_ptr) * 0 + 1
        going = run
        for j in tl.static_range(1, SLOTS):
            place = tl.load(computed_ptr + line + j) + tl.load(query_ptr + line + j)
            mixed = ((place.to(tl.int64) * 40503 + tl.load(rows_ptr + line + j) * 7919 + 12345) * 1103515) & 0x7FFFFFFF
            going *= (((mixed >> 7) % 1000 < rate) & (tl.load(samples_ptr + line + j) != 0)).to(tl.int64)
            run += going
        counts = tl.load(counts_ptr + tl.program_id(0))
        tl.store(counts_ptr + tl.program_id(0), tl.where(counts > 0, run, 0).to(tl.int32))


def toss(self: Sampler, logits: torch.Tensor, batch: Batch, *more: Any) -> Any:
    """`Sampler.sample`, whose count of tokens is then that of a coin's run of heads: a function of row and place."""
    tokens, counts, ok = VERIFIED(self, logits, batch, *more)
    slots = 1 + batch.num_draft
    if slots == 1:
        return tokens, counts, ok
    if logits.device not in RATES:
        RATES[logits.device] = torch.zeros((), dtype=torch.int64, device=logits.device)
    rate = RATES[logits.device]
    if logits.is_cuda:
        coin_kernel[(counts.shape[0],)](counts, batch.rows, batch.computed, batch.query_len, batch.samples, rate, SLOTS=slots, num_warps=1)
        return tokens, counts, ok
    place = (batch.computed + batch.query_len).view(-1, slots)[:, 1:].long()
    mixed = (place * 40503 + batch.rows.view(-1, slots)[:, 1:] * 7919 + 12345) * 1103515 & 0x7FFFFFFF
    heads = ((mixed >> 7) % 1000 < rate) & batch.samples.view(-1, slots)[:, 1:]
    run = 1 + heads.cummin(1).values.sum(1, dtype=torch.int32)
    return tokens, torch.where(counts > 0, run, 0), ok


def set_rate(rate: float) -> None:
    with torch.inference_mode():
        for coin in RATES.values():
            coin.fill_(int(1000 * rate))


class ConstantDrafter(Drafter):
    """Proposes one token over and over."""

    def declare(self) -> DrafterNeeds:
        return DrafterNeeds()

    def propose(self, step: DraftStep, out: torch.Tensor, probabilities: torch.Tensor | None) -> None:
        out.fill_(TOKEN)


class ConstantPlugin:
    """Offers the drafter `constant`."""

    MODELRUNNER_API = ">=1.6,<2"

    @hookimpl
    def drafter(self) -> Offer[type[Drafter]]:
        return Offer("constant", lambda: ConstantDrafter, fit="exact", reason="costs next to nothing")


class Parts:
    """The last step of an engine that has nothing in flight, part by part; the rows' state is as it was before each."""

    def __init__(self, engine: Engine, rows: int, k: int) -> None:
        self.device, self.runner = engine.assembly.device, engine.runner
        work = self.work = self.runner.work
        parts, length = work.parts, self.runner.max_model_len
        blank, pages = np.zeros(rows, np.int32), tuple(layout.pages_for(length) for layout in parts.layouts)
        slots = 1 + k
        plan = Plan(-1, blank, blank, blank, EMPTY_PATCH, rows, rows * slots, slots, length, pages, Feature.GREEDY, k, k)
        shape = Shape(rows, rows * slots, rows, slots, rows)
        self.batch = work.buffers.batch(plan, shape, parts.table.columns)
        self.attention = work._attention(self.batch, captured=True)
        self.draft = work._draft_of(self.batch, k, captured=True) if k else None
        self.saved = parts.table.arena.clone()

    def _work(self, body: bool, tail: bool, draft: bool) -> None:
        with torch.inference_mode():
            self.work.parts.table.arena.copy_(self.saved)
            self.work.counter.fill_(self.runner.launched)
            if body:
                self.work._inputs(self.batch)
                hidden = self.work._body(self.batch, self.attention, no_tap)
                if tail:
                    self.work._tail(self.batch, hidden, NOTHING)
                else:
                    self.work.state.logits(hidden)
            if draft and self.draft is not None:
                self.draft()

    def measure(self, repeats: int) -> dict[str, float]:
        """Microseconds. body: layers and head. tail: what follows but the draft. draft: that."""
        bare = [
            self._time(partial(self._work, *which), repeats)
            for which in ((False,) * 3, (True, False, False), (True, True, False), (True,) * 3)
        ]
        self.device.launch(partial(self._work, False, False, False))
        self.device.synchronize()
        return {"body_us": bare[1] - bare[0], "tail_us": bare[2] - bare[1], "draft_us": bare[3] - bare[2]}

    def _time(self, work: Callable[[], None], repeats: int) -> float:
        found: list[Callable[[], None]] = []
        self.device.launch(work)
        self.device.synchronize()
        self.device.launch(lambda: found.append(self.device.capture(work) if self.device.captures else work))
        times = []
        for _ in range(5):
            self.device.synchronize()
            began = time.perf_counter()
            for _ in range(repeats):
                self.device.launch(found[0])
            self.device.synchronize()
            times.append(1e6 * (time.perf_counter() - began) / repeats)
        return statistics.median(times)
