"""Settings from the environment, from TOML and from plugins' sections, and which source wins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from settings_world import Acme, Inner, load, refused

from modelrunner.errors import SettingsError
from modelrunner.plugins.ngram import NgramSettings
from modelrunner.settings import (
    CacheSettings,
    Section,
    load_settings,
    merge_sections,
    setting_origins,
    settings_class,
)


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    def write(text: str) -> Path:
        path = tmp_path / "settings.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


# ---- environment ---------------------------------------------------------------------------------------------------------


def test_environment_text_is_read_by_type() -> None:
    environ = {
        "MODELRUNNER_CACHE__PAGE_SIZE": "8",
        "MODELRUNNER_CACHE__NUM_PAGES": "none",
        "MODELRUNNER_CACHE__PREFIX_CACHING": "false",
        "MODELRUNNER_CACHE__MEMORY_FRACTION": "0.25",
        "MODELRUNNER_GRAPHS__BUCKET_ROWS": "1,2,4",
        "MODELRUNNER_GRAPHS__BUCKET_TOKENS": "[8, 16]",
        "MODELRUNNER_MODEL__TOKENIZER": "none",
        "MODELRUNNER_SCHEDULER": '{"max_rows": 3}',
        "MODELRUNNER_PIN__MODEL_CONFIG": "mine",
    }
    settings = load(environ=environ)
    assert settings.cache == CacheSettings(page_size=8, num_pages=None, prefix_caching=False, memory_fraction=0.25)
    assert (settings.graphs.bucket_rows, settings.graphs.bucket_tokens) == ((1, 2, 4), (8, 16))
    assert settings.model.tokenizer is None
    unset = load({"revision": "none", "pin.device": "none"}, environ={"MODELRUNNER_REVISION": "v2", "MODELRUNNER_PIN__DEVICE": "cpu"})
    assert (unset.model.revision, unset.pin.device) == (None, None)
    assert load({"model": "none"}).model.name == "none"  # this one cannot be none
    assert settings.scheduler.max_rows == 3
    assert settings.pin.of("model_config") == "mine"


def test_environment_takes_aliases_and_any_case() -> None:
    assert load(environ={"MODELRUNNER_MAX_NUM_SEQS": "5"}).scheduler.max_rows == 5
    assert load(environ={"MODELRUNNER_MODEL": "m"}).model.name == "m"
    assert load(environ={"modelrunner_cache__page_size": "5"}).cache.page_size == 5


@pytest.mark.parametrize(
    ("variable", "near"),
    [
        ("MODELRUNNER_CACH__PAGE_SIZE", "cache.page_size"),
        ("MODELRUNNER_CACHE__PAGESIZE", "cache.page_size"),
        ("MODELRUNNER_MAX_NUM_SEQ", "max_num_seqs"),
    ],
)
def test_misspelt_environment(variable: str, near: str) -> None:
    message = refused(environ={variable: "4"})
    assert f"environment variable {variable}" in message
    assert near in message


def test_bad_environment_value_names_the_variable() -> None:
    message = refused(environ={"MODELRUNNER_CACHE__PAGE_SIZE": "many"})
    assert "environment variable MODELRUNNER_CACHE__PAGE_SIZE" in message
    assert "'many'" in message
    assert "no valid JSON" in refused(environ={"MODELRUNNER_CACHE": "{page_size"})


def test_variables_that_are_no_settings() -> None:
    environ = {
        "MODELRUNNER_PORT": "tcp://10.0.0.1:80",
        "MODELRUNNER_PORT_80_TCP": "tcp://10.0.0.1:80",
        "MODELRUNNER_PORT_80_TCP_ADDR": "10.0.0.1",
        "MODELRUNNER_SERVICE_HOST": "10.0.0.1",
        "MODELRUNNER_SERVICE_PORT_HTTP": "80",
        "MODELRUNNER_API_SERVICE_HOST": "10.0.0.2",
        "MODELRUNNER_API_PORT": "tcp://10.0.0.2:80",
        "MODELRUNNER_DISABLE_PLUGINS": "a",
        "MODELRUNNER_ONLY_PLUGINS": "b",
        "MODELRUNNER_STRICT_PLUGINS": "1",
        "MODELRUNNER_TRACE_PLUGINS": "1",
        "MODELRUNNERS_CACHE": "another program's",
        "PATH": "/bin",
    }
    assert load(environ=environ) == load()


# ---- TOML ----------------------------------------------------------------------------------------------------------------


def test_toml(toml: Any) -> None:
    path = toml('model = "m"\nmax_num_seqs = 7\n[cache]\npage_size = 8\n[plugin.acme]\ninner.width = 2\n')
    settings = load(config_file=path, sections={"acme": Acme})
    assert (settings.model.name, settings.scheduler.max_rows, settings.cache.page_size) == ("m", 7, 8)
    assert settings.section(Acme).inner.width == 2
    assert load({"config_file": str(path)}, sections={"acme": Acme}) == settings
    assert load(environ={"MODELRUNNER_CONFIG": str(path)}, sections={"acme": Acme}) == settings


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[cache]\npagesize = 8\n", ("cache.pagesize", "cache.page_size")),
        ("[cach]\npage_size = 8\n", ("'cach'", "near names are cache")),
        ("max_num_seqs = 1\n[scheduler]\nmax_rows = 1\n", ("given twice", "max_num_seqs")),
        ("[cache]\npage_size = 0\n", ("cache.page_size = 0", "greater than or equal to 1")),
        ("[cache\n", ("not valid TOML",)),
        ("[plugin.nobody]\nx = 1\n", ("plugin.nobody", "installed")),
    ],
)
def test_bad_toml_names_the_file(toml: Any, text: str, words: tuple[str, ...]) -> None:
    path = toml(text)
    message = refused(config_file=path)
    assert str(path) in message
    for word in words:
        assert word in message


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    missing = str(tmp_path / "nothing.toml")
    assert missing in refused(config_file=missing)
    assert missing in refused(environ={"MODELRUNNER_CONFIG": missing})
    assert str(tmp_path) in refused(config_file=tmp_path)


# ---- precedence ----------------------------------------------------------------------------------------------------------


def test_arguments_before_environment_before_file(toml: Any) -> None:
    path = toml("[cache]\npage_size = 1\nnum_pages = 1\nmemory_bytes = 1\n")
    environ = {"MODELRUNNER_CACHE__PAGE_SIZE": "2", "MODELRUNNER_CACHE__NUM_PAGES": "2"}
    settings = load({"block_size": 3}, environ=environ, config_file=path)
    assert (settings.cache.page_size, settings.cache.num_pages, settings.cache.memory_bytes) == (3, 2, 1)
    assert settings.cache.memory_fraction == CacheSettings().memory_fraction
    assert setting_origins({"block_size": 3}, environ=environ, config_file=path) == {
        "cache.page_size": "argument block_size",
        "cache.num_pages": "environment variable MODELRUNNER_CACHE__NUM_PAGES",
        "cache.memory_bytes": f"file {path}, cache.memory_bytes",
    }


def test_a_section_object_overrides_only_what_it_sets(toml: Any) -> None:
    path = toml("[cache]\npage_size = 4\nnum_pages = 5\n")
    cache = load({"cache": CacheSettings(num_pages=6)}, config_file=path).cache
    assert (cache.page_size, cache.num_pages) == (4, 6)


def test_none_from_a_stronger_source_wins(toml: Any) -> None:
    assert load({"cache.num_pages": None}, config_file=toml("[cache]\nnum_pages = 5\n")).cache.num_pages is None


def test_config_file_given_twice(toml: Any) -> None:
    path = toml("")
    with pytest.raises(SettingsError, match="config_file is given twice"):
        load_settings({"config_file": path}, config_file=path, environ={})


def test_an_unknown_name_of_a_section_is_told_those_of_the_section() -> None:
    with pytest.raises(SettingsError, match=r"'pin\.qwertz' .*; settings of pin are .*drafter"):
        load({"pin.qwertz": 1})
    with pytest.raises(SettingsError, match=r"'qwertz' .*; sections are cache, device"):
        load({"qwertz": 1})


def test_a_config_file_that_is_no_path() -> None:
    with pytest.raises(SettingsError, match="config_file = 3: accepted: the path of a TOML file"):
        load_settings({}, config_file=3, environ={})  # type: ignore[arg-type]


def test_a_path_is_as_good_as_its_text(tmp_path: Path) -> None:
    """Where text is meant; a number from a path is no number."""
    settings = load({"model": tmp_path, "tokenizer": tmp_path / "t", "media.folder": tmp_path, "speculation": {"model": tmp_path}})
    named = (settings.model.name, settings.model.tokenizer, settings.media.folder, settings.speculation.model)
    assert named == (str(tmp_path), str(tmp_path / "t"), str(tmp_path), str(tmp_path))
    with pytest.raises(SettingsError, match=r"scheduler\.max_rows"):
        load({"max_num_seqs": tmp_path})


# ---- plugin sections -----------------------------------------------------------------------------------------------------


def test_plugin_section_from_every_source(toml: Any) -> None:
    sections = {"acme": Acme}
    path = toml("[plugin.acme]\ndepth = 1\nnames = ['t']\nlimit = 1\n")
    environ = {
        "MODELRUNNER_PLUGIN__ACME__DEPTH": "2",
        "MODELRUNNER_PLUGIN__ACME__LIMIT": "none",
        "MODELRUNNER_PLUGIN__ACME__INNER__WIDTH": "9",
    }
    settings = load({"plugin": {"acme": {"depth": 3}}}, environ=environ, config_file=path, sections=sections)
    assert settings.section(Acme) == Acme(depth=3, names=("t",), limit=None, inner=Inner(width=9))


def test_plugin_validators_and_names_reach_the_user() -> None:
    sections = {"acme": Acme}
    assert "depth may be anything but 13" in refused({"plugin.acme.depth": 13}, sections=sections)
    assert "plugin.acme.depth" in refused({"plugin": {"acme": {"dept": 1}}}, sections=sections)
    assert "acme" in refused({"plugin": {"akme": {"depth": 1}}}, sections=sections)


def test_section_lookup() -> None:
    settings = load(sections={"acme": Acme})
    assert settings.section(Acme) == Acme()
    assert settings.section(CacheSettings) is settings.cache
    with pytest.raises(SettingsError, match=r"Acme.*none"):
        load().section(Acme)


def test_bad_declarations_name_the_section() -> None:
    class Plain(BaseModel):
        x: int = 1

    class Needy(Section):
        x: int

    with pytest.raises(SettingsError, match=r"'plain'.*subclass"):
        settings_class({"plain": Plain})  # type: ignore[dict-item]
    with pytest.raises(SettingsError, match=r"'needy'.*default"):
        settings_class({"needy": Needy})
    for name in ("Acme", "a-b", "a__b", ""):
        with pytest.raises(SettingsError, match="small letters"):
            settings_class({name: Acme})


def test_two_owners_of_a_section_are_named() -> None:
    assert merge_sections([("a", {"acme": Acme}), ("b", None), ("c", {"other": Inner})]) == {"acme": Acme, "other": Inner}
    with pytest.raises(SettingsError, match="plugins a and b both declare the settings section 'acme'"):
        merge_sections([("a", {"acme": Acme}), ("b", {"acme": Inner})])
    with pytest.raises(
        SettingsError, match=r"plugin d declares the settings section 'odd' as <class 'int'>; .*modelrunner\.settings\.Section"
    ):
        merge_sections([("d", {"odd": int})])  # type: ignore[dict-item]


def test_errors_of_a_whole_section_name_where_its_fields_came_from(toml: Any) -> None:
    sections = {"ngram": NgramSettings}
    arguments, environ = {"plugin.ngram.min_size": 5}, {"MODELRUNNER_PLUGIN__NGRAM__MIN_SIZE": "5"}
    file = toml("[plugin.ngram]\nmax_size = 2\n")
    told = refused(arguments | {"plugin.ngram.max_size": 2}, sections=sections)
    assert "(given by argument plugin.ngram.min_size and argument plugin.ngram.max_size): min_size is 5 and max_size 2" in told
    told = refused(environ=environ, config_file=file, sections=sections)
    assert f"(given by environment variable MODELRUNNER_PLUGIN__NGRAM__MIN_SIZE and file {file}, plugin.ngram.max_size)" in told
    told = refused(arguments, environ=environ, sections=sections)
    assert "(given by argument plugin.ngram.min_size): min_size is 5 and max_size 4" in told, (
        "what was overruled and defaults are not named"
    )
