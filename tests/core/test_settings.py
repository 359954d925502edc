"""Settings: the tree, arguments, and what is refused, with which words."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from settings_world import Acme, load, refused

from modelrunner.errors import SettingsError
from modelrunner.resolved import Resolved
from modelrunner.settings import (
    ALIASES,
    CacheSettings,
    PinSettings,
    RunnerSettings,
    settings_class,
)
from modelrunner.settings_sources import section_type, setting_paths


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "settings.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


# ---- the tree ------------------------------------------------------------------------------------------------------------


def test_defaults() -> None:
    settings = load()
    assert (settings.cache.page_size, settings.scheduler.max_rows, settings.scheduler.max_batched_tokens) == (16, 256, 2048)
    assert settings.scheduler.pipeline_depth == 2
    assert settings.model.name == ""
    assert settings.model.dtype == settings.cache.dtype == settings.device.name == "auto"


def test_every_setting_says_what_it_is() -> None:
    silent = [".".join(path) for path, info in setting_paths(RunnerSettings) if not (info.description or "").endswith(".")]
    assert silent == []


def test_every_number_has_a_range() -> None:
    """An unbounded number is a typing error that shows up as an allocation hours later."""
    schema = RunnerSettings.model_json_schema()
    open_ended = []
    for section, definition in schema["$defs"].items():
        for name, field in definition.get("properties", {}).items():
            kinds = field.get("anyOf", [field])
            numbers = [k for k in kinds if k.get("type") in ("integer", "number")]
            open_ended += [f"{section}.{name}" for k in numbers if "minimum" not in k and "exclusiveMinimum" not in k]
    assert open_ended == []


def test_every_section_is_described() -> None:
    for name, info in RunnerSettings.model_fields.items():
        kind = section_type(info.annotation)
        assert kind is not None, name
        assert (kind.__doc__ or "").strip(), name


def test_frozen() -> None:
    settings = load()
    with pytest.raises(ValidationError):
        settings.cache = CacheSettings()  # type: ignore[misc]
    with pytest.raises(ValidationError):
        settings.cache.page_size = 8  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.dtype", "int4"),
        ("model.max_model_len", 0),
        ("model.load_format", "pickle"),
        ("model.seed", -1),
        ("cache.page_size", 0),
        ("cache.num_pages", 0),
        ("cache.memory_fraction", 0),
        ("cache.memory_fraction", 1.1),
        ("cache.memory_fraction", float("nan")),
        ("cache.memory_bytes", -5),
        ("scheduler.max_rows", 0),
        ("scheduler.max_rows", 2.5),
        ("scheduler.max_batched_tokens", 0),
        ("scheduler.policy", "lifo"),
        ("scheduler.chunked_prefill", "perhaps"),
        ("scheduler.pipeline_depth", 0),
        ("scheduler.pipeline_depth", 9),
        ("sampler.max_stop_token_ids", 0),
        ("sampler.stop_seats", 0),
        ("graphs.bucket_rows", (4, 2)),
        ("graphs.bucket_rows", (2, 2)),
        ("graphs.bucket_tokens", (0, 2)),
        ("device.name", ""),
        ("linear.scheme", ""),
    ],
)
def test_out_of_range_names_setting_value_and_source(name: str, value: Any) -> None:
    message = refused({name: value})
    assert f"{name}" in message
    assert repr(value) in message or str(value) in message or "bucket" in name
    assert f"argument {name}" in message


def test_a_switch_is_no_number() -> None:
    """`--max-num-seqs` with its value forgotten must not mean one row."""
    assert "a number is needed" in refused({"max_num_seqs": True})
    assert "a number is needed" in refused({"cache.num_pages": True})
    assert load({"enforce_eager": True}).graphs.eager is True


def test_all_problems_are_reported_at_once() -> None:
    message = refused({"cache.page_size": 0, "scheduler.policy": "lifo"})
    assert "cache.page_size" in message
    assert "scheduler.policy" in message
    assert "'fcfs' or 'priority'" in message


def test_torch_dtypes_and_short_names_are_read() -> None:
    import torch

    assert load({"dtype": torch.bfloat16}).model.dtype == "bfloat16"
    assert load({"dtype": "half", "kv_cache_dtype": "fp32"}).model.dtype == "float16"


# ---- arguments -----------------------------------------------------------------------------------------------------------


def test_argument_forms_mean_the_same() -> None:
    forms: list[dict[str, Any]] = [
        {"cache": {"page_size": 32}},
        {"cache": CacheSettings(page_size=32)},
        {"cache.page_size": 32},
        {"block_size": 32},
        {"block_size": "32"},
    ]
    assert {load(form).cache for form in forms} == {CacheSettings(page_size=32)}


def test_keyword_arguments_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELRUNNER_CACHE__NUM_PAGES", "9")
    settings = RunnerSettings(model="here", cache={"page_size": 8})
    assert (settings.model.name, settings.cache.page_size, settings.cache.num_pages) == ("here", 8, 9)


def test_a_name_that_is_both_section_and_alias() -> None:
    assert load({"model": "x"}).model.name == "x"
    assert load({"model": {"name": "x", "seed": 3}}).model.seed == 3
    assert load({"device": "cpu"}).device.name == load({"device": {"name": "cpu"}}).device.name == "cpu"


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_alias_points_at_a_setting(alias: str) -> None:
    assert ALIASES[alias] in {".".join(path) for path, _ in setting_paths(RunnerSettings)}


def test_aliases_of_well_known_names() -> None:
    settings = load(
        {
            "model": "m",
            "max_model_len": 128,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "enable_prefix_caching": False,
            "gpu_memory_utilization": 0.5,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "quantization": "int8",
        }
    )
    assert (settings.scheduler.max_rows, settings.scheduler.max_batched_tokens, settings.model.max_model_len) == (4, 64, 128)
    assert (settings.cache.prefix_caching, settings.cache.memory_fraction) == (False, 0.5)
    assert (settings.graphs.eager, settings.model.skip_tokenizer_init, settings.linear.scheme) == (True, True, "int8")


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_num_seqs": 4, "scheduler": {"max_rows": 4}},
        {"max_num_seqs": 4, "scheduler.max_rows": 8},
        {"scheduler": {"max_rows": 4}, "scheduler.max_rows": 4},
    ],
)
def test_both_forms_of_one_setting(arguments: dict[str, Any]) -> None:
    message = refused(arguments)
    assert "scheduler.max_rows is given twice" in message
    assert "argument scheduler.max_rows" in message


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("max_num_seq", "max_num_seqs"),
        ("page_size", "cache.page_size"),
        ("cache.pagesize", "cache.page_size"),
        ("scheduler.max_row", "scheduler.max_rows"),
        ("max_rows", "scheduler.max_rows"),
    ],
)
def test_misspelt_argument(name: str, near: str) -> None:
    message = refused({name: 1})
    assert repr(name) in message
    assert near in message
    assert f"argument {name}" in message


def test_misspelt_nested_argument() -> None:
    message = refused({"cache": {"pagesize": 4}})
    assert "argument cache.pagesize" in message
    assert "cache.page_size" in message


def test_section_given_a_plain_value() -> None:
    message = refused({"cache": 3})
    assert "'cache' is a section" in message
    assert "page_size" in message


def test_path_into_a_setting() -> None:
    assert "'cache.page_size.bytes'" in refused({"cache.page_size.bytes": 3})


# ---- pickling, pins, schema ----------------------------------------------------------------------------------------------


def test_pickle_keeps_everything_and_reads_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load({"max_num_seqs": 3, "plugin.acme.depth": 8}, sections={"acme": Acme})
    frozen = pickle.dumps(settings)
    monkeypatch.setenv("MODELRUNNER_CACHE__PAGE_SIZE", "99")
    again = pickle.loads(frozen)
    assert again == settings
    assert type(again) is type(settings)
    assert again.section(Acme).depth == 8
    assert pickle.loads(pickle.dumps(load())) == load()


def test_pickle_reaches_another_process(tmp_path: Path) -> None:
    path = tmp_path / "settings.pickle"
    path.write_bytes(pickle.dumps(load({"max_num_seqs": 3, "plugin.cache2.page_size": 5}, sections={"cache2": CacheSettings})))
    code = f"import pickle; s = pickle.load(open({str(path)!r}, 'rb')); print(s.scheduler.max_rows, s.plugin.cache2.page_size)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "5"]


def test_pins() -> None:
    """`model_config` is a name that pydantic keeps for itself, so a plain attribute would read pydantic's own dictionary."""
    pins = load({"pin": {"model_config": "a", "device": "b"}}).pin
    assert (pins.of("model_config"), pins.of("device"), pins.of("tokenizer")) == ("a", "b", None)
    with pytest.raises(SettingsError, match="no pin for 'kernels'"):
        pins.of("kernels")
    assert PinSettings(model_config="a").of("model_config") == "a"


def test_every_hook_that_takes_offers_can_be_pinned() -> None:
    from modelrunner.hookspecs import HookSpecs

    hooks = {name for name, member in vars(HookSpecs).items() if "Offer" in str(getattr(member, "__annotations__", {}).get("return", ""))}
    assert len(hooks) == 10
    for hook in hooks:
        assert load({f"pin.{hook}": "x"}).pin.of(hook) == "x"


def test_schema_has_the_plugins() -> None:
    schema = settings_class({"acme": Acme}).model_json_schema()
    assert "Acme" in schema["$defs"]
    assert schema["$defs"]["CacheSettings"]["properties"]["page_size"]["minimum"] == 1
    assert "model_config" in schema["$defs"]["PinSettings"]["properties"]
    json.dumps(schema)


def test_reading_settings_does_not_import_torch() -> None:
    code = "import sys, modelrunner.settings as s; s.load_settings(environ={}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_resolved_prints() -> None:
    text = str(Resolved("m", "float32", "float32", 128, 10, 2**20, {"full": 16}, {"device": "cpu (modelrunner:devices)"}))
    for words in ("10 pages", "10.0 MiB", "full: 16 tokens", "device", "cpu (modelrunner:devices)", "128 tokens"):
        assert words in text
