"""The built-in commands of `modelrunner`. Each module describes one; none imports torch before it runs."""

from __future__ import annotations

from modelrunner.cli import Command
from modelrunner.hookspecs import hookimpl

MODELRUNNER_API = ">=1,<2"


@hookimpl
def cli_commands() -> list[Command]:
    from modelrunner.plugins.commands import explain, generate, plugins, settings

    return [explain.command(), generate.command(), plugins.command(), settings.command()]
