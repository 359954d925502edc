"""Liveness by a clock that the test moves: 20 seconds of prefill and a minute of idling are fine, a loop that turns on the spot is not."""

from __future__ import annotations

from modelrunner.liveness import Liveness
from modelrunner.messages import EngineStats


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_idle_for_long_is_healthy_while_the_process_speaks() -> None:
    clock = Clock()
    liveness = Liveness(10.0, clock)
    for _ in range(60):
        clock.now += 1.0
        liveness.hear(EngineStats())
        assert liveness.problem(0) is None


def test_silence_while_idle_is_a_problem() -> None:
    clock = Clock()
    liveness = Liveness(10.0, clock)
    clock.now += 10.0
    assert liveness.problem(0) is None
    clock.now += 0.1
    assert liveness.problem(0) == ("the idle engine process was silent in the last 10 seconds (setting process.stall_limit: 10 seconds)")
    liveness.hear(EngineStats())
    assert liveness.problem(0) is None


def test_a_long_prefill_in_chunks_is_healthy() -> None:
    clock = Clock()
    liveness = Liveness(10.0, clock)
    liveness.begin()
    for chunk in range(1, 9):
        clock.now += 5.0
        liveness.hear(EngineStats(computed_tokens=chunk * 16))
        assert liveness.problem(1) is None


def test_one_step_may_take_the_limit_even_without_a_word() -> None:
    clock = Clock()
    liveness = Liveness(10.0, clock)
    liveness.begin()
    clock.now += 9.9
    assert liveness.problem(1) is None
    liveness.hear(EngineStats(computed_tokens=2048))
    clock.now += 9.9
    assert liveness.problem(1) is None


def test_turning_without_tokens_is_a_problem() -> None:
    clock = Clock()
    liveness = Liveness(10.0, clock)
    liveness.begin()
    for turn in range(110):
        clock.now += 0.1
        liveness.hear(EngineStats(turns=turn, steps=turn, running=1))
    assert liveness.problem(3) == (
        "no token was computed for 3 open requests in the last 11 seconds (setting process.stall_limit: 10 seconds)"
    )
    liveness.hear(EngineStats(generated_tokens=1))
    assert liveness.problem(3) is None


def test_the_wait_for_tokens_begins_with_the_first_open_request() -> None:
    clock = Clock()
    liveness = Liveness(10.0, clock)
    for _ in range(100):  # idle: no tokens for longer than the limit
        clock.now += 1.0
        liveness.hear(EngineStats())
    liveness.begin()
    clock.now += 9.0
    assert liveness.problem(1) is None
    clock.now += 2.0
    assert liveness.problem(1) is not None


def test_while_the_engine_sleeps_no_tokens_are_awaited() -> None:
    clock = Clock()
    liveness = Liveness(10.0, clock)
    liveness.begin()
    for _ in range(30):
        clock.now += 1.0
        liveness.hear(EngineStats(sleeping=True, turns=1))
        assert liveness.problem(2) is None
    clock.now += 10.1
    assert liveness.problem(2) is not None, "it must go on to speak"
    liveness.hear(EngineStats(sleeping=True))
    liveness.hear(EngineStats())  # awake
    clock.now += 9.9
    assert liveness.problem(2) is None
    liveness.hear(EngineStats())
    clock.now += 0.2
    assert liveness.problem(2) is not None


def test_loading_new_weights_is_healthy_and_weights_that_cannot_be_used_are_not() -> None:
    clock = Clock()
    liveness = Liveness(10.0, clock)
    liveness.begin()
    for loaded in range(1, 9):
        clock.now += 5.0
        liveness.hear(EngineStats(loaded_tensors=loaded))
        assert liveness.problem(1) is None
    for num_open in (0, 1):
        liveness.hear(EngineStats(loaded_tensors=8, weights_problem="the weights are a mixture"))
        assert liveness.problem(num_open) == "the weights are a mixture"
    liveness.hear(EngineStats(loaded_tensors=9))
    assert liveness.problem(1) is None
