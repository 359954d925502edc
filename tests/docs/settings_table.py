"""Writes the tables of docs/settings.md from the settings themselves: `python -P tests/docs/settings_table.py`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from modelrunner.settings import ALIASES, RunnerSettings
from modelrunner.settings_sources import fields_of, section_type

PAGE = Path(__file__).resolve().parents[2] / "docs/settings.md"
HEAD = "| setting | values | default | flat name | |\n| --- | --- | --- | --- | --- |"
WORDS = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true, false",
    "null": "none",
    "array": "list of whole numbers",
}
START, END = "<!-- tables start -->", "<!-- tables end -->"


def tables() -> str:
    """One table a section: name, accepted values, default, flat name, meaning."""
    aliases = {path: alias for alias, path in ALIASES.items()}
    schema = RunnerSettings.model_json_schema()
    lines: list[str] = []
    for section, info in RunnerSettings.model_fields.items():
        kind = section_type(info.annotation)
        if kind is None or section == "plugin":
            continue
        lines += [f"### `{section}`", "", str(kind.__doc__), "", HEAD]
        properties = schema["$defs"][kind.__name__]["properties"]
        for name, field in fields_of(kind).items():
            alias = aliases.get(f"{section}.{name}")
            flat = f"`{alias}`" if alias else ""
            cells = [f"`{section}.{name}`", accepted(properties[name]), f"`{shown(field.default)}`", flat, str(field.description)]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip()


def accepted(schema: dict[str, Any]) -> str:
    """The values a JSON schema accepts, in words."""
    return " or ".join(_accepted(kind) for kind in schema.get("anyOf", [schema]))


def _accepted(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(str(value) for value in schema["enum"])
    lower = str(schema["minimum"]) if "minimum" in schema else ""
    upper = str(schema["maximum"]) if "maximum" in schema else ""
    lower = f"more than {schema['exclusiveMinimum']}" if "exclusiveMinimum" in schema else lower
    upper = f"less than {schema['exclusiveMaximum']}" if "exclusiveMaximum" in schema else upper
    span = f"{lower} to {upper}" if lower and upper else f"{lower} or more" if lower else ""
    return " ".join(part for part in (WORDS[schema["type"]], span) if part)


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return '""' if value == "" else "[]" if value == () else str(value).lower()


def page(text: str) -> str:
    """`text` with its tables as they should be."""
    assert START in text
    assert END in text
    return re.sub(f"{START}.*{END}", lambda _: f"{START}\n\n{tables()}\n\n{END}", text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE}\n")
