"""The engine process: an `Engine` behind two sockets. It knows token ids only; text is the front end's.

`engine_link.EngineLink` starts it. Its loop takes all commands that have come, runs one step, and reports what the step brought in one
message. With nothing to do it sleeps until a command comes, and says once a second that it is there. While it loads new weights it goes on
to say so, and listens for `Stop`. It ends when told to, when the engine fails, and when the process that started it is gone, however that
ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
import zmq

from modelrunner import errors
from modelrunner.engine_changes import Changes, Stopped
from modelrunner.errors import EngineError, PluginError, RequestError
from modelrunner.logprobs import PackedLogprobs
from modelrunner.media_front import Prepared
from modelrunner.messages import (
    Abort,
    Add,
    Change,
    Command,
    Ended,
    EngineStats,
    Facts,
    Failed,
    Greet,
    Hello,
    Ready,
    Refused,
    Report,
    Stop,
    Turn,
    decode_command,
    encode,
)

if TYPE_CHECKING:
    from modelrunner.engine import Engine
    from modelrunner.request import RequestOutput

IDLE_SECONDS = 1.0  # a word at least this often while there is nothing to do
STUCK_SECONDS = 0.01  # pause after a step in which nothing could run, so that the loop does not spin
HALTED_SECONDS = 0.1  # the same while the engine sleeps, or waits for weights that it can use
QUIET_SECONDS = 0.05  # between messages that bring counters only
LINGER_MS = 5000  # to deliver the last message
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Start:
    """What the process is given on its standard input. parent: process id. plugins: pickled, since reading them imports their modules."""

    parent: int
    commands: str
    reports: str
    arguments: dict[str, Any]
    plugins: bytes


class EngineLoop:
    """Runs an engine for a front end. inbox, outbox: PULL and PUSH sockets."""

    def __init__(self, engine: Engine, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> None:
        self.engine = engine
        engine.outputs.logprobs = PackedLogprobs()
        self._inbox, self._outbox = inbox, outbox
        self._numbers: dict[str, int] = {}  # request id -> number, of requests whose end was not reported
        self._ids: dict[int, str] = {}
        self._aborted: dict[str, str] = {}  # request id -> reason to count, of requests that the front end ended
        self._facts: dict[int, Facts] = {}
        self._finished: Counter[str] = Counter()
        self._held: deque[Command] = deque()  # came while new weights were loaded
        self._changes = Changes(engine, self._listen)
        self._turns = 0
        self._stuck = False
        self._sent_at = 0.0
        self._turn = Turn(self.stats())

    def run(self) -> None:
        """Until `Stop`. Raises what the engine cannot go on after."""
        with contextlib.suppress(Stopped):
            while self._take_commands(self._patience()):
                self._step()
                self._report()

    def stats(self) -> EngineStats:
        scheduler = self.engine.scheduler
        pool, counts = scheduler.pool, scheduler.stats
        return EngineStats(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            pages_used=pool.capacity - pool.available,
            pages_total=pool.capacity,
            turns=self._turns,
            steps=counts.steps,
            preemptions=counts.preemptions,
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            computed_tokens=counts.computed_tokens,
            generated_tokens=counts.generated_tokens,
            finished=dict(self._finished),
            sleeping=self.engine.is_sleeping,
            weight_version=self.engine.weight_version,
            weights_problem=self._changes.weights_problem,
            loaded_tensors=self._changes.loaded,
            held=counts.held,
            grammar_ways=dict(self.engine.guides.ways),
            drafted_at=counts.drafted_at,
            accepted_at=counts.accepted_at,
            encoded=self.engine.media.num_encoded,
        )

    # ---- commands ------------------------------------------------------------------------------------------------

    def _patience(self) -> float:
        """Seconds to wait for a command before the next turn."""
        if not self.engine.has_unfinished():
            return IDLE_SECONDS
        if not self._stuck:
            return 0.0
        return HALTED_SECONDS if self.engine.is_sleeping or self.engine.weights_problem else STUCK_SECONDS

    def _take_commands(self, seconds: float) -> bool:
        """Carry out what has come; wait for the first that long. False after `Stop`."""
        if not self._held and not self._inbox.poll(round(seconds * 1000)):
            return True
        for command in self._arrived():
            if isinstance(command, Stop):
                return False
            if isinstance(command, Add):
                self._add(command)
            elif isinstance(command, Abort):
                self._abort(command)
            elif isinstance(command, Change):
                done = self._changes.run(command)  # on the way `_turn` may be sent, and be another one then
                self._turn.done.append(done)
        return True

    def _arrived(self) -> Iterator[Command]:
        """Commands in the order in which they came, until there are no more."""
        with contextlib.suppress(zmq.Again):
            while True:
                yield self._held.popleft() if self._held else decode_command(self._inbox.recv(zmq.NOBLOCK))

    def _listen(self) -> None:
        """In the middle of a change: put aside what has come, and say that this goes on. Raises Stopped for `Stop`."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._held.append(decode_command(self._inbox.recv(zmq.NOBLOCK)))
                if isinstance(self._held[-1], Stop):
                    raise Stopped
        if time.monotonic() - self._sent_at >= QUIET_SECONDS:
            self._send()

    def _add(self, command: Add) -> None:
        from modelrunner.media_messages import unpack
        from modelrunner.sampling_params import SamplingParams

        name = command.request_id
        if problem := self.engine.weights_problem:
            self._turn.refused.append(Refused(command.number, EngineError.__name__, problem))
            return
        if name in self._aborted:
            self._step()  # it reports the end of the request that had this id
        deadline = None if command.deadline is None else max(command.deadline - time.monotonic(), 1e-6)
        try:
            media = None if command.media is None else unpack(command.media)
            self.engine.add_request(
                name,
                Prepared(None, command.prompt, media=media),
                SamplingParams(**command.params),
                priority=command.priority,
                deadline=deadline,
                cache_salt=command.cache_salt,
                choice=command.choice,
                fork=command.fork,
            )
        except EngineError:
            raise
        except Exception as error:
            self._refuse(command.number, error)
            return
        self._numbers[name] = command.number
        self._ids[command.number] = name

    def _abort(self, command: Abort) -> None:
        if (name := self._ids.get(command.number)) is not None:
            self._aborted[name] = command.reason
            self.engine.abort(name)

    def _refuse(self, number: int, error: Exception) -> None:
        known = isinstance(error, RequestError)
        text = str(error) if known else f"request not taken: {type(error).__name__}: {error}"
        self._turn.refused.append(Refused(number, "RequestError" if known else "EngineError", text))

    # ---- a turn --------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._turns += 1
        self._stuck = False
        if not self.engine.has_unfinished():
            return
        scheduler = self.engine.scheduler
        before = scheduler.stats.steps
        try:
            outputs = self.engine.drain() if self.engine.weights_problem else self.engine.step()
        except EngineError:
            raise
        except Exception as error:
            self._give_up_requests(error)
            return
        for output in outputs:
            self._note(output)
        self._stuck = not outputs and scheduler.stats.steps == before and not scheduler.num_in_flight

    def _give_up_requests(self, error: Exception) -> None:
        """A step could not be launched and was undone. Which request is to blame is unknown: all end, and the engine goes on."""
        traceback.print_exception(error)
        text = f"a step could not be launched: {type(error).__name__}: {error}"
        for number, name in self._ids.items():
            self._turn.refused.append(Refused(number, "EngineError", text))
            self._finished["error"] += 1
            self.engine.abort(name)
        self._numbers.clear()
        self._ids.clear()
        self._facts.clear()
        self._aborted.clear()
        while self.engine.has_unfinished():
            self.engine.step()

    def _note(self, output: RequestOutput) -> None:
        """Put an engine's output, which holds what is new, into the message."""
        number, completion = self._numbers[output.request_id], output.outputs[0]
        if (held := self._facts.get(number)) is not None and held.weight_version != output.weight_version:
            self._send()  # facts of a message are of all its tokens
        turn = self._turn
        if count := len(completion.token_ids):
            if completion.logprobs is not None:
                turn.logprobs[len(turn.numbers)] = completion.logprobs
            turn.numbers.append(number)
            turn.counts.append(count)
            turn.tokens.extend(completion.token_ids)
            turn.extra.append(dict(completion.extra))
        if output.prompt_logprobs is not None:
            turn.prompt_logprobs[number] = output.prompt_logprobs
        metrics = output.metrics
        facts = Facts(number, metrics.first_token_time, output.num_cached_tokens, metrics.num_preemptions, output.weight_version)
        if self._facts.get(number) != facts:
            self._facts[number] = facts
            turn.facts.append(facts)
        if completion.finish_reason is not None:
            drafts = completion.num_drafted, completion.num_accepted
            turn.ended.append(Ended(number, completion.finish_reason, completion.stop_reason, *drafts))
            self._finished[self._aborted.pop(output.request_id, completion.finish_reason)] += 1
            del self._numbers[output.request_id], self._ids[number], self._facts[number]

    def _report(self) -> None:
        """Send what is new; a message without news waits until the last one is a little old, or until there is nothing more to do."""
        turn = self._turn
        news = bool(turn.numbers or turn.ended or turn.refused or turn.facts or turn.done)
        if news or time.monotonic() - self._sent_at >= QUIET_SECONDS or not self.engine.has_unfinished():
            self._send()

    def _send(self) -> None:
        stats = self.stats()
        self._outbox.send(encode(msgspec.structs.replace(self._turn, stats=stats)))
        self._sent_at = time.monotonic()
        self._turn = Turn(stats)


# ---- the process -------------------------------------------------------------------------------------------------------


def end_with_parent(parent: int, pipe: int) -> None:
    """Let this process end when the one that started it is gone, whatever this one is doing then, stopped by a signal included.

    Linux kills it; elsewhere a thread sees the end of `pipe`, whose other end the parent holds. (Linux looks at the thread that started
    this process; `EngineLink` lets that one live as long.)
    """

    def watch() -> None:
        while os.read(pipe, 4096):
            pass
        os._exit(1)

    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it went before the kernel was told
    threading.Thread(target=watch, name="modelrunner-parent", daemon=True).start()


def build_engine(start: Start) -> tuple[Engine, list[tuple[str, str]]]:
    """The engine, and the warnings of its assembly as (category, text)."""
    from modelrunner.engine import Engine

    try:
        plugins = pickle.loads(start.plugins)
    except Exception as error:
        raise PluginError(
            f"plugins: the engine process cannot read them ({type(error).__name__}: {error}); accepted: names of modules, and objects "
            "whose class stands in a module that can be imported (not in __main__)"
        ) from error
    with warnings.catch_warnings(record=True) as caught:
        engine = Engine(start.arguments, plugins=plugins)
    return engine, [(item.category.__name__, str(item.message)) for item in caught]


def serve(start: Start, inbox: zmq.Socket[bytes], outbox: zmq.Socket[bytes]) -> None:
    """Build the engine and run it until the front end says `Stop`."""
    if not isinstance(first := decode_command(inbox.recv()), Greet):
        raise RuntimeError(f"the first command is a {type(first).__name__}, not a Greet")
    outbox.send(encode(Hello()))
    engine, warned = build_engine(start)
    loaded = [info.name for info in engine.assembly.manager.describe() if info.state == "loaded"]
    gc.collect()
    gc.freeze()  # what lives for ever is not looked at again by each collection
    facts = astuple(engine.assembly.media.front.facts)
    outbox.send(encode(Ready(engine.assembly.needs.vocab_size, engine.assembly.resolved.max_model_len, loaded, warned, facts)))
    try:
        EngineLoop(engine, inbox, outbox).run()
    finally:
        with contextlib.suppress(Exception):  # what ended the loop is the error to show
            engine.close()


def main(stdin: BinaryIO | None = None) -> int:
    """The process's entry. stdin: a pickled `Start`, then silence for as long as the front end lives. Returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; what it means is for the front end to say
    stream = sys.stdin.buffer if stdin is None else stdin
    start: Start = pickle.load(stream)
    end_with_parent(start.parent, stream.fileno())
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket in (inbox, outbox):
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
    inbox.bind(start.commands)
    outbox.connect(start.reports)
    status = 0
    try:
        serve(start, inbox, outbox)
    except Exception as error:
        if isinstance(error, EngineError) or not hasattr(errors, type(error).__name__):  # the others say all that there is to say
            traceback.print_exc()
        failed: Report = Failed(type(error).__name__, "\n".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())]))
        outbox.send(encode(failed))
        status = 1
    context.destroy(linger=LINGER_MS)
    return status
