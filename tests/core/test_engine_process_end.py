"""How an engine process ends: with its parent, whatever becomes of that; by `close`, whatever it is doing; and by its own failure."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from engine_world import Tamper, engine_processes, gone, last, outputs, run, start, until, wait_until

from modelrunner import AsyncLLM, SamplingParams
from modelrunner.errors import EngineError
from modelrunner.messages import Abort
from modelrunner.testing import P, dense

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PARENT = """
import sys, time
sys.path[:0] = {path!r}
from engine_world import start
llm = start()
print(llm.pid, flush=True)
{then}
"""


def parent(then: str) -> tuple[subprocess.Popen[bytes], int]:
    """A process with an engine process, which then runs `then`; and the engine's process id."""
    code = PARENT.format(path=[str(Path(__file__).parents[1] / "plugins_fixtures")], then=then)
    process = subprocess.Popen([sys.executable, "-P", "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [False, True])
def test_it_ends_when_its_parent_is_killed(stopped: bool) -> None:
    """Nothing of the parent can say goodbye then; a stopped engine process cannot look for itself either."""
    process, pid = parent("time.sleep(3600)")
    try:
        assert not gone(pid)
        if stopped:
            os.kill(pid, signal.SIGSTOP)
    finally:
        end(process)
    try:
        wait_until(lambda: gone(pid))
    finally:
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_it_ends_with_a_parent_that_forgot_it() -> None:
    process, pid = parent("")
    status = process.wait()
    end(process)
    assert status == 0
    assert gone(pid), "the interpreter closes it at its exit"


def test_it_outlives_the_thread_that_asked_for_it() -> None:
    made: list[AsyncLLM] = []
    thread = threading.Thread(target=lambda: made.append(start()))
    thread.start()
    thread.join()
    [llm] = made
    pid = llm.pid
    assert pid is not None
    assert run(last(llm, P(9, 1), LONG)).finished
    assert llm.health()
    llm.close()
    assert gone(pid)
    assert engine_processes() == []


def test_close_ends_a_stopped_process_and_its_requests(tmp_path: Path) -> None:
    tamper = Tamper(tmp_path)
    llm = start(plugins=(tamper,))
    pid = llm.pid
    assert pid is not None

    async def go() -> None:
        tamper.on("slow")
        client = asyncio.create_task(last(llm, P(9, 1), LONG))
        await until(lambda: llm.stats().running == 1)
        os.kill(pid, signal.SIGSTOP)
        await asyncio.to_thread(llm.close, 0.5)
        with pytest.raises(EngineError, match="the engine was closed"):
            await client
        with pytest.raises(EngineError, match="the engine was closed"):
            await last(llm, P(9, 1), LONG)

    run(go())
    assert gone(pid)
    assert llm.problem() == "the engine was closed"
    llm.close()  # once more: nothing to do


@pytest.mark.timeout(120)
def test_nothing_waits_for_a_process_that_has_gone() -> None:
    """Commands that are sent after its end, and before the end was noticed."""
    llm = start()
    link = llm._link
    with link._lock:  # the thread that follows the process cannot get further than finding it gone
        assert link._process is not None
        link._process.kill()
        link._process.wait()
        time.sleep(1)  # the sockets notice
        link._send(Abort(0))
    llm.close()


def test_leaving_the_block_closes_it_cleanly() -> None:
    async def go() -> None:
        async with await asyncio.to_thread(start) as llm:
            assert (await last(llm, P(9, 1), LONG)).finished
            assert not llm._link._folder.exists(), "once both are connected, the sockets need no names"
            assert llm.pid is not None
            process = llm._link._process
            assert process is not None
        assert process.returncode == 0
        assert gone(llm.pid)

    run(go())


def test_a_failed_step_ends_every_request_with_its_cause(tmp_path: Path) -> None:
    """On the device, so that the engine cannot go on. Before that, one on the host, after which it can."""
    tamper = Tamper(tmp_path)
    llm = start(plugins=(tamper,))

    async def all_fail() -> str:
        """What each of three requests at once is told."""
        tamper.on("stall")  # nothing runs before all three are there
        clients = [asyncio.create_task(outputs(llm, P(9, n), LONG)) for n in range(3)]
        await until(lambda: llm._link.num_open == 3)
        tamper.off("stall")
        results = await asyncio.gather(*clients, return_exceptions=True)
        assert [type(result) for result in results] == [EngineError] * 3
        [told] = {str(result) for result in results}
        return told

    async def go() -> None:
        tamper.on("launch")
        assert await all_fail() == "a step could not be launched: RuntimeError: planted in launch"
        assert llm.health()
        assert len((await last(llm, P(9, 1), LONG)).outputs[0].token_ids) == 200
        tamper.on("collect")
        cause = await all_fail()
        assert re.fullmatch(r"step \d+ failed on device 'cpu': .*planted in collect", cause)
        with pytest.raises(EngineError, match="planted in collect"):
            await last(llm, P(9, 1), LONG)
        await until(lambda: not llm.health())
        assert llm.problem() == cause

    run(go())
    assert engine_processes() == []
    llm.close()


def test_a_plugin_that_the_engine_process_cannot_read() -> None:
    """The class is in a script; it can be pickled by name, and the name means nothing elsewhere."""
    code = f"""
from modelrunner import AsyncLLM
from modelrunner.testing import ByteTokenizerPlugin
class Mine(ByteTokenizerPlugin): pass
try:
    AsyncLLM({dense().model!r}, plugins=[Mine()])
except Exception as error:
    print(type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("PluginError plugins: the engine process cannot read them (AttributeError: ")
    assert "accepted: names of modules, and objects whose class stands in a module that can be imported (not in __main__)" in done.stdout
    assert done.stderr == ""
