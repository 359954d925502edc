"""Where settings come from: arguments, the environment, a TOML file.

Each source is brought to one form first, a `Layer`: {path of the setting: what was given}. A name that no setting has is refused there,
with near names, and so are two names for one setting. A more important layer wins setting by setting, so that giving one field leaves
its siblings alone.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from modelrunner.errors import SettingsError

PREFIX = "MODELRUNNER_"
NESTING = "__"

# Flat names that users of vLLM know -> the setting. Every source takes them: keyword arguments, the command line, TOML, the environment.
ALIASES: Mapping[str, str] = types.MappingProxyType(
    {
        "model": "model.name",
        "tokenizer": "model.tokenizer",
        "skip_tokenizer_init": "model.skip_tokenizer_init",
        "revision": "model.revision",
        "dtype": "model.dtype",
        "max_model_len": "model.max_model_len",
        "load_format": "model.load_format",
        "seed": "model.seed",
        "block_size": "cache.page_size",
        "kv_cache_dtype": "cache.dtype",
        "num_gpu_blocks_override": "cache.num_pages",
        "gpu_memory_utilization": "cache.memory_fraction",
        "enable_prefix_caching": "cache.prefix_caching",
        "max_num_seqs": "scheduler.max_rows",
        "max_num_batched_tokens": "scheduler.max_batched_tokens",
        "enable_chunked_prefill": "scheduler.chunked_prefill",
        "scheduling_policy": "scheduler.policy",
        "device": "device.name",
        "deterministic": "device.deterministic",
        "speculative_model": "speculation.model",
        "num_speculative_tokens": "speculation.num_tokens",
        "enforce_eager": "graphs.eager",
        "quantization": "linear.scheme",
        "max_logprobs": "sampler.max_logprobs",
        "logprobs_mode": "sampler.logprobs_mode",
        "enable_prompt_embeds": "media.prompt_embeds",
        "allowed_local_media_path": "media.folder",
    }
)

# Read before any settings exist; they are no settings.
BOOTSTRAP = frozenset({"CONFIG", "DISABLE_PLUGINS", "ONLY_PLUGINS", "STRICT_PLUGINS", "TRACE_PLUGINS"})
# What Kubernetes injects into every pod next to a service called `modelrunner` or `modelrunner-...`.
_KUBERNETES = re.compile(r"([A-Z0-9_]+_)?(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")

SettingPath = tuple[str, ...]


@dataclass(frozen=True)
class Given:
    """A value as a source gave it. origin: for messages, e.g. `environment variable MODELRUNNER_CACHE__PAGE_SIZE`."""

    value: Any
    origin: str


@dataclass
class Layer:
    """One source, brought to {path: given}."""

    values: dict[SettingPath, Given] = field(default_factory=dict)

    def put(self, path: SettingPath, given: Given) -> None:
        """Record a setting; two names for the same one are refused."""
        if path in self.values:
            raise SettingsError(f"{'.'.join(path)} is given twice: by {self.values[path].origin} and by {given.origin}; keep one of them")
        self.values[path] = given

    def nested(self) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for path, given in self.values.items():
            node = tree
            for part in path[:-1]:
                node = node.setdefault(part, {})
            node[path[-1]] = given.value
        return tree


class LayerSource(PydanticBaseSettingsSource):
    """Hands a layer to pydantic-settings, which merges the layers and validates the result."""

    def __init__(self, settings_cls: type[BaseSettings], layer: Layer) -> None:
        super().__init__(settings_cls)
        self.layer = layer

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self.layer.nested().get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return self.layer.nested()


# ---- the tree of settings ----------------------------------------------------------------------------------------------


def section_type(annotation: Any) -> type[BaseModel] | None:
    """The model class behind a field that is itself a section, else None."""
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """The fields of `model` by the names that users write."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def field_names(model: type[BaseModel]) -> dict[str, str]:
    """What users write -> the attribute."""
    return {info.alias or name: name for name, info in model.model_fields.items()}


def setting_paths(root: type[BaseModel], prefix: SettingPath = ()) -> Iterator[tuple[SettingPath, FieldInfo]]:
    """Every setting of the tree below `root`, sections opened."""
    for name, info in fields_of(root).items():
        inner = section_type(info.annotation)
        if inner is None:
            yield (*prefix, name), info
        else:
            yield from setting_paths(inner, (*prefix, name))


def unknown_name(root: type[BaseModel], name: str, origin: str) -> SettingsError:
    """The error for a name that no setting has, with the nearest names that exist."""
    known = {".".join(path): ".".join(path) for path, _ in setting_paths(root)}
    sections = {n: n for n, info in sorted(fields_of(root).items()) if section_type(info.annotation) is not None}
    candidates = {path.rpartition(".")[2]: path for path in known} | {alias: alias for alias in ALIASES} | sections | known
    near = list(dict.fromkeys(candidates[c] for c in difflib.get_close_matches(name, candidates, n=3, cutoff=0.6)))
    section = name.rpartition(".")[0]
    fields = [path.rpartition(".")[2] for path in known if path.rpartition(".")[0] == section]
    if near:
        hint = f"near names are {', '.join(near)}"
    else:
        hint = f"settings of {section} are {', '.join(fields)}" if section and fields else f"sections are {', '.join(sections)}"
    if name.partition(".")[0] == "plugin":
        plugins = sorted({path.split(".")[1] for path in known if path.startswith("plugin.")})
        hint += f"; sections of the loaded plugins are {', '.join(plugins) or 'none'} (is the plugin installed and not disabled?)"
    return SettingsError(f"no setting is called {name!r} (given by {origin}); {hint}; `modelrunner settings show` lists all")


def flatten(root: type[BaseModel], values: Mapping[str, Any], layer: Layer, origin: Callable[[str], str]) -> None:
    """Bring `values` (nested mappings, section objects, dotted names, aliases) into `layer`.

    origin: from a name as written to a description of its source, for messages.
    """
    for key, value in values.items():
        name = str(key)
        is_table = isinstance(value, (Mapping, BaseModel)) or _is_json_object(value)
        alias = ALIASES.get(name) if not is_table else None
        _place(root, (alias or name).split("."), value, layer, origin, name)


def _place(root: type[BaseModel], parts: list[str], value: Any, layer: Layer, origin: Callable[[str], str], name: str) -> None:
    """Put one value, or every field of one section, into `layer`. name: what the source wrote for `parts`."""
    node: type[BaseModel] | None = root
    info: FieldInfo | None = None
    for part in parts:
        if node is None or part not in fields_of(node):
            raise unknown_name(root, name, origin(name))
        info = fields_of(node)[part]
        node = section_type(info.annotation)
    assert info is not None
    if node is None:
        if isinstance(value, bool) and {int, float} & set(_options(info.annotation)) and bool not in _options(info.annotation):
            raise SettingsError(f"{'.'.join(parts)} = {value} (given by {origin(name)}): a number is needed, not a switch")
        layer.put(tuple(parts), Given(parse_text(info.annotation, value), origin(name)))
        return
    if _is_json_object(value):
        whole = origin(name)

        def origin(inner: str) -> str:
            return f"{whole}, {inner}"

    for field_name, field_value in _section_values(node, value, origin(name), name).items():
        _place(root, [*parts, *str(field_name).split(".")], field_value, layer, origin, f"{name}.{field_name}")


def _is_json_object(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip().startswith("{")


def _section_values(section: type[BaseModel], value: Any, origin: str, name: str) -> Mapping[str, Any]:
    if isinstance(value, BaseModel):
        names = field_names(type(value))
        return {public: getattr(value, attribute) for public, attribute in names.items() if attribute in value.model_fields_set}
    if _is_json_object(value):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise SettingsError(f"{origin}: {value!r} is no valid JSON object for the section {name!r}: {error}") from None
    if not isinstance(value, Mapping):
        fields = ", ".join(fields_of(section))
        raise SettingsError(f"{name!r} is a section of settings, but {origin} gives {value!r}; give its fields by name: {fields}")
    return value


def _options(annotation: Any) -> tuple[Any, ...]:
    """The types that a field takes: the members of a union, or the one type."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def parse_text(annotation: Any, value: Any) -> Any:
    """Text as environment and command line give it: `none` where a field may be none; JSON, or values separated by commas, for lists.

    A path, where text is meant, counts as its text. Numbers and truth values are left for pydantic, which reads them from text itself.
    """
    if isinstance(value, PurePath) and str in _options(annotation):
        return str(value)
    if not isinstance(value, str):
        return value
    options = _options(annotation)
    if type(None) in options and value.strip().lower() in ("none", "null"):
        return None
    if str in options:
        return value
    if any(get_origin(option) in (tuple, list, set, frozenset, dict) for option in options):
        if value.lstrip()[:1] in ("[", "{"):
            try:
                return json.loads(value)
            except json.JSONDecodeError:
                return value
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


# ---- the three sources -------------------------------------------------------------------------------------------------


def argument_layer(root: type[BaseModel], arguments: Mapping[str, Any]) -> Layer:
    layer = Layer()
    flatten(root, arguments, layer, lambda name: f"argument {name}")
    return layer


def environment_layer(root: type[BaseModel], environ: Mapping[str, str]) -> Layer:
    """Settings from `MODELRUNNER_SECTION__FIELD`; bootstrap names and what Kubernetes injects are left alone."""
    layer = Layer()
    found: dict[str, str] = {}
    for variable in sorted(environ):
        rest = variable.upper().removeprefix(PREFIX)
        if rest == variable.upper() or rest in BOOTSTRAP or _KUBERNETES.fullmatch(rest):
            continue
        found[rest.lower().replace(NESTING, ".")] = environ[variable]
    flatten(root, found, layer, lambda name: f"environment variable {PREFIX}{name.upper().replace('.', NESTING)}")
    return layer


def toml_layer(root: type[BaseModel], path: str | Path) -> Layer:
    """Settings from a TOML file. A missing or malformed file is an error."""
    layer = Layer()
    if not isinstance(path, str | PurePath):
        raise SettingsError(f"config_file = {path!r}: accepted: the path of a TOML file")
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(
            f"settings file {str(path)!r} does not exist; give an existing file as config_file or in {PREFIX}CONFIG"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"settings file {str(path)!r} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"settings file {str(path)!r} is not valid TOML: {error}") from None
    flatten(root, content, layer, lambda name: f"file {path}, {name}")
    return layer


def read_layers(
    root: type[BaseModel], arguments: Mapping[str, Any], config_file: str | Path | None, environ: Mapping[str, str]
) -> list[Layer]:
    """The layers, the most important first: arguments, environment, TOML (`config_file`, else the file that MODELRUNNER_CONFIG names)."""
    layers = [argument_layer(root, arguments), environment_layer(root, environ)]
    path = config_file or environ.get(f"{PREFIX}CONFIG")
    if path:
        layers.append(toml_layer(root, path))
    return layers


def origins(layers: Iterable[Layer]) -> dict[SettingPath, str]:
    """Which source each given setting was taken from."""
    result: dict[SettingPath, str] = {}
    for layer in layers:
        for path, given in layer.values.items():
            result.setdefault(path, given.origin)
    return result


def explain_validation(error: ValidationError, layers: Iterable[Layer]) -> SettingsError:
    """pydantic's complaints in one message, each with the setting, the value, and the source that gave it."""
    given = origins(layers)
    lines = []
    for problem in error.errors(include_url=False):
        path = tuple(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{'.'.join(path) or 'settings'} = {problem['input']!r} (given by {_source(path, given)}): {message}")
    return SettingsError("\n".join(lines))


def _source(path: SettingPath, given: Mapping[SettingPath, str]) -> str:
    """Who gave the setting `path`, or, for a section, which of its fields."""
    if found := next((given[path[:n]] for n in range(len(path), 0, -1) if path[:n] in given), ""):
        return found
    inside = [origin for inner, origin in given.items() if inner[: len(path)] == path]
    return " and ".join(inside) or "a default"
