"""B60: every process loads plugins, once. Here one process, and one with its engine process; workers and the server wait."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from engine_world import start
from plugin_site import PluginSite

from modelrunner import AsyncLLM
from modelrunner.async_llm import check_plugins
from modelrunner.checkpoint import ModelCard
from modelrunner.errors import PluginError
from modelrunner.messages import Ready
from modelrunner.plugin_manager import PluginManager

CARD = ModelCard("m", Path("m"), "dummy", ("AcmeGoodForCausalLM",), "acme")


def finds_the_model(manager: PluginManager) -> bool:
    return manager.choose("model_state", card=CARD, settings=None, pin="acme").plugin == "acme-good:good"


@pytest.fixture
def log(plugin_site: PluginSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the installed plugin writes one line per import."""
    monkeypatch.setenv("ACME_GOOD_LOG", str(tmp_path / "log"))
    plugin_site.install("acme-good")
    return tmp_path / "log"


@pytest.mark.filterwarnings("ignore::modelrunner.errors.PluginWarning")
def test_the_library_used_twice_and_from_threads_imports_once(log: Path) -> None:
    found: list[bool] = []
    start = threading.Barrier(4)

    def use() -> None:
        start.wait()
        found.append(finds_the_model(PluginManager.load(environ={})))

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4
    assert finds_the_model(PluginManager.load(environ={}))
    assert log.read_text().split() == [str(os.getpid())]


def test_registering_again_is_a_no_op(log: Path) -> None:
    manager = PluginManager.load(environ={})
    before = manager.describe()
    assert manager.register("acme_good") == "acme-good:good"
    assert manager.describe() == before
    assert len(log.read_text().split()) == 1


@pytest.mark.parametrize("command", ["plugins", "acme-hello"])
def test_one_line_per_process_of_the_command_line(log: Path, plugin_site: PluginSite, command: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(plugin_site.folder)!r}); from modelrunner.cli import main; sys.exit(main([{command!r}]))"
    for _ in range(2):
        subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True)
    lines = log.read_text().split()
    assert len(lines) == len(set(lines)) == 2


def test_importing_plugins_touches_no_device(log: Path, plugin_site: PluginSite) -> None:
    """Neither the plugin nor the built-in ones import torch when they are loaded and listed, so no device is touched."""
    code = (
        f"import sys; sys.path.insert(0, {str(plugin_site.folder)!r})\nfrom modelrunner.plugin_manager import PluginManager\n"
        "print(any(i.name == 'acme-good:good' for i in PluginManager.load().describe()), 'torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-P", "-c", code], check=True, capture_output=True, text=True).stdout
    assert shown.split() == ["True", "False"]


def test_a_front_end_and_its_engine_process_load_once_each(log: Path) -> None:
    """Also when asked for in a thread; both have the same plugins in the same order, as `AsyncLLM` checks."""
    made: list[AsyncLLM] = []
    thread = threading.Thread(target=lambda: made.append(start()))
    thread.start()
    thread.join()
    [llm] = made
    try:
        assert "acme-good:good" in llm._link.wait_ready().plugins
        lines = log.read_text().split()
        assert sorted(lines) == sorted([str(os.getpid()), str(llm.pid)])
    finally:
        llm.close()


def test_an_engine_process_with_other_plugins_is_refused(log: Path) -> None:
    """The environment changes between the two: the engine process would load less than this one."""
    here = PluginManager.load(environ={})
    ready = Ready(
        1, 1, [info.name for info in here.describe() if info.state == "loaded" and info.name != "acme-good:good"], [], ("", "", 0, "", 0)
    )
    with pytest.raises(PluginError, match=r"this process has loaded .*acme-good:good.*its engine process has loaded"):
        check_plugins(here, ready)
