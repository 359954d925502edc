"""`modelrunner settings show | schema | check`."""

from __future__ import annotations

import argparse
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from modelrunner.errors import SettingsError
from modelrunner.hookspecs import hookimpl
from modelrunner.plugin_manager import PluginManager
from modelrunner.plugins.commands.settings import command, settings_toml, toml_value
from modelrunner.settings import RunnerSettings, Section, load_settings, setting_origins


class Acme(Section):
    depth: int = 3
    """Depth in layers."""
    weights: dict[str, float] = Field(default_factory=dict)
    """Weight by name."""


class AcmePlugin:
    @hookimpl
    def settings_sections(self) -> dict[str, type[Section]]:
        return {"acme": Acme}


@pytest.fixture
def manager() -> PluginManager:
    return PluginManager.load([AcmePlugin()], {}, discover=False)


def run(manager: PluginManager, *words: str, **settings: Any) -> int:
    parser = argparse.ArgumentParser()
    command().add_arguments(parser)
    args = parser.parse_args(words)
    args.settings = settings
    return command().run(args, manager)


def test_show_is_toml_that_gives_the_same_settings(
    manager: PluginManager, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MODELRUNNER_CACHE__NUM_PAGES", "12")
    assert run(manager, "show", max_num_seqs="5", model='quo"te\n\x7f\U0001f600', **{"plugin.acme.weights": '{"a b": 0.5}'}) == 0
    text = capsys.readouterr().out
    assert "max_rows = 5  # argument max_num_seqs" in text
    assert "num_pages = 12  # environment variable MODELRUNNER_CACHE__NUM_PAGES" in text
    assert "page_size = 16  # default" in text
    assert "# memory_bytes = none  # default" in text
    path = tmp_path / "again.toml"
    path.write_text(text, encoding="utf-8")
    again = load_settings(config_file=path, environ={}, sections={"acme": Acme})
    assert again.model.name == 'quo"te\n\x7f\U0001f600'
    assert (again.scheduler.max_rows, again.cache.num_pages, again.section(Acme).weights) == (5, 12, {"a b": 0.5})


def test_show_lists_every_setting(manager: PluginManager, capsys: pytest.CaptureFixture[str]) -> None:
    run(manager, "show")
    text = capsys.readouterr().out
    for section, info in RunnerSettings.model_fields.items():
        assert f"[{section}" in text
        for name, field in getattr(info.annotation, "model_fields", {}).items():
            assert f"{field.alias or name} = " in text
    assert "[plugin.acme]" in text


def test_schema(manager: PluginManager, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(manager, "schema") == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["$defs"]["Acme"]["properties"]["depth"]["description"] == "Depth in layers."


def test_check(manager: PluginManager, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MODELRUNNER_CACHE__PAGE_SIZE", "nonsense")  # a file is checked by itself
    path = tmp_path / "settings.toml"
    path.write_text("max_num_seqs = 3\n[plugin.acme]\ndepth = 1\n", encoding="utf-8")
    assert run(manager, "check", str(path)) == 0
    assert str(path) in capsys.readouterr().out
    path.write_text("[plugin.acme]\ndept = 1\n", encoding="utf-8")
    with pytest.raises(SettingsError, match=r"plugin\.acme\.dept'.*near names are plugin\.acme\.depth"):
        run(manager, "check", str(path))
    with pytest.raises(SettingsError, match="does not exist"):
        run(manager, "check", str(tmp_path / "none.toml"))


def test_only_show_takes_settings(manager: PluginManager) -> None:
    with pytest.raises(SettingsError, match="takes no settings, but got seed"):
        run(manager, "schema", seed="1")


@pytest.mark.parametrize("value", [True, 3, 0.25, float("inf"), "a\tb\\\"'é", [1, 2], ["x"], {"k": [1], "a b": {"c": False}}])
def test_toml_values(value: Any) -> None:
    assert tomllib.loads(f"x = {toml_value(value)}")["x"] == value


def test_origin_of_every_line() -> None:
    settings = load_settings({"seed": 1}, environ={})
    lines = list(settings_toml(settings, setting_origins({"seed": 1}, environ={})))
    assert all("  # " in line for line in lines if " = " in line)
    assert "seed = 1  # argument seed" in lines
