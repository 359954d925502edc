"""The engine process's loop, driven turn by turn in this process: an engine, and queues in the place of sockets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq
from engine_world import tensors

from modelrunner import engine_process
from modelrunner.engine_process import HALTED_SECONDS, IDLE_SECONDS, EngineLoop
from modelrunner.errors import EngineError
from modelrunner.messages import (
    Abort,
    Add,
    Command,
    EngineStats,
    Facts,
    Greet,
    Sleep,
    Stop,
    Turn,
    UpdateWeights,
    WakeUp,
    decode_report,
    encode,
)
from modelrunner.request import SamplingParams
from modelrunner.testing import P, dense, ref

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "detokenize": False, "output_kind": "delta"}


class Inbox:
    """Commands that have come. waits: seconds of each poll that found nothing; the one after `patience` of them raises."""

    def __init__(self) -> None:
        self.queue: deque[bytes] = deque()
        self.waits: list[float] = []

    def poll(self, milliseconds: int) -> int:
        if not self.queue:
            self.waits.append(milliseconds / 1000)
        return len(self.queue)

    def recv(self, flags: int) -> bytes:
        if not self.queue:
            raise zmq.Again
        return self.queue.popleft()


class World:
    def __init__(self, **short: Any) -> None:
        self.engine = dense().engine(**short)
        self.engine.tokenizer = None
        self.inbox = Inbox()
        self.turns: list[Turn] = []
        inbox: Any = self.inbox
        outbox: Any = self
        self.loop = EngineLoop(self.engine, inbox, outbox)

    def send(self, data: bytes) -> None:
        """The loop's outbox."""
        report = decode_report(data)
        assert isinstance(report, Turn)
        self.turns.append(report)

    def command(self, *commands: Command) -> None:
        self.inbox.queue.extend(map(encode, commands))

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            assert self.loop._take_commands(self.loop._patience())
            self.loop._step()
            self.loop._report()

    def finish(self) -> None:
        self.turn()
        while self.engine.has_unfinished():
            self.turn()

    def tokens(self, number: int) -> list[int]:
        """Everything said of a request's tokens."""
        found = []
        for turn in self.turns:
            start = 0
            for who, size in zip(turn.numbers, turn.counts, strict=True):
                found += turn.tokens[start : start + size] if who == number else []
                start += size
            assert start == len(turn.tokens)
        return found

    def ends(self) -> dict[int, str]:
        ends = [(ended.number, ended.finish_reason) for turn in self.turns for ended in turn.ended]
        assert len(ends) == len(dict(ends)), f"a request ended twice: {ends}"
        return dict(ends)

    def done(self) -> dict[int, str]:
        """Changes that were answered, and the kind of their error."""
        return {done.number: done.kind for turn in self.turns for done in turn.done}

    @property
    def stats(self) -> EngineStats:
        return self.turns[-1].stats


def want(prompt: list[int], tokens: int = 6) -> list[int]:
    return list(ref(dense(), prompt, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)).token_ids)


def test_requests_of_a_step_come_in_one_message() -> None:
    world = World()
    world.command(*(Add(n, f"r{n}", P(9, n), GREEDY) for n in range(1, 4)))
    world.finish()
    assert [world.tokens(n) for n in range(1, 4)] == [want(P(9, n)) for n in range(1, 4)]
    assert world.ends() == dict.fromkeys(range(1, 4), "length")
    assert any(turn.numbers == [1, 2, 3] for turn in world.turns)
    assert all(len(set(turn.numbers)) == len(turn.numbers) for turn in world.turns)


def test_without_a_watcher_tokens_come_at_the_end() -> None:
    world = World()
    world.command(Add(1, "a", P(9, 1), GREEDY | {"output_kind": "final_only"}))
    world.finish()
    speaking = [turn for turn in world.turns if turn.numbers]
    assert [turn.tokens for turn in speaking] == [want(P(9, 1))]
    assert speaking[0].ended[0].finish_reason == "length"


def test_facts_are_said_once_and_when_they_change() -> None:
    world = World()
    world.command(Add(1, "a", P(40, 1), GREEDY), Add(2, "b", P(40, 1), GREEDY))
    world.finish()
    world.command(Add(3, "c", P(40, 1), GREEDY))
    world.finish()
    facts: list[Facts] = [facts for turn in world.turns for facts in turn.facts]
    assert [item.number for item in facts] == [1, 2, 3]
    assert facts[2].num_cached_tokens == 32
    assert all(item.first_token_time is not None for item in facts)


@pytest.mark.parametrize("gap", [0, 1, 3])
def test_an_id_can_be_used_again_right_after_its_abort(gap: int) -> None:
    """In the same batch of commands as the abort, too: words about the first request must not reach the second."""
    world = World()
    world.command(Add(1, "same", P(9, 1), GREEDY | {"max_tokens": 50}))
    world.turn(gap)
    world.command(Abort(1), Add(2, "same", P(9, 2), GREEDY))
    world.finish()
    assert world.ends() == {1: "abort", 2: "length"}
    assert world.tokens(2) == want(P(9, 2))
    assert world.stats.finished == {"abort": 1, "length": 1}


def test_bad_requests_are_refused_and_the_others_go_on() -> None:
    world = World()
    world.command(Add(1, "a", P(9, 1), GREEDY), Add(2, "a", P(9, 2), GREEDY), Add(3, "c", [5000], GREEDY), Abort(77), Greet())
    world.finish()
    refused = [item for turn in world.turns for item in turn.refused]
    assert [(item.number, item.kind) for item in refused] == [(2, "RequestError"), (3, "RequestError")]
    assert refused[0].message == "request id 'a' is in use by an unfinished request; choose another"
    assert world.tokens(1) == want(P(9, 1))
    assert world.ends() == {1: "length"}


def test_a_stop_found_by_the_front_end_is_counted_as_a_stop() -> None:
    world = World()
    world.command(Add(1, "a", P(9, 1), GREEDY | {"max_tokens": 50}), Add(2, "b", P(9, 1), GREEDY | {"max_tokens": 50}))
    world.turn(4)
    world.command(Abort(1, "stop"), Abort(2))
    world.finish()
    assert world.stats.finished == {"stop": 1, "abort": 1}


def test_a_passed_deadline_ends_a_request_at_once() -> None:
    world = World()
    world.command(Add(1, "a", P(9, 1), GREEDY, deadline=1.0))  # long ago on the monotonic clock, or nearly
    world.finish()
    assert world.ends() == {1: "timeout"}


def test_idle_turns_wait_for_commands() -> None:
    world = World()
    world.turn(3)
    assert world.inbox.waits == [IDLE_SECONDS] * 3
    assert len(world.turns) == 3, "an idle process says that it is there"
    world.command(Add(1, "a", P(9, 1), GREEDY))
    world.finish()
    assert set(world.inbox.waits[3:]) == {0.0}, "with work it does not wait"


def test_a_step_in_which_nothing_can_run_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under 200 turns a second, as if a request waited for something that is not there yet."""
    world = World()
    plan = world.engine.scheduler.plan
    monkeypatch.setattr(world.engine.scheduler, "plan", lambda drained=False: None)
    world.command(Add(1, "a", P(9, 1), GREEDY))
    world.turn(20)
    assert min(world.inbox.waits[1:]) >= 1 / 200
    assert len(world.turns) <= 20
    monkeypatch.setattr(world.engine.scheduler, "plan", plan)
    world.finish()
    assert world.tokens(1) == want(P(9, 1))


def test_a_failed_launch_ends_the_requests_and_not_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.command(Add(1, "a", P(9, 1), GREEDY), Add(2, "b", P(9, 2), GREEDY))
    world.turn(2)

    def launch(plan: Any) -> Any:
        monkeypatch.undo()
        raise RuntimeError("planted")

    monkeypatch.setattr(world.engine.runner, "launch", launch)
    world.finish()
    refused = [item for turn in world.turns for item in turn.refused]
    assert [(item.number, item.kind, item.message) for item in refused] == [
        (n, "EngineError", "a step could not be launched: RuntimeError: planted") for n in (1, 2)
    ]
    assert world.ends() == {}
    assert (world.stats.running, world.stats.waiting, world.stats.pages_used, world.stats.finished) == (0, 0, 0, {"error": 2})
    world.command(Add(3, "a", P(9, 3), GREEDY))
    world.finish()
    assert world.tokens(3) == want(P(9, 3))


def test_a_failed_collect_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()

    def collect(ticket: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(world.engine.runner, "collect", collect)
    world.command(Add(1, "a", P(9, 1), GREEDY))
    with pytest.raises(EngineError, match="planted"):
        world.loop.run()


def test_stop_ends_the_loop() -> None:
    world = World()
    world.command(Add(1, "a", P(9, 1), GREEDY), Stop())
    world.loop.run()
    assert world.turns == []


# ---- changes between steps ---------------------------------------------------------------------------------------------


def loading(world: World, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[int], None]) -> UpdateWeights:
    """A command whose tensors are those of dense(2); `meanwhile` is told the number of each before it is read."""
    others = world.loop._changes._tensors

    def tensors_of(command: UpdateWeights) -> Iterator[Any]:
        if command.number != 9:
            yield from others(command)
            return
        for n, pair in enumerate(tensors(dense(2))):
            meanwhile(n)
            yield pair

    monkeypatch.setattr(world.loop._changes, "_tensors", tensors_of)
    return UpdateWeights(9, "", [], "second")


def test_commands_that_come_while_weights_are_loaded_wait_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()

    def meanwhile(n: int) -> None:
        if n == 1:
            world.command(Add(2, "b", P(9, 2), GREEDY), Abort(1), Sleep(10))
        if n == 2:
            world.command(Add(3, "a", P(9, 3), GREEDY), WakeUp(11), UpdateWeights(12, "/nowhere/at/all"))

    world.command(Add(1, "a", P(9, 1), GREEDY | {"max_tokens": 50}))
    world.turn(3)
    world.command(loading(world, monkeypatch, meanwhile))
    world.turn()
    monkeypatch.undo()
    world.finish()
    assert list(world.done().items()) == [(9, ""), (10, ""), (11, ""), (12, "CheckpointError")]
    assert world.ends() == {1: "abort", 2: "length", 3: "length"}
    second = [list(ref(dense(2), P(9, n), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)).token_ids) for n in (2, 3)]
    assert [world.tokens(2), world.tokens(3)] == second
    assert world.stats.weight_version == "second"


def test_the_loop_speaks_while_it_loads_and_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    monkeypatch.setattr(engine_process, "QUIET_SECONDS", 0.0)
    world.command(loading(world, monkeypatch, lambda n: None))
    world.turn()
    loaded = [turn.stats.loaded_tensors for turn in world.turns]
    assert loaded == [*range(len(loaded) - 1), len(list(tensors(dense(2))))]
    assert len(loaded) > 5
    assert {turn.stats.weights_problem for turn in world.turns} == {""}, "a mixture on the way is no problem"
    assert world.done() == {9: ""}


def test_stop_ends_the_loop_while_weights_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    seen: list[int] = []

    def meanwhile(n: int) -> None:
        seen.append(n)
        if n == 2:
            world.command(Abort(1), Stop())

    world.command(loading(world, monkeypatch, meanwhile))
    world.loop.run()
    assert seen == [0, 1, 2]
    assert world.done() == {}


def test_a_halted_loop_neither_spins_nor_sleeps_through_a_deadline() -> None:
    world = World()
    world.command(Add(1, "a", P(9, 1), GREEDY), Sleep(7), Add(2, "b", P(9, 2), GREEDY))
    world.turn(5)
    assert (world.stats.sleeping, world.stats.steps) == (True, 0)
    assert set(world.inbox.waits) == {HALTED_SECONDS}
    world.command(UpdateWeights(8, dense(2).model), WakeUp(9))
    world.finish()
    assert world.done() == {7: "", 8: "", 9: ""}
    assert world.ends() == {1: "length", 2: "length"}
    assert not world.stats.sleeping


def test_with_half_an_update_nothing_runs_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.command(Add(1, "a", P(9, 1), GREEDY | {"max_tokens": 8}), Add(2, "b", P(9, 2), GREEDY))
    world.turn(3)
    monkeypatch.setattr(world.loop._changes, "_tensors", lambda command: iter(list(tensors(dense(2)))[:3]))
    world.command(UpdateWeights(9, "", []), Add(3, "c", P(9, 3), GREEDY), Abort(2))
    world.turn(4)
    assert world.done() == {9: "CheckpointError"}
    assert world.ends() == {2: "abort"}
    steps, problem = world.stats.steps, world.stats.weights_problem
    assert problem.startswith("the weights are a mixture, since the last update_weights failed (CheckpointError: ")
    refused = [item for turn in world.turns for item in turn.refused]
    assert [(item.number, item.kind, item.message) for item in refused] == [(3, "EngineError", problem)]
    world.turn(3)
    assert world.stats.steps == steps
    monkeypatch.undo()
    world.command(UpdateWeights(10, dense(1).model))
    world.finish()
    assert world.stats.weights_problem == ""
    assert world.ends() == {1: "length", 2: "abort"}
    assert world.tokens(1) == list(ref(dense(1), P(9, 1), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)).token_ids)


def test_what_the_engine_cannot_go_on_after_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is found to have failed when a change collects it."""
    world = World()

    def collect(ticket: Any) -> Any:
        raise RuntimeError("planted")

    world.command(Add(1, "a", P(9, 1), GREEDY))
    world.turn()
    monkeypatch.setattr(world.engine.runner, "collect", collect)
    world.command(Sleep(5))
    with pytest.raises(EngineError, match="planted"):
        world.loop.run()
    assert world.done() == {}


def test_an_error_that_is_not_ours_is_shown_here_and_told_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    world = World()
    world.command(Sleep(5))
    world.turn()

    def full(arena: Any) -> None:
        raise MemoryError("planted")

    monkeypatch.setattr("modelrunner.caches.Arena.restore", full)
    world.command(WakeUp(6))
    world.turn()
    assert world.done() == {5: "", 6: "MemoryError"}
    assert "planted" in capsys.readouterr().err
    monkeypatch.undo()
    world.command(WakeUp(7), Add(1, "a", P(9, 1), GREEDY))
    world.finish()
    assert world.tokens(1) == want(P(9, 1))
