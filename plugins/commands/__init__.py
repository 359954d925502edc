"""The built-in commands of `modelrunner`. Each module describes one; none imports torch before it runs."""

from __future__ import annotations

from modelrunner.cli import Command
from modelrunner.hookspecs import hookimpl

MODELRUNNER_API = ">=1,<2"


@hookimpl
def cli_commands() -> list[Command]:
    from modelrunner.plugins.commands import bench, explain, generate, new_plugin, plugins, settings

    return [bench.command(), explain.command(), generate.command(), new_plugin.command(), plugins.command(), settings.command()]
