"""Settings: what the user asked for, as one frozen tree.

    settings = load_settings({"model": "some/model", "max_num_seqs": 64, "cache": {"page_size": 32}})
    settings.scheduler.max_rows        # 64

Precedence: arguments, then environment variables (`MODELRUNNER_CACHE__PAGE_SIZE=32`), then a TOML file (`config_file`, or the file that
`MODELRUNNER_CONFIG` names), then the sections' defaults. Settings of plugins stand under `plugin.<name>`. `ALIASES` lists flat names that
every source takes too. Sections stand in `settings_engine` and `settings_features`; `settings_sources` reads the sources. What was worked
out from the settings (page count, chosen components) is not here but in `modelrunner.resolved`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, cast

from pydantic import ValidationError, create_model
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from modelrunner.errors import SettingsError
from modelrunner.resolved import Resolved
from modelrunner.settings_engine import (
    CacheSettings,
    DeviceSettings,
    GraphSettings,
    LinearSettings,
    ModelSettings,
    PinSettings,
    ProcessSettings,
    SchedulerSettings,
    Section,
)
from modelrunner.settings_features import GrammarSettings, MediaSettings, SamplerSettings, SpeculationSettings
from modelrunner.settings_sources import ALIASES, Layer, LayerSource, explain_validation, origins, read_layers

__all__ = [
    "ALIASES",
    "CacheSettings",
    "DeviceSettings",
    "GrammarSettings",
    "GraphSettings",
    "LinearSettings",
    "MediaSettings",
    "ModelSettings",
    "PinSettings",
    "ProcessSettings",
    "Resolved",
    "RunnerSettings",
    "SamplerSettings",
    "SchedulerSettings",
    "Section",
    "SpeculationSettings",
    "load_settings",
    "merge_sections",
    "setting_origins",
    "settings_class",
]


class PluginSections(Section):
    """Sections that plugins declare, by section name."""


S = TypeVar("S", bound=Section)
Sections = Mapping[str, type[Section]]


class RunnerSettings(BaseSettings):
    """All settings. Frozen and picklable; creating one reads the environment and the settings file.

    Keyword arguments are sections (`cache={"page_size": 32}` or a `CacheSettings`) or flat names of `ALIASES`; `load_settings` takes dotted
    names too.
    Raises SettingsError, which names the setting, the value, and the source that gave it.
    """

    model_config = SettingsConfigDict(extra="forbid", frozen=True)
    sections: ClassVar[Sections] = {}

    model: ModelSettings = ModelSettings()
    """The model and how it is loaded."""
    cache: CacheSettings = CacheSettings()
    """The paged memory that holds what earlier tokens left behind."""
    scheduler: SchedulerSettings = SchedulerSettings()
    """What runs in a step."""
    device: DeviceSettings = DeviceSettings()
    """Where steps run."""
    linear: LinearSettings = LinearSettings()
    """How the weights of linear layers are stored and applied."""
    sampler: SamplerSettings = SamplerSettings()
    """Capacities of the sampler's columns."""
    grammar: GrammarSettings = GrammarSettings()
    """Structured output."""
    media: MediaSettings = MediaSettings()
    """Images, videos and embeddings in prompts."""
    speculation: SpeculationSettings = SpeculationSettings()
    """Speculative decoding."""
    graphs: GraphSettings = GraphSettings()
    """Captured graphs and the batch shapes that they are padded to."""
    process: ProcessSettings = ProcessSettings()
    """The engine process behind AsyncLLM."""
    pin: PinSettings = PinSettings()
    """Offers taken by name."""
    plugin: PluginSections = PluginSections()
    """Sections that plugins declare."""

    def __init__(self, **arguments: Any) -> None:
        try:
            super().__init__(**arguments)
        except ValidationError as error:
            raise explain_validation(error, _layers(type(self), arguments)) from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        layers = _layers(cls, init_settings())
        return tuple(LayerSource(settings_cls, layer) for layer in layers)

    def section(self, kind: type[S]) -> S:
        """The section of class `kind`, a plugin's or a built-in one."""
        for owner in (self.plugin, self):
            for name in type(owner).model_fields:
                if isinstance(found := getattr(owner, name), kind):
                    return found
        raise SettingsError(
            f"no section of class {kind.__name__}; plugins declared {sorted(self.sections) or 'none'} (hook settings_sections)"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (
            dict(self.sections),
            {name: getattr(self, name) for name in type(self).model_fields if name != "plugin"},
            dict(self.plugin),
        )


_CONTROLS = ("config_file", "environ")


def _layers(root: type[RunnerSettings], arguments: Mapping[str, Any]) -> list[Layer]:
    """The layers for `arguments`, two of which say where to read: config_file, and environ (a mapping instead of os.environ)."""
    values = {name: value for name, value in arguments.items() if name not in _CONTROLS}
    environ = arguments.get("environ")
    return read_layers(root, values, arguments.get("config_file"), os.environ if environ is None else environ)


def _restore(sections: Sections, values: Mapping[str, Any], plugin: Mapping[str, Any]) -> RunnerSettings:
    """Unpickle without reading the environment again."""
    cls = settings_class(sections)
    tree = cast(type[PluginSections], cls.model_fields["plugin"].annotation)
    return cls.model_construct(**values, plugin=tree.model_construct(**plugin))


def settings_class(sections: Sections = MappingProxyType({})) -> type[RunnerSettings]:
    """The settings class with the plugin sections `sections` (name -> class). Equal sections give the same class."""
    return _settings_class(tuple(sorted(sections.items()))) if sections else RunnerSettings


@lru_cache(maxsize=64)
def _settings_class(items: tuple[tuple[str, type[Section]], ...]) -> type[RunnerSettings]:
    fields: dict[str, Any] = {}
    for name, kind in items:
        if not (isinstance(kind, type) and issubclass(kind, Section)):
            raise SettingsError(f"plugin settings section {name!r} is {kind!r}; it must be a subclass of modelrunner.settings.Section")
        if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
            raise SettingsError(
                f"plugin settings section {name!r}: the name must be small letters, digits and single underscores, e.g. my_plugin"
            )
        try:
            fields[name] = (kind, kind())
        except ValidationError as error:
            raise SettingsError(
                f"plugin settings section {name!r} ({kind.__module__}.{kind.__qualname__}): every field needs a valid default; {error}"
            ) from None
    tree = create_model("PluginSections", __base__=PluginSections, __module__=__name__, **fields)
    cls = create_model("RunnerSettings", __base__=RunnerSettings, __module__=__name__, plugin=(tree, tree()))
    cls.sections = dict(items)
    return cls


def merge_sections(answers: Iterable[tuple[str, Sections | None]]) -> dict[str, type[Section]]:
    """The answers of the hook `settings_sections`, as (plugin, answer), in one mapping. Two plugins with one section name are refused."""
    merged: dict[str, type[Section]] = {}
    owners: dict[str, str] = {}
    for plugin, sections in answers:
        for name, kind in (sections or {}).items():
            if not (isinstance(kind, type) and issubclass(kind, Section)):
                raise SettingsError(
                    f"plugin {plugin} declares the settings section {name!r} as {kind!r}; it must be a subclass of "
                    "modelrunner.settings.Section. Repair the plugin, or leave it out"
                )
            if name in merged and merged[name] is not kind:
                raise SettingsError(f"plugins {owners[name]} and {plugin} both declare the settings section {name!r}; disable one of them")
            merged[name] = kind
            owners[name] = plugin
    return merged


def load_settings(
    arguments: Mapping[str, Any] | None = None,
    *,
    sections: Sections | None = None,
    config_file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> RunnerSettings:
    """The effective settings.

    arguments: nested mappings, `Section` objects, dotted names ("cache.page_size") or flat names of `ALIASES`, in any mixture; a setting
    given twice is refused. They may name `config_file` too. sections: what plugins declare. config_file: a TOML file, instead of the one
    that MODELRUNNER_CONFIG names. environ: read instead of os.environ. Raises SettingsError.
    """
    return settings_class(sections or {})(**_with_controls(arguments or {}, config_file, environ))


def setting_origins(
    arguments: Mapping[str, Any] | None = None,
    *,
    sections: Sections | None = None,
    config_file: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Where `load_settings`, called alike, took each setting from: {dotted name: source}; those left at their default are absent."""
    layers = _layers(settings_class(sections or {}), _with_controls(arguments or {}, config_file, environ))
    return {".".join(path): origin for path, origin in origins(layers).items()}


def _with_controls(arguments: Mapping[str, Any], config_file: str | Path | None, environ: Mapping[str, str] | None) -> dict[str, Any]:
    if config_file is not None and arguments.get("config_file") is not None:
        raise SettingsError("config_file is given twice; keep one of them")
    controls = {"config_file": config_file, "environ": environ}
    return {**arguments, **{name: value for name, value in controls.items() if value is not None}}
