"""Lets the tests of this folder share `scheduler_world`, and an engine process whose weights and memory change under them."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_world import Tamper, engine_processes, gone, run, start, tensors, until

from modelrunner import AsyncLLM
from modelrunner.testing import dense

sys.path.insert(0, str(Path(__file__).parent))

CHANGING: dict[str, Any] = {"rows": 8, "pages": 64, "tokens": 64}


@pytest.fixture(scope="module")
def tamper_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tamper")


@pytest.fixture(scope="module")
def shared_changing(tamper_folder: Path) -> Iterator[AsyncLLM]:
    llm = start(dense(1), plugins=(Tamper(tamper_folder),), **CHANGING)
    yield llm
    llm.close()
    assert engine_processes() == []


@pytest.fixture
def tamper(tamper_folder: Path) -> Iterator[Tamper]:
    tamper = Tamper(tamper_folder)
    yield tamper
    for name in ("stall", "slow", "load"):
        tamper.off(name)


@pytest.fixture
def changing(shared_changing: AsyncLLM, tamper: Tamper) -> Iterator[AsyncLLM]:
    """An engine process with the weights of dense(1), named "first"; nothing may be left of a test afterwards."""
    llm = shared_changing
    run(llm.update_weights(tensors(dense(1)), "first"))
    yield llm
    tamper.off("slow")

    async def check() -> None:
        await llm.wake_up()
        await until(lambda: (llm.stats().running, llm.stats().waiting, llm.stats().pages_used) == (0, 0, 0))

    run(check())
    assert (llm._link.num_open, llm._link._changes) == (0, {})
    assert llm.pid is not None
    assert not gone(llm.pid)
