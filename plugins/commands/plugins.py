"""`modelrunner plugins`: what is installed, what each brings, and why something is not used."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

from modelrunner.cli import Command, plugin_status
from modelrunner.hookspecs import API_VERSION
from modelrunner.plugin_contract import HOOKS
from modelrunner.plugin_manager import PluginInfo, PluginManager


def command() -> Command:
    return Command("plugins", "list the plugins found, with their hooks; broken ones with the reason", add_arguments, run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON array of objects")
    parser.add_argument("--hook", metavar="NAME", choices=sorted(HOOKS), help="only loaded plugins that implement this hook")


def run(args: argparse.Namespace, manager: PluginManager) -> int:
    """0, for a broken plugin is something to list; in strict mode 2 when one is broken."""
    lines = [info for info in manager.describe() if args.hook is None or args.hook in info.hooks]
    if args.json:
        print(json.dumps([asdict(info) for info in lines], indent=2))
        return plugin_status(manager)
    print(f"plugin interface {API_VERSION}")
    print(table(["NAME", "VERSION", "API", "STATE", "HOOKS"], [_cells(info) for info in lines]))
    for info in lines:
        if info.error:
            print(f"\n{info.name} ({info.distribution} {info.version}, {info.module}) {info.state}:")
            print(textwrap.indent(info.error, "  "))
    for notice in manager.notices:
        print(f"\nwarning: {notice}")
    return plugin_status(manager)


def _cells(info: PluginInfo) -> list[str]:
    return [info.name, info.version, info.api or "-", info.state, " ".join(info.hooks) or "-"]


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their longest cell."""
    widths = [max(len(row[column]) for row in [titles, *rows]) for column in range(len(titles))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [titles, *rows])
