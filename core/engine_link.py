"""The front end's side of an engine process: starting it, talking to it, noticing its end, and ending it.

One thread per process starts it, waits for what it says, makes outputs of it, and lives until the process is gone. Commands are sent by
whichever thread has one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import zmq

from modelrunner import errors
from modelrunner.engine_process import Start
from modelrunner.errors import EngineError
from modelrunner.liveness import Liveness
from modelrunner.messages import Abort, Change, Command, Done, Failed, Greet, Hello, Ready, Refused, Stop, Turn, decode_report, encode
from modelrunner.request import Request, RequestOutput
from modelrunner.request_stream import Item, RequestStream
from modelrunner.text import Tokenizer

BOOTSTRAP = "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from modelrunner.engine_process import main; sys.exit(main())"
POLL_MS = 200  # at most this long after its end is a process found to be gone
RECONNECT_MS = 20
GRACE_SECONDS = 10.0


def in_use(request_id: str) -> errors.RequestError:
    return errors.RequestError(f"request id {request_id!r} is in use by an unfinished request; choose another")


class EngineLink:
    """Starts an engine process at once; `wait_ready` waits until it takes requests. Thread-safe.

    arguments: settings, as for `Engine`. plugins: objects or module names, as for `Engine`; objects are pickled. drafting: whether there
    is a drafter.
    """

    def __init__(self, arguments: Mapping[str, Any], plugins: Sequence[object], stall_limit: float, drafting: bool = False) -> None:
        self.liveness = Liveness(stall_limit)
        self.failure: Exception | None = None
        self._drafting = drafting
        self._packed = pack_plugins(plugins)
        self._arguments = dict(arguments)
        self._lock = threading.RLock()  # a finalizer may run inside any of our calls
        self._streams: dict[int, RequestStream] = {}
        self._changes: dict[int, Future[None]] = {}  # asked for and not yet answered
        self._numbers = count()
        self._ready: Ready | None = None
        self._settled = threading.Event()  # ready, or failed
        self._cause: Exception | None = None  # what the process said of its end
        self._owners: dict[str, object] = {}  # of ids whose requests are several at the engine, under other ids
        self._closing = False
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="modelrunner-"))  # only for this user: whoever can open the sockets can use the engine
        self._context = zmq.Context()
        self._commands, self._reports = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        for socket in (self._commands, self._reports):
            socket.set_hwm(0)
        # A socket that connects has a queue even while the process is not there; one that binds has none then, and sending waits.
        self._commands.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._commands.connect(f"ipc://{self._folder / 'commands'}")
        self._reports.bind(f"ipc://{self._folder / 'reports'}")
        self._thread = threading.Thread(target=self._run, name="modelrunner-engine", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Process id; None before the process runs."""
        return None if self._process is None else self._process.pid

    @property
    def num_open(self) -> int:
        """Requests that wait for outputs."""
        return len(self._streams)

    def wait_ready(self) -> Ready:
        """Wait, as long as loading takes. Raises the error that an `Engine` would raise here, or EngineError."""
        self._settled.wait()
        if self._ready is None:
            assert self.failure is not None, "settled means ready or failed"
            raise self.failure
        return self._ready

    # ---- requests ------------------------------------------------------------------------------------------------

    def open(self, request: Request, tokenizer: Tokenizer | None, name: str = "", arrived: asyncio.Event | None = None) -> RequestStream:
        """Send a request. Outputs come to the running event loop. name, arrived: see `RequestStream`. Raises EngineError when the engine is
        gone.

        Raises RequestError for parameters that cannot be sent to another process.
        """
        if not name and request.id in self._owners:
            raise in_use(request.id)
        stream = RequestStream(next(self._numbers), request, tokenizer, name, arrived)
        stream.drafts = self._drafting and request.params.num_draft_tokens != 0
        try:
            data = encode(stream.command())
        except UnicodeEncodeError as error:
            text = f"half of a surrogate pair (U+{ord(error.object[error.start]):04X})"
            raise errors.RequestError(f"request: a text in it has {text}; accepted: text that UTF-8 can encode") from None
        except (TypeError, OverflowError) as error:
            raise errors.RequestError(f"sampling_params: {error}") from None
        with self._lock:
            self.check()
            if not self._streams:
                self.liveness.begin()
            self._streams[stream.number] = stream
            self._commands.send(data)
        return stream

    def claim(self, request_id: str, owner: object) -> None:
        """Keep an id for a request that is several at the engine. Raises RequestError if it is in use."""
        with self._lock:
            if request_id in self._owners or any(stream.name == request_id for stream in self._streams.values()):
                raise in_use(request_id)
            self._owners[request_id] = owner

    def give_up(self, request_id: str, owner: object) -> None:
        """The end of `claim`; again is nothing."""
        with self._lock:
            if self._owners.get(request_id) is owner:
                del self._owners[request_id]

    def abort(self, request_id: str) -> None:
        """End a request of this id, if there is one; its last output follows."""
        for stream in list(self._streams.values()):
            if stream.name == request_id:
                self._send(Abort(stream.number))

    def release(self, stream: RequestStream, reason: str = "abort") -> None:
        """Nobody waits for this request any more: end it if it has not ended. reason: see `messages.Abort`."""
        with self._lock:
            if self._streams.pop(stream.number, None) is not None:
                self._send(Abort(stream.number, reason))

    def change(self, make: Callable[[int], Change]) -> Future[None]:
        """Ask for a change. make: gives the command of a number. The future ends with the change, or has what the engine raised; nothing
        takes the change back. Raises EngineError when the engine is gone."""
        number, future = next(self._numbers), Future[None]()
        future.set_running_or_notify_cancel()
        data = encode(make(number))
        with self._lock:
            self.check()
            self._changes[number] = future
            self._commands.send(data)
        return future

    def check(self) -> None:
        """Raise EngineError when the engine is gone."""
        if self.failure is not None:
            raise again(self.failure)

    def _send(self, command: Command) -> None:
        with self._lock:
            if not self._commands.closed:
                self._commands.send(encode(command))

    # ---- the end -------------------------------------------------------------------------------------------------

    def close(self, grace: float = GRACE_SECONDS) -> None:
        """End the process, and wait for its end. It is killed when it takes longer than `grace` seconds, or has not finished loading."""
        with self._lock:
            self._closing = True
            self._send(Stop())
        if self._thread is threading.current_thread():
            self._kill()  # the thread goes on to find it gone
            return
        if self._ready is not None:
            self._thread.join(grace)
        if self._thread.is_alive():
            self._kill()
            self._thread.join()

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Start the process and follow it to its end."""
        failure: Exception | None = None
        try:
            self._start()
            self._follow()
        except Exception as error:
            failure = EngineError(f"the connection to the engine process failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        finally:
            self._kill()
            self._fail(failure or self._end_of_process())
            with self._lock:
                self._context.destroy(linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        """This thread starts the process: what Linux takes for a process's parent is the thread that started it."""
        commands, reports = (f"ipc://{self._folder / name}" for name in ("commands", "reports"))
        start = Start(os.getpid(), commands, reports, self._arguments, self._packed)
        message = pickle.dumps(sys.path) + pickle.dumps(start)
        self._process = subprocess.Popen([sys.executable, "-P", "-c", BOOTSTRAP, "modelrunner-engine"], stdin=subprocess.PIPE)
        assert self._process.stdin is not None
        self._process.stdin.write(message)
        self._process.stdin.flush()  # and left open: its end tells the process that we are gone
        self._send(Greet())

    def _follow(self) -> None:
        """Take in reports until the process is gone and all that it said was heard."""
        assert self._process is not None
        while True:
            gone = self._process.poll() is not None
            if self._reports.poll(POLL_MS):
                self._hear(self._reports.recv())
            elif gone:
                return
            elif self._closing and self._ready is None:
                self._process.kill()

    def _end_of_process(self) -> Exception:
        """Why there is no process any more."""
        process = self._process
        if process is None:
            return EngineError("the engine process was not started")
        if process.stdin is not None:
            with contextlib.suppress(OSError):  # a process that died early left bytes unread
                process.stdin.close()
        status = process.wait()
        if self._closing:
            return EngineError("the engine was closed")
        if self._cause is not None:
            return self._cause
        how = f"was killed by signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"ended with exit status {status}"
        return EngineError(f"the engine process (pid {process.pid}) {how}")

    def _fail(self, failure: Exception) -> None:
        with self._lock:
            self.failure = failure
            streams, changes = list(self._streams.values()), list(self._changes.values())
            self._streams.clear()
            self._changes.clear()
        self._hand_over([(stream, again(failure)) for stream in streams])
        for future in changes:
            future.set_exception(again(failure))
        self._settled.set()

    def _hear(self, data: bytes) -> None:
        report = decode_report(data)
        if isinstance(report, Hello):
            shutil.rmtree(self._folder, ignore_errors=True)  # connected: the names are not needed any more
        elif isinstance(report, Ready):
            self._ready = report
            self.liveness.hear(self.liveness.stats)
            self._settled.set()
        elif isinstance(report, Failed):
            self._cause = error_of(report, "the engine process failed")
        else:
            self._take(report)

    def _take(self, turn: Turn) -> None:
        """Make outputs of what a turn of the engine's loop brought."""
        self.liveness.hear(turn.stats)
        items: list[tuple[RequestStream, Item]] = []
        for facts in turn.facts:
            if (stream := self._streams.get(facts.number)) is not None:
                stream.learn(facts)
        ending = {ended.number for ended in turn.ended}
        start = 0
        for place, (number, size, extra) in enumerate(zip(turn.numbers, turn.counts, turn.extra, strict=True)):
            tokens, start = turn.tokens[start : start + size], start + size
            if (stream := self._streams.get(number)) is not None:
                stream.take_logprobs(turn.logprobs.get(place), turn.prompt_logprobs.pop(number, None))
                before = stream.stopped
                items += self._outputs(stream, partial(stream.feed, tokens, extra, number in ending))
                if stream.stopped and not before:
                    self._send(Abort(number, stream.request.finish_reason or "stop"))
        for ended in turn.ended:
            if (stream := self._streams.pop(ended.number, None)) is not None:
                items += self._outputs(stream, partial(stream.end, ended))
        for refused in turn.refused:
            if (stream := self._streams.pop(refused.number, None)) is not None:
                items.append((stream, refusal(refused)))
        self._hand_over(items)
        for done in turn.done:
            future = self._changes.pop(done.number)
            if done.kind:
                future.set_exception(error_of(done, "the engine process could not carry it out"))
            else:
                future.set_result(None)

    def _outputs(self, stream: RequestStream, make: Callable[[], RequestOutput | None]) -> list[tuple[RequestStream, Item]]:
        """What `make` gives, as a list of none or one. An error ends this request and no other."""
        try:
            output = make()
        except Exception as error:
            self.release(stream)
            failure = EngineError(f"request {stream.request.id!r}: its output could not be made: {type(error).__name__}: {error}")
            failure.__cause__ = error
            return [(stream, failure)]
        if output is None:
            return []
        if (reason := output.outputs[0].finish_reason) is not None:
            self.release(stream, reason)  # if its text ended it, the engine does not know yet
        return [(stream, output)]

    def _hand_over(self, items: Sequence[tuple[RequestStream, Item]]) -> None:
        """Give outputs to the event loops that wait for them, to each in one call."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, Item]]] = {}
        for stream, item in items:
            by_loop.setdefault(stream.loop, []).append((stream, item))
        for loop, group in by_loop.items():
            try:
                loop.call_soon_threadsafe(deliver, group)
            except RuntimeError:  # the loop is closed, so nobody waits
                for stream, _ in group:
                    self.release(stream)


def deliver(group: Sequence[tuple[RequestStream, Item]]) -> None:
    for stream, item in group:
        stream.deliver(item)


def again(failure: Exception) -> Exception:
    """An error of the same kind and text, to be raised in another place, with `failure` as its cause."""
    copy = type(failure)(*failure.args)
    copy.__cause__ = failure
    return copy


def error_of(report: Failed | Done, what: str) -> Exception:
    """The error that an engine in this process would have raised; for one that is not ours an EngineError that says what happened."""
    if isinstance(kind := getattr(errors, report.kind, None), type):
        error: Exception = kind(report.message)
        return error
    return EngineError(f"{what}: {report.kind}: {report.message}")


def refusal(refused: Refused) -> Exception:
    kind = errors.RequestError if refused.kind == errors.RequestError.__name__ else EngineError
    return kind(refused.message)


def pack_plugins(plugins: Sequence[object]) -> bytes:
    """Plugins as bytes, modules by their names. Raises PluginError for one that cannot be pickled."""
    packed = []
    for plugin in plugins:
        named = getattr(plugin, "__name__", None) if isinstance(plugin, type(sys)) else plugin
        try:
            pickle.dumps(named)
        except Exception as error:
            raise errors.PluginError(
                f"plugins: {plugin!r} cannot be sent to the engine process ({type(error).__name__}: {error}); accepted: names of modules, "
                "and objects that can be pickled"
            ) from error
        packed.append(named)
    return pickle.dumps(packed)
