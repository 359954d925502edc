"""AsyncLLM's start: settings that reach the engine process whole, bad starts that raise what LLM raises, and being given up."""

from __future__ import annotations

import gc
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from engine_world import engine_processes, gone, outputs, run, wait_until

from modelrunner import LLM, AsyncLLM, SamplingParams
from modelrunner.async_llm import engine_arguments
from modelrunner.errors import CheckpointError, PluginError, RequestError, SettingsError
from modelrunner.settings import load_settings
from modelrunner.testing import ByteTokenizerPlugin, dense, options


def test_settings_reach_the_engine_process_whole() -> None:
    settings = load_settings(
        {"max_model_len": 77, "cache": {"page_size": 8}, "enforce_eager": True, "pin": {"model_config": "x"}}, environ={}
    )
    again = load_settings(engine_arguments(settings), environ={"MODELRUNNER_CACHE__PAGE_SIZE": "4", "MODELRUNNER_MODEL__SEED": "9"})
    assert again == settings.model_copy(update={"model": settings.model.model_copy(update={"skip_tokenizer_init": True})})


BAD_STARTS: list[tuple[type[Exception], dict[str, Any]]] = [
    (SettingsError, {"max_modl_len": 5}),
    (CheckpointError, {"model": "/nowhere/at/all"}),
    (CheckpointError, {"model": "damaged"}),  # found out by the engine process, which alone reads weights
    (PluginError, {"device": {"name": "nope"}}),  # found out by the engine process
    (CheckpointError, {"speculation": {"drafter": "draft_model", "model": "/nowhere"}}),  # with a note of which setting named it
]


def told(error: BaseException) -> str:
    """All that it says: a note crosses to this process as further lines of the message."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


@pytest.mark.parametrize(("kind", "settings"), BAD_STARTS, ids=lambda value: str(value))
def test_a_bad_start_raises_what_llm_raises_and_leaves_no_process(
    kind: type[Exception], settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(dense().model, tmp_path / "damaged")
    (tmp_path / "damaged/model.safetensors").write_bytes(b"not tensors")
    monkeypatch.chdir(tmp_path)
    arguments: dict[str, Any] = {"model": dense().model, "plugins": dense().plugins} | settings
    with pytest.raises(kind) as here:
        LLM(**arguments)
    before = engine_processes()
    with pytest.raises(kind) as there:
        AsyncLLM(**arguments)
    assert told(there.value) == told(here.value)
    assert engine_processes() == before


def test_plugins_that_cannot_travel_are_refused() -> None:
    class Local(ByteTokenizerPlugin):
        pass

    with pytest.raises(PluginError, match=r"Local object.* cannot be sent to the engine process .*accepted: names of modules, and objects"):
        AsyncLLM(dense().model, plugins=[Local()])


def test_warnings_of_the_engine_process_are_heard_here() -> None:
    subject = dense()
    with pytest.warns(UserWarning, match="the cache of 4 pages holds 65 tokens of one request, less than max_model_len"):
        llm = AsyncLLM(subject.model, plugins=subject.plugins, **options(pages=4))
    link, pid = llm._link, llm.pid
    assert pid is not None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plain = subject.llm(pages=4)
        message = refusal_of_a_long_request(llm)
        with pytest.raises(RequestError) as here:
            plain.generate(["a"], SamplingParams(max_tokens=80, temperature=0), use_tqdm=False)
        assert f"prompts[0]: {message}" == str(here.value)
        assert "lower max_tokens or enlarge the cache" in message
        del llm
        gc.collect()
        wait_until(lambda: gone(pid))  # given up without `close`
    finally:
        link.close()


def refusal_of_a_long_request(llm: AsyncLLM) -> str:
    with pytest.raises(RequestError) as there:
        run(outputs(llm, "a", SamplingParams(max_tokens=80, temperature=0), request_id="0"))
    return str(there.value)
