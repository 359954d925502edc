"""When a step runs as it is, and when it is captured."""

from __future__ import annotations

import pytest

from modelrunner.graphs import Key, StepGraphs
from modelrunner.settings import RunnerSettings
from modelrunner.step_buffers import Buckets
from modelrunner.testing.null_device import NullDevice


def test_a_step_whose_first_run_failed_is_run_again_before_it_is_captured() -> None:
    """What its first run would have made ready may not be there: a kernel that could not be loaded, for want of memory."""
    runs = 0

    def work() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise MemoryError

    graphs, key = StepGraphs(NullDevice(RunnerSettings()), Buckets([1], [], 1), lambda key: work), Key("step", 1)
    with pytest.raises(MemoryError):
        graphs.run(key)
    graphs.run(key)
    assert graphs.captured == []
    graphs.run(key)
    assert graphs.captured == [key]
    assert runs == 3
