"""Bad input: each kind is a clear exception at the call, or ends only its own request, and the engine goes on."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from modelrunner import LLM, Engine, SamplingParams, hookimpl
from modelrunner.errors import ModelRunnerError, PluginError, PluginWarning, RequestError, SettingsError
from modelrunner.testing import ByteTokenizerPlugin, Driver, EngineProbe, P, dense, options, tiny_dense

PARAMS = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    """One engine for all bad requests: it must survive every one of them."""
    driver = Driver(dense().engine(rows=2, pages=16))
    yield driver
    EngineProbe(driver).assert_clean()


@pytest.fixture
def fresh(driver: Driver) -> Iterator[Driver]:
    yield driver
    driver.outputs.pop("probe", None)
    EngineProbe(driver).assert_alive(dense())


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": P(256, 1)}, "255"),
        ({"prompt_token_ids": P(300, 1)}, "max_model_len"),
        ({"prompt_token_ids": [1, 331]}, "331"),
        ({"prompt_token_ids": [1, -1]}, "-1"),
        ({"prompt_token_ids": [1, 2.5]}, "2.5"),
        ({"prompt_token_ids": [1, "x"]}, "'x'"),
        ({"prompt_token_ids": [1], "prompt": "a"}, "prompt_token_ids"),
        ({"promt": "a"}, "promt"),
        ({}, "prompt"),
        (None, "prompt"),
        (7, "prompt"),
        ("\ud800", "surrogate"),
    ],
)
def test_bad_prompts(fresh: Driver, prompt: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        fresh.engine.add_request("bad", prompt, PARAMS)
    assert not fresh.engine.has_unfinished()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("top_p", 0.0),
        ("top_p", math.nan),
        ("top_k", -2),
        ("min_p", 1.5),
        ("seed", 2**63),
        ("stop_token_ids", [-1]),
        ("no_such_parameter", 1),
    ],
)
def test_bad_parameters(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as refusal:
        SamplingParams(**{field: value})
    assert "nan" not in str(refusal.value).lower()


@pytest.mark.parametrize(
    "options",
    [
        {"params": SamplingParams(stop_token_ids=(331,))},
        {"params": SamplingParams(stop_token_ids=tuple(range(3, 203)))},
        {"params": {"temperature": 0}},
        {"deadline": -1.0},
        {"deadline": math.nan},
        {"priority": 0.5},
        {"cache_salt": ""},
    ],
)
def test_bad_requests(fresh: Driver, options: dict[str, Any]) -> None:
    with pytest.raises(RequestError):
        fresh.engine.add_request("bad", {"prompt_token_ids": P(4, 1)}, **({"params": PARAMS} | options))
    assert not fresh.engine.has_unfinished()


def test_an_id_in_use(fresh: Driver) -> None:
    fresh.add("twice", P(4, 1), PARAMS)
    with pytest.raises(RequestError, match="twice"):
        fresh.engine.add_request("twice", {"prompt_token_ids": P(5, 1)}, PARAMS)
    fresh.finish()
    assert len(fresh.outputs["twice"][-1].prompt_token_ids) == 4


def test_a_batch_call_with_a_bad_prompt_leaves_the_llm_usable() -> None:
    llm = dense().llm(rows=2)
    with pytest.raises(RequestError):
        llm.generate([{"prompt_token_ids": P(4, 1)}, {"prompt_token_ids": []}], PARAMS, use_tqdm=False)
    (good,) = llm.generate([{"prompt_token_ids": P(4, 1)}], PARAMS, use_tqdm=False)
    assert good.finished


# ---- start-up ------------------------------------------------------------------------------------------------------


def start(model: Path, plugins: tuple[object, ...] = (), **changes: Any) -> Engine:
    settings = {"model": {"name": str(model)}} | options(rows=2, pages=16) | changes
    return Engine(settings, plugins=(ByteTokenizerPlugin(), *plugins))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_dense(), tmp_path / "model"))


def remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def truncate_weights(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def spoil_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a safetensors file at all")


def edit_tensors(folder: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def wrong_shape(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"][:-1].clone()}))


def missing_tensor(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: tensors.__delitem__("model.layers.1.self_attn.k_proj.weight"))


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def spoil_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def nest_config(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)


def spoil_eos(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')


def number_shards(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": 1}}')


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (remove_weights, "safetensors"),
        (truncate_weights, "model.safetensors"),
        (spoil_header, "model.safetensors"),
        (wrong_shape, "model.norm.weight"),
        (missing_tensor, "model.layers.1.self_attn.k_proj.weight"),
        (spoil_config, "config.json"),
        (remove_config, "config.json"),
        (nest_config, "config.json"),
        (spoil_eos, "eos_token_id"),
        (number_shards, "weight_map"),
    ],
)
def test_damaged_checkpoints(copy: Path, damage: Callable[[Path], None], says: str) -> None:
    damage(copy)
    with pytest.raises(ModelRunnerError, match=says) as error:
        start(copy)
    assert str(copy) in str(error.value), "the message should name the place"


def test_a_model_that_is_not_there() -> None:
    with pytest.raises(ModelRunnerError, match="/no/such/model"):
        start(Path("/no/such/model"))


def test_an_unknown_architecture(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"architectures": ["LamaForCausalLM"], "model_type": "lama"}))
    with pytest.raises(PluginError, match="LamaForCausalLM") as error:
        start(copy)
    assert "LlamaForCausalLM" in str(error.value), "a near name should be shown"


def test_a_cache_too_small_for_one_request() -> None:
    """Small requests are served; one that can never fit is refused with both numbers."""
    driver = Driver(dense().engine(pages=2))
    with pytest.raises(RequestError, match=r"40.*33"):
        driver.add("large", P(40, 1), PARAMS)
    EngineProbe(driver).assert_alive(dense())


@pytest.mark.parametrize(
    "changes",
    [
        {"cache": {"num_pages": 0}},
        {"cache": {"page_size": 0}},
        {"scheduler": {"max_rows": 0}},
        {"scheduler": {"policy": "random"}},
        {"scheduler": {"pipeline_depth": 9}},
        {"no_such_section": {"a": 1}},
        {"cache": {"no_such_setting": 1}},
    ],
)
def test_bad_settings(changes: dict[str, Any]) -> None:
    with pytest.raises(SettingsError):
        start(tiny_dense(), **changes)


def test_more_tokens_than_the_model_holds() -> None:
    with pytest.raises(ModelRunnerError, match="256"):
        LLM(str(tiny_dense()), plugins=[ByteTokenizerPlugin()], max_model_len=257)


class BrokenPlugin:
    """Raises as soon as it is asked for a model state."""

    MODELRUNNER_API = ">=1,<2"

    @hookimpl
    def model_state(self, card: Any) -> Any:
        raise RuntimeError("no driver")


class OldPlugin:
    MODELRUNNER_API = ">=0.1,<0.2"


def test_a_broken_plugin_does_not_take_the_engine_along() -> None:
    with pytest.warns(PluginWarning, match=r"BrokenPlugin.*no driver"):
        engine = start(tiny_dense(), (BrokenPlugin(),))
    EngineProbe(Driver(engine)).assert_alive(dense())


def test_a_plugin_for_another_interface_is_refused_by_name() -> None:
    with pytest.raises(PluginError, match=r"OldPlugin.*>=0\.1,<0\.2"):
        start(tiny_dense(), (OldPlugin(),))
