"""`modelrunner settings show | schema | check FILE`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from modelrunner.errors import SettingsError

if TYPE_CHECKING:
    from modelrunner.cli import Command
    from modelrunner.plugin_manager import PluginManager
    from modelrunner.settings import RunnerSettings


def command() -> Command:
    """The command, for the hook `cli_commands`."""
    from modelrunner.cli import Command

    about = "show the effective settings, print their JSON schema, or check a settings file"
    return Command("settings", about, _arguments, run, takes_settings=True)


def _arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="show | schema | check")
    actions.add_parser("show", help="print the effective settings as TOML, each with the source that gave it")
    actions.add_parser("schema", help="print the JSON schema of all settings, those of installed plugins included")
    check = actions.add_parser("check", help="check a settings file by itself; the exit status is not 0 when something is wrong with it")
    check.add_argument("file", metavar="FILE")


def run(args: argparse.Namespace, manager: PluginManager) -> int:
    """Run one of the three actions; 2 in strict mode when a plugin is broken. Raises SettingsError for settings that are wrong."""
    from modelrunner.cli import plugin_status
    from modelrunner.settings import load_settings, merge_sections, setting_origins, settings_class

    given: Mapping[str, Any] = args.settings
    if given and args.action != "show":
        raise SettingsError(f"`modelrunner settings {args.action}` takes no settings, but got {', '.join(given)}; `settings show` does")
    sections = merge_sections(manager.collect("settings_sections"))
    for failure in manager.failures:
        print(f"modelrunner: warning: {failure}; if it declares settings, they are unknown here", file=sys.stderr)
    if args.action == "schema":
        print(json.dumps(settings_class(sections).model_json_schema(), indent=2))
    elif args.action == "check":
        load_settings({}, sections=sections, config_file=args.file, environ={})
        print(f"{args.file}: every setting is known and in range")
    else:
        settings = load_settings(given, sections=sections)
        print("\n".join(settings_toml(settings, setting_origins(given, sections=sections))))
    return plugin_status(manager)


def settings_toml(settings: RunnerSettings, origins: Mapping[str, str]) -> Iterator[str]:
    """Lines of a TOML file that gives `settings`; each with its source in a comment. A setting that is none is a comment as a whole."""
    for name in type(settings).model_fields:
        yield from _table(getattr(settings, name), (name,), origins)


def _table(section: BaseModel, path: Sequence[str], origins: Mapping[str, str]) -> Iterator[str]:
    from modelrunner.settings_sources import field_names

    inner: list[tuple[str, BaseModel]] = []
    lines: list[str] = []
    for name, attribute in field_names(type(section)).items():
        value = getattr(section, attribute)
        if isinstance(value, BaseModel):
            inner.append((name, value))
            continue
        source = origins.get(".".join([*path, name]), "default")
        lines.append(f"# {name} = none  # {source}" if value is None else f"{name} = {toml_value(value)}  # {source}")
    if lines:
        yield from (f"[{'.'.join(path)}]", *lines, "")
    for name, nested in inner:
        yield from _table(nested, (*path, name), origins)


def toml_value(value: Any) -> str:
    """`value` as TOML: numbers, truth values, text, lists and tables; anything else as the text that it prints as."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple, set, frozenset)):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_text(str(key))} = {toml_value(item)}" for key, item in value.items()) + "}"
    return _text(str(value))


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
