"""A device that does nothing, so that only what the host does takes time."""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time_ns
from typing import TYPE_CHECKING

import numpy as np
import torch

from modelrunner.batch import Plan, Record, record_words
from modelrunner.device import Device, Event, PinnedBuffer
from modelrunner.devices.cpu import CpuDevice, Done
from modelrunner.hookspecs import hookimpl
from modelrunner.offers import Offer

if TYPE_CHECKING:
    from modelrunner.settings import RunnerSettings

TOKEN = 7


class NullDevice(CpuDevice):
    """A CPU until `hidden` is set; from then on it drops work, and answers that every row of `plan` sampled TOKEN, or, where it may have
    drafts, so many times that about half of them were kept.

    nanoseconds: that this answering took, which are not the host's.
    """

    name = "null"
    captures = True

    def __init__(self, settings: RunnerSettings) -> None:
        super().__init__(settings)
        self.hidden = False
        self.plan: Plan | None = None
        self.nanoseconds = 0

    def launch(self, work: Callable[[], None]) -> None:
        if not self.hidden:
            work()

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        return work

    def download(self, source: Callable[[], torch.Tensor], target: PinnedBuffer) -> Event:
        if not self.hidden:
            return super().download(source, target)
        start, plan = thread_time_ns(), self.plan
        assert plan is not None, "whoever hides the device names the plan before each launch"
        words = record_words(plan.num_draft)
        records = target.array[: 4 * words * plan.num_rows].view(np.int32).reshape(plan.num_rows, words)
        records[:] = (0, 0, 1, 0, 0, *[TOKEN] * (words - Record.TOKENS))
        records[:, Record.ROW], records[:, Record.GENERATION] = plan.rows, plan.generations
        if plan.num_draft:
            turn = (plan.rows + plan.step) % (1 + plan.num_draft)
            records[:, Record.NUM_TOKENS] = np.minimum(1 + turn, plan.num_query)
            records[:, Record.DRAFTED] = plan.num_query - 1
        self.nanoseconds += thread_time_ns() - start
        return Done()


class NullPlugin:
    """Offers the device `null`."""

    MODELRUNNER_API = ">=1,<2"

    @hookimpl
    def device(self) -> Offer[type[Device]]:
        return Offer("null", lambda: NullDevice, fit="fallback", reason="for measuring the host")
